"""The truth by patching equals plain hooks in a loop, in float64; and what metrics make of it."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.functional import Intervention
from captum_vz.study import METHODS, BadExampleError, Example, Scorer, encode, run_study
from captum_vz.study.examples.patching import activation_patching, counterpart, value_patching
from captum_vz.subjects.heads import predicts_next
from captum_vz.testbed import agreement_sentences, load_model

VALUES = {"agreement": "attention.self.value", "causal": "self_attn.v_proj"}  # where they are, written by hand
NAMES = list(VALUES)


def states(output: Any) -> Tensor:
    """What a module returns first: layers of transformers below 5 return tuples."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


@pytest.fixture(scope="module")
def doubles() -> dict[str, tuple[Any, Any]]:
    return {name: (model.double(), tokenizer) for name in NAMES for model, tokenizer in [load_model(name)]}


def pairs(count: int, causal: bool) -> list[Example]:
    kind = "relational_noun" if causal else None
    return [Example.from_record(record) for record in agreement_sentences(count, seed=6, paradigm=kind)]


def ids_of(model: Any, tokenizer: Any, example: Example) -> Tensor:
    return torch.tensor([encode(tokenizer, example, until_target=predicts_next(model)).ids])


@torch.no_grad()
def naive(name: str, model: Any, tokenizer: Any, example: Example, modules: list[list[nn.Module]]) -> np.ndarray:
    """Row l: outputs of all `modules[l]` at one token come from the other sentence, one token after the other."""
    encoded = encode(tokenizer, example, until_target=predicts_next(model))
    good, bad = encoded.forms

    def difference(ids: Tensor) -> float:
        logits = model(input_ids=ids).logits[0, encoded.target]
        return float(logits[good] - logits[bad])

    ids, other = ids_of(model, tokenizer, example), ids_of(model, tokenizer, counterpart(example))
    clean, falls = difference(ids), []
    for together in modules:
        kept: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, args: Any, output: Any, kept: dict[nn.Module, Tensor] = kept) -> None:
            kept[module] = states(output).clone()

        for module in together:
            with module.register_forward_hook(keep):
                difference(other)
        row = []
        for token in range(ids.shape[1]):

            def patch(
                module: nn.Module, args: Any, output: Any, kept: dict[nn.Module, Tensor] = kept, token: int = token
            ) -> Any:
                changed = states(output).clone()
                changed[0, token] = kept[module][0, token]
                return (changed, *output[1:]) if isinstance(output, tuple) else changed

            with ExitStack() as hooks:
                for module in together:
                    hooks.enter_context(module.register_forward_hook(patch))
                row.append(clean - difference(ids))
        falls.append(row)
    return np.array(falls)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("together", [False, True])
def test_values_equal_plain_hooks(doubles: dict[str, tuple[Any, Any]], name: str, together: bool) -> None:
    model, tokenizer = doubles[name]
    values = [layer.get_submodule(VALUES[name]) for layer in find_layers(model)]
    for example in pairs(1 if name == "causal" else 3, name == "causal")[-1:]:
        found = value_patching(model, tokenizer, example, together=together)
        patched = [values[0 if together else last : last + 1] for last in range(len(values))]
        expected = naive(name, model, tokenizer, example, patched)
        np.testing.assert_allclose(found.falls, expected, rtol=0, atol=1e-9)
        for row, shares in zip(np.clip(expected, 0, None), found.shares.numpy(), strict=True):
            some = row.sum() >= 0.01 * (found.difference - found.other)
            np.testing.assert_allclose(shares, row / row.sum() if some else np.full(len(row), np.nan), atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_states_equal_plain_hooks(doubles: dict[str, tuple[Any, Any]], name: str) -> None:
    """The state before a layer is the output of the layer before it, and of the embeddings."""
    model, tokenizer = doubles[name]
    embeddings = model.bert.embeddings if name == "agreement" else model.model.embed_tokens
    before = [embeddings, *find_layers(model)[:-1]]
    for example in pairs(1, name == "causal"):
        found = activation_patching(model, tokenizer, example)
        expected = naive(name, model, tokenizer, example, [[module] for module in before])
        np.testing.assert_allclose(found.falls, expected, rtol=0, atol=1e-9)
        whole = activation_patching(model, tokenizer, example, together=True)
        np.testing.assert_allclose(whole.falls, np.repeat(expected[:1], len(before), 0), atol=1e-9)
        # Before the first layer the texts differ in the cue only.
        encoded = encode(tokenizer, example, until_target=predicts_next(model))
        assert (whole.shares[0].abs() > 1e-9).nonzero()[:, 0].tolist() == list(encoded.cue)
        assert whole.falls[0].sum() == pytest.approx(whole.difference - whole.other)


def test_sentences_without_a_truth(doubles: dict[str, tuple[Any, Any]]) -> None:
    """Of an untrained model the two forms are about as likely."""
    model, tokenizer = doubles["agreement"]
    untrained = type(model)(model.config).double().eval()
    found = value_patching(untrained, tokenizer, pairs(1, False)[0])
    assert abs(found.difference) < 1
    assert found.falls.isfinite().all()
    assert found.shares.isnan().all()
    example = Example("1", ("the", "hats", "[MASK]", "nice"), 2, (1,), "are", "is", other_cue=("hatgzq",))
    with pytest.raises(BadExampleError, match="with the other cue"):
        value_patching(model, tokenizer, example)
    without = Example("1", ("the", "hats", "[MASK]", "nice"), 2, (1,), "are", "is")
    with pytest.raises(BadExampleError, match="other_cue has 0"):
        activation_patching(model, tokenizer, without)
    example = Example(
        "1", ("The", "hats", ",", "[MASK]"), 3, (1,), "are", "is", text="The hats, [MASK]", other_cue=("hat",)
    )
    assert counterpart(example).text == "The hat, [MASK]"
    assert counterpart(example).words == ("The", "hat", ",", "[MASK]")


METRICS = ["value_patching", "value_patching_top", "activation_patching", "activation_patching_top"]


def test_metrics_equal_a_loop(doubles: dict[str, tuple[Any, Any]]) -> None:
    """Rows of one layer, rows of joined layers, and one row for all layers have truths of their own."""
    model, tokenizer = doubles["agreement"]
    examples, methods = pairs(2, False), ["value-zeroing", "attention-rollout", "value-zeroing-effect", "position"]
    rows = Scorer(model, tokenizer, methods, METRICS).score(examples)
    assert not [row["skipped"] for row in rows if row["skipped"]]
    truths = {
        (example.id, patching, together): patching(model, tokenizer, example, together=together).shares.numpy()
        for example in examples
        for patching in (value_patching, activation_patching)
        for together in (False, True)
    }
    defined = 0
    for row in rows:
        for patching, name in ((value_patching, METRICS[0]), (activation_patching, METRICS[2])):
            truth = truths[row["example"], patching, row["method"] != "value-zeroing"]
            truth, scores = truth[3 if row["layer"] is None else row["layer"]], row["scores"]
            expected = sum(map(min, truth, scores)), float(np.argmax(truth) == np.argmax(scores))
            expected = expected if np.isfinite(truth).all() else (np.nan, np.nan)
            assert (row[name], row[f"{name}_top"]) == pytest.approx(expected, abs=1e-9, nan_ok=True)
            defined += np.isfinite(truth).all()
    assert defined > len(rows)


class ByLayer(Intervention):
    """Values are scaled, in each layer by another factor."""

    def __init__(self, *factors: float) -> None:
        self.factors = factors

    def in_run(self, layer: int, run: int) -> Intervention:
        return ByLayer(self.factors[layer])

    def new_values(self, values: Tensor, zeroed: Tensor) -> Tensor:
        return torch.where(zeroed[..., None], self.factors[0] * values, values)


def test_maps_have_the_interventions_of_their_layers(doubles: dict[str, tuple[Any, Any]]) -> None:
    model, tokenizer = doubles["agreement"]
    inputs, factors = tokenizer("the hats [MASK] nice", return_tensors="pt"), (0.5, 0.0, 2.0, 3.0)
    layers = find_layers(model)
    maps = ValueZeroing(model, layers, intervention=ByLayer(*factors)).attribute(inputs)
    for one, layer, factor in zip(maps, layers, factors, strict=True):
        alone = ValueZeroing(model, layer, intervention=ByLayer(factor)).attribute(inputs)
        torch.testing.assert_close(one, alone)


def test_truth_needs_to_know_whether_rows_join_layers(tmp_path: Path) -> None:
    """A rollout under a name of its own is not compared with the truth of each layer's values alone."""
    examples = [Example.from_record(record) for record in agreement_sentences(2, paradigm="relational_noun")]
    methods = {"mine": replace(METHODS["alti"], own=True)}
    study = run_study({"agreement": load_model}, examples, tmp_path / "s", methods, ["value_patching"], quiet=True)
    assert study.rows(["value_patching"])["value_patching"].isna().all()
    assert study.skipped["skipped"].str.contains("it is unknown whether the rows of mine join the layers").all()
    for confidence, resamples in ((95, 1999), (0.95, 0)):
        asked = {"confidence": confidence, "resamples": resamples}
        with pytest.raises(ArgumentError):
            run_study({"agreement": load_model}, examples, tmp_path / "t", methods, quiet=True, **asked)
        assert not (tmp_path / "t").exists()

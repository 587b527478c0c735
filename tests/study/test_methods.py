"""The registry: one row is enough for a method, and its parts fit each other."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients, ShapleyValueSampling
from torch import Tensor

from captum_vz import LayerAttention, RandomAttribution, ValueGates, find_layers
from captum_vz.cli import main
from captum_vz.functional import normalize_rows
from captum_vz.study import DEFAULT_METHODS, METHODS, Batch, Method, Scorer, compare
from captum_vz.study.examples import Example
from captum_vz.study.methods import rollout_of
from tests.command import refused
from tests.study.conftest import Shipped

SENTENCE = "the pictures of some hat [MASK] scaring marcus."


@pytest.fixture
def uniform(monkeypatch: pytest.MonkeyPatch) -> str:
    """A new method: one row of the registry."""

    def rows(batch: Batch) -> list[Tensor]:
        return [torch.full(batch.inputs["input_ids"].shape, 1 / batch.inputs["input_ids"].shape[1])]

    monkeypatch.setitem(METHODS, "uniform", Method("uniform", rows))
    return "uniform"


def test_new_row_reaches_every_reader(
    uniform: str,
    shipped: Shipped,
    examples: list[Example],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    assert set(compare(shipped, SENTENCE, uniform).shares) == {uniform}
    (row,) = Scorer(*shipped, uniform, "cue_dot").score(examples[:1])
    assert row["cue_dot"] == pytest.approx(1 / len(row["tokens"]))
    assert main(["explain", SENTENCE, "--method", uniform, "--folder", str(tmp_path / "picture.png")]) == 0
    assert "uniform: how much [MASK] draws on each token" in capsys.readouterr().out
    assert (tmp_path / "picture.png").is_file()
    told = refused(capsys, "generate", "the hat", "--method", uniform)
    assert "--method uniform cannot explain generated text: pass one of value-zeroing, " in told
    monkeypatch.setitem(METHODS, uniform, replace(METHODS[uniform], of_text=RandomAttribution))
    found = generated(capsys, "--method", uniform)
    assert found["method"] == uniform
    assert found["scores"] == generated(capsys, "--method", "random")["scores"]


def generated(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What `generate` prints as JSON."""
    assert main(["generate", "the hat", "--max-new-tokens", "2", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_new_row_before_the_command_is_imported() -> None:
    """A process of its own, in which no command has read the registry."""
    program = """
from dataclasses import replace
from captum_vz.study.methods import METHODS
METHODS["uniform"] = replace(METHODS["random"], of_text=None)
METHODS["other"] = METHODS["random"]
from captum_vz.cli import main
assert main(["generate", "the hat", "--max-new-tokens", "1", "--method", "other"]) == 0
raise SystemExit(main(["generate", "the hat", "--method", "uniform"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "other: the prompt tokens" in done.stdout
    assert "--method uniform cannot explain generated text" in done.stderr


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.joined is not None])
def test_joined_rows_share_the_maps(name: str, shipped: Shipped) -> None:
    """The maps that a row names are those that its class joins, so they may be computed once for all methods."""
    model, _ = shipped
    layers, method = find_layers(model), METHODS[name]
    assert method.joined is not None
    assert method.maps is not None
    own, shared = method.joined(model, layers).maps, method.maps(model, layers)
    assert type(own) is type(shared)
    options = {key: value for key, value in vars(shared).items() if isinstance(value, (str, int, float, type(None)))}
    assert {key: vars(own)[key] for key in options} == options


@pytest.mark.parametrize(
    ("name", "rollout"),
    [
        ("value-zeroing", "value-zeroing-rollout"),
        ("attention", "attention-rollout"),
        ("globenc-layer", "globenc"),
        ("alti", "alti"),
        ("hidden-token-attribution", None),
        ("saliency", None),
    ],
)
def test_rollout_of_each_method(name: str, rollout: str | None) -> None:
    assert rollout_of(METHODS[name]) is (None if rollout is None else METHODS[rollout])


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("value-zeroing", "layer 2"),
        ("alti", "layers 0 to 2"),
        ("value-zeroing-rollout", "layers 0 to 2, no residual"),
        ("attention-flow", "all layers, residual 0.5"),
        ("value-zeroing-effect", "all layers"),
        ("value-zeroing-effect-layer", "layer 2"),
        ("value-zeroing-shapley", "all layers"),
        ("random", ""),
    ],
)
def test_scope_names_the_layers_shown(name: str, scope: str) -> None:
    assert METHODS[name].scope(2) == scope


def test_default_methods_omit_slow_ones() -> None:
    slow = {name for name, method in METHODS.items() if method.slow}
    gradients = {"saliency", "input-x-gradient", "integrated-gradients", "attention-gradient"}
    gates = {"value-zeroing-shapley", "value-zeroing-integrated"}
    assert slow == {*gradients, *gates, "attention-flow", "hidden-token-attribution", "alti-logit"}
    assert set(DEFAULT_METHODS) == set(METHODS) - slow


def test_maps_are_computed_once(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = shipped
    built: list[str] = []
    init = LayerAttention.__init__

    def counted(self: LayerAttention, *args: Any, **kwargs: Any) -> None:
        built.append("attention")
        init(self, *args, **kwargs)

    inputs = tokenizer(SENTENCE, return_tensors="pt")
    batch = Batch(model, tokenizer, find_layers(model), inputs, [6])
    METHODS["attention-rollout"].rows(batch)
    monkeypatch.setattr(LayerAttention, "__init__", counted)
    whole = batch.whole_maps(LayerAttention)
    rows = METHODS["attention"].rows(batch)
    assert not built  # no other object of this class, so no other pass
    torch.testing.assert_close(rows[1], whole[1][:, 6])


KINDS = {
    "value-zeroing-shapley": (ShapleyValueSampling, {"n_samples": 25}),
    "value-zeroing-integrated": (IntegratedGradients, {"n_steps": 50}),
}


@pytest.mark.parametrize("name", KINDS)
def test_gated_rows_are_captums(name: str, shipped: Shipped) -> None:
    model, tokenizer = shipped
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])
    gated, (kind, options) = ValueGates(model, find_layers(model)), KINDS[name]

    def choice(gates: Tensor) -> Tensor:
        logits = gated(gates, inputs)[:, 6]
        return logits[:, right] - logits[:, wrong]

    before = torch.get_rng_state()
    found = compare((model, tokenizer), SENTENCE, name, target="are", foil="is").shares[name]
    again = compare((model, tokenizer), SENTENCE, name, target="are", foil="is").shares[name]
    assert torch.equal(found, again)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    scores = kind(choice).attribute(torch.ones(inputs["input_ids"].shape), **options)
    torch.testing.assert_close(found.float(), normalize_rows(scores.abs())[0].float(), rtol=1e-3, atol=1e-4)
    assert inputs.tokens()[found.argmax()] == "pictures"


def test_integrated_rows_of_a_batch(shipped: Shipped) -> None:
    """The rows of a padded batch are those of its sentences, and padding has none."""
    model, tokenizer = shipped
    texts = ["the hats [MASK] here.", "the pictures of some hat [MASK] scaring marcus."]

    def rows(*texts: str) -> Tensor:
        inputs = tokenizer(list(texts), padding=True, return_tensors="pt")
        places = [ids.index(tokenizer.mask_token_id) for ids in inputs["input_ids"].tolist()]
        batch = Batch(model, tokenizer, find_layers(model), inputs, places)
        (found,) = METHODS["value-zeroing-integrated"].rows(batch)
        return found

    together = rows(*texts)
    for row, text in zip(together, texts, strict=True):
        (alone,) = rows(text)
        torch.testing.assert_close(row[: len(alone)], alone, rtol=1e-3, atol=1e-5)
        assert not row[len(alone) :].any()

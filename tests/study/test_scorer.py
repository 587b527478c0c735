"""Methods and metrics on batches: the numbers equal those of single sentences, computed in loops."""

import inspect
import re
import textwrap
from dataclasses import replace
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from captum_vz import explain
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.functional import deciding_layer
from captum_vz.study import DEFAULT_METHODS, METHODS, Batch, Example, Scorer, as_method, run_study
from captum_vz.study.scoring.scorer import COLUMNS
from captum_vz.testbed import agreement_sentences, load_model
from captum_vz.text import encode_record
from tests.study.conftest import Decoder, Shipped
from tests.view.pages import missing

SHORT = Example("short", ("hats", "[MASK]", "nice"), 1, (0,), "are", "is", group="short")


def test_batch_equals_single_sentences(precise: Shipped, examples: list[Example]) -> None:
    mixed = [examples[0], SHORT, replace(SHORT, id="without forms", good=None)]
    metrics = ["cue_dot", "cue_ap"]
    methods = [*DEFAULT_METHODS, "saliency"]
    together = Scorer(*precise, methods, metrics, batch_size=2).score(mixed)
    alone = [row for example in mixed for row in Scorer(*precise, methods, metrics).score([example])]
    assert len(together) == len(alone) > len(mixed) * len(methods)
    about = set(COLUMNS) - {"scores"}
    for one, other in zip(together, alone, strict=True):
        assert {name: one[name] for name in about} == {name: other[name] for name in about}
        for name in ("scores", *metrics):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-7, err_msg=one["method"])


def test_bad_examples_skipped_in_place(shipped: Shipped, examples: list[Example]) -> None:
    bad = replace(examples[1], id="no cue", cue=())
    worse = replace(bad, id="worse", target=99)
    done: list[int] = []
    rows = Scorer(*shipped, ["position"], batch_size=2).score([examples[0], bad, worse, *examples[3:5]], done.append)
    ids = [examples[0].id, *["no cue"] * 3, "worse", *(example.id for example in examples[3:5])]
    assert [row["example"] for row in rows] == ids
    told = [(row["method"], row["metric"], row["skipped"]) for row in rows]
    without = [(None, metric, "there is no cue") for metric in ("cue_dot", "cue_ap")]
    assert told[1:5] == [("position", None, None), *without, (None, None, told[4][2])]
    assert told[4][2].startswith("the target is word 99")
    assert (rows[1]["cue_dot"], rows[1]["group"], rows[4]["scores"]) == (None, bad.group, [])
    assert -1 <= rows[1]["blank_out"] <= 1
    assert all(set(row) == {*COLUMNS, "cue_dot", "cue_ap", "blank_out"} for row in rows)
    assert sum(done) == 5


def test_decoder_evaluated_before_target(decoder: Decoder, examples: list[Example]) -> None:
    before = [example for example in examples if example.cue[0] < example.target - 1]
    rows = Scorer(*decoder, metrics=["cue_dot", "blank_out:delete"]).score(before)
    of_globenc = [row for row in rows if row["method"] == "globenc"]
    assert len(of_globenc) == len(before)
    assert all("pre-norm" in row["skipped"] for row in of_globenc)
    for row in rows:
        if row["skipped"] is None:
            assert row["target"] == len(row["tokens"]) - 1
            assert 0 <= row["cue_dot"] <= 1
            ordered = len({row["scores"][token] for token in row["content"]}) > 1
            assert -1 <= row["blank_out:delete"] <= 1 if ordered else isnan(row["blank_out:delete"])
    first = replace(SHORT, words=("hats", "are", "[MASK]"), target=2)
    for example, told in ((SHORT, "the cue is the token that is explained"), (first, "the cue is the first token")):
        _, row = Scorer(*decoder, ["random"], ["cue_dot"]).score([example])
        assert row["skipped"].startswith(told)


def test_one_refused_example_skipped_alone(
    shipped: Shipped, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    def picky(batch: Batch) -> Tensor:
        if batch.inputs["input_ids"].shape[1] == length or len(batch.token) > 1:
            raise RefusedError("it has an odd length")
        return batch.scores(METHODS["position"])[0]

    length = 5
    assert len(encode_record(shipped[1], SHORT.to_record()).encoding["input_ids"][0]) == length
    monkeypatch.setitem(METHODS, "picky", as_method(picky))
    rows = Scorer(*shipped, ["picky", "random"], "cue_dot").score([examples[0], SHORT, examples[1]])
    assert [row["method"] for row in rows] == ["picky", "random"] * 3
    assert [row["skipped"] for row in rows] == [None, None, "it has an odd length", None, None, None]


def test_scorer_takes_and_returns_columns(shipped: Shipped, examples: list[Example]) -> None:
    scorer = Scorer(*shipped, ["value-zeroing"], "cue_dot")
    fields = [example.to_dict() for example in examples[:3]]
    columns: dict[str, Any] = {name: [one[name] for one in fields] for name in fields[0]}
    columns["words"][1] = None
    columns["text"][1] = None
    as_arrays = columns | {"target": np.array(columns["target"]), "id": np.array(columns["id"])}
    for passed in (columns, as_arrays):
        found = scorer(passed)
        assert {len(column) for column in found.values()} == {9}
        assert found["layer"] == [0, 1, 2, 3, None, 0, 1, 2, 3]
        assert found["skipped"][4].startswith("there are neither words (or tokens) nor a text")
    rows = scorer.score([examples[0], examples[2]])
    assert found["cue_dot"][:4] + found["cue_dot"][5:] == [row["cue_dot"] for row in rows]


def test_documented_data_set_runs(shipped: Shipped, examples: list[Example]) -> None:
    if find_spec("datasets") is None:
        missing('datasets is not installed: pip install -e ".[datasets]"')
    (code,) = re.findall(r"code-block:: python\n\n((?: {4}.*\n|\n)+)", f"{inspect.getdoc(Scorer)}\n")
    expected = Scorer(*shipped, ["value-zeroing", "random"]).score(examples)
    session: dict[str, Any] = {"examples": examples, "model": shipped[0], "tokenizer": shipped[1], "Scorer": Scorer}
    exec(textwrap.dedent(code).replace("256", "4"), session)
    rows: Any = session["rows"]
    assert list(rows["example"]) == [row["example"] for row in expected]
    np.testing.assert_allclose(rows["cue_dot"], [row["cue_dot"] for row in expected], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("passed", "complaint"),
    [
        ({"metrics": "magic"}, "metrics has 'magic'"),
        ({"metrics": []}, "metrics is empty"),
        ({"metrics": "infidelity:mask"}, ":delete needs none"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_unknown_names_refused(passed: dict[str, Any], complaint: str, decoder: Decoder) -> None:
    with pytest.raises(ValueError, match=complaint):
        Scorer(*decoder, **passed)


WORDS = ("the", "pictures", "of", "some", "hat", "near", "the", "birds")


@pytest.fixture(scope="module")
def ragged() -> list[Example]:
    """24 sentences of 2 to 9 words."""
    found = []
    for number in range(24):
        words = ("hats", *WORDS[: number % 8], "[MASK]")
        found.append(Example(str(number), words, len(words) - 1, (0,), "are", "is"))
    return found


class Watched:
    """Equal scores, and the shapes of the batches. Batches of more than `most` tokens run out of memory."""

    def __init__(self, most: int = 10**9, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.most = most
        self.error = error
        self.seen: list[tuple[int, int]] = []

    def rows(self, batch: Batch) -> Tensor:
        mask = batch.inputs["attention_mask"]
        self.seen.append((mask.shape[0], mask.shape[1]))
        if mask.numel() > self.most:
            raise self.error("no room")
        return mask


def scored(loaded: Shipped, examples: list[Example], watched: Watched, **options: Any) -> list[dict[str, Any]]:
    return Scorer(*loaded, {"watched": watched.rows}, "cue_dot", **options).score(examples)


@pytest.mark.parametrize("tokens", [1, 30, 64, 10**6])
def test_batches_are_filled_by_tokens(tokens: int, shipped: Shipped, ragged: list[Example]) -> None:
    watched = Watched()
    rows = scored(shipped, ragged, watched, batch_tokens=tokens)
    assert [row["example"] for row in rows] == [example.id for example in ragged]
    assert all(count * length <= tokens or count == 1 for count, length in watched.seen)
    assert sum(count for count, _ in watched.seen) == 24
    if tokens == 64:  # no two neighbours would have fitted together
        pairs = zip(watched.seen, watched.seen[1:], strict=False)
        assert all((one[0] + 1) * other[1] > tokens or (one[0] + 1) * one[1] > tokens for one, other in pairs)


def test_batch_without_memory_is_halved(shipped: Shipped, ragged: list[Example]) -> None:
    watched = Watched(most=60)
    rows = scored(shipped, ragged, watched)
    assert len(rows) == 24
    assert all(row["skipped"] is None for row in rows)
    sizes = [count * length for count, length in watched.seen]
    failed = [place for place, size in enumerate(sizes) if size > 60]
    assert 1 <= len(failed) <= 3  # 24, 12 and 6 sentences
    assert failed == list(range(len(failed)))  # later batches fit at once
    assert len(sizes) < 12
    watched = Watched(most=10, error=KeyError)
    scored(shipped, ragged, watched)
    assert len(watched.seen) == 1 + 24


# The layer that decides


DECIDING = ["value-zeroing", "value-zeroing:deciding", "decision"]
EXAMPLES = [Example.from_record(one) for one in agreement_sentences(3, seed=4, paradigm="relational_noun")]


@pytest.mark.parametrize("name", ["agreement", "causal"])
def test_rows_are_those_of_the_chosen_layers(name: str) -> None:
    loaded = load_model(name)
    rows = Scorer(*loaded, DECIDING, "cue_dot").score(EXAMPLES)
    for example in EXAMPLES:
        of = [[row for row in rows if (row["example"], row["method"]) == (example.id, method)] for method in DECIDING]
        (decided,), (decision,) = of[1:]
        layers = torch.tensor([row["scores"] for row in of[0]])
        layer, products = deciding_layer(layers, torch.tensor(decision["scores"]), decided["target"])
        assert (decided["layer"], decided["deciding"], decision["deciding"]) == (None, layer, None)
        assert decided["scores"] == pytest.approx(layers[layer].tolist())
        text = example.text or " ".join(example.words)
        text = text[: text.index("[MASK]")].rstrip() if name == "causal" else text
        found = explain(loaded, text, method="value-zeroing", target=example.good, foil=example.bad, layer="deciding")
        assert found.layer == layer
        _, second = products.topk(2).indices.tolist()
        told = f"{products[layer]:.2f} of it; then layer {second} {products[second]:.2f}"
        assert any(line.startswith(f"value-zeroing: layer {layer} ") and told in line for line in found.told)


def test_study_keeps_and_tells_the_layers(tmp_path: Path) -> None:
    study = run_study("causal", EXAMPLES, tmp_path, DECIDING, "cue_dot", quiet=True, resamples=9)
    layers = study.rows(["method", "deciding"]).query("method == 'value-zeroing:deciding'")["deciding"]
    assert layers.notna().all()
    told = next(line for line in study.lines() if line.startswith("causal, value-zeroing:deciding: layer"))
    often = f"s {layers.min()} to {layers.max()}, most often {layers.mode()[0]} (in "
    assert (often if layers.nunique() > 1 else f" {layers.iloc[0]}") in told
    assert set(study.summary.query("method == 'value-zeroing:deciding'")["examples"]) >= {len(EXAMPLES)}
    with pytest.raises(ArgumentError, match=r"methods is .*: pass"):
        Scorer(*load_model(), ["value-zeroing-rollout:deciding"], "cue_dot")

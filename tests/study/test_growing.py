"""A study that grows: only what is new, or of other code, is computed, and the result is that of one start."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from captum_vz.study import METHODS as REGISTRY
from captum_vz.study import METRICS, Batch, EvaluationBatch, Example, Study, as_method, load_plugin
from captum_vz.study import run as work
from captum_vz.study.folder import code_identity
from tests.study.conftest import Shipped, never, without_drawing
from tests.study.test_given import largest
from tests.study.test_run import in_a_process, parts
from tests.study.test_run import study as any_study

pytestmark = pytest.mark.usefixtures("undrawn")
METHODS = ["value-zeroing", "random"]


def study(folder: Path, examples: list[Example], shipped: Shipped, **changed: Any) -> Study:
    options = {"models": {"agreement": shipped}, "methods": METHODS, "metrics": ["cue_dot"], "block": 4} | changed
    return any_study(folder, examples, **options)


def assert_same_rows(found: Study, expected: Study) -> None:
    keys = ["model", "example", "method", "layer"]
    rows = [one.rows().sort_values(keys).reset_index(drop=True) for one in (found, expected)]
    pd.testing.assert_frame_equal(*(one[sorted(one.columns)] for one in rows), rtol=1e-4, atol=1e-6)
    keys = ["example", "method", "metric", "skipped"]
    skipped = [one.skipped[keys].fillna("").sort_values(keys).reset_index(drop=True) for one in (found, expected)]
    pd.testing.assert_frame_equal(*skipped)


@pytest.fixture(scope="module")
def some(examples: list[Example]) -> list[Example]:
    """Ten examples: one without a cue, and one that is no example of this model."""
    return [*examples[:2], replace(examples[2], cue=()), *examples[3:9], replace(examples[9], target=99)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Any, ...]]:
    """How often each method, and each metric of a method, was computed for each part."""
    found: Counter[tuple[Any, ...]] = Counter()
    add_rows = work.add_rows

    def noted(folder: Path, codes: Any, model: str, block: Any, lacking: Any, rows: Any, made: Any) -> None:
        pairs = ((method, metric) for method, metrics in lacking.items() for metric in metrics)
        found.update((model, block.number, *pair) for pair in pairs)
        add_rows(folder, codes, model, block, lacking, rows, made)

    monkeypatch.setattr(work, "add_rows", noted)
    return found


ALL_METRICS = ["cue_dot", "blank_out", "cue_ap"]
ALL_METHODS = ["value-zeroing", "random", "position"]


@pytest.fixture(scope="module")
def whole(some: list[Example], shipped: Shipped, tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("whole") / "s"
    with without_drawing():
        return study(folder, some, shipped, methods=ALL_METHODS, metrics=ALL_METRICS)


STEPS: dict[str, list[dict[str, Any]]] = {
    "methods": [{"metrics": ALL_METRICS, "methods": [name]} for name in ALL_METHODS],
    "metrics": [{"metrics": [name], "methods": ALL_METHODS} for name in ALL_METRICS],
    "examples": [{"metrics": ALL_METRICS, "methods": ALL_METHODS, "count": count} for count in (3, 5, 10)],
    "mixed": [
        {"metrics": ["cue_dot"], "methods": ["random"], "count": 6},
        {"metrics": ["blank_out"], "methods": ["random", "position"], "batch_size": 3},
        {"metrics": ALL_METRICS, "methods": ALL_METHODS, "block": 3},
    ],
}


@pytest.mark.parametrize("kind", STEPS)
def test_grown_study_equals_one_start(
    kind: str, some: list[Example], shipped: Shipped, whole: Study, tmp_path: Path, computed: Counter[Any]
) -> None:
    for step in STEPS[kind]:
        options = {name: value for name, value in step.items() if name != "count"}
        found = study(tmp_path / "s", some[: step.get("count", 10)], shipped, **options)
    assert set(computed.values()) == {1}  # nothing is computed again
    assert_same_rows(found, whole)
    # Rows are added to the files of a part, so there are two files for each.
    assert len(list((tmp_path / "s").rglob("*.parquet"))) == 2 * len({key[:2] for key in computed})
    after = parts(tmp_path / "s")
    study(tmp_path / "s", some, shipped, **options | {"batch_size": 7, "confidence": 0.5})
    assert parts(tmp_path / "s") == after


def test_models_are_added(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    model, tokenizer = shipped
    study(tmp_path / "s", some, shipped)
    other = type(model)(model.config).eval(), tokenizer
    both = study(tmp_path / "s", some, shipped, models={"other": other})
    assert both.rows()["model"].unique().tolist() == ["agreement", "other"]
    alone = study(tmp_path / "t", some, shipped, models={"other": other})
    rows = both.rows()
    pd.testing.assert_frame_equal(rows[rows["model"] == "other"].reset_index(drop=True), alone.rows())


def hides(batch: EvaluationBatch, rows: Tensor) -> Tensor:
    """It runs the model, and was registered without saying so."""
    return rows.sum(-1) * len(batch.tokenizer)


def test_metrics_of_scores_need_no_model(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    study(tmp_path / "s", some, shipped)
    metrics = {"cue_ap": METRICS["cue_ap"], "largest": largest}
    found = study(tmp_path / "s", some, shipped, models={"agreement": never}, metrics=metrics)
    assert [max(scores) for scores in found.rows()["scores"]] == found.rows()["largest"].tolist()
    expected = study(tmp_path / "t", some, shipped, metrics={"cue_dot": METRICS["cue_dot"]} | metrics)
    assert_same_rows(found, expected)
    found = study(tmp_path / "s", some, shipped, models={"agreement": never}, metrics={"hides": hides})
    told = found.skipped.query("metric == 'hides'")["skipped"]
    assert len(told)
    assert told.str.contains("Metric(..., runs_model=True)", regex=False).all()


def flat(batch: Batch) -> Tensor:
    return torch.ones(batch.inputs["input_ids"].shape)


def by_place(batch: Batch) -> Tensor:
    return torch.arange(1.0, 1 + batch.inputs["input_ids"].shape[1]).expand(batch.inputs["input_ids"].shape)


def test_changed_code_is_computed_again(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    study(tmp_path / "s", some[:4], shipped, methods={"mine": flat, "random": "random"})
    found = study(tmp_path / "s", some[:4], shipped, methods={"mine": by_place})
    rows = found.rows()
    assert set(rows["method"]) == {"mine", "random"}
    for scores in rows[rows["method"] == "mine"]["scores"]:
        assert scores[-1] == pytest.approx(2 / (len(scores) + 1))
    for metric in (lambda batch, rows: rows.min(-1).values, largest):
        again = study(tmp_path / "s", some[:4], shipped, metrics={"own": metric}, methods={"mine": by_place})
    mine = again.rows().query("method == 'mine'")
    assert [max(scores) for scores in mine["scores"]] == mine["own"].tolist()


def versioned(function: Callable[[Batch], Any], version: str = "1") -> Any:
    return replace(as_method(function), version=version)


def powers(exponent: int) -> Callable[[Batch], Tensor]:
    return lambda batch: by_place(batch) ** exponent


def test_version_stands_for_the_source(
    some: list[Example], shipped: Shipped, tmp_path: Path, computed: Counter[Any]
) -> None:
    for exponent in (1, 2):
        study(tmp_path / "s", some[:4], shipped, methods={"mine": versioned(powers(exponent))})
    assert set(computed.values()) == {1}
    study(tmp_path / "s", some[:4], shipped, methods={"mine": versioned(powers(2), "2")})
    assert set(computed.values()) == {2}


def test_contents_of_an_example_are_compared(
    some: list[Example], shipped: Shipped, tmp_path: Path, computed: Counter[Any]
) -> None:
    study(tmp_path / "s", some[:4], shipped)
    with pytest.raises(ValueError, match="pass another id"):
        study(tmp_path / "s", [replace(some[0], cue=(0,)), *some[1:4]], shipped)
    lists: Any = [replace(one, words=[*one.words], cue=[*one.cue], other_cue=[*one.other_cue]) for one in some[:4]]
    study(tmp_path / "s", lists, shipped)
    assert set(computed.values()) == {1}


def test_starts_at_the_same_time_keep_both(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    """The second start begins while the first one holds a part, and adds to the same parts."""
    others: list[Any] = []

    def slow(batch: Batch) -> Tensor:
        if not others:
            others.append(
                in_a_process(lambda: study(tmp_path / "s", some, shipped, methods=["position"], metrics=["cue_ap"]))
            )
            others[0].join(1)
        return flat(batch)

    study(tmp_path / "s", some, shipped, methods={"slow": versioned(slow)})
    others[0].join()
    assert others[0].exitcode == 0
    both = study(tmp_path / "s", some, shipped, methods={"slow": versioned(slow)})
    assert set(both.rows()["method"]) == {"slow", "position"}
    counts = both.summary.query("group == 'all'").set_index(["method", "metric"])["examples"]
    assert counts["slow", "cue_dot"] == counts["position", "cue_ap"] == 8


def test_metrics_a_model_lacks_are_left_out(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    """Of the other model they are there. A model that lacks all is refused before the first one runs."""
    model, tokenizer = shipped
    models = {"agreement": lambda: shipped, "headless": lambda: (model.bert, tokenizer)}
    with pytest.raises(ValueError, match="'headless' can have"):
        study(tmp_path / "s", some, shipped, models=models, metrics=["blank_out"])
    assert not parts(tmp_path / "s")
    found = study(tmp_path / "s", some, shipped, models=models, metrics=["cue_dot", "blank_out"])
    counts = found.summary.query("group == 'all'").groupby(["model", "metric"])["examples"].max()
    assert counts["headless", "blank_out"] == 0 < counts["headless", "cue_dot"] == counts["agreement", "cue_dot"]
    assert "headless, blank_out: 10 examples skipped (BertModel has no head that predicts words)" in str(found)


# The identity of code


def test_what_code_of_one_file_holds_counts() -> None:
    for one, other in (
        (partial(int, base=1), partial(int, base=2)),
        (partial(int, torch.zeros(3)), partial(int, torch.ones(3))),
        (lambda: 1, lambda: 2),
    ):
        assert code_identity(one) == code_identity(one) != code_identity(other)


#: Plugins that define `mine`, a method. The number in the place of NUMBER decides its scores.
PLUGINS = {
    "data": "W = [NUMBER]\ndef mine(batch): return W[0]",
    "partial": "def f(k, batch): return k\nmine = partial(f, NUMBER)",
    "base class": "class B:\n    def attribute(self): return NUMBER\nclass C(B): pass\nmine = C()",
    "slots": (
        "class C:\n    __slots__ = 'k'\n    def __init__(self, k): self.k = k\n    def attribute(self): return self.k\n"
        "mine = C(NUMBER)"
    ),
    "decorated": "def f(): return NUMBER\n@torch.no_grad()\ndef mine(batch): return f()",
    "cache": "def f(): return NUMBER\n@cache\ndef mine(batch): return f()",
    "module": (
        "class M(torch.nn.Module):\n    def __init__(self, k):\n        super().__init__()\n        self.k = k\n"
        "def make(m):\n    return lambda batch: m\nmine = make(M(NUMBER))"
    ),
}


def identity_of(source: str, folder: Path) -> str:
    path = folder / "mine.py"
    path.write_text(
        "from functools import *\nimport numpy as np\nimport torch\nfrom captum_vz.study import register_method\n"
        f"{source}\nregister_method('mine', mine)\n"
    )
    load_plugin(path)
    method = REGISTRY.pop("mine")
    return code_identity(method.source)


@pytest.fixture(autouse=True)
def bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may keep compiled files, and takes one of the same length and second for the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


@pytest.mark.parametrize("kind", PLUGINS)
def test_changed_plugin_has_another_identity(kind: str, tmp_path: Path) -> None:
    first, again, other = (identity_of(PLUGINS[kind].replace("NUMBER", number), tmp_path) for number in "778")
    assert first == again
    assert first != other


def test_plugins_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """`inspect` looks for a class in the file of its module."""
    kinds = []
    for number in (7, 8):
        path = tmp_path / str(number) / "mine.py"
        path.parent.mkdir()
        path.write_text(
            f"from captum_vz.study import register_method\nclass C:\n    def attribute(self, inputs): return {number}\n"
            "register_method('mine', C)\n"
        )
        load_plugin(path)
        kinds.append(REGISTRY.pop("mine").source)
    for kind, number in zip(kinds, (7, 8), strict=True):
        assert f"return {number}" in getsource(kind)
    assert len({code_identity(kind).split()[-1] for kind in kinds}) == 2

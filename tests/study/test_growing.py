"""A study that grows: only what is new is computed, and the result is that of one start."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from captum_vz.study import METRICS, Batch, EvaluationBatch, Example, Study, as_method, run_study
from tests.study.conftest import Shipped

METHODS = ["value-zeroing", "random"]


def study(folder: Path, examples: list[Example], shipped: Shipped, **changed: Any) -> Study:
    options: dict[str, Any] = {"models": {"agreement": shipped}, "methods": METHODS, "metrics": ["cue_dot"]}
    options |= {"shard_size": 4, "resamples": 50, "quiet": True}
    options |= changed
    return run_study(options.pop("models"), examples, folder, **options)


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()}


def by_key(found: Study) -> pd.DataFrame:
    """The rows in an order that does not depend on how the study grew."""
    rows = found.rows().sort_values(["model", "example", "method", "layer"]).reset_index(drop=True)
    return rows[sorted(rows.columns)]


def assert_same_rows(found: Study, expected: Study) -> None:
    pd.testing.assert_frame_equal(by_key(found), by_key(expected), rtol=1e-4, atol=1e-6)
    keys = ["example", "method", "metric", "skipped"]
    skipped = [one.skipped[keys].fillna("").sort_values(keys).reset_index(drop=True) for one in (found, expected)]
    pd.testing.assert_frame_equal(*skipped)


@pytest.fixture(scope="module")
def some(examples: list[Example]) -> list[Example]:
    """Ten examples: one without a cue, and one that is no example of this model."""
    return [*examples[:2], replace(examples[2], cue=()), *examples[3:9], replace(examples[9], target=99)]


ALL_METRICS = ["cue_dot", "blank_out", "cue_ap"]
ALL_METHODS = ["value-zeroing", "random", "position"]


@pytest.fixture(scope="module")
def whole(some: list[Example], shipped: Shipped, tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("whole") / "s"
    return study(folder, some, shipped, methods=ALL_METHODS, metrics=ALL_METRICS)


STEPS: dict[str, list[dict[str, Any]]] = {
    "methods": [{"metrics": ALL_METRICS, "methods": [name]} for name in ALL_METHODS],
    "metrics": [{"metrics": [name], "methods": ALL_METHODS} for name in ALL_METRICS],
    "examples": [{"metrics": ALL_METRICS, "methods": ALL_METHODS, "count": count} for count in (3, 5, 10)],
    "mixed": [
        {"metrics": ["cue_dot"], "methods": ["random"], "count": 6},
        {"metrics": ["blank_out"], "methods": ["random", "position"], "batch_size": 3},
        {"metrics": ALL_METRICS, "methods": ALL_METHODS, "shard_size": 3},
    ],
}


@pytest.mark.parametrize("kind", STEPS)
def test_grown_study_equals_one_start(
    kind: str, some: list[Example], shipped: Shipped, whole: Study, tmp_path: Path
) -> None:
    for step in STEPS[kind]:
        before = files(tmp_path / "s") if (tmp_path / "s").exists() else {}
        options = {name: value for name, value in step.items() if name != "count"}
        found = study(tmp_path / "s", some[: step.get("count", 10)], shipped, **options)
        assert before.items() <= files(tmp_path / "s").items()  # nothing is computed again
    assert_same_rows(found, whole)
    after = files(tmp_path / "s")
    study(tmp_path / "s", some, shipped, **options | {"batch_size": 7, "confidence": 0.5})
    assert files(tmp_path / "s") == after


def test_models_are_added(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    model, tokenizer = shipped
    study(tmp_path / "s", some, shipped)
    other = type(model)(model.config).eval(), tokenizer
    both = study(tmp_path / "s", some, shipped, models={"other": other})
    assert both.rows()["model"].unique().tolist() == ["agreement", "other"]
    alone = study(tmp_path / "t", some, shipped, models={"other": other})
    rows = both.rows()
    pd.testing.assert_frame_equal(rows[rows["model"] == "other"].reset_index(drop=True), alone.rows())


def largest(batch: EvaluationBatch, rows: Tensor) -> Tensor:
    return rows.max(-1).values


def smallest(batch: EvaluationBatch, rows: Tensor) -> Tensor:
    return rows.min(-1).values


def test_metrics_of_scores_need_no_model(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    def never() -> Any:
        raise AssertionError("loaded")

    study(tmp_path / "s", some, shipped)
    metrics = {"cue_ap": METRICS["cue_ap"], "largest": largest}
    found = study(tmp_path / "s", some, shipped, models={"agreement": never}, metrics=metrics)
    assert [max(scores) for scores in found.rows()["scores"]] == found.rows()["largest"].tolist()
    expected = study(tmp_path / "t", some, shipped, metrics={"cue_dot": METRICS["cue_dot"]} | metrics)
    assert_same_rows(found, expected)


def test_metric_that_hides_its_model_is_told(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    def hides(batch: EvaluationBatch, rows: Tensor) -> Tensor:
        return rows.sum(-1) * len(batch.tokenizer)

    study(tmp_path / "s", some[:2], shipped)
    found = study(tmp_path / "s", some[:2], shipped, metrics={"hides": hides})
    assert found.skipped["skipped"].str.contains("register it with runs_model=True").all()


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
    for metric in (smallest, largest):
        again = study(tmp_path / "s", some[:4], shipped, metrics={"own": metric}, methods={"mine": by_place})
    mine = again.rows().query("method == 'mine'")
    assert [max(scores) for scores in mine["scores"]] == mine["own"].tolist()


def test_version_stands_for_the_source(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    one, other = (replace(as_method(METHODS_OF[name]), version=version) for name, version in (("a", "1"), ("a", "2")))
    before = study(tmp_path / "s", some[:4], shipped, methods={"mine": one}).folder
    known = files(before)
    study(tmp_path / "s", some[:4], shipped, methods={"mine": one})
    assert files(before) == known
    study(tmp_path / "s", some[:4], shipped, methods={"mine": other})
    assert len(files(before)) == 2 * len(known)


def _place_shares(batch: Batch) -> list[Tensor]:
    mask = batch.inputs["attention_mask"].double()
    return [mask / mask.sum(-1, keepdim=True)]


METHODS_OF = {"a": _place_shares}


def test_other_contents_of_an_example_refused(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    study(tmp_path / "s", some[:4], shipped)
    with pytest.raises(ValueError, match=r"with other contents: pass another id, or another folder"):
        study(tmp_path / "s", [replace(some[0], cue=(0,)), *some[1:4]], shipped)


def test_example_of_lists_is_known(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    study(tmp_path / "s", some[:2], shipped)
    lists: Any = [replace(one, words=[*one.words], cue=[*one.cue], other_cue=[*one.other_cue]) for one in some[:2]]
    before = files(tmp_path / "s")
    study(tmp_path / "s", lists, shipped)
    assert files(tmp_path / "s") == before


def test_starts_at_the_same_time_keep_both(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    """The second start finds nothing, and ends before the first one has written anything."""
    seen = []

    def slow(batch: Batch) -> Tensor:
        if not seen:
            seen.append(1)
            study(tmp_path / "s", some, shipped, methods=["position"], metrics=["cue_ap"])
        return flat(batch)

    both = study(tmp_path / "s", some, shipped, methods={"slow": replace(as_method(slow), version="1")})
    assert set(both.rows()["method"]) == {"slow", "position"}
    counts = both.summary.query("group == 'all'").set_index(["method", "metric"])["examples"]
    assert counts["slow", "cue_dot"] == counts["position", "cue_ap"] == 8


def test_part_without_memory_is_replaced(some: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    """Also by a start that has more methods."""
    room: list[bool] = []

    def narrow(batch: Batch) -> Tensor:
        if not room:
            raise MemoryError("no room")
        return flat(batch)

    mine = {"mine": replace(as_method(narrow), version="1")}
    study(tmp_path / "s", some[:4], shipped, methods=["random"])
    found = study(tmp_path / "s", some[:4], shipped, methods=mine | {"random": "random"})
    assert len(found.skipped.query("method == 'mine'")) == 4
    room.append(True)
    found = study(tmp_path / "s", some[:4], shipped, methods=mine | {"random": "random", "position": "position"})
    assert "mine" not in set(found.skipped["method"])
    assert set(found.rows()["method"]) == {"mine", "random", "position"}
    assert len(files(tmp_path / "s")) == 2

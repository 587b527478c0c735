"""The controls in the paper's report, and the models side by side."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from captum_vz.study import Example, Scorer, with_interval
from captum_vz.testbed import agreement_sentences, load_model
from paper import Reproduction, reproduce
from paper.report import CHECKS, TRUTHS
from tests.study.conftest import without_drawing

METHODS = ["value-zeroing", "attention-rollout", "position"]
CONTROLS = 5
NAMES = ("agreement", "causal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("controls") / "out"


@pytest.fixture(scope="module")
def found(folder: Path) -> Reproduction:
    examples = [Example.from_record(record) for record in agreement_sentences(6, paradigm="relational_noun")]
    models = {name: load_model(name) for name in NAMES}
    with without_drawing():
        return reproduce(models, examples, folder, METHODS, resamples=20, quiet=True, controls=CONTROLS)


def test_tables_equal_their_parts(found: Reproduction) -> None:
    examples = [Example.from_record(record) for record in agreement_sentences(CONTROLS, seed=1)]
    for name in NAMES:
        own = found.tables["sanity"].query("model == @name").set_index(["metric", "method"])["mean"]
        rows = pd.DataFrame(Scorer(*load_model(name), METHODS, list(CHECKS)).score(examples))
        last = rows.groupby(["method", "example"]).tail(1).groupby("method")[list(CHECKS)].mean()
        for check in CHECKS:
            assert own[check].to_dict() == pytest.approx(last[check].to_dict())
    rows = [row for row in Scorer(*load_model(), METHODS, list(TRUTHS)).score(examples) if row["skipped"] is None]
    truth = found.tables["truth"].query("model == 'agreement' and group == 'all'").set_index(["method", "metric"])
    for metric in TRUTHS:
        values = [row[metric] for row in rows if row["method"] == "position"]
        assert truth.loc[("position", metric), "mean"] == pytest.approx(np.nanmean(values))
    # The cue of most sentences stands where the position baseline has little.
    assert truth.loc[("position", "value_patching"), "mean"] < 0.5


def test_report_shows_controls_and_models(found: Reproduction, folder: Path) -> None:
    counts = [line.split(",")[0] for line in found.repeat if line.startswith("Sentences")]
    assert counts == ["Sentences: 6", f"Sentences of the controls: {CONTROLS}"]
    report = (folder / "report.md").read_text("utf-8")
    assert report == f"{found}\n"
    lines = [[cell.strip() for cell in x.split("|")[1:-1]] for x in report.splitlines() if x.startswith("| ")]
    sanity = next(line for line in lines if line[0] == "position" and line[-1] == "no")
    assert [cell.split()[0] for cell in sanity[1:]] == [
        "1.00",
        "1.00",
        "no",
    ] * 2  # a baseline that looks at no model does not pass
    assert "agreement, sanity" not in report
    whole = found.tables["truth"].query("model == 'agreement' and group == 'all' and method == 'position'")
    cells = [with_interval(*row) for row in whole.set_index("metric").loc[list(TRUTHS), ["mean", "low", "high"]].values]
    assert ["position", *cells] in lines
    whole = found.tables["summary"].query("group == 'all' and metric == 'cue_dot'")
    means = [whole.query("model == @name and method == 'value-zeroing'")["mean"].iloc[-1] for name in NAMES]
    assert ["value-zeroing", *(f"{mean:.2f}" for mean in means)] in lines
    for name in ("sanity", "truth", "truth_differences"):
        assert len(pd.read_csv(folder / f"{name}.csv"))

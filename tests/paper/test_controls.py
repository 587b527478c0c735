"""The controls in the paper's report, the models side by side, and the findings that hold in all of them."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from captum_vz.study import Example, Scorer, sanity_checks, with_interval
from captum_vz.testbed import agreement_sentences, load_model
from paper import Reproduction, reproduce
from paper.across import TRUTHS, findings, told_findings

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
    return reproduce(models, examples, folder, METHODS, resamples=20, quiet=True, controls=CONTROLS)


def test_tables_equal_their_parts(found: Reproduction) -> None:
    examples = [Example.from_record(record) for record in agreement_sentences(CONTROLS, seed=1)]
    for name in NAMES:
        own = found.tables["sanity"].query("model == @name").drop(columns="model").reset_index(drop=True)
        checks = sanity_checks(*load_model(name), examples, METHODS, resamples=20)
        pd.testing.assert_frame_equal(own, checks)
    rows = [row for row in Scorer(*load_model(), METHODS, list(TRUTHS)).score(examples) if row["skipped"] is None]
    truth = found.tables["truth"].query("model == 'agreement' and group == 'all'").set_index(["method", "metric"])
    for metric in TRUTHS:
        values = [row[metric] for row in rows if row["method"] == "position"]
        assert truth.loc[("position", metric), "mean"] == pytest.approx(np.nanmean(values))
    # The cue of most sentences stands where the position baseline has little.
    assert truth.loc[("position", "value_patching"), "mean"] < 0.5


def test_report_shows_controls_and_models(found: Reproduction, folder: Path) -> None:
    assert [line.split()[0] for line in found.repeat][:3] == ["Versions:", "Model", "Model"]
    counts = [line.partition(": ")[::2] for line in found.repeat if line.startswith("Sentences")]
    assert [(who, told.split()[0]) for who, told in counts] == [
        ("Sentences", "6,"),
        ("Sentences of the controls", f"{CONTROLS},"),
    ]
    report = (folder / "report.md").read_text("utf-8")
    assert report == f"{found}\n"
    lines = [[cell.strip() for cell in x.split("|")[1:-1]] for x in report.splitlines() if x.startswith("| ")]
    sanity = next(line for line in lines if line[0] == "position" and line[-1] == "no")
    assert [cell.split()[0] for cell in sanity[1:]] == [
        "1.00",
        "1.00",
        "no",
    ] * 2  # a baseline that looks at no model does not pass
    ties = found.tables["truth_differences"].query("model == 'agreement'").groupby("metric", sort=False)["tied"].sum()
    names = ("values, overlap", "values, largest", "states, overlap", "states, largest")
    told = "; ".join(f"{name} {count} of 3" for name, count in zip(names, ties[list(TRUTHS)], strict=True))
    assert re.search(rf"Pairs that are not shown to differ \(\d+ sentences\): {told}\.", report)
    whole = found.tables["truth"].query("model == 'agreement' and group == 'all' and method == 'position'")
    cells = [with_interval(*row) for row in whole.set_index("metric").loc[list(TRUTHS), ["mean", "low", "high"]].values]
    assert ["position", *cells] in lines
    heads = [line for line in lines if line[0] == "method" and line[1].startswith(f"{NAMES[0]} (")]
    both = pd.concat([found.tables["summary"], found.tables["truth"]]).query("group == 'all'")
    for line, (_, rows) in zip(heads, both.groupby("metric", sort=False), strict=True):
        counts = [rows.query("model == @name")["examples"].max() for name in NAMES]
        assert line[1:] == [f"{name} ({count} sentences)" for name, count in zip(NAMES, counts, strict=True)]
    whole = found.tables["summary"].query("group == 'all' and metric == 'cue_dot'")
    means = [whole.query("model == @name and method == 'value-zeroing'")["mean"].iloc[-1] for name in NAMES]
    assert ["value-zeroing", *(f"{mean:.2f}" for mean in means)] in lines
    assert "## Findings that hold in all 2 models" in report
    for name in ("sanity", "truth", "truth_differences"):
        assert len(pd.read_csv(folder / f"{name}.csv"))
    for name in ("sanity-agreement", "sanity-causal", "truth"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert name in found.figures


def test_findings_count_directions() -> None:
    """Each pair once: where it holds, where it is a tie, and where it turns over."""
    rows = [
        ("cue", "a", "b", (0.3, 0.2, 0.1), (False, False, False)),  # holds in all
        ("cue", "a", "c", (0.3, -0.2, -0.2), (False, False, False)),  # turns over: c is above in two
        ("cue", "b", "c", (-0.3, -0.2, 0.1), (False, False, True)),  # a tie in the last model
        ("cue", "c", "d", (0.3, 0.3, 0.3), (True, True, True)),  # never differs
    ]
    table = pd.DataFrame(
        {"model": model, "metric": metric, "one": one, "other": other, "mean": means[place], "tied": tied[place]}
        for metric, one, other, means, tied in rows
        for place, model in enumerate("xyz")
    )
    expected = [
        ("cue", "a", "b", 3, 3, 0, 0),
        ("cue", "c", "a", 3, 2, 0, 1),
        ("cue", "c", "b", 3, 2, 1, 0),
    ]
    assert list(findings(table).itertuples(index=False, name=None)) == expected
    # A folder may have grown in another order of methods: the pairs of one model are then the other way round.
    other = table["model"] == "y"
    table.loc[other, ["one", "other"]] = table.loc[other, ["other", "one"]].to_numpy()
    table.loc[other, "mean"] *= -1
    assert list(findings(table).itertuples(index=False, name=None)) == expected
    told = "\n".join(told_findings(findings(table), 3))
    assert "- cue: 1 pairs hold in all models, 1 turn over between models.\n    - a > b" in told
    assert "No pair of methods is shown to differ" in "\n".join(told_findings(findings(table[table["one"] == "d"]), 3))

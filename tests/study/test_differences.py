"""The figure of a study, and its paired comparisons: table, text, figure and report."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from captum_vz.metrics import compare_pairs
from captum_vz.study import Example, Study, run_study
from captum_vz.study.figures import _hundredths, counted
from captum_vz.testbed import agreement_sentences
from tests.study.conftest import Shipped

METHODS = ["value-zeroing", "attention", "attention-rollout", "random"]


@pytest.fixture(scope="module")
def found(shipped: Shipped, tmp_path_factory: pytest.TempPathFactory) -> Study:
    examples = [Example.from_record(record) for record in agreement_sentences(20, seed=5)]
    metrics = ["cue_dot", "blank_out"]
    folder = tmp_path_factory.mktemp("pairs") / "s"
    return run_study({"agreement": shipped}, examples, folder, METHODS, metrics, resamples=99, quiet=True)


def test_table_equals_the_rows(found: Study) -> None:
    rows = found.rows()
    for metric in ("cue_dot", "blank_out"):
        values = {}
        for method in METHODS:
            of_method = rows[rows["method"] == method]
            last = of_method[of_method["layer"].isna() | (of_method["layer"] == 3)]
            values[method] = torch.tensor(last.sort_values("example")[metric].to_numpy(dtype="float64"))
        expected = pd.DataFrame(compare_pairs(values, resamples=99))
        table = found.differences
        table = table[table["metric"] == metric].drop(columns=["model", "metric"]).reset_index(drop=True)
        # The order of the examples moves the resamples, so only the ends of intervals differ a little.
        pd.testing.assert_frame_equal(table.drop(columns=["low", "high"]), expected.drop(columns=["low", "high"]))
        assert (table[["low", "high"]] - expected[["low", "high"]]).abs().to_numpy().max() < 0.1
    assert len(found.differences) == 2 * 6


def test_figure_shows_last_layers(found: Study) -> None:
    by_layer, last = found.plot("cue_dot").axes
    summary = found.summary.query("group == 'all' and metric == 'cue_dot'")
    summary = summary.groupby("method").tail(1).set_index("method")["mean"]
    names = [label.get_text() for label in last.get_yticklabels()]
    assert sorted(names) == sorted(summary.index)
    drawn = [line.get_xdata()[0] for line in last.lines]
    assert drawn == pytest.approx(summary[names].tolist())
    assert len([line for line in by_layer.lines if line.get_linestyle() == ":"]) == 1  # random has no layers
    assert (found.folder / "figures" / "cue_dot.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="metric is 'magic': pass one of 'cue_dot'"):
        found.plot("magic")


def test_ties_are_told_and_drawn(found: Study) -> None:
    table = found.differences.query("metric == 'blank_out'")
    assert 0 < table["tied"].sum() < len(table)
    line = next(line for line in str(found).splitlines() if line.startswith("agreement, blank_out: "))
    assert (
        f"{table['tied'].sum()} of 6 pairs of methods are not shown to differ ({table['examples'].max()} sentences)"
        in line
    )
    figure = found.plot_differences("blank_out")
    drawn = [text.get_text() for text in figure.axes[0].texts]
    assert drawn.count("=") == 2 * table["tied"].sum()
    for row in table.itertuples():
        assert (f"{row.one} and {row.other}" in line) == row.tied
        assert row.tied or _hundredths(row.mean) in drawn
    assert (found.folder / "figures" / "blank_out-differences.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="metric is 'magic': pass one of 'cue_dot', 'blank_out'"):
        found.plot_differences("magic")


def test_single_method_has_no_pairs(shipped: Shipped, examples: list[Example], tmp_path: Path) -> None:
    one = run_study({"m": shipped}, examples[:2], tmp_path / "s", ["random"], ["cue_dot"], resamples=9, quiet=True)
    assert one.differences.empty
    assert "differ" not in str(one)


def test_few_sentences_show_no_difference(shipped: Shipped, examples: list[Example], tmp_path: Path) -> None:
    """Wilcoxon's test of three sentences has no p-value below 0.25, so equality is not what it shows."""
    one = run_study({"m": shipped}, examples[:3], tmp_path / "s", METHODS, ["cue_mrr"], resamples=9, quiet=True)
    assert one.differences["tied"].all()
    assert str(one).endswith("m, cue_mrr: none of 6 pairs of methods is shown to differ (3 sentences)")
    assert [counted(number, "sentence") for number in (1, 2279)] == ["1 sentence", "2,279 sentences"]

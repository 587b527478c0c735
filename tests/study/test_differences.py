"""Paired comparisons of a study, its figures, and where its numbers come from."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from captum.attr import Saliency

from captum_vz.cli import main
from captum_vz.metrics import compare_pairs
from captum_vz.study import METRICS, EvaluationBatch, Example, Study, run_study, safe_name, write_jsonl
from captum_vz.study.examples import counted
from captum_vz.study.figures import _hundredths
from captum_vz.study.folder.provenance import code_identity
from captum_vz.testbed import agreement_sentences, load_model
from captum_vz.visualization import read_provenance
from captum_vz.visualization.pictures.files import weights_fingerprint
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


def test_few_sentences_and_methods_show_no_difference(
    shipped: Shipped, examples: list[Example], tmp_path: Path
) -> None:
    """Wilcoxon's test of three sentences has no p-value below 0.25, so equality is not what it shows."""
    one = run_study({"m": shipped}, examples[:3], tmp_path / "s", METHODS, ["cue_mrr"], resamples=9, quiet=True)
    assert one.differences["tied"].all()
    assert str(one).endswith("m, cue_mrr: none of 6 pairs of methods is shown to differ (3 sentences)")
    assert [counted(number, "sentence") for number in (1, 2279)] == ["1 sentence", "2,279 sentences"]
    one = run_study({"m": shipped}, examples[:2], tmp_path / "s", ["random"], ["cue_dot"], resamples=9, quiet=True)
    assert one.differences.empty
    assert "differ" not in str(one)


# Where the numbers come from


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study by the command, which grew by a second one."""
    folder = tmp_path_factory.mktemp("typed")
    write_jsonl(folder / "mine.jsonl", [Example.from_record(record) for record in agreement_sentences(6)])
    given = ["study", "--jsonl", str(folder / "mine.jsonl"), "--folder", str(folder / "s"), "--metrics", "cue_dot"]
    assert main([*given, "--quiet", "--methods", "random"]) == 0
    assert main([*given, "--quiet", "--methods", "value-zeroing", "random"]) == 0
    return Study(folder / "s")


def test_settings_name_everything(typed: Study) -> None:
    found = json.loads((typed.folder / "study.json").read_text())["provenance"]
    (maker,) = found["models"]["agreement"]
    model, _ = load_model()
    assert maker["weights"] == weights_fingerprint(model)
    assert maker["model"] == type(model).__name__
    assert (maker["dtype"], maker["device"], maker["torch"]) == ("float32", "cpu", torch.__version__)
    assert (found["confidence"], found["resamples"], found["seeds"]["bootstrap"]) == (0.95, 1999, 0)


def test_figures_carry_it(typed: Study) -> None:
    (maker,) = typed.settings["provenance"]["models"]["agreement"]
    for figure in (typed.plot("cue_dot"), typed.plot_differences("cue_dot")):
        foot = figure.get_supxlabel().replace("\n", " ")
        assert maker["weights"][:8] in foot
        assert f"torch {torch.__version__}" in foot
        assert "6 sentences, 95 % intervals" in foot
    kinds = [line.partition(" ")[0].strip(":") for line in typed.repeat]
    assert kinds == ["Versions", "Model", "Sentences", "Seeds"]
    for path in (typed.folder / "figures").iterdir():
        kept = read_provenance(path)
        assert maker["weights"] in kept["model agreement"]


def test_own_code_is_named(examples: list[Example], tmp_path: Path) -> None:
    """With the digest of its source. A name is no path of a figure."""

    def largest(batch: EvaluationBatch, rows: torch.Tensor) -> torch.Tensor:
        return rows.max(-1).values

    metrics = {"../my/largest": largest, "cue_dot": METRICS["cue_dot"]}
    models = {"agreement": load_model}
    found = run_study(models, examples[:2], tmp_path / "s", [Saliency, "random"], metrics, quiet=True, resamples=20)
    own = [line for line in found.repeat if line.startswith("Own")]
    assert own == [f"Own code: ../my/largest, {code_identity(largest)}."]
    kept = read_provenance(tmp_path / "s" / "figures" / "cue_dot.png")
    assert own == [f"Own code: {kept['own code']}"]
    figures = sorted(path.name for path in (tmp_path / "s" / "figures").iterdir())
    assert figures == sorted(f"{safe_name(metric + kind)}.png" for metric in metrics for kind in ("", "-differences"))

"""Paired comparisons of a study, how its figures look, and where its numbers come from."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from captum.attr import Saliency
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from captum_vz.cli import main
from captum_vz.metrics import compare_pairs
from captum_vz.study import METHODS as REGISTRY
from captum_vz.study import METRICS, Example, Study, run_study, safe_name, sign_figure, write_jsonl
from captum_vz.study.figures import (
    COLUMN,
    _hundredths,
    counted,
    draw_differences,
    draw_summary,
    in_order,
    label_color,
    method_color,
    method_mark,
)
from captum_vz.study.folder import code_identity
from captum_vz.study.scoring.metrics import _joins
from captum_vz.testbed import agreement_sentences, load_model
from captum_vz.visualization import read_provenance
from captum_vz.visualization.pictures.files import weights_fingerprint
from paper.figures import draw_page, draw_probing
from tests.study.conftest import Shipped
from tests.study.test_given import largest
from tests.visualization.test_boxes import assert_inside

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
    with pytest.raises(ValueError, match="metric is 'magic'"):
        found.plot("magic")


def test_ties_are_told_and_drawn(found: Study) -> None:
    table = found.differences.query("metric == 'blank_out'")
    assert 0 < table["tied"].sum() < len(table)
    line = next(line for line in str(found).splitlines() if line.startswith("agreement, blank_out: "))
    pairs = f"{table['tied'].sum()} of 6 pairs of methods"
    assert f"{pairs} not shown to differ ({table['examples'].max()} sentences)" in line
    figure = found.plot_differences("blank_out")
    drawn = [text.get_text() for text in figure.axes[0].texts]
    assert drawn.count("=") == 2 * table["tied"].sum()
    for row in table.itertuples():
        assert (f"{row.one} and {row.other}" in line) == row.tied
        assert row.tied or _hundredths(row.mean) in drawn
    assert (found.folder / "figures" / "blank_out-differences.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="metric is 'magic'"):
        found.plot_differences("magic")


def test_few_sentences_and_methods_show_no_difference(
    shipped: Shipped, examples: list[Example], tmp_path: Path
) -> None:
    """Wilcoxon's test of three sentences has no p-value below 0.25, so equality is not what it shows."""
    one = run_study({"m": shipped}, examples[:3], tmp_path / "s", METHODS, ["cue_mrr"], resamples=9, quiet=True)
    assert one.differences["tied"].all()
    assert str(one).endswith("m, cue_mrr: 6 of 6 pairs of methods not shown to differ (3 sentences)")
    assert [counted(number, "sentence") for number in (1, 2279)] == ["1 sentence", "2,279 sentences"]
    one = run_study({"m": shipped}, examples[:2], tmp_path / "t", ["random"], ["cue_dot"], resamples=9, quiet=True)
    assert one.differences.empty
    assert "differ" not in str(one)


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study by the command, which grew by a second one."""
    folder = tmp_path_factory.mktemp("typed")
    write_jsonl(folder / "mine.jsonl", [Example.from_record(record) for record in agreement_sentences(6)])
    given = ["study", "--jsonl", str(folder / "mine.jsonl"), "--folder", str(folder / "s"), "--metrics", "cue_dot"]
    assert main([*given, "--quiet", "--methods", "random"]) == 0
    assert main([*given, "--quiet", "--methods", "value-zeroing", "random"]) == 0
    return Study(folder / "s")


def test_settings_and_figures_name_everything(typed: Study) -> None:
    found = json.loads((typed.folder / "study.json").read_text())["provenance"]
    (maker,) = found["models"]["agreement"]
    model, _ = load_model()
    assert maker["weights"] == weights_fingerprint(model)
    assert maker["model"] == type(model).__name__
    assert (maker["dtype"], maker["device"], maker["torch"]) == ("float32", "cpu", torch.__version__)
    assert (found["confidence"], found["resamples"], found["seeds"]["bootstrap"]) == (0.95, 1999, 0)
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

    metrics = {"../my/largest": largest, "cue_dot": METRICS["cue_dot"]}
    models = {"agreement": load_model}
    found = run_study(models, examples[:2], tmp_path / "s", [Saliency, "random"], metrics, quiet=True, resamples=20)
    own = [line for line in found.repeat if line.startswith("Own")]
    assert own == [f"Own code: ../my/largest, {code_identity(largest)}."]
    kept = read_provenance(tmp_path / "s" / "figures" / "cue_dot.png")
    assert own == [f"Own code: {kept['own code']}"]
    figures = sorted(path.name for path in (tmp_path / "s" / "figures").iterdir())
    assert figures == sorted(f"{safe_name(metric + kind)}.png" for metric in metrics for kind in ("", "-differences"))


# How figures look


def linear(color: Any) -> Any:
    """The linear red, green and blue of a colour in sRGB."""
    return np.array([x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(color)])


def contrast_with_white(color: Any) -> float:
    """WCAG 2's contrast, by tables of the standard's own terms."""
    return float(1.05 / (np.dot([0.2126, 0.7152, 0.0722], linear(color)) + 0.05))


def test_methods_keep_their_look_and_place() -> None:
    """The hues are those of Okabe & Ito, which readers without red or green vision tell apart too."""
    names = [*REGISTRY, *(f"{name}:deciding" for name, one in REGISTRY.items() if one.shows_layers)]
    looks = {(method_color(name), method_mark(name)) for name in REGISTRY}
    assert len(looks) == len(REGISTRY)
    assert len({(method_color(name), method_mark(name)) for name in names[len(REGISTRY) :]} & looks) == 0
    assert len({color for color, _ in looks} | {method_color("one of my own")}) == 7
    assert [name for name in in_order(names) if name.startswith("attention")][:2] == ["attention", "attention:deciding"]
    # Names keep the hue of their method, and have the contrast that small text needs.
    assert contrast_with_white("0.0") == pytest.approx(21)
    assert min(contrast_with_white(method_color(method)) for method in REGISTRY) < 3
    for method in REGISTRY:
        mark, name = to_rgb(method_color(method)), label_color(method)
        assert contrast_with_white(name) >= 4.5
        assert np.dot(mark, name) / np.linalg.norm(mark) / np.linalg.norm(name) == pytest.approx(1)
    assert sorted(in_order(REGISTRY)) == sorted(REGISTRY)
    assert in_order(REGISTRY)[-2:] == ["random", "position"]
    assert in_order(["random", "mine", "alti", "attention"]) == ["attention", "alti", "mine", "random"]
    pairs = pd.DataFrame(combinations(["random", "alti", "attention"], 2), columns=["one", "other"])
    pairs = pairs.assign(model="m", metric="cue_dot", mean=0.5, low=0.4, high=0.6, p=0.0, examples=3, tied=False)
    (panel,) = draw_differences(pairs, "cue_dot").axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["attention", "alti", "random"]


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    """Tables of all methods and two models of 24 layers."""
    draw = np.random.default_rng(0)
    models = ["six-layers", "a model with a long name, as $folders$ have it"]
    numbers: dict[str, Any] = {"examples": 2279, "undefined": 0}

    def rows(keys: dict[str, list[Any]]) -> pd.DataFrame:
        index = pd.MultiIndex.from_product(keys.values(), names=keys.keys())
        mean = draw.uniform(-1, 1, len(index))
        its = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
        return pd.DataFrame(index=index).reset_index().assign(**its, **numbers)

    all_layers = {"model": models, "method": list(REGISTRY), "layer": list(range(24))}
    metrics = ["cue_ap", "cue_dot", "blank_out", "value_patching"]
    summary = rows(all_layers | {"metric": metrics, "group": ["all"]}).astype({"layer": "Int64"})
    unlayered = summary["method"].isin([name for name, one in REGISTRY.items() if not one.layered])
    summary = summary[~unlayered | (summary["layer"] == 23)]
    summary.loc[unlayered, "layer"] = pd.NA
    pairs = pd.DataFrame(combinations(REGISTRY, 2), columns=["one", "other"])
    layers = pd.DataFrame({"layer": range(24), "compression": 2.0, "lowest": 1.5, "highest": 2.5, "control": 1.0})
    return {
        "summary": summary,
        "differences": pairs.assign(
            model=models[1], metric="cue_ap", mean=-0.123, low=-0.2, high=-0.1, p=0.0, tied=False, **numbers
        ),
        "sanity": rows({"model": models, "method": list(REGISTRY), "metric": ["sanity_last", "sanity"]}),
        "probing": layers.assign(model=models[1], accuracy=0.95, examples=2279, seeds=5),
        "correlation": rows({"model": [models[1]], "method": list(REGISTRY)}).rename(columns={"mean": "statistic"}),
    }


@pytest.fixture(scope="module")
def figures(tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    summary, data = tables["summary"], "BLiMP, held out"
    page = tables | {"truth": summary}
    return {
        "summary": draw_summary(summary, "cue_ap"),
        "differences": draw_differences(tables["differences"], "cue_ap"),
        "probing": draw_probing(tables["probing"], tables["correlation"], data),
        "page": draw_page(page, 0.2, data),
    }


def test_figures_can_be_read_in_one_column(figures: dict[str, Figure], typed: Study) -> None:
    """Texts are inside, letters are not small, and each model has a column, or the figure is as wide as a page.

    Titles name the model and the number of sentences, and those of the paper the data.
    """
    settings = json.loads((typed.folder / "study.json").read_text())
    settings["examples"]["count"] = 2279
    (maker,) = settings["provenance"]["models"].values()
    settings["provenance"]["models"] = dict.fromkeys(("six-layers", "a model with a long name"), maker)
    for name, figure in figures.items():
        sign_figure(figure, settings)
        figure.draw_without_rendering()
        models = max(1, len(figure.subfigs)) if name != "page" else 2
        assert figure.get_figwidth() <= 2.1 * COLUMN * min(models, 2) / 2, name
        # What a page of A4 holds. The page of all evaluations has more rows than it is made for.
        assert name == "page" or figure.get_figheight() <= 9.7, name
        shown = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip()]
        assert min(text.get_fontsize() for text in shown) >= 6, name
        assert_inside(figure)
        said = " ".join(text.get_text().replace("\n", " ") for text in shown)
        for words in ("2,279 sentences", "95 % intervals"):
            assert words in said, (name, words)
        assert ("BLiMP, held out" in said) == (name in ("probing", "page"))


def test_models_have_one_scale(tables: dict[str, pd.DataFrame]) -> None:
    near = tables["summary"].assign(mean=lambda rows: rows["mean"] * (0.5 + 0.5 * (rows["model"] == "six-layers")))
    near = near.assign(low=near["mean"], high=near["mean"])
    layers, points, others, other_points = draw_summary(near, "cue_ap").axes
    assert layers.get_ylim() == others.get_ylim()
    assert points.get_xlim() == other_points.get_xlim()
    assert points.get_xlim()[1] >= near.query("metric == 'cue_ap' and layer.isna()")["mean"].max()


def test_methods_with_another_truth_stand_apart(tables: dict[str, pd.DataFrame]) -> None:
    """Those whose rows are compared with the truth of all layers, as the metric itself decides it."""
    panel = draw_summary(tables["summary"], "value_patching").axes[1]
    (line,) = (one for one in panel.lines if len(one.get_xdata()) == 2)
    names = [label.get_text() for label in panel.get_yticklabels()]
    above = [name for place, name in enumerate(names) if place < line.get_ydata()[0]]
    assert above == in_order(name for name, one in REGISTRY.items() if one.layered and not _joins(name))
    assert "truth" not in " ".join(text.get_text() for text in draw_summary(tables["summary"], "cue_ap").findobj(Text))

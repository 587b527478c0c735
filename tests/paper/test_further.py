"""What the report has beyond the paper: each table equals the metrics and means of the study, computed in loops."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from captum.attr import Saliency
from scipy import stats

from captum_vz import LayerAttention
from captum_vz.study import Batch, Example, Scorer, Study
from captum_vz.study.figures import in_order
from captum_vz.testbed import agreement_sentences
from captum_vz.visualization.pictures.files import alt_text_of
from captum_vz.visualization.pictures.scales import short_number
from paper import Reproduction, reproduce
from paper.figures import draw_groups
from paper.further import REMOVING, VARIANTS, groups_of, sees_forms
from paper.report import variant_title
from tests.study.conftest import Shipped

METHODS = ["attention", "value-zeroing-effect", "random"]


@pytest.fixture(scope="module")
def sentences() -> list[Example]:
    return [Example.from_record(record) for record in agreement_sentences(10, seed=5)]


@pytest.fixture(scope="module")
def found(shipped: Shipped, sentences: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    folder = tmp_path_factory.mktemp("further") / "out"
    return reproduce({"agreement": shipped}, sentences, folder, METHODS, resamples=50, quiet=True)


@pytest.fixture(scope="module")
def last(shipped: Shipped, sentences: list[Example]) -> pd.DataFrame:
    """The last layers with all metrics, computed by a scorer."""
    names = list(VARIANTS)
    rows = pd.DataFrame(Scorer(*shipped, METHODS, [*names, "cue_dot", "cue_ap", "blank_out"]).score(sentences))
    return rows.groupby(["method", "example"], sort=False).tail(1)


def test_variants_equal_the_metrics(found: Reproduction, last: pd.DataFrame) -> None:
    table = found.tables["variants"]
    assert len(table) == len(METHODS) * len(VARIANTS)
    for row in table.itertuples():
        values = last[last["method"] == row.method][row.variant]
        assert row.mean == pytest.approx(values.mean(), abs=1e-6)
        assert row.examples + row.undefined == 10
        assert row.low <= row.mean <= row.high


def test_bounds_hold_all_methods(found: Reproduction, shipped: Shipped, sentences: list[Example]) -> None:
    table = found.tables["removing"].set_index(["metric", "method"])["mean"]
    for method in METHODS:
        assert table["comprehensiveness:delete", "worst order"] <= table["comprehensiveness:delete", method]
        assert table["comprehensiveness:delete", method] <= table["comprehensiveness:delete", "best order"]
        assert (
            table["sufficiency:delete", "best order"]
            <= table["sufficiency:delete", method]
            <= table["sufficiency:delete", "worst order"]
        )
    rows = pd.DataFrame(Scorer(*shipped, METHODS, list(REMOVING)).score(sentences))
    whole = rows.groupby(["method", "example"], sort=False).tail(1).groupby("method")[list(REMOVING)].mean()
    for method in METHODS:
        for metric in REMOVING:
            assert table[metric, method] == pytest.approx(whole.loc[method, metric], abs=1e-5)


def test_groups_equal_means(found: Reproduction, last: pd.DataFrame) -> None:
    table = found.tables["groups"].set_index(["metric", "method", "by", "group"])["mean"]
    assert {"paradigm", "label"} == {key[2] for key in table.index}
    for metric in ("cue_dot", "cue_ap", "blank_out"):
        for method in METHODS:
            rows = last[last["method"] == method]
            for by, column in (("paradigm", "group"), ("label", "label")):
                means = {str(key): part[metric].mean() for key, part in rows.groupby(column)}
                for key, mean in means.items():
                    assert table[metric, method, by, key] == pytest.approx(mean, abs=1e-6)
                assert table[metric, method, by, "macro"] == pytest.approx(np.mean([*means.values()]), abs=1e-6)
                assert table[metric, method, by, "all"] == pytest.approx(rows[metric].mean(), abs=1e-6)


def test_macro_needs_all_paradigms(last: pd.DataFrame) -> None:
    """A method without rows, or without values, in one paradigm has no mean of paradigms; others keep theirs."""
    out = sorted(last["group"].unique())[0]
    unlike = (last["group"] == out) & (last["method"] == "attention")
    rows = last[~unlike].copy()
    rows.loc[(rows["group"] == out) & (rows["method"] == "random"), "cue_dot"] = np.nan
    found = groups_of(rows, ["cue_dot", "cue_ap"], 1999)
    table = found.set_index(["metric", "method", "by", "group"])
    for method, count in (("attention", 0), ("random", 0)):
        assert np.isnan(table.loc[("cue_dot", method, "paradigm", "macro"), "mean"])
        assert table.loc[("cue_dot", method, "paradigm", out), "examples"] == count
    effect = rows[rows["method"] == "value-zeroing-effect"].groupby("group")["cue_dot"].mean()
    assert table.loc[("cue_dot", "value-zeroing-effect", "paradigm", "macro"), "mean"] == pytest.approx(effect.mean())
    assert table.loc[("cue_ap", "random", "paradigm", "macro"), "mean"] > 0
    figure = draw_groups(found.assign(model="agreement"), "cue_dot")
    heads = " ".join(label.get_text() for label in figure.axes[0].get_xticklabels())
    assert f"mean of {len(effect)} paradigms" in heads


def test_methods_that_none_exceeds_are_framed() -> None:
    """Methods that do not differ share a frame, whatever their means. A column without ranks has none."""
    ranks = {"alti": (1, np.nan), "attention": (1, np.nan), "random": (3, np.nan)}
    rows = [
        {"model": "m", "method": method, "by": "paradigm", "group": group, "mean": 0.5 / place, "rank": rank}
        for place, (method, both) in enumerate(ranks.items(), start=1)
        for group, rank in zip(("one", "macro"), both, strict=True)
    ]
    numbers = {"metric": "cue_dot", "examples": 3, "undefined": 0, "low": 0.0, "high": 1.0}
    figure = draw_groups(pd.DataFrame(rows).assign(**numbers), "cue_dot")
    (panel,) = figure.axes
    framed = {(round(one.get_x() + 0.46), round(one.get_y() + 0.46)) for one in panel.patches}
    assert framed == {(0, 0), (0, 1)}
    assert "attention and alti" in alt_text_of(figure)


def test_ranks_count_the_methods_that_are_higher(found: Reproduction, last: pd.DataFrame) -> None:
    """By Wilcoxon's test with Holm's correction, and the sign of the mean difference."""
    table = found.tables["variants"]
    seen = set()
    for name in VARIANTS:
        values = last.pivot(index="example", columns="method", values=name)
        pairs = [(one, other, (values[one] - values[other]).dropna()) for one, other in combinations(METHODS, 2)]
        tests = [stats.wilcoxon(gap, zero_method="zsplit").pvalue for _, _, gap in pairs]
        order, corrected = np.argsort(tests), np.zeros(3)
        corrected[order] = np.maximum.accumulate(np.minimum(1, np.sort(tests) * [3, 2, 1]))
        expected = dict.fromkeys(METHODS, 1)
        for (one, other, gap), p in zip(pairs, corrected, strict=True):
            if p <= 0.05:
                expected[other if gap.mean() > 0 else one] += 1
        ranks = table[table["variant"] == name].set_index("method")["rank"].to_dict()
        if set(expected.values()) == {1}:  # no difference is shown, so there is no rank
            assert all(rank != rank for rank in ranks.values())
            continue
        assert ranks == expected
        seen |= set(ranks.values())
    assert seen == {1, 2, 3}
    groups = found.tables["groups"]
    assert groups[groups["group"] == "macro"]["rank"].isna().all()
    pooled = groups[(groups["group"] == "all") & (groups["metric"] == "blank_out") & (groups["by"] == "label")]
    assert pooled.set_index("method")["rank"].to_dict() == (
        table[table["variant"] == "blank_out"].set_index("method")["rank"].to_dict()
    )


def test_agreement_equals_scipy(found: Reproduction, last: pd.DataFrame) -> None:
    assert len(found.tables["agreement"]) == 3
    for row in found.tables["agreement"].itertuples():
        values = []
        for _, pair in last[last["method"].isin([row.one, row.other])].groupby("example"):
            content = pair["content"].iloc[0]
            one, other = (np.array(pair[pair["method"] == name]["scores"].iloc[0])[content] for name in row[2:4])
            values.append(stats.spearmanr(one, other).statistic)
        assert row.mean == pytest.approx(np.mean(values), abs=1e-6)


def test_report_has_the_tables(found: Reproduction) -> None:
    report = str(found)
    head = next(line for line in report.splitlines() if "sees the forms" in line)
    assert [cell.strip() for cell in head.split("|")[3:-1]] == [variant_title(name) for name in VARIANTS]
    seen = {line.split("|")[1].strip() for line in report.splitlines() if line.replace(" ", "").count("|yes|")}
    assert seen == {"value-zeroing-effect"}
    assert "| best order" in report
    paradigms = set(found.tables["groups"].query("by == 'paradigm'")["group"]) - {"all", "macro"}
    assert f"mean of {len(paradigms)} paradigms (10)" in report
    assert "### Do the methods agree?" in report


def blind(batch: Batch) -> torch.Tensor:
    return batch.inputs["input_ids"]


def test_report_says_which_methods_see_the_forms(
    shipped: Shipped, sentences: list[Example], tmp_path: Path, undrawn: None
) -> None:
    """By the method, not by its name: a class of Captum and a renamed method see them too."""
    methods = {"a|b": Saliency, "effect": "value-zeroing-effect", "c\nd": blind, "e": "attention", "f": LayerAttention}
    found = reproduce({"agreement": shipped}, sentences[:3], tmp_path, methods, resamples=50, quiet=True, controls=1)
    table = found.tables["variants"].drop_duplicates("method").set_index("method")["sees_forms"].to_dict()
    assert table == {"a|b": "yes", "effect": "yes", "c\nd": "can", "e": "no", "f": "no"}
    report = str(found)
    assert "a|b, effect are given these two forms; c\nd is your own code, and can read them; the other" in report
    assert re.search(r"\| a\\\|b +\| yes ", report)
    assert re.search(r"\| c d +\| can ", report)
    assert "e: 1 sentences skipped, most often because: it is unknown whether the rows of e join the layers" in report
    tables = re.findall(r"(?:^\|.*\n)+", report, re.M)
    for lines in (table.splitlines() for table in tables):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert sees_forms("gone", None) == "unknown"
    assert sees_forms("alti-logit", None) == "yes"


def test_undefined_agreement_is_not_told(shipped: Shipped, sentences: list[Example], tmp_path: Path) -> None:
    def unknown(batch: Batch) -> torch.Tensor:
        return torch.full(batch.inputs["input_ids"].shape, torch.nan)

    found = reproduce({"agreement": shipped}, sentences[:2], tmp_path, [unknown, "random"], resamples=50, quiet=True)
    assert "Do the methods agree?" not in str(found)


def test_figures_show_the_tables(found: Reproduction) -> None:
    (panel,) = found.plot("variants").axes
    shown = [text.get_text() for text in panel.texts]
    ranks = found.tables["variants"].pivot(index="method", columns="variant", values="rank")
    ranks = ranks[list(VARIANTS)].loc[in_order(METHODS)]
    assert shown[: ranks.size] == ["" if rank != rank else f"{rank:.0f}" for rank in ranks.to_numpy().ravel()]
    for told, low, high in zip(shown[ranks.size :], ranks.min(axis=1), ranks.max(axis=1), strict=True):
        assert told in (f"{low:.0f} to {high:.0f}", f"{low:.0f}")
    panel = found.plot("groups-cue_ap").axes[0]
    shown = [text.get_text() for text in panel.texts]
    table = (
        found.tables["groups"].query("metric == 'cue_ap' and method == 'attention'").set_index(["by", "group"])["mean"]
    )
    assert shown[-1] != ""
    assert short_number(round(table["paradigm", "macro"], 2)) in shown
    panel = found.plot("agreement").axes[0]
    agreement = found.tables["agreement"]["mean"]
    assert f"{100 * agreement.iloc[0]:.0f}" in [text.get_text() for text in panel.texts]


def test_files_hold_the_tables(shipped: Shipped, sentences: list[Example], tmp_path: Path) -> None:
    found = reproduce({"agreement": shipped}, sentences[:4], tmp_path / "out", ["attention"], resamples=50, quiet=True)
    for name, table in found.tables.items():
        assert len(pd.read_csv(tmp_path / "out" / f"{name}.csv")) == len(table) > 0
    assert (tmp_path / "out" / "variants.png").read_bytes().startswith(b"\x89PNG")
    assert "agreement" not in found.tables  # of one method
    assert Study(tmp_path / "out" / "agreement").settings["metrics"].keys() == {"cue_dot", "cue_ap", "blank_out"}


def test_paper_with_less_tells_all_of_its_folder(
    shipped: Shipped, sentences: list[Example], tmp_path: Path, undrawn: None
) -> None:
    def made(count: int, methods: list[str]) -> Reproduction:
        return reproduce({"agreement": shipped}, sentences[:count], tmp_path, methods, resamples=50, quiet=True)

    whole, again = made(4, ["attention", "random"]), made(2, ["random"])
    for name in ("variants", "removing", "groups", "agreement"):
        pd.testing.assert_frame_equal(again.tables[name], whole.tables[name])

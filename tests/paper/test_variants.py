"""The variants of blank-out: their table equals the metrics of the study, and ranks follow from the paired tests."""

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
from captum_vz.testbed import agreement_sentences
from paper import Reproduction, reproduce
from paper.variants import VARIANTS, sees_forms, variant_title
from tests.study.conftest import Shipped, without_drawing

METHODS = ["attention", "value-zeroing-effect", "random"]


@pytest.fixture(scope="module")
def sentences() -> list[Example]:
    return [Example.from_record(record) for record in agreement_sentences(10, seed=5)]


@pytest.fixture(scope="module")
def found(shipped: Shipped, sentences: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    folder = tmp_path_factory.mktemp("variants") / "out"
    with without_drawing():
        return reproduce({"agreement": shipped}, sentences, folder, METHODS, resamples=50, quiet=True)


@pytest.fixture(scope="module")
def last(shipped: Shipped, sentences: list[Example]) -> pd.DataFrame:
    """The last layers with all variants, computed by a scorer."""
    rows = pd.DataFrame(Scorer(*shipped, METHODS, list(VARIANTS)).score(sentences))
    return rows.groupby(["method", "example"], sort=False).tail(1)


def test_variants_equal_the_metrics(found: Reproduction, last: pd.DataFrame) -> None:
    table = found.tables["variants"]
    assert len(table) == len(METHODS) * len(VARIANTS)
    for row in table.itertuples():
        values = last[last["method"] == row.method][row.variant]
        assert row.mean == pytest.approx(values.mean(), abs=1e-6)
        assert row.examples + row.undefined == 10
        assert row.low <= row.mean <= row.high


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


def test_report_has_the_tables(found: Reproduction) -> None:
    report = str(found)
    head = next(line for line in report.splitlines() if "sees the forms" in line)
    assert [cell.strip() for cell in head.split("|")[3:-1]] == [variant_title(name) for name in VARIANTS]
    seen = {line.split("|")[1].strip() for line in report.splitlines() if line.replace(" ", "").count("|yes|")}
    assert seen == {"value-zeroing-effect"}


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
    assert re.search(r"\| a\\\|b +\| yes ", report)
    assert re.search(r"\| c d +\| can ", report)
    assert "e: 1 sentences skipped, most often because: it is unknown whether the rows of e join the layers" in report
    tables = re.findall(r"(?:^\|.*\n)+", report, re.M)
    for lines in (table.splitlines() for table in tables):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert sees_forms("gone", None) == "unknown"
    assert sees_forms("alti-logit", None) == "yes"


def test_files_hold_the_tables(shipped: Shipped, sentences: list[Example], tmp_path: Path, undrawn: None) -> None:
    found = reproduce({"agreement": shipped}, sentences[:4], tmp_path / "out", ["attention"], resamples=50, quiet=True)
    for name, table in found.tables.items():
        assert len(pd.read_csv(tmp_path / "out" / f"{name}.csv")) == len(table) > 0
    assert Study(tmp_path / "out" / "agreement").settings["metrics"].keys() == {"cue_dot", "cue_ap", "blank_out"}


def test_paper_with_less_tells_all_of_its_folder(
    shipped: Shipped, sentences: list[Example], tmp_path: Path, undrawn: None
) -> None:
    def made(count: int, methods: list[str]) -> Reproduction:
        return reproduce({"agreement": shipped}, sentences[:count], tmp_path, methods, resamples=50, quiet=True)

    whole, again = made(4, ["attention", "random"]), made(2, ["random"])
    pd.testing.assert_frame_equal(again.tables["variants"], whole.tables["variants"])

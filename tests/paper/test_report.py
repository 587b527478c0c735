"""The paper's evaluations together: their tables equal those of the parts, and a second start repeats nothing."""

import ast
import json
import re
import runpy
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertModel

from captum_vz.metrics import description_length, linear_probe, probing_correlation
from captum_vz.study import Example, Scorer, Study, encode, with_interval
from captum_vz.study.examples import pad
from captum_vz.testbed import HELD_OUT_PARADIGMS, agreement_sentences, load_model
from captum_vz.visualization import read_provenance
from paper import Reproduction, evaluations, reproduce
from paper.__main__ import main
from paper.evaluations import FEWEST
from paper.report import CHECKS, TRUTHS
from tests import command
from tests.command import Output
from tests.study.conftest import Shipped, empty_figures, parts_of, without_drawing
from tests.testbed.conftest import KINDS

METHODS = ["value-zeroing", "alti", "random"]


@pytest.fixture(scope="module")
def sentences() -> list[Example]:
    return [Example.from_record(record) for record in agreement_sentences(FEWEST, seed=8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paper") / "out"


@pytest.fixture(scope="module")
def found(shipped: Shipped, sentences: list[Example], folder: Path) -> Reproduction:
    """Two seeds of probes say as much as five. Figures of the study are empty, those of the paper are not."""
    with pytest.MonkeyPatch.context() as patched, empty_figures():
        patched.setattr("paper.evaluations.SEEDS", (0, 1))
        return reproduce({"agreement": shipped}, sentences, folder, METHODS, resamples=50, quiet=True, controls=0)


def test_probing_uses_states_at_target(found: Reproduction, shipped: Shipped, sentences: list[Example]) -> None:
    model, tokenizer = shipped
    encoded = [encode(tokenizer, example) for example in sentences]
    labels = torch.tensor([example.label == "singular" for example in sentences]).long()
    with torch.no_grad():
        hidden = model(**pad(tokenizer, encoded), output_hidden_states=True).hidden_states
    targets = torch.tensor([one.target for one in encoded])
    for layer in (0, 3):
        states = hidden[layer + 1][torch.arange(len(targets)), targets]
        expected = description_length(states, labels)
        row = found.tables["probing"].set_index("layer").loc[layer]
        each = [expected, description_length(states, labels, seed=1)]
        # In batches of other sizes, the last digits of float32 differ, and training amplifies the difference.
        assert row["bits"] == pytest.approx(sum(one.total for one in each) / 2, rel=0.02)
        assert row["compression"] == pytest.approx(FEWEST / row["bits"])
        ends = [one.compression for one in each]
        assert (row["lowest"], row["highest"]) == pytest.approx((min(ends), max(ends)), rel=0.02)
        assert row["seeds"] == 2
        assert row["low"] < row["compression"] < row["high"]
        assert row["control_lowest"] <= row["control"] <= row["control_highest"] < 1.1
        assert row["accuracy"] == pytest.approx(linear_probe(states, labels).mean().item(), abs=0.01)
        assert row["examples"] == FEWEST
    assert found.tables["probing"]["compression"].iloc[3] > 2 > found.tables["probing"]["compression"].iloc[0]


def test_correlation_uses_methods_cue_alignment(found: Reproduction, folder: Path) -> None:
    rows = Study(folder / "agreement").rows(["example", "method", "layer", "cue_dot"])
    pd.testing.assert_frame_equal(found.tables["summary"], Study(folder / "agreement").summary)
    assert found.tables["correlation"]["method"].tolist() == METHODS[:2]  # random has no layers
    for line in found.tables["correlation"].itertuples():
        layers = [rows[(rows["method"] == line.method) & (rows["layer"] == layer)] for layer in range(4)]
        alignment = torch.tensor([one.sort_values("example")["cue_dot"].tolist() for one in layers]).double().T
        expected = probing_correlation(alignment, found.tables["probing"]["compression"].tolist(), resamples=50)
        assert line.statistic == pytest.approx(expected.statistic)
        assert (line.examples, line.undefined, line.layers) == (FEWEST, 0, 4)
        assert line.p == pytest.approx(expected.p)


@pytest.mark.slow
def test_second_start_computes_nothing(
    found: Reproduction, shipped: Shipped, sentences: list[Example], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paper.evaluations.SEEDS", (0, 1))
    kept = sorted((folder / "agreement").glob("*-*.csv"))
    assert [path.stem.rpartition("-")[0] for path in kept] == ["probing"]
    before = [path.stat().st_mtime_ns for path in kept]
    again = reproduce({"agreement": lambda: shipped}, sentences, folder, METHODS, resamples=50, quiet=True, controls=0)
    assert str(again) == str(found)
    assert sorted((folder / "agreement").glob("*-*.csv")) == kept
    assert [path.stat().st_mtime_ns for path in kept] == before
    model, tokenizer = shipped
    other = type(model)(model.config).eval()
    with pytest.raises(ValueError, match="other weights"):
        reproduce({"agreement": (other, tokenizer)}, sentences, folder, METHODS, resamples=50, quiet=True, controls=0)


def test_report_and_files_hold_results(found: Reproduction, folder: Path) -> None:
    report = (folder / "report.md").read_text("utf-8")
    assert report == f"{found}\n"
    assert f"## agreement: {FEWEST} sentences, 0 skipped" in report
    last = found.tables["summary"].query("group == 'all' and layer == 3").set_index(["method", "metric"])
    cells = [last.loc[("alti", metric)] for metric in ("cue_dot", "cue_ap", "blank_out")]
    dot, precision, blank = (f"{cell['mean']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}]" for cell in cells)
    line = next(line for line in report.splitlines() if line.startswith("| alti "))
    assert re.sub(" +", " ", line).startswith(f"| alti | {dot} | {precision} |")
    assert f"| {blank} " in line
    assert line.endswith("| 0.17              |")
    assert [name for name in METHODS if f"\n| {name} " in report] == METHODS
    for name in ("summary", "probing", "correlation"):
        written = pd.read_csv(folder / f"{name}.csv", dtype={"layer": "Int64"} if name == "summary" else None)
        pd.testing.assert_frame_equal(written, found.tables[name])
    for name in ("agreement/figures/cue_dot", "agreement/figures/cue_ap", "probing"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "page.pdf").read_bytes().startswith(b"%PDF")
    (digest,) = {line.split()[7].rstrip(",") for line in found.repeat if line.startswith("Model agreement")}
    for name in ("page", "probing"):
        assert digest in read_provenance(folder / f"{name}.png")["model agreement"]


def test_figures_and_report_tell_sources(found: Reproduction, folder: Path) -> None:
    above, below = found.plot("probing").axes
    assert list(above.lines[0].get_ydata()) == pytest.approx(found.tables["probing"]["compression"].tolist())
    points = [line.get_xdata()[0] for line in below.lines if line.get_linestyle() == "None"]
    assert sorted(points) == sorted(found.tables["correlation"]["statistic"])
    named = replace(found, title="a name of the data")
    for what in ("probing", "page"):
        titles = " ".join(part.get_suptitle() for part in parts_of(named.plot(what)))
        assert "a name of the data" in titles.replace("\n", " "), what
    report, told = str(replace(found, about="3 of 4 pairs.")), Study(folder / "agreement").lines()
    assert report.startswith("3 of 4 pairs.\n\n## agreement")
    assert len(told) >= 3 and all(f"- {line}\n" in report for line in told)
    assert all(report.count(line) for line in found.repeat)
    assert "sentences have no" not in str(found)
    summary = found.tables["summary"]
    place = summary.query("method == 'alti' and metric == 'blank_out' and layer == 3 and group == 'all'").index
    counted = summary.assign(undefined=summary["undefined"].where(~summary.index.isin(place), 7))
    assert "alti: 7 sentences have no blank_out." in str(replace(found, tables={**found.tables, "summary": counted}))


def test_headless_model_omits_faithfulness(shipped: Shipped, sentences: list[Example], tmp_path: Path) -> None:
    model, tokenizer = shipped
    bare = BertModel(model.config).eval()
    methods = ["value-zeroing", "saliency", "value-zeroing-effect"]
    found = reproduce({"bare": (bare, tokenizer)}, sentences[:6], tmp_path / "out", methods, resamples=50, quiet=True)
    assert set(found.tables["summary"]["metric"]) == {"cue_dot", "cue_ap"}
    assert set(found.tables["summary"]["method"]) == {"value-zeroing"}
    assert found.tables["omitted"]["what"].tolist() == ["saliency", "value-zeroing-effect", "blank-out", "probing"]
    report = str(found)
    assert "Without blank-out: BertModel has no head that predicts words" in report
    assert "Without saliency: BertModel gives no logits" in report
    assert f"Without probing: 6 sentences have a label, of 2 kinds. Pass at least {FEWEST}, of 2 kinds" in report
    with pytest.raises(ValueError, match="what is 'probing'"):
        found.plot("probing")
    with pytest.raises(ValueError, match="can explain 'bare'"):
        reproduce({"bare": (bare, tokenizer)}, sentences, tmp_path / "none", ["saliency"], quiet=True)
    assert not (tmp_path / "none").exists()


def test_evaluations_use_public_names_only() -> None:
    """What they do, a user can do with another study: they have no way around the public interface."""
    for path in Path(evaluations.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("captum_vz"):
                names = {alias.name for alias in node.names}
                assert "._" not in module, path.name
                assert names <= {*getattr(import_module(module), "__all__", names)}, path.name


def test_rare_label_and_names_that_end_cells(
    shipped: Shipped, sentences: list[Example], tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paper.evaluations.FEWEST", 10)
    rare = [replace(sentences[0], label="rare"), *sentences[1:10]]
    methods = {"a|b": "attention", "c\nd": "random"}
    found = reproduce({"agreement": shipped}, rare, tmp_path, methods, resamples=50, quiet=True, controls=0)
    assert found.tables["omitted"]["reason"].tolist() == ["1 sentences have the label 'rare'. Pass at least 5 of each."]
    report = str(found)
    assert r"| a\|b " in report and "| c d " in report
    for table in re.findall(r"(?:^\|.*\n)+", report, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


# The controls, and the models side by side


CONTROLLED = ["value-zeroing", "attention-rollout", "position"]
CONTROLS = 5
NAMES = ("agreement", "causal")


@pytest.fixture(scope="module")
def controls_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("controls") / "out"


@pytest.fixture(scope="module")
def controlled(controls_folder: Path) -> Reproduction:
    examples = [Example.from_record(record) for record in agreement_sentences(6, paradigm="relational_noun")]
    models = {name: load_model(name) for name in NAMES}
    with without_drawing():
        return reproduce(models, examples, controls_folder, CONTROLLED, resamples=20, quiet=True, controls=CONTROLS)


def test_tables_equal_their_parts(controlled: Reproduction) -> None:
    examples = [Example.from_record(record) for record in agreement_sentences(CONTROLS, seed=1)]
    for name in NAMES:
        own = controlled.tables["sanity"].query("model == @name").set_index(["metric", "method"])["mean"]
        rows = pd.DataFrame(Scorer(*load_model(name), CONTROLLED, list(CHECKS)).score(examples))
        last = rows.groupby(["method", "example"]).tail(1).groupby("method")[list(CHECKS)].mean()
        for check in CHECKS:
            assert own[check].to_dict() == pytest.approx(last[check].to_dict())
    rows = [row for row in Scorer(*load_model(), CONTROLLED, list(TRUTHS)).score(examples) if row["skipped"] is None]
    whole = controlled.tables["truth"].query("model == 'agreement' and group == 'all'")
    truth = whole.set_index(["method", "metric"])["mean"].to_dict()
    for metric in TRUTHS:
        values = [row[metric] for row in rows if row["method"] == "position"]
        assert truth["position", metric] == pytest.approx(np.nanmean(values))
    # The cue of most sentences stands where the position baseline has little.
    assert truth["position", "value_patching"] < 0.5


def test_report_shows_controls_and_models(controlled: Reproduction, controls_folder: Path) -> None:
    counts = [line.split(",")[0] for line in controlled.repeat if line.startswith("Sentences")]
    assert counts == ["Sentences: 6", f"Sentences of the controls: {CONTROLS}"]
    report = (controls_folder / "report.md").read_text("utf-8")
    assert report == f"{controlled}\n"
    lines = [[cell.strip() for cell in x.split("|")[1:-1]] for x in report.splitlines() if x.startswith("| ")]
    sanity = next(line for line in lines if line[0] == "position" and line[-1] == "no")
    # A baseline that looks at no model does not pass.
    assert [cell.split()[0] for cell in sanity[1:]] == ["1.00", "1.00", "no"] * 2
    assert "agreement, sanity" not in report
    whole = controlled.tables["truth"].query("model == 'agreement' and group == 'all' and method == 'position'")
    cells = [with_interval(*row) for row in whole.set_index("metric").loc[list(TRUTHS), ["mean", "low", "high"]].values]
    assert ["position", *cells] in lines
    whole = controlled.tables["summary"].query("group == 'all' and metric == 'cue_dot'")
    means = [whole.query("model == @name and method == 'value-zeroing'")["mean"].iloc[-1] for name in NAMES]
    assert ["value-zeroing", *(f"{mean:.2f}" for mean in means)] in lines
    for name in ("sanity", "truth", "truth_differences"):
        assert len(pd.read_csv(controls_folder / f"{name}.csv"))


# `python tutorials/paper`: its sentences, its models, and its errors of one line


refused = partial(command.refused, run=main, name="paper")


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_held_out_blimp(capsys: Output, working_folder: Path) -> None:
    """A folder in BLiMP's format with the grammar's sentences. BLiMP writes anaphors in another form."""
    for paradigm, kind in zip(HELD_OUT_PARADIGMS, KINDS, strict=True):
        records = [record | {"UID": paradigm} for record in agreement_sentences(6, paradigm=kind)]
        (working_folder / f"{paradigm}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    asked = ["--blimp", ".", "--methods", "random", "--folder", "out", "--controls", "0"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    (found,) = re.findall(r"## agreement: (\d+) sentences, (\d+) skipped", out)
    assert 12 <= sum(map(int, found)) <= 15
    assert out.endswith("tables, figures and this report: out\n")
    assert main([*asked, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_errors_are_one_line(capsys: Output, monkeypatch: pytest.MonkeyPatch, working_folder: Path) -> None:
    assert "anaphor_number_agreement.jsonl is missing" in refused(capsys, "--blimp", "nowhere", "--folder", "out")
    assert "there are 0 examples: pass at least 1" in refused(capsys, "--grammar", "0", "--folder", "out")
    (working_folder / "taken").write_text("", encoding="utf-8")
    assert "taken" in refused(capsys, "--grammar", "2", "--folder", "taken", "--methods", "random")

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paper.__main__.reproduce", stopped)
    assert main(["--grammar", "2", "--folder", "out"]) == 130
    assert capsys.readouterr().err == "paper: stopped. The same command continues from here.\n"


def test_program_and_report_without_empty_tables(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, working_folder: Path
) -> None:
    """A method without layers has no row in the table of layers. One sentence has no interval."""
    assert main(["--grammar", "1", "--methods", "random", "--folder", "out"]) == 0
    out = capsys.readouterr().out
    assert "in each layer" not in out
    assert "nan" not in out
    script = Path(__file__).parents[2] / "tutorials" / "paper"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    assert left.value.code == 0
    assert "usage: python tutorials/paper" in capsys.readouterr().out

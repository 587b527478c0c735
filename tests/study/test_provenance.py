"""Where the numbers of a study come from: in its settings, figures and reports, and enough to repeat it."""

import json
from pathlib import Path

import pytest
import torch
from captum.attr import Saliency

from captum_vz.cli import main
from captum_vz.study import METRICS, EvaluationBatch, Example, Study, run_study, safe_name, write_jsonl
from captum_vz.study.folder.provenance import code_identity
from captum_vz.testbed import agreement_sentences, load_model
from captum_vz.visualization import read_provenance
from captum_vz.visualization.pictures.files import weights_fingerprint

METHODS = ["value-zeroing", "random"]


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study by the command, which grew by a second one."""
    folder = tmp_path_factory.mktemp("typed")
    write_jsonl(folder / "mine.jsonl", [Example.from_record(record) for record in agreement_sentences(6)])
    given = ["study", "--jsonl", str(folder / "mine.jsonl"), "--folder", str(folder / "s"), "--metrics", "cue_dot"]
    assert main([*given, "--quiet", "--methods", "random"]) == 0
    assert main([*given, "--quiet", "--methods", *METHODS]) == 0
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

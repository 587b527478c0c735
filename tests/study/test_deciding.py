"""In a study, the layer that decides is chosen for each sentence, and it is that of `explain`."""

from pathlib import Path

import pytest
import torch

from captum_vz import explain
from captum_vz.errors import ArgumentError
from captum_vz.functional import deciding_layer
from captum_vz.study import Example, Scorer, run_study
from captum_vz.testbed import agreement_sentences, load_model

METHODS = ["value-zeroing", "value-zeroing:deciding", "decision"]
EXAMPLES = [Example.from_record(one) for one in agreement_sentences(3, seed=4, paradigm="relational_noun")]


@pytest.mark.parametrize("name", ["agreement", "causal"])
def test_rows_are_those_of_the_chosen_layers(name: str) -> None:
    loaded = load_model(name)
    rows = Scorer(*loaded, METHODS, "cue_dot").score(EXAMPLES)
    for example in EXAMPLES:
        of = [[row for row in rows if (row["example"], row["method"]) == (example.id, method)] for method in METHODS]
        (decided,), (decision,) = of[1:]
        layers = torch.tensor([row["scores"] for row in of[0]])
        layer, _ = deciding_layer(layers, torch.tensor(decision["scores"]), decided["target"])
        assert (decided["layer"], decided["deciding"], decision["deciding"]) == (None, layer, None)
        assert decided["scores"] == pytest.approx(layers[layer].tolist())
        text = example.text or " ".join(example.words)
        text = text[: text.index("[MASK]")].rstrip() if name == "causal" else text
        found = explain(loaded, text, method="value-zeroing", target=example.good, foil=example.bad, layer="deciding")
        assert found.layer == layer


def test_study_keeps_and_tells_the_layers(tmp_path: Path) -> None:
    study = run_study("causal", EXAMPLES, tmp_path, METHODS, "cue_dot", quiet=True, resamples=9)
    layers = study.rows(["method", "deciding"]).query("method == 'value-zeroing:deciding'")["deciding"]
    assert layers.notna().all()
    told = next(line for line in study.lines() if line.startswith("causal, value-zeroing:deciding: layer"))
    often = f"s {layers.min()} to {layers.max()}, most often {layers.mode()[0]} (in "
    assert (often if layers.nunique() > 1 else f" {layers.iloc[0]}") in told
    assert set(study.summary.query("method == 'value-zeroing:deciding'")["examples"]) >= {len(EXAMPLES)}


def test_methods_without_own_maps_have_no_deciding_layer() -> None:
    with pytest.raises(ArgumentError, match=r"methods is .*: pass some of .*value-zeroing:deciding"):
        Scorer(*load_model(), ["value-zeroing-rollout:deciding"], "cue_dot")

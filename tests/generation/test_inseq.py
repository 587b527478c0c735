"""`to_inseq` equals the attribution that inseq computes itself, of the same model and text."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from captum_vz import LayerAttention, ValueZeroing
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.testbed import load_model
from tests.generation.models import case_of, tokenizer_of_words
from tests.view.pages import missing

TEXT, NEW = "<bos> the woman likes", [41, 12, 30]


def found_by(name: str, kind: Any = ValueZeroing) -> GenerationAttribution:
    found: GenerationAttribution = attribute_generation(
        (case_of(name).model, tokenizer_of_words()), TEXT, kind, generated=NEW
    )
    return found


@pytest.fixture
def inseq() -> Any:
    if find_spec("inseq") is None:
        missing("inseq is not installed: pip install inseq")
    import inseq

    return inseq


def test_scores_of_an_encoder_decoder(inseq: Any) -> None:
    found = found_by("bart")
    (one,) = found.to_inseq()
    source = len(one.source)
    assert [token.id for token in [*one.source, *one.target]] == [*found.prompt.ids, *found.generated.ids]
    assert one.attr_pos_start == 1  # the decoder's start
    assert one.target[0].id == case_of("bart").model.config.decoder_start_token_id
    torch.testing.assert_close(one.source_attributions.T, found.scores[:, :source, -1].float())
    torch.testing.assert_close(one.target_attributions[0], found.scores[:, source, -1].float())


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_shown_and_saved(inseq: Any, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    result = found_by(name).to_inseq()
    result.show()
    shown = capsys.readouterr().out
    assert "Target Saliency Heatmap" in shown and ("Source Saliency Heatmap" in shown) == (name == "bart")
    assert "woman" in result.show(display=False, return_html=True)
    result.save(tmp_path / "scores.json")
    again = inseq.FeatureAttributionOutput.load(tmp_path / "scores.json")
    torch.testing.assert_close(again[0].target_attributions, result[0].target_attributions, equal_nan=True)


def test_equals_inseqs_own_attention(inseq: Any) -> None:
    model, tokenizer = load_model("causal")
    text, new = "the pictures of some hat", " have upset anna"
    found = attribute_generation((model, tokenizer), text, LayerAttention, generated=new)
    assert isinstance(found, GenerationAttribution)
    model.set_attn_implementation("eager")
    wrapped = inseq.load_model(model, "attention", tokenizer=tokenizer)
    (theirs,) = wrapped.attribute(text, text + new, show_progress=False)
    for layer in range(len(found.layers)):
        (ours,) = found.to_inseq(layer)
        of_layer = theirs.target_attributions[:, :, layer].mean(-1)
        torch.testing.assert_close(ours.target_attributions, of_layer, equal_nan=True, rtol=1e-4, atol=1e-6)
    assert [token.id for token in theirs.source] == [token.id for token in ours.source]
    assert [token.id for token in theirs.target] == [token.id for token in ours.target]
    assert (theirs.attr_pos_start, theirs.attr_pos_end) == (ours.attr_pos_start, ours.attr_pos_end)


def test_without_inseq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inseq.data.attribution", None)
    monkeypatch.setitem(sys.modules, "inseq", None)
    with pytest.raises(ModuleNotFoundError, match="pip install inseq"):
        found_by("gpt2").to_inseq()

"""What a context does to generated tokens, against loops over growing texts."""

from typing import Any

import pytest
import torch

from captum_vz.errors import ArgumentError
from captum_vz.generation import attribute_generation, context_reliance
from captum_vz.testbed import load_model
from tests.generation.models import case_of, tokenizer_of_words

CONTEXT, TEXT = "the pictures of ", "some hat"


def test_divergence_equals_growing_texts() -> None:
    model, words = load_model("causal")
    found = context_reliance((model, words), CONTEXT, TEXT, max_new_tokens=4)
    prompts = [words(one)["input_ids"] for one in (CONTEXT + TEXT, TEXT)]
    written = model.generate(torch.tensor([prompts[0]]), max_new_tokens=4)[0, len(prompts[0]) :].tolist()
    for step, number in enumerate(written):
        logs = [model(torch.tensor([ids + written[:step]])).logits[0, -1].double().log_softmax(-1) for ids in prompts]
        probability = torch.tensor([one[number].exp() for one in logs], dtype=torch.float64)
        torch.testing.assert_close(found.probability[step], probability, rtol=1e-4, atol=1e-6)
        entropy = torch.stack([-(one.exp() * one).sum() for one in logs])
        torch.testing.assert_close(found.entropy[step], entropy, rtol=1e-4, atol=1e-6)
        moved = (logs[0].exp() * (logs[0] - logs[1])).sum()
        torch.testing.assert_close(found.divergence[step], moved, rtol=1e-4, atol=1e-6)
        assert found.instead[step] == words.decode([int(logs[1].argmax())])
    least = found.divergence.mean() + found.divergence.std(correction=0)
    assert found.sensitive == tuple(step for step in range(4) if found.divergence[step] >= least) != ()


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("method", ["attn-lrp", "value-zeroing-effect"])
def test_cues_are_of_the_context(name: str, method: str) -> None:
    """The scores explain the written token rather than the one without the context, whose tokens they leave out."""
    model, words = case_of(name, torch.float32).model, tokenizer_of_words()
    found = context_reliance(model, "a woman ", "anna likes", method, 4, tokenizer=words, deviations=0.0)
    ids = words("a woman anna likes")["input_ids"]
    step, places = found.sensitive[0], found.cues[0]
    instead = words.convert_tokens_to_ids(found.instead[step])
    new = words.convert_tokens_to_ids(list(found.tokens))
    foils = [instead if place == step and instead != new[step] else None for place in range(len(new))]
    expected: Any = attribute_generation((model, words), ids, method, generated=new, foil=foils)
    row = expected.all_scores[step, ids.index(words("a")["input_ids"][0]) :, -1][: len(found.context)]
    torch.testing.assert_close(found.scores[0], row)
    assert list(places) == [place for place, one in enumerate(row) if one >= row.mean() and one > 0]
    assert len(found.context) == 2
    assert str(found).startswith(f"{step} {found.tokens[step]}: ")
    assert found.to_pandas()["token"].tolist() == list(found.tokens)


@pytest.mark.parametrize(("context", "text"), [("", TEXT), (" ", TEXT), (CONTEXT, "")])
def test_context_without_tokens_is_refused(context: str, text: str) -> None:
    with pytest.raises(ArgumentError, match="adds no tokens before the text"):
        context_reliance("causal", context, text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((5, TEXT), "context is of type int: pass a text"),
        ((CONTEXT, None), "text is of type NoneType: pass a text"),
        ((CONTEXT, TEXT, "value-zeroing"), "explains the state of a token: pass a method that explains the output"),
    ],
)
def test_wrong_arguments(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        context_reliance("causal", *given)


def test_context_with_an_image_is_refused() -> None:
    """The texts were compared without the image."""
    with pytest.raises(ArgumentError, match="compares two texts, but was passed pixel_values"):
        context_reliance("causal", CONTEXT, TEXT, pixel_values=torch.zeros(1, 3, 8, 8))

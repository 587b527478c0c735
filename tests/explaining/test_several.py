"""A list of texts: each as alone, a table, and a picture of the words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import captum_vz
from captum_vz.errors import ArgumentError
from captum_vz.result import Explanations

TEXTS = ["the pictures of some hat [MASK] scaring marcus.", "the hat [MASK] new.", "The Pictures [MASK] new."]


@pytest.mark.parametrize("options", [{}, {"target": "are"}, {"words": True, "method": "attention"}])
def test_list_is_each_text_alone(options: dict[str, Any]) -> None:
    found = captum_vz.explain("agreement", TEXTS, **options)
    assert isinstance(found, Explanations)
    assert len(found) == len(TEXTS)
    for one, text in zip(found, TEXTS, strict=True):
        alone = captum_vz.explain("agreement", text, **options)
        torch.testing.assert_close(one.scores, alone.scores)
        assert (one.tokens, one.predictions) == (alone.tokens, alone.predictions)
    assert found[1:][0] is found[1]


def test_words_table_and_picture_of_several_texts() -> None:
    """Words are compared in lower case, and [CLS], [SEP], the mask's neighbours in brackets and "." are left out."""
    found = captum_vz.explain("agreement", TEXTS)
    words = found.words()
    own = [one.scores[place] for one in found for place, token in enumerate(one.tokens) if token == "pictures"]
    torch.testing.assert_close(words["pictures"], torch.stack(own))
    assert found.to_pandas()["text"].tolist() == [number for number, one in enumerate(found) for _ in one.tokens]
    means = [float(scores.abs().mean()) for scores in words.values()]
    assert means == sorted(means, reverse=True)
    assert not {"[cls]", "[sep]", "."} & set(words)
    found = captum_vz.explain("agreement", TEXTS, target="are")
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(TEXTS)
    assert "pictures +" in lines[1]
    assert "<td" in found._repr_html_()
    panel = found.plot(most=4).axes[0]
    assert [one.get_text() for one in panel.get_yticklabels()] == [
        f"{word} ({len(scores)})" for word, scores in list(found.words().items())[:4]
    ]
    bars = [one.get_width() for one in panel.patches]
    assert bars == pytest.approx([float(scores.mean()) for scores in list(found.words().values())[:4]])


def test_pairs_of_several_texts() -> None:
    with pytest.raises(ArgumentError, match="there are 3 texts and 1 second ones"):
        captum_vz.explain("agreement", TEXTS, ["one"])
    with pytest.raises(ArgumentError, match="the list of texts is empty"):
        captum_vz.explain("agreement", [])

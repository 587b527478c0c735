"""The first token of causal models: set apart where rows are mostly on it, and where rollouts end."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from captum.attr import TextTokenInput

import captum_vz
from captum_vz import ValueZeroingRollout
from captum_vz.generation import LLMTokenMaps, attribute_generation
from captum_vz.methods import METHODS
from captum_vz.result import Explanation, Part, Row
from captum_vz.study import compare
from tests.explaining import models

TOKENS, ROW = ["The", "capital", "of", "France", "is"], [0.5, 0.0, 0.0, 0.25, 0.25]
REMARK = "The, the first token, takes 50 %: shares of the others are without it"
TEXT, ROLLOUT = "the pictures of some hat", "value-zeroing-rollout"


def explained(*shares: float, row: list[float] = ROW, method: str = "attention", is_causal: bool = True) -> Explanation:
    """A row, after layers in which its first token has these shares."""
    layers = torch.tensor([*([one, *[(1 - one) / 4] * 4] for one in shares), row], dtype=torch.float64)
    about = [Row("is", 4, layers[-1])], layers[None], tuple(map(str, range(len(layers)))), len(layers) - 1
    part = Part(method, METHODS[method], *about, is_causal=is_causal)
    return Explanation(TOKENS, {method: part}, words=list(range(5)), special=[False] * 5)


def test_first_token_is_set_apart() -> None:
    found = explained(0.1, 0.9)
    _, *lines, remark = str(found).split("\n")
    assert remark == REMARK
    assert [line.replace(">", " ").split()[:3] for line in lines] == [
        ["1", "capital", "0.0000"],
        ["2", "of", "0.0000"],
        ["3", "France", "0.5000"],
        ["4", "is", "0.5000"],
    ]
    told = json.loads(found.to_json())
    assert told["scores"] == list(found.to_pandas()["is"]) == ROW
    assert told["without_first"] == {"attention": [None, 0.0, 0.0, 0.5, 0.5]}
    assert "left out" in found.plot().get_suptitle()
    assert "The, the first token, takes 50 %, and is left out (Options)." in found.view().subtitle


def test_table_of_several_methods() -> None:
    """How far a method agrees is of whole rows, in the table and in its picture."""
    found = explained(0.9)
    found.truth = torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert found.agreement == {"attention": 0.75}
    assert REMARK not in str(found)
    assert re.search(r" 0 +The +0\.500\*? +0\.500", str(found))
    texts = [text.get_text() for axes in found.plot().axes for text in axes.texts]
    assert "0.75" in texts and "0.50" not in texts
    first, other = explained(0.9), explained(0.1)
    both = Explanation(TOKENS, {"attention": first.first, "alti-layer": other.first})
    assert re.search(r" 0 +The +0\.500\*?$", str(both), re.MULTILINE)
    assert REMARK.replace("50 %", "50 % of attention") in str(both).split("\n")
    assert both.shares["attention"].tolist() == ROW


@pytest.mark.parametrize(
    "found",
    [
        explained(*[0.1] * 10),  # in no other layer
        explained(0.9, row=[0.2, 0.8, 0.0, 0.0, 0.0]),  # not in this layer
        explained(0.9, is_causal=False),
        explained(0.9, method="value-zeroing-effect"),  # amounts
        explained(0.9, row=[1.0, 0.0, 0.0, 0.0, 0.0], method=ROLLOUT),  # nothing would be left
    ],
)
def test_nothing_is_apart(found: Explanation) -> None:
    assert found.first.apart is None
    assert "The" in str(found).split("\n")[1]
    assert "without_first" not in found.to_dict()


@pytest.fixture(scope="module")
def deep() -> tuple[Any, Any]:
    return models.deep(spread=0.02)


def test_rollout_of_generated_text_says_nothing(deep: tuple[Any, Any]) -> None:
    found = attribute_generation(deep, TEXT, ROLLOUT, max_new_tokens=2)
    assert "says nothing here: nearly all is on [CLS]" in found.printed().split("\n")[-1]
    assert "says nothing" in found.printed(step=0)
    assert "says nothing" not in found.printed(layer=0)
    assert "says nothing" in str(attribute_generation(deep, TEXT, ROLLOUT, max_new_tokens=2, layer=23).remarks())
    maps = LLMTokenMaps(ValueZeroingRollout(deep[0]), deep[1])
    with pytest.warns(UserWarning, match="first column. Choose layer 'deciding'"):
        maps.attribute(TextTokenInput(TEXT, deep[1]), gen_args={"max_new_tokens": 2})


def test_where_rollouts_say_nothing(deep: tuple[Any, Any]) -> None:
    found = captum_vz.explain("causal", TEXT, method=ROLLOUT, token=-1)
    assert not any("says nothing" in line for line in found.remarks())
    assert found.view().methods[0].panels[-1].label == "rollout, residual 0.5"
    found = captum_vz.explain(deep, TEXT, method="value-zeroing", token=-1)
    assert found.rollout is not None
    assert found.rollout[-1, 0] > 0.95
    assert len(found.plot(maps=True).axes) == 24 + 1  # a colour bar
    labels = [panel.label for panel in found.view(maps=True).methods[0].panels]
    assert labels == [f"layer {index}" for index in range(24)]
    several = compare(deep, TEXT, [ROLLOUT, "value-zeroing"], token=-1)
    assert [line.split(" says ")[0] for line in several.remarks()] == [ROLLOUT]
    assert several.view().layer == 23

"""What `view` takes and refuses, and what its labels and numbers are. No browser is needed."""

import re
from typing import Any

import pytest
import torch

import captum_vz
from captum_vz import ValueZeroing
from captum_vz.errors import ArgumentError
from captum_vz.subjects import subject_of
from captum_vz.visualization import view
from captum_vz.visualization.view.page import KINDS, read_labels
from tests.view.pages import TOKENS, shares

MAP = shares(8, 1)


def panels(made: Any) -> dict[str, list[str]]:
    return {method.name: [panel.label for panel in method.panels] for method in made.methods}


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        (MAP, {"": ["map"]}),
        (MAP[None], {"": ["layer 0"]}),
        ([MAP, MAP[None]], {"": ["layer 0", "layer 1"]}),
        (torch.stack([MAP, MAP]), {"": ["layer 0", "layer 1"]}),
        (torch.stack([MAP, MAP])[:, None], {"": ["layer 0", "layer 1"]}),
        ({"first": MAP, "last": MAP}, {"": ["first", "last"]}),
        ({"a": [MAP], "b": torch.stack([MAP, MAP])}, {"a": ["layer 0"], "b": ["layer 0", "layer 1"]}),
        ({"a": {"x": MAP}, "b": [MAP]}, {"a": ["x"], "b": ["layer 0"]}),
    ],
)
def test_maps_in_every_form(maps: Any, expected: dict[str, list[str]]) -> None:
    made = view(maps, TOKENS)
    assert panels(made) == expected
    assert all(torch.allclose(panel.scores, MAP) for method in made.methods for panel in method.panels)


@pytest.mark.parametrize(
    ("maps", "options", "complaint"),
    [
        ([torch.stack([MAP, MAP])], {}, "batch (2, 8, 8)"),
        ({}, {}, "maps holds no map"),
        ("text", {}, "got str"),
        ([MAP], {"rollout": {"x": MAP}}, "rollout is a dict"),
        ({"a": [MAP], "b": [MAP]}, {"rollout": MAP}, "dict of these names"),
        *(([MAP], {"tokens": tokens}, "tokens is") for tokens in ([], "text", [1, 2], None)),
        ([MAP], {"token": 8}, "8 is out of range"),
        ([MAP], {"layer": 1}, "1 is out of range"),
        ([MAP], {"predict": [9]}, "9 is out of range"),
        ([MAP], {"theme": "blue"}, "theme is 'blue'"),
        ([MAP], {"special": [1]}, "special is [1] for"),
        ([MAP], {"columns": TOKENS, "offset": 1}, "offset is 1"),
    ],
)
def test_wrong_arguments(maps: Any, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(complaint)):
        view(**{"maps": maps, "tokens": TOKENS} | options)


def test_rows_are_shares_and_totals() -> None:
    raw = MAP * torch.arange(1.0, 9)[:, None]
    (panel,) = view(raw, TOKENS).methods[0].panels
    assert panel.totals is not None
    assert torch.allclose(panel.totals, torch.arange(1.0, 9, dtype=torch.float64))
    assert torch.allclose(panel.scores, MAP)
    padded = MAP.clone()
    padded[3] = 0
    assert view(padded, TOKENS).methods[0].panels[0].totals is None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("count", "error"), [(8, 1e-4), (60, 1e-3), (512, 2e-2)])
def test_quantised_numbers_are_close(count: int, error: float, sign: int) -> None:
    scores = shares(count, 2)
    scores[0, 0] *= sign
    made = view(scores, [f"t{i}" for i in range(count)])
    (found,) = made.encoded.maps[0]
    given = made.methods[0].panels[0].scores
    assert (found - given).abs().max() <= error * given.abs().max()
    assert torch.equal(found.sign(), torch.where(found == 0, 0, given.sign()))


def test_tokens_are_readable_and_have_kinds() -> None:
    for tokens, words in (
        (["a", "w", "##u", "##g", "##"], ["a", "wug", "##"]),
        (["a", "\u0120w", "ug", ",", "\u0120x"], ["a", "wug", ",", "x"]),
        (["\u2581a", "\u2581w", "ug", "</s>"], ["a", "wug", "</s>"]),
        (["no", "marks"], ["no", "marks"]),
    ):
        assert read_labels(tokens, None, None, "tokens").words == words
    given = read_labels(["a", "b", "c"], [None, 0, 0], None, "tokens")
    assert (given.groups, given.words) == ([0, 1, 1], ["a", "bc"])
    # Marks of spaces are left out, and bytes are read as the characters that they form.
    for tokens, shown in (
        (["The", "\u0120caf\u00c3\u00a9", "\u0120wug", "s", "\u010a"], ["The", "caf\u00e9", "wug", "s", r"\n"]),
        (["\u2581the", "\u2581wug", "s", "\u2581"], ["the", "wug", "s", "\u2423"]),
        (["\u0120a", "\u00e6", "\u0120\u6f22"], ["a", "\u00e6", "\u0120\u6f22"]),  # half a character
        (["\u00c3\u00a9", "caf\u00e9"], ["\u00c3\u00a9", "caf\u00e9"]),  # another vocabulary
    ):
        assert read_labels(tokens, None, None, "tokens").tokens == shown
    tokens = ["<s>", "The", "[MASK]", "!?", "a##", "<|eot|>", "$", "of", "##fer"]
    labels = read_labels(tokens, None, None, "tokens")
    assert [KINDS[kind] for kind in labels.kinds] == ["special", "stop", "", "punctuation", "", "special", "", "", ""]
    marked = read_labels(["a", "b"], None, torch.tensor([[0, 1]]), "tokens")
    assert [KINDS[kind] for kind in marked.kinds] == ["stop", "special"]


def test_where_a_page_opens() -> None:
    made = view([MAP, MAP], TOKENS, rollout=MAP)
    assert (made.layer, made.token) == (1, 5)
    assert view([MAP, MAP], TOKENS, rollout=MAP, layer=2).layer == 2
    assert view([MAP, MAP], TOKENS, rollout=MAP, layer=-2).layer == 0
    assert view({"rollout": MAP}, TOKENS).layer == 0
    assert view(MAP, [*TOKENS[:3], "<mask>", *TOKENS[4:]]).token == 3
    assert view(MAP, ["[CLS]"] * 8).token == 7
    assert panels(view([MAP], TOKENS, rollout=MAP)) == {"": ["layer 0", "rollout"]}
    made = view({"a": [MAP], "b": [MAP]}, TOKENS, rollout={"b": MAP[None]})
    assert panels(made) == {"a": ["layer 0"], "b": ["layer 0", "rollout"]}
    heads = torch.stack([shares(8, 1), shares(8, 2)])[None]
    made = view([heads, MAP], TOKENS)
    assert panels(made) == {"": ["layer 0, head 0", "layer 0, head 1", "layer 1"]}
    assert torch.allclose(made.methods[0].panels[1].scores, heads[0, 1])


@pytest.mark.parametrize("method", ["value-zeroing", "value-zeroing-rollout", "attention"])
def test_page_of_a_command_has_distances(method: str) -> None:
    """`explain --html` and the demo show how much there was to divide, without another rollout or other shares."""
    loaded = subject_of("agreement")
    found = captum_vz.explain(loaded, "the pictures of some hat [MASK].", method=method)
    panels = found.view(title="title").methods[0].panels
    assert [panel.label for panel in panels] == [*(f"layer {index}" for index in range(4)), "rollout, residual 0.5"]
    for panel, scores in zip(panels, [*found.maps, found.rollout], strict=True):
        torch.testing.assert_close(panel.scores, scores.double(), rtol=1e-6, atol=1e-7)
    inputs = loaded.tokenizer("the pictures of some hat [MASK].", return_tensors="pt")
    distances = ValueZeroing(loaded.model, loaded.layers, normalize=False).attribute(inputs)
    for panel, one in zip(panels, distances, strict=False):
        assert (panel.totals is None) == (method == "attention")
        if panel.totals is not None:
            torch.testing.assert_close(panel.totals, one[0].sum(1).double(), rtol=1e-6, atol=1e-7)


def test_windows_are_named_by_what_is_scored() -> None:
    """A text in windows has one map, of the layer or the layers that are asked for."""
    for method, named in (("value-zeroing", "layer 2"), ("value-zeroing-rollout", "layers 0 to 2, residual 0.5")):
        found = captum_vz.explain("agreement", "hat " * 40, method=method, window=(20, 5), layer=2)
        assert panels(found.view())[method] == [named]

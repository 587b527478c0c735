"""What a decision rests on, the default answer of deep models, and the layer in which it is read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import TextTokenInput
from torch import Tensor

import captum_vz
from captum_vz import AttnLRP, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.functional import deciding_layer, word_mask
from captum_vz.generation import LLMTokenMaps, attribute_generation
from captum_vz.methods import METHODS, Question
from captum_vz.methods.decision import LONGEST
from captum_vz.result import Explanation, Part, Row
from captum_vz.study import compare
from captum_vz.subjects import Subject
from captum_vz.testbed import load_model
from tests.command import Output, ran
from tests.explaining.models import deep, joint, views

PREFIX = "the pictures of some hat"


@pytest.mark.parametrize(("name", "foil"), [("causal", "is"), ("agreement", "is"), ("agreement", None)])
def test_decision_is_the_mean_of_two_views(name: str, foil: str | None) -> None:
    """Of a next word against a foil, and of a word at a mask also without one."""
    text = PREFIX if name == "causal" else f"{PREFIX} [MASK] scaring marcus."
    found = captum_vz.explain(name, text, method="decision", target="are", foil=foil)
    model, tokenizer = load_model(name)
    inputs, place = tokenizer(text, return_tensors="pt"), found.token
    assert place is not None
    are, other = tokenizer.convert_tokens_to_ids(["are", "is"])
    expected = joint(views(model, inputs, (place, are), foil and (place, other)), (0, place))
    torch.testing.assert_close(found.scores.double(), torch.tensor(expected).double(), atol=1e-5, rtol=0)
    assert found.told == ["decision: by Value Zeroing's effect and CP-LRP"]


def test_next_word_without_a_foil_is_explained_by_its_log_probability() -> None:
    model, tokenizer = deep()
    found = captum_vz.explain((model, tokenizer), PREFIX)
    inputs, place = tokenizer(PREFIX, return_tensors="pt"), found.token
    assert place is not None
    best = int(model(**inputs).logits[0, place].argmax())

    def read(output: Any) -> Tensor:
        numbers: Tensor = output.logits[:, place].log_softmax(-1)[:, best]
        return numbers

    relevance = AttnLRP(model).attribute(inputs, target=read)[0].sum(-1)
    torch.testing.assert_close(found.scores, torch.tensor(joint([relevance.tolist()], (0, place))).double())
    against = f"{found.predictions[0][0]}, against all other answers: pass foil= to ask about one"
    assert found.told[:2] == ["decision: by AttnLRP", against]


def test_deep_models_answer_with_the_decision_and_where_it_is_read() -> None:
    given = deep()
    found = captum_vz.explain(given, PREFIX, target="are", foil="is")
    assert list(found.parts) == ["decision", "value-zeroing"]
    shown = found.parts["value-zeroing"]
    alone = captum_vz.explain(given, PREFIX, method="value-zeroing", target="are", foil="is", layer="deciding")
    assert shown.layer == alone.layer == found.layer
    torch.testing.assert_close(shown.rows[0].scores, alone.scores)
    lines = str(found).splitlines()
    assert lines[0] == "decision: how much are rather than is rests on each token"
    assert f"value-zeroing, layer {shown.layer}: how much hat draws on each token" in lines
    assert found.to_dict()["others"]["value-zeroing"] == {"layer": shown.layer, "scores": shown.rows[0].scores.tolist()}
    names = [label.get_text() for label in found.plot().axes[0].get_yticklabels()]
    assert names[:3] == ["decision", f"value-zeroing, layer {shown.layer}", "layer 0"]
    page = found.view()
    assert "rests on" in page.subtitle
    assert (page.rows.tokens, page.offset, page.layer) == (["hat"], found.token, shown.layer)
    (method,) = page.methods  # no map is computed
    torch.testing.assert_close(torch.cat([panel.scores for panel in method.panels]), shown.scores[0])
    assert len(found.view(maps=True).rows.tokens) == len(found.tokens)


def test_shallow_models_and_short_texts_have_a_layer() -> None:
    assert list(captum_vz.explain("causal", PREFIX).parts) == ["value-zeroing"]
    assert list(captum_vz.explain(deep(11), PREFIX).parts) == ["value-zeroing"]
    assert list(captum_vz.explain(deep(12), PREFIX).parts) == ["decision", "value-zeroing"]
    # Nothing is left but the first token and the explained one.
    assert list(captum_vz.explain(deep(), "the").parts) == ["value-zeroing"]
    # What is asked for is what is shown.
    for options in ({"method": "value-zeroing"}, {"layer": 3}, {"window": 4}):
        assert "decision" not in captum_vz.explain(deep(), PREFIX, **options).parts


def test_long_texts_are_explained_by_relevance_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(ValueZeroingEffect, "attribute", lambda *args, **named: calls.append(args))
    text = " ".join(["the pictures"] * LONGEST)
    found = captum_vz.explain(deep(12), text, target="are", foil="is")
    assert not calls
    assert found.told[0] == "decision: by CP-LRP"
    assert captum_vz.explain(deep(12), text).told[0] == "decision: by AttnLRP"


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_equals_its_singles(side: str) -> None:
    model, tokenizer = load_model("causal")
    texts = [PREFIX, "some hat", "the hat of anna and the pictures"]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
    subject = Subject(model, model, find_layers(model), tokenizer)
    counts, width = batch["attention_mask"].sum(1).tolist(), batch["input_ids"].shape[1]
    starts = [width - count if side == "left" else 0 for count in counts]
    places = [start + count - 1 for start, count in zip(starts, counts, strict=True)]
    are, other = tokenizer.convert_tokens_to_ids(["are", "is"])
    for foil in (None, [other] * 3):
        asked = Question(dict(batch), places, [are] * 3, foil)
        (together,) = METHODS["decision"].scores(subject, asked)
        for row, text in enumerate(texts):
            one = Question(dict(tokenizer(text, return_tensors="pt")), [counts[row] - 1], [are], foil and foil[:1])
            (alone,) = METHODS["decision"].scores(subject, one)
            own = together[row, starts[row] : starts[row] + counts[row]]
            torch.testing.assert_close(own, alone[0], atol=1e-5, rtol=0)
            assert together[row].count_nonzero() == own.count_nonzero()


def test_generated_tokens_have_a_foil_and_a_layer_each() -> None:
    given = deep(12)
    found = attribute_generation(given, PREFIX, max_new_tokens=3, foil=[None, "is", None])
    for step, foil in enumerate([None, "is", None]):
        before = f"{PREFIX} {given[1].decode(list(found.generated.ids[:step]))}".strip()
        target = int(found.generated.ids[step])
        alone = captum_vz.explain(given, before, target=target, foil=foil)
        torch.testing.assert_close(found.all_scores[step, : len(alone.tokens), 0], alone.scores, atol=1e-6, rtol=0)
        assert found.deciding[step] == alone.layer
        assert f"layer {alone.layer}: " in str(found)
        row = found.parts["value-zeroing"].rows[step].scores
        of_layer = alone.parts["value-zeroing"].rows[0].scores
        torch.testing.assert_close(row[: len(alone.tokens)], of_layer, atol=1e-6, rtol=0)


def test_foil_is_the_first_token_that_differs() -> None:
    found = attribute_generation("causal", PREFIX, "decision", 3)
    ids = found.generated.ids
    word = load_model("causal")[1].decode([ids[0]]) + " small"
    contrast = attribute_generation("causal", PREFIX, "decision", 3, foil=word)
    torch.testing.assert_close(contrast.all_scores[0], found.all_scores[0], atol=1e-6, rtol=0)
    assert (contrast.all_scores[1] - found.all_scores[1]).abs().max() > 0.01
    (told,) = contrast.told
    assert told.endswith("at step 1")
    assert told in str(contrast)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "value-zeroing-rollout", "foil": "is"}, "explains no output"),
        ({"method": "value-zeroing-rollout", "layer": "deciding"}, "a map of each layer"),
        ({"method": "decision", "foil": ["is"]}, "1 entries for 3"),
        ({"method": "decision", "foil": "were not boring"}, "what is generated"),
        *(({"method": "decision", "foil": one}, "no word") for one in ("", " ", -1, 3.5, ["is", "", None])),
    ],
)
def test_refusals_of_generation(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        attribute_generation("causal", PREFIX, max_new_tokens=3, **options)


def test_maps_of_deep_models_are_computed_on_demand(
    tmp_path: Path, saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Of the page: of all tokens, with a bar on a terminal."""
    name = saved(*deep(13))
    monkeypatch.setattr("captum_vz.app.is_terminal", lambda stream: True)
    asked, page, sizes = ["explain", PREFIX, "--model", name], tmp_path / "page.html", list[int]()
    shown = ran(capsys, *asked).out
    assert "pass --foil to ask about one" in shown and "all 13 layers: --html FILE, of all tokens with --maps" in shown
    for more, has_bar in ([], False), (["--maps"], True):
        assert ("Value Zeroing attribution" in ran(capsys, *asked, "--html", str(page), *more).err) == has_bar
        sizes.append(len(page.read_text()))
    assert sizes[1] > sizes[0]
    for more in ([], ["--maps"]):
        told = ran(capsys, *asked, "--method", "value-zeroing", "--json", *more)
        assert len(json.loads(told.out)["layers"]) == 13
        assert ("maps" in json.loads(told.out)) == ("Value Zeroing attribution" in told.err) == bool(more)


# The layer that decides


MASKED = "the pictures of some hat [MASK] scaring marcus."


def test_words_are_one_source_each() -> None:
    text = "the unhappiness of some hat [MASK] scaring marcus."  # words of several tokens
    found = captum_vz.explain("agreement", text, target="are", foil="is", layer="deciding", words=True)
    model, tokenizer = load_model()
    inputs = tokenizer(text, return_tensors="pt")
    place, groups = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id), word_mask(inputs)
    are, other = tokenizer.convert_tokens_to_ids(["are", "is"])
    index = {"target": (place, are), "foil": (place, other)}
    effects = ValueZeroingEffect(model).attribute(inputs, feature_mask=groups, **index)[0]
    maps = ValueZeroing(model, find_layers(model)).attribute(inputs, token=place, feature_mask=groups)
    words = groups[0].tolist()
    firsts = [words.index(word) for word in dict.fromkeys(words)]
    rows, at = [row[0][firsts].tolist() for row in maps], list(dict.fromkeys(words)).index(words[place])
    by_word = [
        [sum(view[i] for i, one in enumerate(words) if one == word) for word in dict.fromkeys(words)]
        for view in views(model, inputs, index["target"], index["foil"])[1:]
    ]
    rests_on = joint([effects[firsts].tolist(), *by_word], (0, at))
    assert found.layer == deciding_layer(torch.tensor(rows), torch.tensor(rests_on), at)[0]


def test_compare_has_a_layer_for_each_method_and_computes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["value-zeroing", "attention", "value-zeroing-rollout", "value-zeroing-effect"]
    found = compare("causal", PREFIX, methods, "are", foil="is", layer="deciding")
    for name in ("value-zeroing", "attention"):
        alone = captum_vz.explain("causal", PREFIX, method=name, target="are", foil="is", layer="deciding")
        assert found.parts[name].layer == alone.layer
        torch.testing.assert_close(found.parts[name].rows[0].scores, alone.scores)
    last = compare("causal", PREFIX, methods, "are", foil="is")
    for name in ("value-zeroing-rollout", "value-zeroing-effect"):
        torch.testing.assert_close(found.shares[name], last.shares[name])
    assert len(found.told) == 2
    # For all methods of a table.
    own, calls = ValueZeroingEffect.attribute, list[Any]()
    monkeypatch.setattr(
        ValueZeroingEffect, "attribute", lambda *args, **named: calls.append(args) or own(*args, **named)
    )
    compare("causal", PREFIX, ["value-zeroing", "attention", "attention-norm"], "are", foil="is", layer="deciding")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("agreement", {"method": "value-zeroing-rollout"}, "of single layers"),
        ("agreement", {"method": "value-zeroing-effect-layer"}, "of single layers"),
        ("agreement", {"window": 6}, "read whole"),
        ("agreement", {"layer": "deciding."}, "'deciding' or None"),
        ("minilm", {}, "a model with a head"),
    ],
)
def test_refusals(model: str, options: dict[str, Any], message: str) -> None:
    text = MASKED if model == "agreement" else "some hat is small."
    with pytest.raises(ArgumentError, match=message):
        captum_vz.explain(model, text, **({"layer": "deciding"} | options))


# The first token of causal models: set apart where rows are mostly on it, and where rollouts end


TOKENS, ROW = ["The", "capital", "of", "France", "is"], [0.5, 0.0, 0.0, 0.25, 0.25]
REMARK = "The, the first token, takes 50 %: shares of the others are without it"
ROLLOUT = "value-zeroing-rollout"


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
def flat() -> tuple[Any, Any]:
    return deep(spread=0.02)


def test_rollout_of_generated_text_says_nothing(flat: tuple[Any, Any]) -> None:
    found = attribute_generation(flat, PREFIX, ROLLOUT, max_new_tokens=2)
    assert "says nothing here: nearly all is on [CLS]" in found.printed().split("\n")[-1]
    assert "says nothing" in found.printed(step=0)
    assert "says nothing" not in found.printed(layer=0)
    assert "says nothing" in str(attribute_generation(flat, PREFIX, ROLLOUT, max_new_tokens=2, layer=23).remarks())
    maps = LLMTokenMaps(ValueZeroingRollout(flat[0]), flat[1])
    with pytest.warns(UserWarning, match="layer 'deciding'"):
        maps.attribute(TextTokenInput(PREFIX, flat[1]), gen_args={"max_new_tokens": 2})


def test_where_rollouts_say_nothing(flat: tuple[Any, Any]) -> None:
    found = captum_vz.explain("causal", PREFIX, method=ROLLOUT, token=-1)
    assert not any("says nothing" in line for line in found.remarks())
    assert found.view().methods[0].panels[-1].label == "rollout, residual 0.5"
    found = captum_vz.explain(flat, PREFIX, method="value-zeroing", token=-1)
    assert found.rollout is not None
    assert found.rollout[-1, 0] > 0.95
    assert len(found.plot(maps=True).axes) == 24 + 1  # a colour bar
    labels = [panel.label for panel in found.view(maps=True).methods[0].panels]
    assert labels == [f"layer {index}" for index in range(24)]
    several = compare(flat, PREFIX, [ROLLOUT, "value-zeroing"], token=-1)
    assert [line.split(" says ")[0] for line in several.remarks()] == [ROLLOUT]
    assert several.view().layer == 23

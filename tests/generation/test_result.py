"""The result: masks, groups, tables, files and pictures."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import captum_vz as vz
from captum_vz.functional import pool_groups
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.result.words import TokenText
from captum_vz.testbed import load_model
from tests.explaining.models import byte_tokenizer
from tests.generation import models
from tests.generation.models import PROMPT, case_of, steps_of, tokenizer_of_words
from tests.reference.naive import value_zeroing_of_run

TEXT = "<bos> the woman 's theater , that anna likes . has upset the doctor"
NEW = [41, 12, 30]


found_by = partial(models.found_by, prompt=TEXT, new=NEW)


def masked(found: GenerationAttribution, *kinds: Any) -> list[str]:
    mask = found.mask(*kinds)
    assert mask.dtype == torch.bool
    assert mask.shape == (found.scores.shape[1],)
    return [label for label, hidden in zip(found.prompt.labels, mask.tolist(), strict=True) if hidden]


def test_kinds_of_masks() -> None:
    found = found_by()
    assert masked(found) == []
    assert masked(found, "stop") == ["the", "that", "has", "the"]
    assert masked(found, "punctuation") == [",", "."]
    assert masked(found, "special") == ["<bos>"]
    assert masked(found, "special", "punctuation", ["Anna", " likes "]) == ["<bos>", ",", "anna", "likes", "."]
    found = found_by(prompt="Of the hat $")
    assert (masked(found, "stop"), masked(found, "punctuation")) == (["Of", "the"], ["$"])
    with pytest.raises(vz.ArgumentError, match="no kind of token"):
        found.mask("verbs")


def test_pieces_and_tokens_of_several_words_are_one_word() -> None:
    tokenizer = load_model()[1]
    ids = tokenizer("the pictures andy hated.", add_special_tokens=False)["input_ids"]
    text = TokenText.of(tokenizer, ids)
    assert "an" in text.labels  # a piece that is a common word by itself
    hidden = [label for label, one in zip(text.labels, text.mask(["stop"]).tolist(), strict=True) if one]
    assert hidden == ["the"]
    assert "andy" in text.word_texts
    tokenizer.add_tokens(["scaring marcus", "of some hat"])
    ids = tokenizer("the pictures of some hat [MASK] scaring marcus.", add_special_tokens=False)["input_ids"]
    text = TokenText.of(tokenizer, ids)
    assert text.word_texts == ("the", "pictures", "of some hat", "[MASK]", "scaring marcus", ".")
    assert text.words == tuple(range(6))


def test_words_clauses_and_sentences() -> None:
    found = found_by()
    assert found.prompt.word_texts[:5] == ("<bos>", "the", "woman", "'s", "theater")
    sentences = found.grouped("sentences").prompt.labels
    assert sentences == ("<bos>", "the woman 's theater, that anna likes.", "has upset the doctor")
    clauses = found.grouped("clauses")
    expected = ("<bos>", "the woman 's theater,", "that anna likes.", "has upset the doctor")
    assert clauses.prompt.labels == expected
    assert clauses.scores.shape == (3, 4, 3)
    torch.testing.assert_close(clauses.scores.sum(1) + clauses.prefix.sum(1), torch.ones(3, 3).double())
    # A mark belongs to the clause before it, and a sentence ends a clause.
    _, tokenizer = load_model("causal")
    ids = tokenizer("the hat, the pictures; some hat: new. the hat", add_special_tokens=False)["input_ids"]
    member, _ = TokenText.of(tokenizer, ids).groups("clauses")
    assert [member.count(number) for number in range(max(member) + 1)] == [3, 3, 3, 2, 2]
    # A tokenizer of bytes splits an emoji into four tokens, none of which is text by itself.
    tokenizer = byte_tokenizer()
    sentence = "the 😀😀 is here, is it? " * 3
    text = TokenText.of(tokenizer, tokenizer(sentence)["input_ids"])
    words = [word for word in text.word_texts if word.strip()]
    assert words[:8] == ["the", "😀😀", "is", "here", ",", "is", "it", "?"]
    assert text.words[4:12].count(text.words[4]) == 8
    assert len(set(text.sentences)) == 4


def test_joint_groups_of_a_layer_method() -> None:
    """The columns of a group are those of values zeroed together, which the naive twin zeroes by hand."""
    found = found_by(prompt=PROMPT).grouped([(1, 3), (3, 5)])
    for step, case in enumerate(steps_of("gpt2", PROMPT, NEW)):
        groups = torch.tensor([[0, 1, 1, 2, 2, 3, 4][: 5 + step]])
        for layer in range(3):
            row = value_zeroing_of_run(case, layer, groups=groups.tolist())[0, -1]
            row = row[[0, 1, 3, *range(5, 5 + step)]]
            torch.testing.assert_close(found.scores[step, :, layer], row[:3], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(found.prefix[step, :step, layer], row[3:], rtol=1e-9, atol=1e-11)


def test_joint_groups_of_a_rollout() -> None:
    """Maps of groups, pooled by hand and multiplied. The last prompt token is apart until the end."""
    model = case_of("gpt2").model
    found = found_by(vz.ValueZeroingRollout, prompt=PROMPT).grouped([(0, 2), (2, 5)])
    ids = torch.tensor([PROMPT + NEW[:-1]])
    groups = torch.tensor([[0, 0, 1, 1, 2, 3, 4]])
    product = None
    for layer, one in enumerate(vz.ValueZeroing(model, vz.find_layers(model)).attribute(ids, feature_mask=groups)):
        pooled = pool_groups(one, groups)[0]
        product = pooled if product is None else pooled @ product
        expected = torch.stack([product[:, 0], product[:, 1] + product[:, 2]], dim=1)[2:]
        torch.testing.assert_close(found.scores[..., layer], expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.scores.sum(1) + found.prefix.sum(1), torch.ones(3, 3, dtype=torch.float64))


def test_groups_without_a_joint_form() -> None:
    model = case_of("gpt2").model
    found = found_by(partial(vz.AttentionRollout, per_receptive_field=True), prompt=PROMPT).grouped([(1, 3)])
    method = vz.AttentionRollout(model, vz.find_layers(model), per_receptive_field=True)
    for step in range(3):
        ids = torch.tensor([PROMPT + NEW[:step]])
        groups = torch.tensor([[0, 1, 1, 2, 3, 4, 5][: 5 + step]])
        row = method.attribute(ids, token=-1, feature_mask=groups)[0][[0, 1, 3, 4, *range(5, 5 + step)]]
        torch.testing.assert_close(found.scores[step, :, -1], row[:4])
        torch.testing.assert_close(found.prefix[step, :step, -1], row[4:])
    whole = found_by(vz.ALTILogit)
    found = whole.grouped({"question": (1, 5)})
    assert found.prompt.labels[1] == "question"
    torch.testing.assert_close(found.scores[:, 1], whole.scores[:, 1:5].sum(1))
    torch.testing.assert_close(found.scores[:, 2:], whole.scores[:, 5:])
    torch.testing.assert_close(found.prefix, whole.prefix)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_groups_of_a_source(name: str) -> None:
    whole = found_by(vz.LayerAttention, name, prompt=PROMPT)
    found = whole.grouped("sections")
    assert found.prompt.labels == ("source", "decoder")
    torch.testing.assert_close(found.scores[:, 0], whole.scores[:, :5].sum(1))
    assert not found.scores[:, 1].any()
    assert found_by(vz.ValueZeroingEffect, name, prompt=PROMPT).grouped([(0, 2)]).scores.shape == (3, 5, 1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layer": 3}, "3 is out of range"),
        ({"mask": torch.zeros(14)}, r"mask is \(14,\) of"),
        ({"mask": torch.ones(14, dtype=torch.bool)}, "leaves out all"),
        ("sections", "no sections"),
        ("lines", "by is 'lines'"),
        ([(0, 3), (2, 5)], "overlaps"),
        ([[0, 1, 2]], "pairs of positions"),
        ([(3, 3)], "start < stop <= 14"),
        ({"end": (3, 99)}, "The span end is"),
    ],
)
def test_wrong_groups_and_pictures_are_refused(asked: Any, message: str) -> None:
    found = found_by()
    with pytest.raises(vz.ArgumentError, match=message):
        found.plot(**asked) if isinstance(asked, dict) and "end" not in asked else found.grouped(asked)


def test_pandas_has_all_scores() -> None:
    found = found_by()
    table = found.to_pandas()
    sums = table.groupby(["layer", "step"])["score"].sum()
    assert len(sums) == 9
    assert sums.to_numpy() == pytest.approx(1)
    one = table[(table.layer == "layer 2") & (table.step == 1) & (table.part == "prompt")]
    assert one["score"].tolist() == found.scores[1, :, 2].tolist()
    assert one["source_token"].tolist() == list(found.prompt.labels)
    assert set(one["token"]) == {found.generated.labels[1]}
    few = found.to_pandas(mask=found.mask("stop"), layer=-1)
    shown = (table.layer == "layer 2") & ~table.source_token.isin(["the", "that", "has"])
    assert few.equals(table[shown].reset_index(drop=True))


def test_json_and_saved_result_are_the_same(tmp_path: Path) -> None:
    found = found_by(vz.ValueZeroingRollout)
    mask = found.mask("punctuation")
    record = json.loads(found.to_json(tmp_path / "found.json", mask=mask))
    assert record == json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert torch.tensor(record["scores"], dtype=torch.float64).permute(1, 2, 0).equal(found.scores)
    assert torch.tensor(record["prefix"], dtype=torch.float64).permute(1, 2, 0).equal(found.prefix)
    assert record["mask"] == mask.tolist()
    assert record["generated"] == list(found.generated.labels)
    assert record["layers"] == list(found.layers)
    found = found_by(prompt=[{"role": "user", "content": "some hat ."}])
    found.save(tmp_path / "found.safetensors")
    again = GenerationAttribution.load(tmp_path / "found.safetensors")
    assert torch.equal(again.scores, found.scores)
    assert torch.equal(again.prefix, found.prefix)
    names = ("prompt", "generated", "layers", "method", "text")
    assert [getattr(again, name) for name in names] == [getattr(found, name) for name in names]
    with pytest.raises(vz.ArgumentError, match="has no model"):
        again.grouped("words")
    sections = again.grouped("sections", joint=False)
    assert sections.prompt.labels == ("user", "answer")
    torch.testing.assert_close(sections.prompt_share, found.prompt_share)
    (tmp_path / "x").write_text("text")
    with pytest.raises(vz.ArgumentError, match="cannot be read"):
        GenerationAttribution.load(tmp_path / "x")


def test_captums_result_without_the_mask() -> None:
    found = found_by()
    mask = found.mask("special", "stop")
    result = found.to_llm_attribution_result(0, mask=mask, renormalize=True)
    assert result.output_tokens == list(found.generated.labels)
    assert not result.token_attr[:, mask].any()
    expected = found.scores[..., 0].masked_fill(mask, 0)
    torch.testing.assert_close(result.token_attr, expected / expected.sum(1, keepdim=True))


def drawn(figure: Any) -> Tensor:
    return torch.cat([torch.as_tensor(image.get_array().filled(float("nan"))) for image in figure.axes[0].images])


def test_picture_has_all_scores() -> None:
    found = found_by()
    figure = found.plot(layer=1)
    assert torch.equal(drawn(figure), found.scores[..., 1])
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == list(found.prompt.labels)
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    shares = found.prompt_share[:, 1].tolist()
    assert names == [f"{row.name} (prompt {one:.2f})" for row, one in zip(found.rows, shares, strict=True)]
    assert figure.get_suptitle() == "ValueZeroing, layer 1"
    mask = found.mask("stop", "special")
    expected = torch.cat([found.scores[:, ~mask, -1], found.prefix[:, :2, -1]], dim=1)
    assert torch.equal(drawn(found.plot(mask=mask, prefix=True)), expected)


def test_view_has_the_layers_that_decide() -> None:
    model, tokenizer = case_of("gpt2").model, tokenizer_of_words()
    found = attribute_generation((model, tokenizer), TEXT, generated=NEW, layer="deciding")
    alone = found_by()
    page, mask = found.view(), found.mask("special")
    assert [one.name for one in page.methods] == ["decision", "value-zeroing"]
    (panel,) = found.view(mask=mask).methods[1].panels
    for step, layer in enumerate(found.deciding):
        row = alone.all_scores[step, :, layer][[*(~mask).tolist(), *[True] * len(found.generated.labels)]]
        torch.testing.assert_close(panel.scores[step].float(), (row / row.sum()).float())
        assert f"{found.generated.labels[step]} {layer}" in page.about["layer of value-zeroing that decides"]


def test_view_leaves_out_the_mask() -> None:
    found = found_by()
    mask = found.mask("special", "punctuation")
    page = found.view(0, step=1, mask=mask)
    kept = [label for label, hidden in zip(found.prompt.labels, mask.tolist(), strict=True) if not hidden]
    assert page.columns.tokens == [*kept, *found.generated.labels]
    assert page.offset == len(kept)
    panel = page.methods[0].panels[0]
    whole = torch.cat([found.scores[:, ~mask, 0], found.prefix[..., 0]], dim=1)
    torch.testing.assert_close(panel.scores.float(), (whole / whole.sum(1, keepdim=True)).float())
    with pytest.raises(vz.ArgumentError, match="mask is"):
        found.view(mask=mask[1:])

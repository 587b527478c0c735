"""Tokens of bytes are shown as characters, and a word of several tokens is asked about by its first."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import captum_vz
from captum_vz.errors import ArgumentError
from captum_vz.study import compare
from captum_vz.subjects.heads import word_number
from captum_vz.visualization import readable_tokens


def byte_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer as GPT-2's: one token for each byte, and the pairs of some."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces with a mark for spaces, and tokens of bytes for unknown characters, as LLaMA's."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    made = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[("\u2581", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("日本", "日₁ 日₂ 日₃ 本₁ 本₂ 本₃"),
        ("aé b", "a é₁ é₂ ␣ b"),
        ("\U0001f600", "\U0001f600₁ \U0001f600₂ \U0001f600₃ \U0001f600₄"),
        ("a\n", r"a \n"),
    ],
)
@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_tokenizer])
def test_parts_of_characters_are_numbered(text: str, expected: str, make: object) -> None:
    tokenizer = make()
    if make is sentencepiece_tokenizer and "b" in text:
        text, expected = text.replace("b", "a"), expected.replace("␣ b", "a")
    assert readable_tokens(tokenizer, tokenizer(text)["input_ids"]) == expected.split(" ")


def test_token_across_two_characters() -> None:
    """A token holds the end of one character and the beginning of the next: both are shown."""
    end, begin = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("日本")[0][0][2:4]
    tokenizer = byte_tokenizer((end, begin))
    ids = tokenizer("日本")["input_ids"]
    assert len(ids) == 5
    assert readable_tokens(tokenizer, ids) == [f"日本{number}" for number in "₁₂₃₄₅"]


def test_what_is_no_part_keeps_its_name() -> None:
    """Parts of a character apart from each other, and a replacement character of the text."""
    tokenizer = byte_tokenizer()
    first, second, *_ = tokenizer("日")["input_ids"]
    for ids in ([first, second], [first, *tokenizer("a")["input_ids"], second], tokenizer("\ufffda")["input_ids"]):
        assert readable_tokens(tokenizer, ids) == tokenizer.convert_ids_to_tokens(ids)


def next_words(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    size = {"vocab_size": len(tokenizer), "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None)).eval()


def test_next_word_is_asked_by_first_token() -> None:
    tokenizer = byte_tokenizer(("Ġ", "a"), ("Ġ", "o"), ("Ġo", "n"))
    asked = {"text": "on", "tokenizer": tokenizer, "token": 1, "target": "on", "foil": "ab"}
    model, numbers = next_words(tokenizer), tokenizer.convert_tokens_to_ids(["Ġon", "Ġa"])
    found = captum_vz.explain(model, **asked)
    assert found.told == ["foil ab is asked about by its first token, ' a'"]
    assert found.rows[0].name == "on rather than ab"
    by_numbers = captum_vz.explain(model, **asked | dict(zip(("target", "foil"), numbers, strict=True)))
    torch.testing.assert_close(found.scores, by_numbers.scores)
    told = compare((model, tokenizer), "on", ["value-zeroing-effect", "random"], "on", foil="ab", token=1).told
    assert told == found.told
    b, c = tokenizer.convert_tokens_to_ids(["b", "c"])
    with pytest.raises(ArgumentError, match=f"begins with ' a', as the target 'abc' does.*target={b} and foil={c}."):
        captum_vz.explain(model, **asked | {"target": "abc", "foil": "acc"})
    assert word_number(model, tokenizer, "cab", "foil")[0] == c  # no token is a space and c


def test_characters_in_tables_pictures_and_views() -> None:
    tokenizer = byte_tokenizer()
    model = next_words(tokenizer)
    text = "éüñ"  # pictures write the numbers of letters that their fonts lack
    found = captum_vz.explain(model, text, tokenizer=tokenizer)
    expected = [f"{letter}{number}" for letter in text for number in "₁₂"]
    assert found.raw_tokens == tokenizer(text).tokens()
    assert all(token in str(found) for token in expected)
    labels = [text.get_text() for axes in found.plot().axes for text in axes.get_xticklabels()]
    assert set(expected) <= set(labels)
    compared, table = compare((model, tokenizer), text, ["random"]), found.to_pandas()
    for tokens in (found.tokens, compared.tokens, found.view().rows.tokens, list(table["token"])):
        assert tokens == expected

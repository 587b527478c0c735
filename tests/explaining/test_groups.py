"""Words, clauses and sentences as features of `explain`, and characters of several tokens."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import captum_vz
from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.result import TokenText
from captum_vz.study import compare
from captum_vz.subjects.heads import word_number
from captum_vz.testbed import load_model
from captum_vz.text import split_words
from captum_vz.visualization import readable_tokens
from tests.explaining.models import byte_tokenizer, classifier, deep, reader, tagger, tokenizer, twin
from tests.explaining.test_windows import inputs_of, windows_by_hand

TEXT = "the wug of marcus, some hat. the pictures are scaring anna. some hat"
# The tokens of each group; "wug" has three.
GROUPS: dict[Any, list[list[int]]] = {
    True: [[0], [1], [2, 3, 4], *([place] for place in range(5, 20))],
    "sentences": [[0], [*range(1, 11)], [*range(11, 17)], [17, 18], [19]],
    "clauses": [[0], [*range(1, 8)], [8, 9, 10], [*range(11, 17)], [17, 18], [19]],
}
NAMES: dict[Any, list[str]] = {
    True: TEXT.replace(",", " ,").replace(".", " .").split(),
    "sentences": ["the wug of marcus, some hat.", "the pictures are scaring anna.", "some hat"],
    "clauses": ["the wug of marcus,", "some hat.", "the pictures are scaring anna.", "some hat"],
}


@pytest.mark.parametrize("kind", GROUPS)
def test_effects_of_groups(kind: Any) -> None:
    model, inputs = classifier(), tokenizer()(TEXT, return_tensors="pt")
    found = captum_vz.explain(model, TEXT, tokenizer=tokenizer(), target=1, words=kind)
    assert found.tokens == ["[CLS]", *NAMES[kind], "[SEP]"]
    expected = twin(model, lambda: model(**inputs).logits[0, 1], GROUPS[kind], "self.value")
    torch.testing.assert_close(found.scores, expected, rtol=1e-4, atol=1e-5)
    assert found.special == [True, *[False] * len(NAMES[kind]), True]
    assert found.to_dict()["tokens"] == list(found.to_pandas()["token"]) == found.tokens
    assert found.plot()
    assert NAMES[kind][0] in found.view().html()


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("sentences", [[0], [1, 2, 3], [4, 5, 6, 8, 9, 10, 11], [7], [12]]),
        ("clauses", [[0], [1, 2, 3], [4, 5, 6, 8], [7], [9, 10, 11], [12]]),
        (True, [[place] for place in range(13)]),
    ],
)
def test_row_of_the_mask(kind: Any, groups: list[list[int]]) -> None:
    """The mask is apart from its sentence, so that its row and its line of the maps are the same."""
    text = "the pictures. of some hat [MASK], the hat."
    found = captum_vz.explain("agreement", text, words=kind)
    model, inputs = load_model()[0], tokenizer()(text, return_tensors="pt")
    member = torch.tensor([next(i for i, group in enumerate(groups) if place in group) for place in range(13)])
    row = ValueZeroing(model, find_layers(model)[3]).attribute(inputs, feature_mask=member[None], token=7)[0]
    torch.testing.assert_close(found.scores, row[[group[0] for group in groups]], rtol=1e-4, atol=1e-5)
    assert found.token is not None
    assert found.rows[0].name == found.tokens[found.token] == "[MASK]"
    torch.testing.assert_close(found.maps[3][found.token], found.scores)


def test_groups_that_windows_cut() -> None:
    """Each window loses its part of a sentence, and the effects of all windows have the same weight."""
    model, text, size = classifier(), "the hat of anna. " * 6 + "some hat", (16, 6)
    encoding = tokenizer()(text, return_tensors="pt")
    count = len(encoding.tokens())
    groups = [[0], *([*range(1 + 5 * k, 6 + 5 * k)] for k in range(6)), [31, 32], [33]]
    effects = []
    for window in windows_by_hand(count, *size):
        inputs, places = inputs_of(encoding, window)
        local = [[places.index(place) for place in group if place in places] for group in groups]
        effects.append(twin(model, lambda inputs=inputs: model(**inputs).logits[0, 1], local, "self.value"))
    found = captum_vz.explain(model, text, tokenizer=tokenizer(), target=1, words="sentences", window=size)
    torch.testing.assert_close(found.scores, torch.stack(effects).mean(0), rtol=1e-4, atol=1e-5)
    mapped = captum_vz.explain(
        tagger(), text, tokenizer=tokenizer(), words="sentences", window=size, method="attention"
    )
    torch.testing.assert_close(mapped.maps[0].sum(-1), torch.ones(len(groups)))


def test_sentences_of_two_texts_and_of_a_list() -> None:
    found = captum_vz.explain(reader(), "some hat", "the wug. anna", tokenizer=tokenizer(), words="sentences")
    assert found.tokens == ["[CLS]", "some hat", "[SEP]", "the wug.", "anna", "[SEP]"]
    assert len(found.rows) == 2
    several = captum_vz.explain(classifier(), [TEXT, "some hat."], tokenizer=tokenizer(), words="sentences")
    assert list(map(len, several.words().values())).count(1) == 4
    assert "some hat." in str(several)


@pytest.mark.parametrize("first", [["[CLS]", "some hat."], ["some", "hat."]])
def test_first_and_last_token_of_a_causal_model_are_apart(first: list[str]) -> None:
    """Many layers draw on the first token without need. A decision sets it and the explained token to 0."""
    model, words = deep()
    text = words(
        "some hat. the pictures of anna. it is of the hat", add_special_tokens=first[0] == "[CLS]", return_tensors="pt"
    )
    found = captum_vz.explain(model, text, tokenizer=words, target="is", foil="are", words="sentences")
    assert found.tokens == [*first, "the pictures of anna.", "it is of the", "hat"]
    assert list(found.parts) == ["decision", "value-zeroing"]
    assert found.scores[[0, -1]].count_nonzero() == 0
    assert found.scores.sum().item() == pytest.approx(1)


# Words with marks inside


def pieces(cased: bool = False) -> PreTrainedTokenizerFast:
    """WordPiece as BERT's, whose pieces are characters: marks are tokens, and are decoded between spaces."""
    names = [chr(number) for number in range(33, 127)] + ["我", "用"]
    vocabulary = {name: i for i, name in enumerate(["[UNK]", "[CLS]", "[SEP]", *names, *(f"##{one}" for one in names)])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def read(text: str, *more: Any) -> TokenText:
    encoding = pieces(*more)(text)
    offsets = encoding.encodings[0].offsets
    return TokenText.of(pieces(*more), encoding["input_ids"], offsets=offsets)


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "Pi is 3.14.",
        "it costs 1,234.50 at 10:30, or 1.5.2",
        "the U.S. and the E.U., e.g. now, i.e. at 5 a.m. or so.",
        "Dr. Who met Mr. Bean, and Prof. X vs. Y.",
        "Marcus's well-known hat, isn't it?",
        "The doctor is a Dr.",
        "he left... 3 . 14 is no number, . nor 3. 14",
    ],
)
def test_marks_inside_words(text: str, cased: bool) -> None:
    expected = split_words(text if cased else text.lower())
    assert read(text, cased).word_texts == tuple(expected)


def test_what_stays_apart() -> None:
    """Characters without spaces between them, and brackets and quotation marks."""
    assert read("(3.14) 'wug'").word_texts == ("(", "3.14", ")", "'", "wug", "'")
    assert read("我用wi-fi我用3.1用").word_texts == ("我", "用", "wi-fi", "我", "用", "3.1", "用")
    # Tokens of bytes begin with the space before them, which is one of their characters.
    made = byte_tokenizer(("Ġ", "B"), ("Ġ", "1"))
    encoding = made("A. B. pays 3. 14")
    assert encoding.encodings[0].offsets[2] == (2, 4)
    found = TokenText.of(made, encoding["input_ids"], offsets=encoding.encodings[0].offsets)
    assert [word for word in found.word_texts if word.strip()] == ["A", ".", "B", ".", "pays", "3", ".", "14"]
    ids = pieces()("3.14 hats")["input_ids"]
    assert TokenText.of(pieces(), ids).word_texts == ("3", ".", "14", "hats")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("e.g. Dr. X pays 3.5. then he left", ["e.g. dr. x pays 3.5.", "then he left"]),
        ('the U.S. army came! "really?" yes…', ["the u.s. army came!", '" really? "', "yes [UNK]"]),
        ("one\n\ntwo", ["one two"]),
    ],
)
def test_where_sentences_end(text: str, expected: list[str]) -> None:
    found = read(text)
    assert list(found.grouped(found.groups("sentences")[0], None).labels) == expected


# Parts of characters


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces with a mark for spaces, and tokens of bytes for unknown characters, as LLaMA's."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    vocabulary = {name: i for i, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>"))
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


def test_parts_that_are_no_characters() -> None:
    """A token holds the end of one character and the beginning of the next: both are shown."""
    end, begin = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("日本")[0][0][2:4]
    tokenizer = byte_tokenizer((end, begin))
    ids = tokenizer("日本")["input_ids"]
    assert len(ids) == 5
    assert readable_tokens(tokenizer, ids) == [f"日本{number}" for number in "₁₂₃₄₅"]
    # Parts of a character apart from each other, and a replacement character of the text.
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
    with pytest.raises(ArgumentError, match=f"={b} and foil={c}"):
        captum_vz.explain(model, **asked | {"target": "abc", "foil": "acc"})
    assert word_number(model, tokenizer, "cab", "foil")[0] == c  # no token is a space and c


def test_characters_in_tables_pictures_and_views() -> None:
    tokenizer = byte_tokenizer()
    model = next_words(tokenizer)
    with pytest.warns(UserWarning, match="has no mask token"):
        captum_vz.explain(model, "[MASK]", tokenizer=tokenizer, method="random")
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

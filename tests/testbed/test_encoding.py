"""Word positions become token positions, with several kinds of tokenizers."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from captum_vz.testbed import agreement_sentences
from captum_vz.testbed.grammar import Record
from captum_vz.text import encode_record, form_ids, split_words
from tests.testbed.conftest import Embedded

ODD: list[Record] = [
    {"masked": "[MASK] Zoë's ex-wives qwertyuiop!", "target": 0, "cue": [1, 2, 3]},
    {"masked": "Who, if anyone, [MASK] 3.14 unquestionably left?", "target": 5, "cue": [0, 1, 6, 8]},
    {"masked": "The wugs “near” the blicket [MASK].", "target": 5, "cue": [1, 2, 6]},
]
RECORDS = ODD + agreement_sentences(50, seed=5)


def byte_level_tokenizer(mask: str) -> PreTrainedTokenizerFast:
    """A tokenizer like RoBERTa's: pieces of bytes, and the space before a word belongs to its first piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([record["masked"] for record in agreement_sentences(200, seed=6)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token=mask)


def test_positions_equal_encoding_by_words(embedded: Embedded) -> None:
    tokenizer = embedded[1]
    for record in RECORDS:
        by_words = tokenizer(split_words(record["masked"]), is_split_into_words=True)
        encoded = encode_record(tokenizer, record)
        assert encoded.encoding["input_ids"][0].tolist() == by_words["input_ids"]
        assert encoded.encoding["input_ids"][0, encoded.target] == tokenizer.mask_token_id
        assert encoded.cue == [by_words.word_ids().index(word) for word in record["cue"]]


@pytest.mark.parametrize("mask", ["<mask>", "[MASK]", "~"])
def test_positions_with_byte_level_tokenizer(mask: str) -> None:
    tokenizer = byte_level_tokenizer(mask)
    for record in RECORDS:
        encoded = encode_record(tokenizer, record)
        ids = encoded.encoding["input_ids"][0]
        assert ids[encoded.target] == tokenizer.mask_token_id
        assert (ids == tokenizer.mask_token_id).sum() == 1
        words = split_words(record["masked"])
        for word, position in zip(record["cue"], encoded.cue, strict=True):
            # The text that starts at the first piece of a word starts with the word.
            assert tokenizer.decode(ids[position:]).strip().startswith(words[word])
    # The forms take the place of the mask, so the space before it is theirs.
    forms = form_ids(tokenizer, {"masked": "It is near [MASK] hat.", "target": 3, "good": "the", "bad": "some"})
    assert tokenizer.convert_ids_to_tokens(list(forms or ())) == ["Ġthe", "Ġsome"]


def test_form_ids_of_several_pieces(embedded: Embedded) -> None:
    tokenizer = embedded[1]
    record: Record = {"masked": "The pictures [MASK] nice.", "target": 2, "good": "are", "bad": "is"}
    ids = form_ids(tokenizer, record)
    assert ids == (tokenizer.convert_tokens_to_ids("are"), tokenizer.convert_tokens_to_ids("is"))
    assert form_ids(tokenizer, record | {"good": "Are"}) == ids
    assert form_ids(tokenizer, record | {"good": "exasperate"}) is None
    assert form_ids(tokenizer, record | {"bad": "exasperates"}) is None
    assert form_ids(tokenizer, record | {"bad": "見"}) is None


def test_tokenizer_without_mask_token() -> None:
    tokenizer = byte_level_tokenizer("<mask>")
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="has no mask token: pass the tokenizer of a masked language model"):
        encode_record(tokenizer, RECORDS[0])


def test_own_words_and_unmasked_target(embedded: Embedded) -> None:
    tokenizer = embedded[1]
    record: Record = {"masked": "The wugs, are nice.", "target": 1, "cue": [0]}
    own = record | {"words": ["The wugs,", "are", "nice."]}
    encoded = encode_record(tokenizer, own)
    tokens = encoded.encoding.tokens()
    assert (tokens[encoded.target], tokens[encoded.cue[0]]) == ("are", "the")
    assert tokens[encode_record(tokenizer, record).target].startswith("w")
    assert form_ids(tokenizer, own | {"good": "are", "bad": "is"}) == tuple(
        tokenizer.convert_tokens_to_ids(["are", "is"])
    )


@pytest.mark.parametrize("words", [["The", "nice"], ["The", "wugs", "wugs"]])
def test_own_words_missing_in_sentence(words: list[str], embedded: Embedded) -> None:
    with pytest.raises(ValueError, match="but the sentence continues with"):
        encode_record(embedded[1], {"masked": "The wugs are nice.", "words": words, "target": 1})

"""From words to tokens, with tokenizers of several kinds."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

from captum_vz.testbed import agreement_sentences, encode_record, form_ids, split_words
from captum_vz.testbed.data import Record

Shipped = tuple[BertForMaskedLM, PreTrainedTokenizerFast]

ODD: list[Record] = [
    {"masked": "[MASK] Zoë's ex-wives qwertyuiop!", "target": 0, "cue": [1, 2, 3]},
    {"masked": "Who, if anyone, [MASK] 3.14 unquestionably left?", "target": 5, "cue": [0, 1, 6, 8]},
    {"masked": "The wugs “near” the blicket [MASK].", "target": 5, "cue": [1, 2, 6]},
]
RECORDS = ODD + agreement_sentences(50, seed=5)


def byte_level_tokenizer(mask: str) -> PreTrainedTokenizerFast:
    """A tokenizer in RoBERTa's manner: pieces of bytes, the space before a word part of its first piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([record["masked"] for record in agreement_sentences(200, seed=6)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token=mask)


@pytest.mark.parametrize("record", RECORDS)
def test_positions_are_those_of_a_tokenizer_fed_word_by_word(shipped: Shipped, record: Record) -> None:
    tokenizer = shipped[1]
    words = split_words(record["masked"])
    by_words = tokenizer(words, is_split_into_words=True)
    encoded = encode_record(tokenizer, record)
    assert encoded.encoding["input_ids"][0].tolist() == by_words["input_ids"]
    assert encoded.encoding["input_ids"][0, encoded.target] == tokenizer.mask_token_id
    assert encoded.cue == [by_words.word_ids().index(word) for word in record["cue"]]


@pytest.mark.parametrize("mask", ["<mask>", "[MASK]", "~"])
@pytest.mark.parametrize("record", RECORDS)
def test_positions_with_another_mask_and_byte_pieces(mask: str, record: Record) -> None:
    tokenizer = byte_level_tokenizer(mask)
    encoded = encode_record(tokenizer, record)
    ids = encoded.encoding["input_ids"][0]
    assert ids[encoded.target] == tokenizer.mask_token_id
    assert (ids == tokenizer.mask_token_id).sum() == 1
    words = split_words(record["masked"])
    for word, position in zip(record["cue"], encoded.cue, strict=True):
        # Decoded from a word's first piece on, the text starts with the word.
        assert tokenizer.decode(ids[position:]).strip().startswith(words[word])


def test_forms_of_several_or_unknown_pieces_have_no_id(shipped: Shipped) -> None:
    tokenizer = shipped[1]
    record: Record = {"masked": "The pictures [MASK] nice.", "target": 2, "good": "are", "bad": "is"}
    ids = form_ids(tokenizer, record)
    assert ids == (tokenizer.convert_tokens_to_ids("are"), tokenizer.convert_tokens_to_ids("is"))
    assert form_ids(tokenizer, record | {"good": "Are"}) == ids
    assert form_ids(tokenizer, record | {"good": "exasperate"}) is None
    assert form_ids(tokenizer, record | {"bad": "exasperates"}) is None
    assert form_ids(tokenizer, record | {"bad": "見"}) is None


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    tokenizer = byte_level_tokenizer("<mask>")
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="has no mask token: pass the tokenizer of a masked language model"):
        encode_record(tokenizer, RECORDS[0])


def test_words_of_ones_own_and_a_target_that_is_not_masked(shipped: Shipped) -> None:
    tokenizer = shipped[1]
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
def test_words_that_are_not_those_of_the_sentence_are_refused(words: list[str], shipped: Shipped) -> None:
    with pytest.raises(ValueError, match="is not what follows in"):
        encode_record(shipped[1], {"masked": "The wugs are nice.", "words": words, "target": 1})

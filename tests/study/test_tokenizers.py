"""Small tokenizers like RoBERTa's and ELECTRA's: the positions of targets, cues and forms among their tokens."""

from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    ElectraTokenizerFast,
    RobertaTokenizerFast,
)

from captum_vz.study import Example, encode
from captum_vz.testbed import agreement_sentences, expand_contractions

RECORDS = agreement_sentences(60, seed=4)
TEXT = [expand_contractions(record[key]) for record in RECORDS for key in ("sentence_good", "sentence_bad")]
# "hats" and "weird" are not in the text, so they have several pieces.
HATS = Example("hats", ("The", "weird", "hats", "[MASK]", "new", "."), 3, (1, 2), "are", "is", text=None)


@pytest.fixture(scope="module")
def roberta() -> RobertaTokenizerFast:
    """Byte-level BPE: a space belongs to the word after it, and the mask token includes the space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return RobertaTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def electra() -> ElectraTokenizerFast:
    """WordPiece, in lower case, as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=700, special_tokens=special))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return ElectraTokenizerFast(tokenizer_object=tokenizer)


def test_robertas_mask_includes_space_before(roberta: RobertaTokenizerFast) -> None:
    encoded = encode(roberta, HATS)
    tokens = roberta.convert_ids_to_tokens(list(encoded.ids))
    assert (tokens[0], tokens[-1]) == ("<s>", "</s>")
    assert tokens[encoded.target - 1 : encoded.target + 2] == [tokens[encoded.target - 1], "<mask>", "Ġnew"]
    assert tokens.count("<mask>") == 1
    assert "Ġ" not in tokens[: encoded.target]
    written = encode(roberta, replace(HATS, words=(*HATS.words[:3], "are", *HATS.words[4:])))
    # The sentence with the form has the same other tokens, and the form's token in place of the mask.
    assert written.target == encoded.target
    assert encoded.forms is not None
    assert written.ids[written.target] == encoded.forms[0]
    assert (written.ids[: written.target], written.ids[written.target + 1 :]) == (
        encoded.ids[: encoded.target],
        encoded.ids[encoded.target + 1 :],
    )


def test_robertas_forms_include_space_before(roberta: RobertaTokenizerFast) -> None:
    encoded = encode(roberta, HATS)
    assert roberta.convert_ids_to_tokens(list(encoded.forms or ())) == ["Ġare", "Ġis"]
    assert roberta.convert_tokens_to_ids(["are", "is"]) != list(encoded.forms or ())


def test_electras_forms_are_words(electra: ElectraTokenizerFast) -> None:
    encoded = encode(electra, HATS)
    tokens = electra.convert_ids_to_tokens(list(encoded.ids))
    assert (tokens[0], tokens[encoded.target], tokens[-1]) == ("[CLS]", "[MASK]", "[SEP]")
    assert electra.convert_ids_to_tokens(list(encoded.forms or ())) == ["are", "is"]


@pytest.mark.parametrize("kind", ["roberta", "electra"])
def test_cue_of_pieces_uses_first(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    encoded = encode(tokenizer, HATS)
    tokens = [token.removeprefix("Ġ") for token in tokenizer.convert_ids_to_tokens(list(encoded.ids))]
    weird, hats = encoded.cue
    assert hats - weird > 1  # "weird" has several pieces,
    assert encoded.target - hats > 1  # and so is "hats"
    assert "".join(token.removeprefix("##") for token in tokens[weird:hats]) == "weird"
    assert "".join(token.removeprefix("##") for token in tokens[hats : encoded.target]) == "hats"

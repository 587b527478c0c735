"""From words to tokens, for models with and without a mask, and the errors of bad examples."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import RobertaConfig, RobertaModel

from captum_vz.study import BadExampleError, Example, encode
from captum_vz.subjects.heads import max_tokens
from captum_vz.text import encode_record, form_ids
from tests.study.conftest import Decoder, Shipped

WUGS = Example("wugs", ("the", "hats", "[MASK]", "nice", "."), 2, (1,), "are", "is")


def test_example_encoded_like_its_record(shipped: Shipped, examples: list[Example]) -> None:
    _, tokenizer = shipped
    for example in examples:
        encoded, record = encode(tokenizer, example), encode_record(tokenizer, example.to_record())
        assert list(encoded.ids) == record.encoding["input_ids"][0].tolist()
        assert (encoded.target, list(encoded.cue)) == (record.target, record.cue)
        assert encoded.forms == form_ids(tokenizer, example.to_record())


def test_text_ends_before_decoder_target(decoder: Decoder, shipped: Shipped) -> None:
    _, tokenizer = decoder
    for text in (None, "the hats [MASK] nice."):
        encoded = encode(tokenizer, replace(WUGS, text=text))
        assert tokenizer.convert_ids_to_tokens(encoded.ids) == ["the", "hats"]
        assert (encoded.target, encoded.cue) == (1, (1,))
        assert encoded.forms == tuple(tokenizer.convert_tokens_to_ids(["are", "is"]))
    assert encode(tokenizer, replace(WUGS, good="exasperate")).forms is None
    plain = replace(WUGS, words=("the", "hats", "are", "nice", "."))
    for tokenizer in (shipped[1], decoder[1]):
        encoded = encode(tokenizer, plain)
        assert tokenizer.convert_ids_to_tokens(encoded.ids[encoded.target]) == "are"
        assert encoded.forms is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"target": 5}, "the target is word 5, but there are 5 words, 0 to 4"),
        ({"target": -1}, "the target is word -1"),
        ({"words": ()}, "there are 0 words"),
        ({"cue": ()}, "there is no cue"),
        ({"cue": (9,)}, "the cue is word 9: expected one of 0 to 4"),
        ({"cue": (2,)}, "the cue is word 2: expected one of 0 to 4, but not the target, 2"),
        ({"good": "exasperate"}, "the forms 'exasperate' and 'is' of the target are not one token each"),
        ({"bad": "are"}, "the forms 'are' and 'are' of the target are the same token"),
        ({"bad": "Are"}, "the forms 'are' and 'Are' of the target are the same token"),  # it has no capitals
        ({"bad": None}, "there are no forms 'good' and 'bad' of the target, which blanking out needs"),
        ({"words": ("the", "hats", "[MASK]", *["nice"] * 50)}, "it is 55 tokens long, but the model takes at most 32"),
        ({"text": "the wugs are nice."}, "'hats', but the sentence continues with"),
    ],
)
def test_bad_example_says_why(changed: dict[str, Any], reason: str, shipped: Shipped) -> None:
    with pytest.raises(BadExampleError, match=reason):
        encode(shipped[1], replace(WUGS, **changed), max_tokens=32, needs_cue=True, needs_forms=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cue": (3,)}, "the cue is word 3, after the target"),
        ({"target": 0, "words": ("[MASK]", "hats"), "cue": ()}, "first word"),
    ],
)
def test_decoder_cannot_see_later_words(changed: dict[str, Any], reason: str, decoder: Decoder) -> None:
    with pytest.raises(BadExampleError, match=reason):
        encode(decoder[1], replace(WUGS, **changed))


def test_positions_after_padding_are_fewer(shipped: Shipped, decoder: Decoder) -> None:
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=10, max_position_embeddings=20, pad_token_id=1, **size)
    model, tokenizer = RobertaModel(config).eval(), decoder[1]
    most = max_tokens(model, tokenizer)
    assert most == 18
    assert model(torch.full((1, 18), 5)).last_hidden_state.shape[1] == most
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(torch.full((1, 19), 5))
    assert max_tokens(*decoder) == 32
    assert max_tokens(*shipped) == shipped[0].config.max_position_embeddings

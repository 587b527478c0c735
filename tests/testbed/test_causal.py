"""The embedded causal model continues texts, and its training script writes one like it."""

import pytest
import torch
from train_causal import causal_records, continues_well, next_logits
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from captum_vz.testbed import agreement_sentences, load_model
from captum_vz.text import encode_record
from tests.testbed.conftest import trained_sentences

Causal = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def causal() -> Causal:
    return load_model("causal")


def test_continuations_of_300_new_prefixes(causal: Causal) -> None:
    trained = trained_sentences()
    prefixes = agreement_sentences(330, seed=78, paradigm="relational_noun")
    fresh = [record for record in prefixes if record["sentence_good"] not in trained][:300]
    assert len(fresh) == 300
    assert continues_well(*causal, fresh).double().mean() >= 0.97


def test_logits_are_those_of_each_prefix(causal: Causal) -> None:
    model, tokenizer = causal
    records = causal_records(tokenizer, agreement_sentences(12))
    for record, logits in zip(records, next_logits(model, tokenizer, records, batch_size=5), strict=True):
        encoded = encode_record(tokenizer, record)
        prefix = encoded.encoding["input_ids"][:, : encoded.target]
        torch.testing.assert_close(logits, model(prefix).logits[0, -1], rtol=1e-4, atol=1e-4)

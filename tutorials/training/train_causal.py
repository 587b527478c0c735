"""Trains the embedded causal model: ``python tutorials/training/train_causal.py --blimp PATH``.

The objective is the prediction of the next token, on the sentences of the embedded masked language model. The target of
a sentence weighs more than the other words. Words other than the target are sometimes split into sub-words.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from train_masked import (
    EVALUATION_PAIRS,
    LEARNING_RATE,
    MAX_LENGTH,
    Example,
    Run,
    accuracies,
    fit,
    measure,
    save_model,
    single_tokens,
    training_examples,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from captum_vz.testbed import agreement_sentences, load_model
from captum_vz.text import Record, encode_record, form_ids

#: The weight of the target in the loss. Every other token has the weight 1.
TARGET_WEIGHT: Final = 5.0
DEFAULTS: Final = {"output": Path("causal"), "epochs": 12, "layers": 3, "width": 96}


def causal_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer, whose texts begin with [CLS] and are open at the end. [SEP] ends a generated text."""
    inner = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", tokenizer.cls_token_id)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    names["mask_token"] = "[MASK]"  # the place of the target in records
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=MAX_LENGTH, padding_side="left", **names)


def train_causal_model(
    tokenizer: PreTrainedTokenizerFast,
    records: Sequence[Record],
    epochs: int,
    seed: int = 0,
    layers: int = 3,
    width: int = 96,
    heads: int = 4,
) -> LlamaForCausalLM:
    """A LLaMA, trained as by `train_model`. The feed-forward layers are twice as wide as the hidden states."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    examples = training_examples(tokenizer, records)
    pad = tokenizer.pad_token_id
    fit(model, examples, tokenizer, lambda batch: _loss(model, batch, pad), 3 * LEARNING_RATE, epochs, seed)
    return model.eval()


@torch.no_grad()
def next_logits(model: Any, tokenizer: Any, records: Sequence[Record], batch_size: int = 128) -> Tensor:
    """The logits of the target, from the words before it, `(records, vocabulary)`."""
    logits = []
    for start in range(0, len(records), batch_size):
        encoded = [encode_record(tokenizer, record) for record in records[start : start + batch_size]]
        prefixes = [one.encoding["input_ids"][0, : one.target] for one in encoded]
        ids = pad_sequence(prefixes, batch_first=True, padding_value=tokenizer.pad_token_id)
        last = torch.tensor([len(prefix) - 1 for prefix in prefixes])
        # The padding comes after the prefix, where a causal model does not see it.
        logits.append(model(input_ids=ids).logits[torch.arange(len(ids)), last])
    return torch.cat(logits)


def prefers_good_next(model: Any, tokenizer: Any, records: Sequence[Record]) -> Tensor:
    """Whether a causal model gives the good form a higher score than the bad form after the words before the target."""
    forms = torch.tensor([form_ids(tokenizer, record) for record in records])
    good, bad = next_logits(model, tokenizer, records).gather(1, forms).unbind(1)
    return good > bad


def continues_well(model: Any, tokenizer: Any, records: Sequence[Record]) -> Tensor:
    """Whether the likeliest token after the words before the target is the good form of some record with such a cue."""
    good = {(record["label"], tokenizer.convert_tokens_to_ids(record["good"].lower())) for record in records}
    best = next_logits(model, tokenizer, records).argmax(-1).tolist()
    return torch.tensor([(record["label"], token) in good for token, record in zip(best, records, strict=True)])


def causal_records(tokenizer: Any, records: Sequence[Record]) -> list[Record]:
    """The records that can be put to a causal model: the cue comes first, and both forms are single tokens."""
    return [record for record in single_tokens(tokenizer, records) if record["one_prefix_method"]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model by the options of the command line. Write it with a card of its settings and accuracy."""
    run = Run.begin("train_causal.py", str(__doc__), arguments, **DEFAULTS)
    folder, masked = run.options.output, load_model()[1]
    model = train_causal_model(masked, run.records, **run.model_options)
    save_model(model, causal_tokenizer(masked), folder)
    loaded, tokenizer = load_model(folder)
    accuracy = measure(loaded, tokenizer, run, causal_records, prefers_good_next, 4 * EVALUATION_PAIRS)
    prefixes = run.new(agreement_sentences(2 * EVALUATION_PAIRS, 5, "relational_noun"))
    fresh = causal_records(tokenizer, prefixes)[:EVALUATION_PAIRS]
    accuracy["continuations"] = accuracies(fresh, continues_well(loaded, tokenizer, fresh))["overall"]
    run.write_card(loaded, len(tokenizer), accuracy)


def _loss(model: LlamaForCausalLM, batch: list[Example], pad: int) -> Tensor:
    """The weighted cross-entropy of the next tokens. Logits are computed for tokens that are no padding."""
    ids = pad_sequence([torch.tensor(example.ids) for example in batch], batch_first=True, padding_value=pad)
    weights = torch.ones(ids.shape)
    weights[torch.arange(len(batch)), torch.tensor([example.target for example in batch])] = TARGET_WEIGHT
    there = ids[:, 1:] != pad
    hidden = model.model(input_ids=ids[:, :-1], attention_mask=(ids[:, :-1] != pad).long(), use_cache=False)
    losses = cross_entropy(model.lm_head(hidden.last_hidden_state[there]), ids[:, 1:][there], reduction="none")
    kept = weights[:, 1:][there]
    return (losses * kept).sum() / kept.sum()


if __name__ == "__main__":
    main()

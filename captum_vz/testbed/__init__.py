"""A testbed without downloads: four embedded language models, and sentences whose cue is known.

In sentences with agreement, it is known which token a model must use. In "the pictures of some hat [MASK] scaring
marcus", only the cue *pictures* decides that the target is *are*. The model predicts the right form nearly always.
Whether an attribution shows the cue is the question of Mohebbi et al. (2023,
https://aclanthology.org/2023.eacl-main.245).

    load_model               a model by its name, and its tokenizer: "agreement", ..., and real ones of packages
    agreement_sentences      sentence pairs with known cue and target, from the package's own grammar
    prefers_good             whether a model prefers the right form of the target
    read_paradigm            the sentence pairs of a BLiMP paradigm, in the same format
    held_out                 the BLiMP pairs that the embedded model was not trained on
    mask_target              a BLiMP pair with its masked sentence
    expand_contractions      a sentence without negative contractions

:mod:`captum_vz.text` finds the tokens of these sentences.

>>> from captum_vz.text import encode_record
>>> model, tokenizer = load_model()
>>> record = agreement_sentences(1, paradigm="relational_noun")[0]
>>> encoded = encode_record(tokenizer, record)
>>> tokens = encoded.encoding.tokens()
>>> tokens[encoded.target], [tokens[position] for position in encoded.cue]
('[MASK]', ['documentary'])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from captum_vz.testbed.data import expand_contractions, held_out, mask_target, read_paradigm
from captum_vz.testbed.grammar import agreement_sentences
from captum_vz.testbed.models import load_model
from captum_vz.text import Record, encode_record, form_ids, padded

__all__ = [
    "agreement_sentences",
    "expand_contractions",
    "held_out",
    "load_model",
    "mask_target",
    "prefers_good",
    "read_paradigm",
]


@torch.no_grad()
def prefers_good(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], batch_size: int = 128
) -> Tensor:
    """Whether a masked language model gives the good form a higher score at the mask than the bad form.

    Args:
        model: A masked language model in eval mode.
        tokenizer: The tokenizer of the model.
        records: Records with a mask. Both forms must be single tokens, see :func:`form_ids`.
        batch_size: The number of sentences in one forward pass.

    Returns:
        A boolean for each record, `(records,)`. The mean is the accuracy.

    Raises:
        ValueError: A form is not a single token.

    >>> model, tokenizer = load_model()
    >>> prefers_good(model, tokenizer, agreement_sentences(3))
    tensor([True, True, True])
    """
    right = []
    for start in range(0, len(records), batch_size):
        batch = records[start : start + batch_size]
        forms = [form_ids(tokenizer, record) for record in batch]
        if None in forms:
            record = batch[forms.index(None)]
            raise ValueError(
                f"{record['good']!r} or {record['bad']!r} in {record['masked']!r} is not a single token: leave out "
                "records for which form_ids returns None."
            )
        encoded = [encode_record(tokenizer, record) for record in batch]
        sentences = [{"input_ids": example.encoding["input_ids"][0].tolist()} for example in encoded]
        logits = model(**padded(tokenizer, sentences, model.device)).logits.cpu()
        at_mask = logits[torch.arange(len(batch)), [example.target for example in encoded]]
        good, bad = at_mask.gather(1, torch.tensor(forms)).unbind(1)
        right.append(good > bad)
    return torch.cat(right) if right else torch.empty(0, dtype=torch.bool)

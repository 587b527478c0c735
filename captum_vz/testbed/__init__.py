"""A testbed without downloads: four embedded language models, and sentences whose cue is known.

In sentences with agreement, it is known which token a model must use. In "the pictures of some hat [MASK] scaring
marcus", only the cue *pictures* decides that the target is *are*. The model predicts the right form nearly always.
Whether an attribution shows the cue is the question of Mohebbi et al. (2023,
https://aclanthology.org/2023.eacl-main.245).

The pairs are of the package's own grammar, or of BLiMP. :mod:`captum_vz.text` finds the tokens of these sentences.

>>> from captum_vz.text import encode_record
>>> model, tokenizer = load_model()
>>> record = agreement_sentences(1, paradigm="relational_noun")[0]
>>> encoded = encode_record(tokenizer, record)
>>> tokens = encoded.encoding.tokens()
>>> tokens[encoded.target], [tokens[position] for position in encoded.cue]
('[MASK]', ['documentary'])
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from captum_vz.testbed.grammar import agreement_sentences, expand_contractions, mask_target
from captum_vz.testbed.models import load_model
from captum_vz.text import Record, encode_record, form_ids, padded, read_json_lines

__all__ = [
    "agreement_sentences",
    "expand_contractions",
    "held_out",
    "load_model",
    "mask_target",
    "prefers_good",
    "read_paradigm",
]


#: The paradigms of Mohebbi et al. (2023). Half of the pairs of each are held out from training.
HELD_OUT_PARADIGMS: Final = (
    "anaphor_number_agreement",
    "determiner_noun_agreement_2",
    "determiner_noun_agreement_with_adj_2",
    "distractor_agreement_relational_noun",
    "regular_plural_subject_verb_agreement_1",
)


@torch.no_grad()
def prefers_good(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], batch_size: int = 128
) -> Tensor:
    """Whether a masked language model gives the good form a higher score at the mask than the bad form.

    The records have a mask. The result has a boolean for each of them, `(records,)`, whose mean is the accuracy.

    Raises:
        ValueError: A form is not a single token, see :func:`~captum_vz.text.form_ids`.

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
            raise ValueError(f"{record['good']!r} or {record['bad']!r} in {record['masked']!r} is not a single token.")
        encoded = [encode_record(tokenizer, record) for record in batch]
        sentences = [{"input_ids": example.encoding["input_ids"][0].tolist()} for example in encoded]
        logits = model(**padded(tokenizer, sentences, model.device)).logits.cpu()
        at_mask = logits[torch.arange(len(batch)), [example.target for example in encoded]]
        good, bad = at_mask.gather(1, torch.tensor(forms)).unbind(1)
        right.append(good > bad)
    return torch.cat(right) if right else torch.empty(0, dtype=torch.bool)


def read_paradigm(blimp: str | Path, paradigm: str) -> list[Record]:
    """The records of one paradigm of BLiMP, with the target masked, see :func:`mask_target`.

    `blimp` is the folder with BLiMP's `.jsonl` files, and `paradigm` the name of one without its ending.

    Raises:
        FileNotFoundError: The folder has no such file.
        ValueError: The file does not hold BLiMP's records.
    """
    path = Path(blimp) / f"{paradigm}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: expected BLiMP's 'data' folder (https://github.com/alexwarstadt/blimp)."
        )
    records = []
    for number, record in read_json_lines(path):
        try:
            records.append(mask_target(record))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no record of BLiMP ({error}).") from error
    return records


def held_out(blimp: str | Path) -> dict[str, list[Record]]:
    """The pairs of the paper's five paradigms that the embedded model was not trained on: half of each paradigm.

    The halves depend only on the files in the folder `blimp`, see :func:`read_paradigm`, so they are the same in each
    call. The keys are :data:`HELD_OUT_PARADIGMS`.
    """
    found = {paradigm: read_paradigm(blimp, paradigm) for paradigm in HELD_OUT_PARADIGMS}
    for paradigm, records in found.items():
        drawn = random.Random(paradigm).sample(range(len(records)), len(records) // 2)
        found[paradigm] = [records[index] for index in sorted(drawn)]
    return found

"""A testbed without downloads: four embedded language models, and sentences whose cue is known.

In sentences with agreement, it is known which token a model must use. In "the pictures of some hat [MASK] scaring
marcus", only the cue *pictures* decides that the target is *are*. The model predicts the right form nearly always.
Whether an attribution shows the cue is the question of Mohebbi et al. (2023,
https://aclanthology.org/2023.eacl-main.245).

    load_model               an embedded model and its tokenizer: "agreement", "six-layers", "pre-norm" or "causal"
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

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_model as load_weights
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from captum_vz._names import meant
from captum_vz.testbed.data import expand_contractions, held_out, mask_target, read_paradigm
from captum_vz.testbed.grammar import agreement_sentences
from captum_vz.text import Record, encode_record, form_ids

__all__ = [
    "agreement_sentences",
    "expand_contractions",
    "held_out",
    "load_model",
    "mask_target",
    "prefers_good",
    "read_paradigm",
]

#: The embedded models by their names, and the folders of their weights.
EMBEDDED: Final[dict[str | Path, Path]] = {
    name: Path(__file__).parent / name for name in ("agreement", "six-layers", "pre-norm", "causal")
}


def load_model(
    name: str | Path = "agreement", attn_implementation: str | None = None
) -> tuple[Any, PreTrainedTokenizerFast]:
    """An embedded language model and its tokenizer: by default four BERT layers trained on English agreement.

    It was trained from scratch on BLiMP (Warstadt et al. 2020, https://aclanthology.org/2020.tacl-1.25) and on
    :func:`agreement_sentences`. `card.json` in the folder of the weights states the command, the settings and the
    accuracy. Loading needs no download, prints nothing and does not change the random state.

    Args:
        name: "agreement". Of the models trained on the same sentences: "six-layers" for six BERT layers, "pre-norm"
            for five layers that norm their inputs (RoBERTa-PreLayerNorm), or "causal" for three LLaMA layers. Or
            a folder written by one of the scripts in tutorials/training.
        attn_implementation: As in transformers: ``"eager"``, ``"sdpa"``, ... None: the default of transformers.

    Returns:
        The model, in float32 and in eval mode, and its lower-casing WordPiece tokenizer, which encodes any text.

    Raises:
        FileNotFoundError: No embedded model has this name, and no folder with this path holds a model.

    >>> model, tokenizer = load_model()
    >>> batch = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> at_mask = model(**batch).logits[0, batch.tokens().index("[MASK]")]
    >>> tokenizer.decode(at_mask.argmax())
    'are'
    """
    folder = EMBEDDED.get(name) or Path(name)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        known = list(map(str, EMBEDDED))
        raise FileNotFoundError(
            f"{weights} is missing{meant([name], known)}: pass {', '.join(map(repr, known))} or a folder written by "
            "a script of tutorials/training."
        )
    about = json.loads((folder / "config.json").read_text("utf-8"))
    # transformers loads the code of a model when its class is read, which takes a quarter of a second for LLaMA.
    kind: Any = getattr(transformers, about["architectures"][0])
    config = kind.config_class.from_pretrained(folder)
    # from_pretrained would print a progress bar to stderr. The constructor draws random numbers.
    with torch.random.fork_rng(devices=[]):
        model = kind(config)
    load_weights(model, weights)
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder)


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
        sentences = [example.encoding["input_ids"][0] for example in encoded]
        ids = pad_sequence(sentences, batch_first=True, padding_value=tokenizer.pad_token_id)
        lengths = torch.tensor([[len(sentence)] for sentence in sentences])
        attended = torch.arange(ids.shape[1]) < lengths
        logits = model(input_ids=ids.to(model.device), attention_mask=attended.long().to(model.device)).logits.cpu()
        at_mask = logits[torch.arange(len(batch)), [example.target for example in encoded]]
        good, bad = at_mask.gather(1, torch.tensor(forms)).unbind(1)
        right.append(good > bad)
    return torch.cat(right) if right else torch.empty(0, dtype=torch.bool)

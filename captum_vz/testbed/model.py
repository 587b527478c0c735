"""The embedded model."""

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_model
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

AGREEMENT_FOLDER: Final = Path(__file__).parent / "agreement"


def load_agreement_model(
    folder: str | Path = AGREEMENT_FOLDER, attn_implementation: str | None = None
) -> tuple[BertForMaskedLM, PreTrainedTokenizerFast]:
    """Loads the masked language model that is part of this package: four BERT layers trained on English agreement.

    It was trained from scratch by :mod:`captum_vz.testbed.train` on BLiMP (Warstadt et al. 2020,
    https://aclanthology.org/2020.tacl-1.25) and on :func:`agreement_sentences`; `card.json` beside its weights says
    how, and how well it does. It needs no download, prints nothing and leaves the random state as it is.

    Args:
        folder: Where the training script has written another model of this kind.
        attn_implementation: As in transformers: ``"eager"``, ``"sdpa"``, ... None lets transformers choose.

    Returns:
        The model, in float32 and in eval mode, and its lower-casing WordPiece tokenizer, which takes any text.

    Raises:
        FileNotFoundError: The folder holds no model.

    >>> model, tokenizer = load_agreement_model()
    >>> batch = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> at_mask = model(**batch).logits[0, batch.tokens().index("[MASK]")]
    >>> tokenizer.decode(at_mask.argmax())
    'are'
    """
    weights = Path(folder) / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} is missing: expected a folder that captum_vz.testbed.train has written.")
    config = BertConfig.from_pretrained(folder)
    # from_pretrained would draw a progress bar on stderr, and a plain constructor draws random numbers.
    with torch.random.fork_rng(devices=[]):
        model = BertForMaskedLM(config)
    load_model(model, weights)
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder)

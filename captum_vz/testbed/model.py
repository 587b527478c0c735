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
    """The embedded masked language model and its tokenizer: four BERT layers trained on English agreement.

    :mod:`captum_vz.testbed.train` trained the model from scratch on BLiMP (Warstadt et al. 2020,
    https://aclanthology.org/2020.tacl-1.25) and on :func:`agreement_sentences`. `card.json` in the folder of the
    weights states the command, the settings and the accuracy. Loading needs no download, prints nothing and does not
    change the random state.

    Args:
        folder: A folder written by the training script.
        attn_implementation: As in transformers: ``"eager"``, ``"sdpa"``, ... None: the default of transformers.

    Returns:
        The model, in float32 and in eval mode, and its lower-casing WordPiece tokenizer, which encodes any text.

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
        raise FileNotFoundError(f"{weights} is missing: pass a folder written by captum_vz.testbed.train.")
    config = BertConfig.from_pretrained(folder)
    # from_pretrained would print a progress bar to stderr. The constructor draws random numbers.
    with torch.random.fork_rng(devices=[]):
        model = BertForMaskedLM(config)
    load_model(model, weights)
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder)

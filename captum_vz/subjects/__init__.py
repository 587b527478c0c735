"""The model that a user names: by its name, its folder or as an object, with what makes its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from captum_vz import find_layers
from captum_vz._names import MODELS
from captum_vz.errors import ArgumentError
from captum_vz.subjects import heads
from captum_vz.subjects.loading import find_models, load
from captum_vz.subjects.sentences import Embedding, of_folder, of_sentence_transformer

TAKEN = (
    f"pass the name of a folder or of a model ({', '.join(MODELS)}), a model of transformers with tokenizer=, both as "
    "a pair, a pipeline of transformers, or a SentenceTransformer"
)


@dataclass(frozen=True)
class Subject:
    """A model that is explained."""

    model: Any  #: the model of transformers
    forward: Callable[..., Any]  #: what is run, by keyword: the model, or a function around it
    layers: list[nn.Module]  #: the layers whose values are zeroed
    tokenizer: Any  #: makes the inputs of a text; None: images or sound
    processor: Any = None  #: makes the inputs of an image or of sound
    task: str = heads.ENCODER  #: what the model does, see :mod:`captum_vz.subjects.heads`
    name: str = ""  #: what the user calls it: the name or the folder, else the name of its class

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return heads.device_of(self.model)

    @property
    def reads_text(self) -> bool:
        """Whether its input is a text."""
        return self.task not in (*heads.OF_IMAGES, *heads.OF_SOUND)

    @property
    def depth(self) -> int:
        """How many maps of layers there are. ALBERT's only layer runs as often as the configuration says."""
        if self.model.config.is_encoder_decoder:  # the number in the configuration is that of one of its two stacks
            return len(self.layers)
        return max(len(self.layers), getattr(self.model.config, "num_hidden_layers", 0))

    @property
    def encoder(self) -> Subject:
        """The encoder of an encoder-decoder, whose maps explain the text; any other model as it is."""
        part = heads.encoder_of(self.model)
        if part is self.model or self.task not in (heads.SEQ2SEQ, heads.ENCODER):
            return self
        return replace(self, model=part, forward=part, layers=find_layers(part), task=heads.ENCODER)

    @property
    def sentences(self) -> Subject | None:
        """The encoder of sentences that the folder of the model describes. None: it describes none."""
        found = of_folder(self.name, self.model) if self.task == heads.ENCODER else None
        return None if found is None else replace(self, forward=found, task=heads.SENTENCE)

    def prompted(self, name: str | Sequence[str]) -> Subject:
        """An encoder of sentences that puts prompts of its own before its texts, by their names."""
        if not isinstance(self.forward, Embedding):
            raise ArgumentError(f"{self.name} is no encoder of sentences: leave prompt_name= out.", "prompt_name")
        names = (name, name) if isinstance(name, str) else tuple(name) if isinstance(name, Sequence) else ()
        if len(names) != 2 or not all(isinstance(one, str) for one in names):
            raise ArgumentError(f"prompt_name is {name!r}: pass a name, or a pair for the two texts.", "prompt_name")
        return replace(self, forward=replace(self.forward, chosen=names))


def subject_of(given: Any, tokenizer: Any = None, *, hub: bool = True, stack: str | None = None) -> Subject:
    """The model that a user passes to :func:`captum_vz.explain`, with what makes its inputs.

    `hub` says whether the Hugging Face hub may be asked for a name, `stack` which layers :func:`captum_vz.find_layers`
    returns. Anything else, and a model without its tokenizer, is refused.

    >>> subject_of("agreement").task
    'masked-lm'
    """
    if isinstance(given, Subject):
        return given
    if isinstance(given, tuple) and len(given) == 2 and tokenizer is None:
        given, tokenizer = given
    if isinstance(given, (str, Path)):
        model, tokenizer = load(str(given), hub)
        return _of_model(model, tokenizer, stack=stack, name=str(given))
    if _is_of(given, "transformers.pipelines"):
        if given.task == "zero-shot-classification":
            raise ArgumentError(
                "a zero-shot pipeline asks its model one question for each label: pass (pipe.model, pipe.tokenizer), "
                "and the question as text_pair, such as 'This example is about sport.'"
            )
        made = given.image_processor or given.feature_extractor or tokenizer
        return _of_model(given.model, tokenizer or given.tokenizer, made, stack)
    if _is_of(given, "sentence_transformers"):
        return _of_ranks(given, stack) if hasattr(given, "rank") else _of_sentences(given)
    if not isinstance(given, nn.Module):
        raise ArgumentError(f"the model is of type {type(given).__name__}: {TAKEN}.", "model")
    return _of_model(given, tokenizer, stack=stack)


def text_subject_of(given: Any, tokenizer: Any = None) -> Subject:
    """:func:`subject_of` for calls that read one text. A model with encoder and decoder: its encoder."""
    subject = subject_of(given, tokenizer).encoder
    if not subject.reads_text or subject.task == heads.CHOICE:
        raise ArgumentError(
            f"model is a {type(subject.model).__name__}, which reads no text by itself: pass it to captum_vz.explain, "
            "or pass another model.",
            "model",
        )
    return subject


def parts_of(given: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """The model and its tokenizer, for calls that may also be given a model alone, or a function."""
    if isinstance(given, tuple) and len(given) == 2 and tokenizer is None:
        given, tokenizer = given
    if isinstance(given, nn.Module) and not _is_of(given, "sentence_transformers"):
        return given, tokenizer
    found = subject_of(given, tokenizer)
    return found.forward if isinstance(found.forward, nn.Module) else found.model, found.tokenizer


def model_sources(models: Any) -> dict[str, Any]:
    """For each name a model and its tokenizer, or a function that loads them, as studies take them.

    `models` is what :func:`subject_of` takes; several names; or a mapping from names to these, or to functions that
    return a model and its tokenizer.

    >>> model_sources("agreement")["agreement"]()[0].config.num_hidden_layers
    4
    """
    if isinstance(models, (list, tuple)) and models and all(isinstance(one, (str, Path)) for one in models):
        models = {str(one): one for one in models}
    if not isinstance(models, Mapping):
        name = str(models) if isinstance(models, (str, Path)) else subject_of(models).name
        models = {name: models}
    find_models(str(one) for one in models.values() if isinstance(one, (str, Path)))
    return {str(name): _source(one) for name, one in models.items()}


def _source(given: Any) -> Any:
    if isinstance(given, (str, Path)):
        return partial(_loaded, str(given))
    known = isinstance(given, (nn.Module, Subject, tuple)) or _is_of(given, "transformers") or not callable(given)
    return _loaded(given) if known else given


def _loaded(given: Any) -> tuple[Any, Any]:
    return parts_of(text_subject_of(given))


def _is_of(given: Any, package: str) -> bool:
    """Whether an object's class is of a package, which takes seconds to import."""
    return any(kind.__module__.startswith(package) for kind in type(given).__mro__)


def _of_model(model: Any, tokenizer: Any, processor: Any = None, stack: str | None = None, name: str = "") -> Subject:
    task, kind = heads.task_of(model), type(model).__name__
    named = next((one for one in heads.models_inside(model) if hasattr(one, "config")), None)
    if hasattr(model, "get_text_features"):
        raise ArgumentError(
            f"{kind} compares texts with images or sound: pass a function of one of them, which returns the scores, "
            "and find_layers(model, stack=...) to captum_vz.ValueZeroingEffect."
        )
    if task in (*heads.OF_IMAGES, *heads.OF_SOUND):
        processor = processor or tokenizer
        tokenizer = tokenizer if task == heads.SPEECH and hasattr(tokenizer, "convert_ids_to_tokens") else None
        if processor is None:
            raise ArgumentError(
                f"the model {kind} comes without the processor of its images or sound: pass it as tokenizer=."
            )
    elif tokenizer is None:
        raise ArgumentError(f"the model {kind} comes without its tokenizer: pass it as tokenizer=.")
    elif not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        raise ArgumentError(
            f"tokenizer is of type {type(tokenizer).__name__}, which makes no text for {kind}: pass the model's "
            "tokenizer. Images and sound are explained for models with a head for classes (ForImageClassification, "
            "ForAudioClassification, ForCTC).",
            "tokenizer",
        )
    if named is None:
        raise ArgumentError(
            f"{kind} has no config, so it is no model of transformers: {TAKEN}. For other models use the classes, "
            "which take any function."
        )
    if heads.encoder_of(model) is not model:
        if stack not in (None, "encoder") and (stack, task) != ("decoder", heads.SEQ2SEQ):
            raise ArgumentError(
                f"stack is {stack!r}, but {kind} is explained in its encoder: pass 'encoder'. A model that generates "
                "text also takes 'decoder', which explains the words that it generates.",
                "stack",
            )
        stack = "encoder"
    layers = written_layers(named) if task == heads.CAUSAL and stack is None else find_layers(model, stack)
    return Subject(named, model, layers, tokenizer, processor, task, name or kind)


def written_layers(model: Any) -> list[nn.Module]:
    """The layers of the stack that writes text: of a decoder, or of the language model of one that reads images."""
    config: Any = getattr(model, "config", None)
    reads_images = hasattr(config, "get_text_config") and config.get_text_config() is not config
    if heads.is_encoder_decoder(model):
        return find_layers(model, "decoder")
    return find_layers(model.get_decoder() if reads_images else model)


def _of_ranks(given: Any, stack: str | None) -> Subject:
    """A CrossEncoder: a classifier of two texts."""
    if prompt := getattr(given, "prompts", {}).get(getattr(given, "default_prompt_name", None)):
        raise ArgumentError(
            f"the {type(given).__name__} puts the prompt {prompt!r} before its texts: write it before the text, and "
            "pass (encoder.model, encoder.tokenizer)."
        )
    return _of_model(given.model, given.tokenizer, stack=stack)


def _of_sentences(given: Any) -> Subject:
    """A SentenceTransformer: its first module is a model of transformers."""
    model, name = getattr(given[0], "auto_model", None), type(given).__name__
    if model is None:
        raise ArgumentError(
            f"the first module of {name} is a {type(given[0]).__name__}, which is no model of transformers: pass a "
            "SentenceTransformer that begins with one."
        )
    made = of_sentence_transformer(given)
    return Subject(model, made, find_layers(model), given.tokenizer, None, heads.SENTENCE, name)

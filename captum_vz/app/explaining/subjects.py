"""What a user wants to have explained: a model of any kind, with what makes its inputs."""

from __future__ import annotations

import os
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz.app.explaining.tasks import (
    AUDIO,
    ENCODER,
    IMAGE,
    OF_IMAGES,
    OF_SOUND,
    SENTENCE,
    SEQ2SEQ,
    SPEECH,
    task_of,
)
from captum_vz.app.models import Loaded, load_with_head
from captum_vz.errors import ArgumentError
from captum_vz.study.methods import encoder_of

TAKEN = (
    "pass the name of a folder, a model of transformers with tokenizer=, a pipeline of transformers, or a "
    "SentenceTransformer"
)


@dataclass(frozen=True)
class Subject:
    """A model that is explained.

    Attributes:
        model: The model of transformers.
        forward: What is run, by keyword: the model, or a function around it.
        layers: The layers whose values are zeroed.
        tokenizer: Makes the inputs of a text. None: images or sound.
        processor: Makes the inputs of an image or of sound.
        task: A name of :data:`~captum_vz.app.explaining.tasks.TASKS`, or "encoder" or "sentence-embedding".
    """

    model: Any
    forward: Callable[..., Any]
    layers: list[nn.Module]
    tokenizer: Any
    processor: Any
    task: str

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        found: torch.device = next(self.model.parameters()).device
        return found

    @property
    def encoder(self) -> Subject:
        """The encoder of an encoder-decoder, whose maps explain the text; any other model as it is."""
        part = encoder_of(self.model)
        if part is self.model or self.task not in (SEQ2SEQ, ENCODER):
            return self
        return Subject(part, part, find_layers(part), self.tokenizer, self.processor, ENCODER)


def subject_of(
    given: Any, tokenizer: Any = None, task: str | None = None, hub: bool = True, stack: str | None = None
) -> Subject:
    """The model that a user passes, with what makes its inputs.

    Args:
        given: The name of a model or its folder, a model, a pipeline, or a SentenceTransformer.
        tokenizer: The tokenizer of a model, or the processor of its images or sound.
        task: The task whose head is loaded from a folder. None: the head of the checkpoint.
        hub: Whether the Hugging Face hub may be asked for a name.
        stack: The stack of layers, see :func:`captum_vz.find_layers`.

    Raises:
        ArgumentError: It is something else, the tokenizer is missing, or there is no such stack.
    """
    if isinstance(given, (str, Path)):
        model, tokenizer = load_with_head(str(given), hub, task)
        return _of_model(model, tokenizer, stack=stack)
    if task is not None:
        raise ArgumentError(f"task is {task!r}, which chooses the head of a folder: load the model with that head.")
    if _is_of(given, "transformers.pipelines"):
        made = given.image_processor or given.feature_extractor or tokenizer
        return _of_model(given.model, tokenizer or given.tokenizer, made, stack)
    if _is_of(given, "sentence_transformers"):
        return _of_sentences(given)
    if not isinstance(given, nn.Module):
        raise ArgumentError(f"the model is of type {type(given).__name__}: {TAKEN}.")
    return _of_model(given, tokenizer, stack=stack)


def subject_of_loaded(loaded: Loaded) -> Subject:
    """A text model that the commands have loaded; of an encoder-decoder the encoder."""
    return Subject(loaded.model, loaded.model, list(loaded.layers), loaded.tokenizer, None, task_of(loaded.model))


def _is_of(given: Any, package: str) -> bool:
    """Whether an object's class is of a package, which takes seconds to import."""
    return any(kind.__module__.startswith(package) for kind in type(given).__mro__)


def _of_model(model: Any, tokenizer: Any, processor: Any = None, stack: str | None = None) -> Subject:
    task = task_of(model)
    if task in (*OF_IMAGES, *OF_SOUND):
        processor = processor or tokenizer
        tokenizer = tokenizer if task == SPEECH and hasattr(tokenizer, "convert_ids_to_tokens") else None
    if (tokenizer if task not in (*OF_IMAGES, *OF_SOUND) else processor) is None:
        kind = "the processor of its images or sound" if task in (*OF_IMAGES, *OF_SOUND) else "its tokenizer"
        raise ArgumentError(f"the model {type(model).__name__} comes without {kind}: pass it as tokenizer=.")
    if task not in (*OF_IMAGES, *OF_SOUND) and not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        raise ArgumentError(
            f"{type(model).__name__} with a {type(tokenizer).__name__} takes no text here: images and sound are "
            "explained for models with a head for classes (ForImageClassification, ForAudioClassification, ForCTC)."
        )
    if encoder_of(model) is not model:
        if stack not in (None, "encoder") and (stack, task) != ("decoder", SEQ2SEQ):
            raise ArgumentError(
                f"stack is {stack!r}, but {type(model).__name__} is explained in its encoder: pass 'encoder'. A model "
                "that generates text also takes 'decoder', which explains the words that it generates."
            )
        stack = "encoder"
    return Subject(model, model, find_layers(model, stack), tokenizer, processor, task)


def _of_sentences(given: Any) -> Subject:
    """A SentenceTransformer: its first module is a model of transformers."""
    model = getattr(given[0], "auto_model", None)
    if model is None:
        raise ArgumentError(
            f"the first module of {type(given).__name__} is a {type(given[0]).__name__}, which is no model of "
            "transformers: pass a SentenceTransformer that begins with one."
        )
    return Subject(model, _Embedding(given), find_layers(model), given.tokenizer, None, SENTENCE)


class _Embedding:
    """The embeddings of sentences, `(batch, d)`, from a tokenizer's output by keyword."""

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder

    def __call__(self, **inputs: Any) -> Tensor:
        found: Tensor = self.encoder(dict(inputs))["sentence_embedding"]
        return found


def read_input(subject: Subject, given: Any) -> dict[str, Tensor]:
    """The inputs of an image or of sound: a file, an array, or an image of Pillow."""
    processor: Any = subject.processor
    if subject.task == IMAGE:
        made = processor(images=_image(given), return_tensors="pt")
    else:
        rate = getattr(processor, "sampling_rate", None)
        made = processor(_sound(given, rate), sampling_rate=rate, return_tensors="pt")
    return {name: one.to(subject.device) for name, one in dict(made).items() if isinstance(one, Tensor)}


def _image(given: Any) -> Any:
    if isinstance(given, (str, Path)):
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(given) as opened:
                return opened.convert("RGB")
        except FileNotFoundError as error:
            raise ArgumentError(f"there is no file {str(given)!r}: pass the file of an image.") from error
        except (UnidentifiedImageError, OSError) as error:
            raise ArgumentError(f"{str(given)!r} is no image that Pillow reads: pass a file such as a PNG.") from error
    return given


def _sound(given: Any, rate: int | None) -> Any:
    """The samples of a WAV file, from -1 to 1, its channels averaged; an array or a pipeline's mapping as it is."""
    if isinstance(given, Mapping):
        given = given.get("raw", given.get("array"))
    if not isinstance(given, (str, os.PathLike)):
        return np.asarray(given, dtype=np.float32)
    try:
        with wave.open(os.fspath(given), "rb") as file:
            channels, width, found = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except FileNotFoundError as error:
        raise ArgumentError(f"there is no file {str(given)!r}: pass the file of a sound, a WAV.") from error
    except (wave.Error, EOFError) as error:
        raise ArgumentError(f"{str(given)!r} is no WAV file of whole numbers: {error}. Convert it to one.") from error
    if width not in (1, 2, 4):
        raise ArgumentError(f"{str(given)!r} has samples of {8 * width} bits: expected 8, 16 or 32.")
    if rate is not None and found != rate:
        raise ArgumentError(f"{str(given)!r} has {found} samples a second, but the model takes {rate}: resample it.")
    samples = np.frombuffer(data, {1: "u1", 2: "<i2", 4: "<i4"}[width]).astype(np.float32)
    middle, highest = (128, 128) if width == 1 else (0, 2 ** (8 * width - 1))
    return ((samples - middle) / highest).reshape(-1, channels).mean(1).astype(np.float32)


def source_names(subject: Subject, count: int, inputs: Mapping[str, Tensor]) -> list[str]:
    """The names of the sources of an image or of sound: patches by their row and column, frames by their number."""
    if subject.task in (AUDIO, SPEECH):
        return [f"frame {i}" for i in range(count)]
    pixels = inputs.get("pixel_values")
    size = getattr(subject.model.config, "patch_size", None)
    if pixels is None or not isinstance(size, int):
        return [f"source {i}" for i in range(count)]
    down, across = pixels.shape[-2] // size, pixels.shape[-1] // size
    extra = count - down * across
    if extra < 0:
        return [f"source {i}" for i in range(count)]
    before = ["[CLS]", *(f"extra {i}" for i in range(1, extra))][:extra]
    return [*before, *(f"patch {i // across},{i % across}" for i in range(down * across))]

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
from captum_vz.app.models import Loaded, load_with_head
from captum_vz.app.tasks import (
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
from captum_vz.errors import ArgumentError
from captum_vz.study.examples.text import encoder_of, models_inside

TAKEN = (
    "pass the name of a folder, a model of transformers with tokenizer=, both as a pair, a pipeline of transformers, "
    "or a SentenceTransformer"
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
        task: A name of :data:`~captum_vz.app.tasks.TASKS`, or "encoder" or "sentence-embedding".
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
        given: The name of a model or its folder, a model, a model and its tokenizer, a pipeline, or a
            SentenceTransformer.
        tokenizer: The tokenizer of a model, or the processor of its images or sound.
        task: The task whose head is loaded from a folder. None: the head of the checkpoint.
        hub: Whether the Hugging Face hub may be asked for a name.
        stack: The stack of layers, see :func:`captum_vz.find_layers`.

    Raises:
        ArgumentError: It is something else, the tokenizer is missing, or there is no such stack.
    """
    if isinstance(given, tuple) and len(given) == 2 and tokenizer is None:
        given, tokenizer = given
    if isinstance(given, (str, Path)):
        model, tokenizer = load_with_head(str(given), hub, task)
        return _of_model(model, tokenizer, stack=stack)
    if task is not None:
        raise ArgumentError(f"task is {task!r}, which chooses the head of a folder: load the model with that head.")
    if _is_of(given, "transformers.pipelines"):
        if given.task == "zero-shot-classification":
            raise ArgumentError(
                "a zero-shot pipeline asks its model one question for each label: pass (pipe.model, pipe.tokenizer), "
                "and the question as text_pair, such as 'This example is about sport.'"
            )
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
    named = next((one for one in models_inside(model) if hasattr(one, "config")), None)
    if task in (*OF_IMAGES, *OF_SOUND):
        processor = processor or tokenizer
        tokenizer = tokenizer if task == SPEECH and hasattr(tokenizer, "convert_ids_to_tokens") else None
    if (tokenizer if task not in (*OF_IMAGES, *OF_SOUND) else processor) is None:
        kind = "the processor of its images or sound" if task in (*OF_IMAGES, *OF_SOUND) else "its tokenizer"
        raise ArgumentError(f"the model {type(model).__name__} comes without {kind}: pass it as tokenizer=.")
    if task not in (*OF_IMAGES, *OF_SOUND) and not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        raise ArgumentError(
            f"tokenizer is of type {type(tokenizer).__name__}, which makes no text for {type(model).__name__}: pass "
            "the model's tokenizer. Images and sound are explained for models with a head for classes "
            "(ForImageClassification, ForAudioClassification, ForCTC)."
        )
    if named is None:
        raise ArgumentError(
            f"{type(model).__name__} has no config, so it is no model of transformers: {TAKEN}. For other models use "
            "the classes, which take any function."
        )
    if encoder_of(model) is not model:
        if stack not in (None, "encoder") and (stack, task) != ("decoder", SEQ2SEQ):
            raise ArgumentError(
                f"stack is {stack!r}, but {type(model).__name__} is explained in its encoder: pass 'encoder'. A model "
                "that generates text also takes 'decoder', which explains the words that it generates."
            )
        stack = "encoder"
    return Subject(named, model, find_layers(model, stack), tokenizer, processor, task)


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
    """The inputs of an image or of sound: a file, an array, or an image of Pillow.

    Raises:
        ArgumentError: It is something else, or the processor does not take it.
    """
    processor: Any = subject.processor
    if subject.task == IMAGE:
        rescales = bool(getattr(processor, "do_rescale", True))
        read, rate, expected = (
            _image(given, rescales),
            None,
            "an image of Pillow, an array (height, width, 3), or a file",
        )
    else:
        rate = getattr(processor, "sampling_rate", None)
        read, expected = _sound(given, rate), "an array (samples,), or a WAV file"
    try:
        made = dict(processor(images=read, return_tensors="pt")) if rate is None else {}
        made = made or dict(processor(read, sampling_rate=rate, return_tensors="pt"))
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ArgumentError(
            f"{type(processor).__name__} takes no {type(given).__name__} like this ({reason}): pass {expected}, and "
            "the processor of the model as tokenizer."
        ) from error
    return {name: one.to(subject.device) for name, one in made.items() if isinstance(one, Tensor)}


@torch.no_grad()
def check_runs(subject: Subject, inputs: Mapping[str, Tensor]) -> Any:
    """The output of a model for an image or a sound. A sound may be too short for its convolutions."""
    try:
        return subject.forward(**inputs)
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in inputs.items())
        raise ArgumentError(
            f"{type(subject.model).__name__} does not run on {shapes} ({str(error).partition(chr(10))[0]}): pass a "
            f"{'larger image' if subject.task == IMAGE else 'longer sound'}."
        ) from error


def _image(given: Any, rescales: bool) -> Any:
    """An image of three channels, from 0 to 255 for a processor that rescales it."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(given, Image.Image):
        return given.convert("RGB")
    if isinstance(given, (str, Path)):
        try:
            with Image.open(given) as opened:
                return opened.convert("RGB")
        except FileNotFoundError as error:
            raise ArgumentError(f"there is no file {str(given)!r}: pass the file of an image.") from error
        except (UnidentifiedImageError, OSError) as error:
            raise ArgumentError(f"{str(given)!r} is no image that Pillow reads: pass a file such as a PNG.") from error
    if isinstance(given, (list, tuple)):
        raise ArgumentError(f"a {type(given).__name__} of {len(given)} is no image: pass one image.")
    if not isinstance(given, (np.ndarray, Tensor)):
        return given
    pixels = np.asarray(given)
    if pixels.ndim not in (2, 3) or not pixels.size:
        raise ArgumentError(f"the image has the shape {pixels.shape}: pass one image, (height, width, channels).")
    if rescales and np.issubdtype(pixels.dtype, np.floating) and pixels.min() >= 0 and pixels.max() <= 1:
        pixels = (255 * pixels).round().astype(np.uint8)
    return np.stack([pixels] * 3, -1) if pixels.ndim == 2 else pixels


def _sound(given: Any, rate: int | None) -> Any:
    """The samples of a WAV file, from -1 to 1, its channels averaged; an array or a pipeline's mapping as it is."""
    if isinstance(given, Mapping):
        _check_rate("the sound", given.get("sampling_rate", rate), rate)
        given = given.get("raw", given.get("array"))
    if isinstance(given, (str, os.PathLike)):
        return _wave(os.fspath(given), rate)
    try:
        samples = np.asarray(given, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the sound is of type {type(given).__name__}: pass an array (samples,).") from error
    if samples.ndim != 1 or not samples.size:
        raise ArgumentError(f"the sound has the shape {samples.shape}: pass one channel, an array (samples,).")
    return samples


def _wave(path: str, rate: int | None) -> Any:
    try:
        with wave.open(path, "rb") as file:
            channels, width, found = file.getnchannels(), file.getsampwidth(), file.getframerate()
            expected, data = file.getnframes() * channels * width, file.readframes(file.getnframes())
    except FileNotFoundError as error:
        raise ArgumentError(f"there is no file {path!r}: pass the file of a sound, a WAV.") from error
    except (wave.Error, EOFError, OSError) as error:
        why = str(error) or "it ends too early"
        raise ArgumentError(f"{path!r} is no WAV file of whole numbers: {why}. Convert it to one.") from error
    if width not in (1, 2, 4):
        raise ArgumentError(f"{path!r} has samples of {8 * width} bits: expected 8, 16 or 32.")
    if not data or len(data) < expected:
        raise ArgumentError(f"{path!r} holds {len(data)} bytes of sound, and says {expected}: copy it again.")
    _check_rate(repr(path), found, rate)
    samples = np.frombuffer(data, {1: "u1", 2: "<i2", 4: "<i4"}[width]).astype(np.float32)
    middle, highest = (128, 128) if width == 1 else (0, 2 ** (8 * width - 1))
    return ((samples - middle) / highest).reshape(-1, channels).mean(1).astype(np.float32)


def _check_rate(name: str, found: Any, rate: int | None) -> None:
    if rate is not None and found != rate:
        raise ArgumentError(f"{name} has {found} samples a second, but the model takes {rate}: resample it.")


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

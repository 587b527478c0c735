"""Images and sound as a model takes them."""

from __future__ import annotations

import os
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.subjects import Subject
from captum_vz.subjects.heads import IMAGE

#: How the names of arguments begin that hold images, videos or sound. `generate` and the pass read them unchanged.
SIGNALS = ("pixel_", "image_", "video_", "input_features", "input_values", "audio_", "feature_", "mm_")


def read_input(subject: Subject, given: Any) -> dict[str, Tensor]:
    """The inputs of an image or of sound: a file, an array, an image of Pillow, or what the processor returned."""
    if isinstance(given, Mapping) and any(str(name).startswith(SIGNALS) for name in given):
        made = {name: one.to(subject.device) for name, one in given.items() if isinstance(one, Tensor)}
        if not made or any(len(one) != 1 for one in made.values()):
            raise ArgumentError("pass what the processor returned for one image or sound, with return_tensors='pt'.")
        return made
    processor: Any = subject.processor
    if subject.task == IMAGE:
        rate, read = None, _image(given, bool(getattr(processor, "do_rescale", True)))
        expected = "an image of Pillow, an array (height, width, 3), or a file"
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
    given = given.detach().cpu() if isinstance(given, Tensor) else given
    pixels = np.asarray(given.float() if isinstance(given, Tensor) and given.is_floating_point() else given)
    pixels = pixels[0] if pixels.ndim == 4 and len(pixels) == 1 else pixels  # a batch of one
    if pixels.ndim == 3 and 1 in pixels.shape[::2]:  # one channel
        pixels = pixels[0] if len(pixels) == 1 else pixels[..., 0]
    if rescales and pixels.size and pixels.min() < 0:
        raise ArgumentError("the image has negative numbers: pass what the processor returned, with pixel_values.")
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
            channels, width, found, frames, *_ = file.getparams()
            data, expected = file.readframes(frames), frames * channels * width
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


def source_names(config: Any, count: int, inputs: Mapping[str, Tensor]) -> list[str]:
    """The names of the sources of an image or of sound: patches by their row and column, frames by their number."""
    pixels, size = inputs.get("pixel_values"), getattr(getattr(config, "encoder", config), "patch_size", None)
    if pixels is not None and isinstance(size, int):
        down, across = pixels.shape[-2] // size, pixels.shape[-1] // size
        extra = count - down * across
        if extra >= 0:
            before = ["[CLS]", *(f"extra {i}" for i in range(1, extra))][:extra]
            return [*before, *(f"patch {i // across},{i % across}" for i in range(down * across))]
    return [f"{'frame' if pixels is None else 'source'} {i}" for i in range(count)]


def signals_of(options: dict[str, Any]) -> dict[str, Tensor]:
    """Take images, videos and sound out of the arguments of `generate`, and the types of tokens that go with them."""
    names = [name for name, one in options.items() if isinstance(one, Tensor) and name.startswith(SIGNALS)]
    if names and "token_type_ids" in options:
        names.append("token_type_ids")
    return {name: options.pop(name) for name in names}


def placeholders(model: Any) -> set[int]:
    """The ids of tokens that stand for images, videos and sound."""
    names = (f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))
    found = (getattr(getattr(model, "config", None), name, None) for name in names)
    return {one for one in found if isinstance(one, int)}

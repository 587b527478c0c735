"""Inputs for any model, told by the names of what its forward takes: three examples, padded where there is a mask."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LENGTHS = (7, 5, 4)
TOKENS = max(LENGTHS)
WAVE = 4000
FRAMES = 64


def candidate_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The inputs that a forward with these arguments may take, the likeliest first."""
    names = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    texts = list(_texts(names, config))
    pictures = list(_pictures(names, config))
    sounds = list(_sounds(names, config))
    extra = {"use_cache": False} if "use_cache" in names else {}
    for parts in (texts, [p | t for p in pictures for t in texts], [s | t for s in sounds for t in texts]):
        yield from (part | _decoder(names, config, part) | extra for part in parts)
    for parts in (pictures, sounds, _embeddings(names, config)):
        yield from (part | _decoder(names, config, part) | extra for part in parts)


def padding_mask() -> Tensor:
    """Ones for the tokens of each example, zeros behind them, `(batch, tokens)`."""
    return torch.tensor([[int(place < length) for place in range(TOKENS)] for length in LENGTHS])


def _tokens(seed: int, mask: Tensor, pad: int) -> Tensor:
    tokens = torch.randint(4, 50, mask.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask.bool(), tokens, pad)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _value(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that a config or one of its nested configs has."""
    nested = [value for value in vars(config).values() if hasattr(value, "to_dict")] if config is not None else []
    for one in (config, *nested):
        for name in names:
            value = getattr(one, name, None)
            if value is not None:
                return value
    return default


def _pad(config: Any) -> int:
    pad = _value(config, "pad_token_id", default=0)
    return pad if isinstance(pad, int) and 0 <= pad < 128 else 0


def _texts(names: Any, config: Any) -> Iterator[dict[str, Any]]:
    if "input_ids" not in names:
        return
    mask = padding_mask()
    text: dict[str, Any] = {"input_ids": _tokens(1, mask, _pad(config))}
    if "attention_mask" in names:
        text["attention_mask"] = mask
    if "bbox" in names:
        text["bbox"] = torch.tensor([1, 2, 5, 9]).expand(*mask.shape, 4)
    yield text
    yield {"input_ids": text["input_ids"]}


def _decoder(names: Any, config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    if "decoder_input_ids" not in names:
        return {}
    batch = len(next(iter(inputs.values())))
    mask = padding_mask()[:batch, :6].flip(0)
    decoder: dict[str, Any] = {"decoder_input_ids": _tokens(2, mask, _pad(config))}
    if "decoder_attention_mask" in names:
        decoder["decoder_attention_mask"] = mask
    return decoder


def _pictures(names: Any, config: Any) -> Iterator[dict[str, Any]]:
    name = next((name for name in ("pixel_values", "pixel_values_videos") if name in names), None)
    if name is None:
        return
    size = _value(config, "image_size", "img_size", "input_size", default=64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _value(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    yield {name: _noise(2, channels, height, width)}
    frames = _value(config, "num_frames", "frames_per_clip", default=4)
    yield {name: _noise(2, frames, channels, height, width)}
    yield {name: _noise(2, channels, 128, 128)}


def _sounds(names: Any, config: Any) -> Iterator[dict[str, Any]]:
    padded = {"attention_mask": torch.tensor([[1] * WAVE, [1] * (WAVE * 3 // 4) + [0] * (WAVE // 4)])}
    mask = padded if "attention_mask" in names else {}
    if "input_values" in names:
        yield {"input_values": _noise(2, WAVE)} | mask
        yield {"input_values": _noise(2, 1, WAVE)}
    if "input_features" in names:
        mels = _value(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", default=80)
        seconds = _value(config, "max_source_positions", default=FRAMES // 2)
        short = {"attention_mask": torch.tensor([[1] * FRAMES, [1] * 40 + [0] * (FRAMES - 40)])}
        yield {"input_features": _noise(2, FRAMES, mels)} | (short if "attention_mask" in names else {})
        yield {"input_features": _noise(2, mels, 2 * seconds)}
        yield {"input_features": _noise(2, mels, FRAMES)}


def _embeddings(names: Any, config: Any) -> Iterator[dict[str, Any]]:
    width = _value(config, "hidden_size", "d_model", "embed_dim", default=64)
    for name in ("inputs_embeds", "hidden_states", "inputs"):
        if name in names and isinstance(width, int):
            mask = {"attention_mask": padding_mask()} if "attention_mask" in names else {}
            yield {name: _noise(3, TOKENS, width)} | mask
            yield {name: _noise(3, TOKENS, width)}

"""Inputs for any model, chosen by the names of the arguments of its `forward`.

Texts are three sentences of different lengths. They are padded if the model takes a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# How many tokens each sentence of a batch has.
SHORT = (7, 5, 4)
LONG = (36, 29, 20)
WAVE = 4000
FRAMES = 64
PATCH = 16


def candidate_inputs(model: nn.Module, lengths: tuple[int, ...] = SHORT) -> Iterator[dict[str, Any]]:
    """Inputs that the model's `forward` may take, the most likely ones first."""
    names = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    mask = padding_mask(lengths)
    texts = list(_texts(names, config, mask))
    pictures = [*_patches(names, config), *_pictures(names, config)]
    sounds = list(_sounds(names, config))
    extra = {"use_cache": False} if "use_cache" in names else {}
    both = [other | _first(text, other) for other in (*pictures, *sounds) for text in texts]
    for parts in (texts, both):
        yield from (part | _decoder(names, config, part, mask) | extra for part in parts)
    for parts in (pictures, sounds, _series(names, config), _embeddings(names, config, mask)):
        yield from (part | _decoder(names, config, part, mask) | extra for part in parts)


def first_example(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The first example of a batch. None: the examples are joined to one sequence, or are one already."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    if len({len(value) for value in tensors.values()} - {1}) != 1:
        return None
    return {**inputs, **{name: value[:1] for name, value in tensors.items()}}


def padding_mask(lengths: tuple[int, ...]) -> Tensor:
    """Ones for the tokens of each sentence, zeros for the padding after them, `(batch, tokens)`."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def _tokens(seed: int, mask: Tensor, pad: int) -> Tensor:
    tokens = torch.randint(4, 50, mask.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask.bool(), tokens, pad)


def _first(text: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The first texts, as many as the batch has images or sounds."""
    return {name: value[: len(next(iter(other.values())))] for name, value in text.items()}


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _value(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the config or a nested config has."""
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


def _texts(names: Any, config: Any, mask: Tensor) -> Iterator[dict[str, Any]]:
    if "input_ids" not in names:
        return
    text: dict[str, Any] = {"input_ids": _tokens(1, mask, _pad(config))}
    if "attention_mask" in names:
        text["attention_mask"] = mask
    if "bbox" in names:
        corners = torch.tensor([1, 2, 5, 9]).expand(*mask.shape, 4)
        # Models that also take boxes of patches expect fractions of a page.
        text["bbox"] = corners / 10 if "visual_bbox" in names else corners
    yield text
    yield {"input_ids": text["input_ids"]}
    codes = _value(config, "n_codes_total", "num_channels")
    if isinstance(codes, int):  # a sound is one token of each codebook
        codebook = {"codebook_idx": codes - 1} if "codebook_idx" in names else {}
        yield text | {"input_ids": text["input_ids"][..., None].expand(-1, -1, codes)} | codebook


def _decoder(names: Any, config: Any, inputs: dict[str, Any], mask: Tensor) -> dict[str, Any]:
    if "decoder_input_ids" not in names:
        return {}
    batch = len(next(iter(inputs.values())))
    mask = mask[:batch, :-1].flip(0)  # not as long as the encoder's sentences
    decoder: dict[str, Any] = {"decoder_input_ids": _tokens(2, mask, _pad(config))}
    if "decoder_attention_mask" in names:
        decoder["decoder_attention_mask"] = mask
    return decoder


def _patches(names: Any, config: Any) -> Iterator[dict[str, Any]]:
    """Two images of 4 by 4 patches, either joined in one sequence or padded to the same number of patches."""
    pixels = next((name for name in ("pixel_values", "hidden_states") if name in names), None)
    channels = _value(config, "in_channels", "num_channels", "in_chans", default=3)
    side = _value(config, "patch_size", default=PATCH)
    if pixels is None or not isinstance(channels, int) or not isinstance(side, int):
        return
    grid = next((name for name in ("grid_thw", "image_grid_thw", "grid_hws") if name in names), None)
    if grid is not None:
        sizes = torch.tensor([[1, 4, 4], [1, 4, 4]])[:, 0 if "thw" in grid else 1 :]
        merged = {"merge_sizes": torch.tensor([2, 2])} if "merge_sizes" in names else {}
        for frames in dict.fromkeys((_value(config, "temporal_patch_size", default=1), 1, 2)):
            yield {pixels: _noise(32, channels * frames * side * side), grid: sizes} | merged
            yield {pixels: _noise(32, channels, side, side), grid: sizes} | merged
        yield {pixels: _noise(1, 32, channels, side, side), grid: sizes}
    if "target_sizes" in names:
        yield {pixels: _noise(1, channels, side, 32 * side), "target_sizes": torch.tensor([[4, 4], [4, 4]])}
    if "spatial_shapes" in names:
        mask = torch.tensor([[1] * 16, [1] * 12 + [0] * 4])
        shapes = torch.tensor([[4, 4], [3, 4]])
        yield {pixels: _noise(2, 16, channels * side * side), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    if "pixel_position_ids" in names:
        edge = 2 * _value(config, "pooling_kernel_size", default=2)
        places = torch.cartesian_prod(torch.arange(edge), torch.arange(edge)).repeat(2, 1, 1)
        places[1, -edge:] = -1
        yield {pixels: _noise(2, edge * edge, channels * side * side), "pixel_position_ids": places}


def _pictures(names: Any, config: Any) -> Iterator[dict[str, Any]]:
    name = next((name for name in ("pixel_values", "pixel_values_videos") if name in names), None)
    if name is None:
        return
    size = _value(config, "image_size", "img_size", "input_size", default=64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _value(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    height = width if "prompt_masks" in names else height  # the model puts the prompt above the image
    prompt = {prompt: _noise(2, channels, height, width) for prompt in ("prompt_pixel_values", "prompt_masks")}
    yield {name: _noise(2, channels, height, width)} | {key: value for key, value in prompt.items() if key in names}
    frames = _value(config, "num_frames", "frames_per_clip", default=4)
    yield {name: _noise(2, frames, channels, height, width)}
    yield {name: _noise(2, channels, 128, 128)}
    yield {name: _noise(2, 2, channels, 128, 128)}
    yield {name: _noise(frames, channels, height, width)}  # the frames of one video


def _sounds(names: Any, config: Any) -> Iterator[dict[str, Any]]:
    padded = {"attention_mask": torch.tensor([[1] * WAVE, [1] * (WAVE * 3 // 4) + [0] * (WAVE // 4)])}
    mask = padded if "attention_mask" in names else {}
    if "input_values" in names:
        yield {"input_values": _noise(2, WAVE)} | mask
        yield {"input_values": _noise(2, 1, WAVE)}
        mels = _value(config, "num_mel_bins", default=80)
        yield {"input_values": _noise(2, _value(config, "max_length", default=FRAMES), mels)}
    if "input_features" in names:
        mels = _value(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", default=80)
        seconds = _value(config, "max_source_positions", default=FRAMES // 2)
        short = {"attention_mask": torch.tensor([[1] * FRAMES, [1] * 40 + [0] * (FRAMES - 40)])}
        yield {"input_features": _noise(2, FRAMES, mels)} | (short if "attention_mask" in names else {})
        yield {"input_features": _noise(2, mels, 2 * seconds)}
        yield {"input_features": _noise(2, mels, FRAMES)}
        for bins in (128, 4 * mels):  # a width that no config names; four frames in one
            yield {"input_features": _noise(2, FRAMES, bins)} | (short if "attention_mask" in names else {})
        if "input_features_mask" in names:
            for frames in (FRAMES, 2 * seconds, 4 * _value(config, "n_window", default=FRAMES)):
                valid = torch.tensor([[1] * frames, [1] * (frames * 5 // 8) + [0] * (frames - frames * 5 // 8)])
                yield {"input_features": _noise(2, mels, frames), "input_features_mask": valid}
                yield {"input_features": _noise(2, frames, mels), "input_features_mask": valid}
            yield {"input_features": _noise(2, frames, 7 * mels), "input_features_mask": valid}
        if "feature_lens" in names:  # both sounds in one sequence
            yield {"input_features": _noise(mels, FRAMES + 40), "feature_lens": torch.tensor([FRAMES, 40])}


def _series(names: Any, config: Any) -> Iterator[dict[str, Any]]:
    """Past and future values of a time series."""
    if "past_values" not in names:
        return
    if "past_values_padding" in names:
        past = 4 * _value(config, "patch_length")
        patches = {"past_values": _noise(2, past), "past_values_padding": torch.zeros(2, past).long()}
        yield patches | ({"freq": torch.zeros(2, 1).long()} if "freq" in names else {})
    past = _value(config, "context_length", default=8)
    yield {"past_values": _noise(2, past, _value(config, "num_input_channels", default=1))}
    past += max(_value(config, "lags_sequence", default=[0]))
    future, known = _value(config, "prediction_length", default=6), _value(config, "num_time_features", default=0)
    yield {
        "past_values": _noise(2, past),
        "past_time_features": _noise(2, past, known),
        "past_observed_mask": torch.ones(2, past),
        "future_values": _noise(2, future),
        "future_time_features": _noise(2, future, known),
    }


def _embeddings(names: Any, config: Any, mask: Tensor) -> Iterator[dict[str, Any]]:
    width = _value(config, "hidden_size", "d_model", "embed_dim", default=64)
    for name in ("inputs_embeds", "hidden_states", "query_embeds", "inputs"):
        if name in names and isinstance(width, int):
            padding = {"attention_mask": mask} if "attention_mask" in names else {}
            batch, tokens = mask.shape
            read = _value(config, "encoder_hidden_size", default=width)
            encoder = {"encoder_hidden_states": _noise(batch, 9, read)} if name == "query_embeds" else {}
            yield {name: _noise(batch, tokens, width)} | padding | encoder
            yield {name: _noise(batch, tokens, width)} | encoder

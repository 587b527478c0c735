"""Groups of tokens: words, spans and regions. Their masks, and their maps from maps of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.functional.scores import widen


def pool_groups(scores: Tensor, groups: Tensor, reduce: Literal["mean", "max"] = "mean", shared: bool = True) -> Tensor:
    r"""Reduces a map of tokens to a map of groups of tokens: words, spans, regions of an image.

    .. math:: P_{gh} = \operatorname*{reduce}_{i \in g}\; c_{ih}, \qquad
        c_{ih} = \begin{cases} C_{ij} \text{ for any } j \in h & \text{shared} \\
        \sum_{j \in h} C_{ij} & \text{otherwise} \end{cases}

    This follows `Mohebbi et al. 2023 <https://aclanthology.org/2023.emnlp-main.513>`_, who pool the frames of a spoken
    word.

    Args:
        scores: A map `(batch, tokens, tokens)`, or one row for each example, `(batch, tokens)`.
        groups: Integers `(1 or batch, tokens)`. Tokens with the same number are one group, as in Captum's
            `feature_mask`.
        reduce: A group's row is the "mean" or the "max" of its tokens' rows. Rows of padding (all zero) are left out.
            Single rows `(batch, tokens)` are not pooled.
        shared: True: all tokens of a group carry the group's score, as after zeroing them together with a
            `feature_mask`, and this score counts once. Padding carries 0. False: each token has a score of its own, and
            the scores of a group are added up.

    Returns:
        `(batch, groups, groups)`, or `(batch, groups)` for rows, in at least float32. Groups are sorted by number. The
        rows and columns of a group that an example lacks are zero. If each row of `scores` sums to 1
        (over groups if `shared`, over tokens otherwise), each row of the result does too, except for "max".

    Raises:
        ArgumentError: Shapes do not fit, `groups` are not integers, `reduce` is unknown, or `shared` scores differ
            within a group.

    >>> import torch
    >>> words = torch.tensor([[0, 0, 1]])  # the first two tokens are one word
    >>> pool_groups(torch.tensor([[0.25, 0.25, 0.75]]), words)
    tensor([[0.2500, 0.7500]])
    >>> pool_groups(torch.tensor([[[0.2, 0.2, 0.6], [0.4, 0.2, 0.4], [0.0, 0.5, 0.5]]]), words, shared=False)
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]])
    """
    if reduce not in ("mean", "max"):
        raise ArgumentError(f"reduce is {reduce!r}: pass 'mean' or 'max'.")
    _check_shapes(scores, groups)
    names, member = groups.unique(return_inverse=True)
    scores = widen(scores)
    columns = _scatter(scores, member, len(names), "amax" if shared else "sum")
    carried = columns.gather(-1, (member if scores.ndim == 2 else member[:, None]).expand_as(scores))
    if shared and not torch.all((scores == 0) | scores.isclose(carried)):
        raise ArgumentError(
            "The tokens of a group carry different scores. With shared=True all of them must carry the group's score; "
            "pass shared=False to add them up."
        )
    if scores.ndim == 2:
        return columns
    if reduce == "max":
        return _scatter(columns.mT, member, len(names), "amax").mT.contiguous()
    total = _scatter(columns.mT, member, len(names), "sum").mT
    rows = _scatter(columns.any(-1).to(columns), member, len(names), "sum")  # without padding
    return (total / rows.clamp_min(1)[..., None]).contiguous()


def _scatter(scores: Tensor, member: Tensor, count: int, reduce: str) -> Tensor:
    """Reduces the last axis, (..., tokens), to (..., groups); a group without tokens gets 0."""
    index = (member if scores.ndim == 2 else member[:, None]).expand_as(scores)
    return scores.new_zeros(*scores.shape[:-1], count).scatter_reduce(-1, index, scores, reduce, include_self=False)


def _check_shapes(scores: Tensor, groups: Tensor) -> None:
    if scores.ndim != 2 and (scores.ndim != 3 or scores.shape[1] != scores.shape[2]):
        raise ArgumentError(
            f"Expected a map (batch, tokens, tokens) or rows (batch, tokens), got {tuple(scores.shape)}."
        )
    batch, tokens = scores.shape[0], scores.shape[-1]
    if groups.ndim != 2 or groups.shape[0] not in (1, batch) or groups.shape[1] != tokens:
        raise ArgumentError(
            f"groups is {tuple(groups.shape)}, but scores {tuple(scores.shape)} need (1 or {batch}, {tokens}): "
            "one group number for each token."
        )
    if groups.is_floating_point() or groups.is_complex():
        raise ArgumentError(f"groups must be integers, got {groups.dtype}.")


#: Parameters of vision models that hold tokens before the patches, `(1, tokens, d)`.
BEFORE_PATCHES: Final = ("cls_token", "class_token", "distillation_token", "register_tokens", "reg_token")


def word_mask(encoding: Any) -> Tensor:
    """The `feature_mask` in which the tokens of a word form one feature.

    Args:
        encoding: What a fast tokenizer returned, for one text or several. Or `encoding.word_ids()`, a list with the
            number of each token's word, or None for a token that is no word, such as `[CLS]`.

    Returns:
        Integers `(batch, tokens)`. A token without a word is a feature of its own.

    Raises:
        ArgumentError: The tokenizer does not know words, or the list holds other things.

    >>> from captum_vz import ValueZeroing, find_layers, word_mask
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("a wug [MASK]", return_tensors="pt")
    >>> word_mask(inputs)
    tensor([[0, 1, 2, 2, 2, 3, 4]])
    >>> rows = ValueZeroing(model, find_layers(model)[-1]).attribute(inputs, feature_mask=word_mask(inputs), token=5)
    >>> rows[0, 2] == rows[0, 4]
    tensor(True)
    """
    if not hasattr(encoding, "word_ids"):
        return numbered(encoding)
    try:
        count = len(encoding.encodings or [None])  # the ids of one text may be without an axis of texts
        rows = [encoding.word_ids(example) for example in range(count)]
        # The words of the second of two texts begin at 0 again.
        texts = [encoding.sequence_ids(example) for example in range(len(rows))]
    except ValueError as error:
        raise ArgumentError(
            "the tokenizer does not know which tokens form a word: pass the output of a fast tokenizer, or the number "
            "of each token's word in a list."
        ) from error
    keys = [
        [None if word is None else (text, word) for word, text in zip(*pair, strict=True)]
        for pair in zip(rows, texts, strict=True)
    ]
    return torch.tensor([_numbers(row) for row in keys])


def numbered(mask: Any) -> Any:
    """A mask as `attribute` takes it, `(batch, tokens)`: lists and one-dimensional tensors become tensors.

    A list holds integers, or None for a token that is a feature of its own. Anything else is returned as it is.
    """
    if isinstance(mask, tuple) and len(mask) == 1 and isinstance(mask[0], Tensor):  # one mask for each input
        mask = mask[0]
    if isinstance(mask, Tensor):
        return mask[None] if mask.dim() == 1 else mask
    if not isinstance(mask, (list, tuple)) or not mask or isinstance(mask[0], Tensor):
        return mask
    rows = list(mask) if isinstance(mask[0], (list, tuple)) else [mask]
    known = all(one is None or (isinstance(one, int) and not isinstance(one, bool)) for row in rows for one in row)
    if not known or len({len(row) for row in rows}) != 1:
        raise ArgumentError(
            "feature_mask is a list that is no list of words: pass an integer or None for each token, in a list, or in "
            "a list of lists of the same length for several examples."
        )
    return torch.tensor([_numbers(row) for row in rows])


def _numbers(keys: Sequence[Any]) -> list[int]:
    """Numbers from 0 in the order of first appearance. None is a number of its own each time."""
    own = [("alone", place) if key is None else ("of", key) for place, key in enumerate(keys)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(own))}
    return [numbers[key] for key in own]


def patch_mask(pixel_mask: Tensor, model: nn.Module, *, extra: int | None = None) -> Tensor:
    """The `feature_mask` of a vision transformer from a mask of pixels, such as the segments of an image.

    Args:
        pixel_mask: The number of each pixel's region, integers `(height, width)`, `(1, height, width)` or `(1, 1,
            height, width)`, as for Captum's methods on pixels.
        model: The model, whose config says how large a patch is.
        extra: The number of tokens before the patches. None: those of the model, such as `[CLS]` and registers.

    Returns:
        Integers `(1, tokens)`. A patch belongs to the region that most of its pixels have, of several the lowest. Each
        token before the patches is a feature of its own.

    Raises:
        ArgumentError: The mask has another shape, its patches do not fit, or the config has no patch size.

    >>> from captum_vz import patch_mask
    >>> from transformers import ViTConfig, ViTModel
    >>> model = ViTModel(ViTConfig(image_size=8, patch_size=4, hidden_size=12, num_hidden_layers=1))
    >>> halves = torch.arange(8).div(4, rounding_mode="floor").expand(8, 8)  # left and right
    >>> patch_mask(halves, model)
    tensor([[2, 0, 1, 0, 1]])
    """
    if not isinstance(pixel_mask, Tensor) or pixel_mask.is_floating_point() or pixel_mask.is_complex():
        shown = f"of {pixel_mask.dtype}" if isinstance(pixel_mask, Tensor) else f"of type {type(pixel_mask).__name__}"
        raise ArgumentError(f"pixel_mask is {shown}: pass a tensor of integers (height, width).")
    shape = tuple(pixel_mask.shape)
    if pixel_mask.dim() < 2 or pixel_mask[(0,) * (pixel_mask.dim() - 2)].numel() != pixel_mask.numel():
        raise ArgumentError(f"pixel_mask is {shape}: pass one mask (height, width), the same for all channels.")
    size: Any = getattr(getattr(model, "config", None), "patch_size", None)
    tall, wide = (size, size) if isinstance(size, int) else size or (0, 0)
    height, width = shape[-2:]
    if not tall or not wide or height % tall or width % wide:
        raise ArgumentError(
            f"pixel_mask is {shape}, and a patch of {type(model).__name__} is {size}: pass a mask whose height and "
            "width are whole numbers of patches, and a model whose config has patch_size."
        )
    names, regions = pixel_mask.reshape(height, width).unique(return_inverse=True)
    patches = regions.reshape(height // tall, tall, width // wide, wide).transpose(1, 2).reshape(-1, tall * wide)
    counts = torch.zeros(len(patches), len(names), dtype=torch.long, device=patches.device)
    chosen = names[counts.scatter_add(1, patches, torch.ones_like(patches)).argmax(1)]
    if extra is None:
        before = dict.fromkeys(BEFORE_PATCHES, 0)
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in before and parameter.dim() == 3:
                before[name.rpartition(".")[2]] = parameter.shape[1]
        extra = sum(before.values())
    first = torch.arange(extra, device=chosen.device) + int(names.max()) + 1
    return torch.cat([first, chosen])[None]

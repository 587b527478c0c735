"""The numbers of a page: quantised, compressed, in ASCII."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from captum_vz.visualization.view.methods import Method

# Levels of a share's root, finest first. The finest that fits the room is used. 12 bits show three digits of a share.
LEVELS = (65535, 4095, 1023, 255, 127, 63, 31, 15)
SIGNED_LEVELS = (32767, 4095, 1023, 127, 63, 31, 15)
LEAST_BYTES, MOST_BYTES, BYTES_PER_PAIR = 56_000, 1_350_000, 12
LEAST_RATIO = 4


@dataclass(frozen=True)
class Encoded:
    """All maps of a page.

    Attributes:
        text: Base64 of the compressed integers, methods after each other, maps after each other, row by row.
        levels: The integer of the largest score of a map.
        signed: Whether integers have signs.
        scales: The largest absolute score of each map, for each method.
        maps: What the integers say, which differs from the scores by rounding: `(out, in)` for each map.
    """

    text: str
    levels: int
    signed: bool
    scales: list[list[float]]
    maps: list[list[Tensor]]


def encode(methods: Sequence[Method]) -> Encoded:
    r"""Quantise roots of scores, so that small shares keep their relative precision.

    .. math:: q = \operatorname{round}\big( Q \sqrt{|s| / \textstyle\max |s|} \big) \operatorname{sign} s

    Q is the largest number of levels with which all maps fit into the room that a page has.
    """
    scales = [[float(f"{panel.scores.abs().max().item():.6g}") for panel in method.panels] for method in methods]
    rows, columns = methods[0].panels[0].scores.shape
    room = max(LEAST_BYTES, min(MOST_BYTES, BYTES_PER_PAIR * rows * columns))
    signed = any(method.signed for method in methods)
    for levels in SIGNED_LEVELS if signed else LEVELS:
        found = _integers(methods, scales, levels)
        width = 2 if levels > 255 else 1
        last = levels == LEVELS[-1]
        if width * sum(one.size for one in found) > LEAST_RATIO * room and not last:
            continue  # compression does not save that much
        numbers = np.concatenate([one.ravel() for one in found]).astype(f"<{'i' if signed else 'u'}{width}")
        text = base64.b64encode(gzip.compress(_planes(numbers), 6, mtime=0)).decode("ascii")
        if len(text) <= room or last:
            break
    parts = iter(found)
    maps = [
        [torch.from_numpy(np.sign(q) * scale * (q / levels) ** 2) for scale, q in zip(row, parts, strict=False)]
        for row in scales
    ]
    return Encoded(text, levels, signed, scales, maps)


def _integers(methods: Sequence[Method], scales: list[list[float]], levels: int) -> list[np.ndarray]:
    found = []
    for method, row in zip(methods, scales, strict=True):
        for panel, scale in zip(method.panels, row, strict=True):
            scores = panel.scores.numpy()
            root = np.sqrt(np.minimum(np.abs(scores) / (scale or 1.0), 1))
            found.append(np.sign(scores) * np.round(levels * root))
    return found


def _planes(integers: np.ndarray) -> bytes:
    """The low bytes of all integers, then the high bytes, which compress better apart."""
    return integers.view(np.uint8).reshape(len(integers), -1).T.tobytes()

"""What the fast lane answers in the place of a layer's norm, its matrices and GELU, chunk after chunk of pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_vz._engine.blocks import Chunk
from captum_vz._engine.replay import NotReproducedError
from captum_vz._engine.shapes import Norm

# Rows of a product in bfloat16 on a CPU: beyond some 600 rows oneDNN takes twice the time for each (measured on AMX).
# It also compiles a kernel for each number of rows, and keeps it: so these come in few sizes.
HALF_ROWS, HALF_STEP = 512, 64
# Numbers that a core's cache holds, in float32.
PIECE = 1 << 18


@dataclass(frozen=True)
class First:
    """A first matrix: `W n(p - u) = s(p - u) (base - sum_h a_h W g(f_h)) + constant`."""

    module: nn.Module
    matrix: Tensor  # (d, features)
    base: Tensor  # W g(p) of each target, (target, features)
    constant: Tensor  # W beta, and W's own bias, (1, features)
    result: Tensor  # filled anew by each chunk


@dataclass(frozen=True)
class Last:
    """A later matrix, of which only what changes in its input is multiplied, in bfloat16."""

    module: nn.Module
    matrix: Tensor  # (features, d)
    inputs: Tensor  # of each target, unchanged, (target, features)
    outputs: Tensor  # (target, d)
    change: Tensor  # filled anew by each chunk


class Answers:
    """What the norm, the first and the last matrices give for the chunk that runs now."""

    chunk: Chunk
    weights: Tensor  # (n + 2, member * head)
    folded: list[Tensor]  # W g(f_h(j)) of each first matrix, (member * head, features); empty: it acts on the pairs
    scale: Tensor  # of the norm, (n + 2, 1)

    def __init__(self, norm: Norm, firsts: list[First], lasts: list[Last]) -> None:
        self.norm = norm
        self.firsts = firsts
        self.lasts = lasts

    def normed(self, x: Tensor) -> Tensor:
        """The norm of `x (..., d)`, whose scale the first matrices will need."""
        normed, scale = self.norm.normed_and_scale(x)
        self.scale = scale.reshape(-1, 1)
        return normed

    def first(self, number: int, x: Tensor) -> Tensor:
        """What a first matrix makes of the norm's output `x (..., d)`."""
        first = self.firsts[number]
        if not self.folded:
            return first.module(x)
        if len(self.scale) != len(self.weights):
            raise NotReproducedError("the norm behind the attention saw other positions than it was given")
        result = first.result[: len(self.weights)]
        weights = -self.scale * self.weights
        for span in self.chunk.spans:
            rows = result[span.rows]
            torch.addcmul(first.constant, first.base[span.targets], self.scale[span.rows], out=rows)
            vectors = self.folded[number][span.vectors]
            torch.addmm(rows, weights[span.rows, : len(vectors)], vectors, out=rows)
        return result.view(*x.shape[:-1], -1)

    def last(self, number: int, x: Tensor) -> Tensor:
        """What a later matrix makes of its input `x (..., features)`."""
        last = self.lasts[number]
        rows = x.flatten(0, -2)
        change = last.change[: few_sizes(len(rows))]
        for span in self.chunk.spans:
            change[span.rows] = rows[span.rows] - last.inputs[span.targets]
        result = last.outputs.index_select(0, self.chunk.target)
        return result.add_(product(change, last.matrix)[: len(rows)]).view(*x.shape[:-1], -1)


def gelu_by_tanh(x: Tensor) -> Tensor:
    """GELU's approximation by tanh, `x` times the sigmoid of twice what tanh is taken of."""
    if x.device.type != "cpu":
        return functional.gelu(x, approximate="tanh")
    # In pieces that stay in the caches: two thirds of the time that torch's own kernel takes.
    result = x.new_empty(x.shape)
    for piece, into in zip(x.flatten().split(PIECE), result.flatten().split(PIECE), strict=True):
        torch.mul(piece, piece, out=into)
        torch.addcmul(piece, into, piece, value=0.044715, out=into)
        into.mul_(math.sqrt(8 / math.pi)).sigmoid_().mul_(piece)
    return result


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """`rows @ matrix`."""
    if rows.device.type != "cpu" or rows.dtype != torch.bfloat16:
        return rows @ matrix
    count = len(rows)
    if count % HALF_STEP:
        rows = functional.pad(rows, (0, 0, 0, few_sizes(count) - count))
    return torch.cat([part @ matrix for part in rows.split(HALF_ROWS)])[:count]


def few_sizes(rows: int) -> int:
    """The next of the few sizes that products come in."""
    return -(-rows // HALF_STEP) * HALF_STEP

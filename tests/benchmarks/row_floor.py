"""python -m tests.benchmarks.row_floor MODEL TOKENS: CPU time of a row and of maps, in forward passes.

The floor is a forward pass, and the products of the row's pairs with the matrices after the attention. Every pair needs
these in each exact form but folding, which is dearer for one row. Of all pairs of a map, the last matrix alone is
the floor, and all three are what packed pairs need. CPU time of one thread: other programs hardly matter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

from captum_vz import ValueZeroing
from tests.benchmarks.contenders import floor
from tests.benchmarks.models import SIZES, Size, build, token_ids

ROUNDS = 9


def products(size: Size, layers: list[nn.Module], pairs: int) -> Callable[[], None]:
    """The attention's projection, which is square here, and all matrices of the feed-forward, times `pairs` rows."""
    wide, width = size.last
    weights = [x for layer in layers for x in layer.parameters() if x.dim() == 2 and wide in x.shape]
    square = weights[0].new_ones(width, width)
    rows = {numbers: square.new_ones(pairs, numbers) for numbers in (width, wide)}

    def run() -> None:
        for weight in [*weights, *[square] * len(layers)]:
            linear(rows[weight.shape[1]], weight)

    return run


def cpu_seconds(run: Callable[[], object]) -> float:
    """The CPU time of one call."""
    before = time.process_time()
    run()
    return time.process_time() - before


@torch.no_grad()
def main(name: str, tokens: int) -> None:
    """Print both numbers."""
    torch.set_num_threads(1)
    size = SIZES[name]
    model = build(size, torch.float32, "cpu")
    layers, ids = size.layers(model), token_ids(tokens, "cpu")
    explain = ValueZeroing(model, layers)
    every = tokens * (tokens + 1) // 2 if size.causal else tokens * tokens
    runs: list[Callable[[], object]] = [
        lambda: model(ids),
        lambda: explain.attribute(ids, token=-1),
        products(size, layers, tokens),
        lambda: explain.attribute(ids),
        floor(size, len(layers), every, torch.float32, "cpu", 512),
        products(size, layers, every),
    ]
    rounds = [[cpu_seconds(run) for run in runs] for _ in range(ROUNDS)]
    forward, row, of_row, maps, of_maps, packed = map(min, zip(*rounds, strict=True))
    print(
        f"{name}, {tokens} tokens: row {row / forward:.2f}, floor {1 + of_row / forward:.2f} forward passes; maps "
        f"{maps / forward:.2f}, floor {1 + of_maps / forward:.2f}, packed pairs {1 + packed / forward:.2f}"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

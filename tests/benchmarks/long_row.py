"""python -m tests.benchmarks.long_row TOKENS: the memory that one row of a GPT-2 layer takes beyond a forward pass."""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2Model

from captum_vz import ValueZeroing, find_layers
from tests.benchmarks.measure import peak_bytes


def main(tokens: int) -> None:
    """Print the peak memory."""
    model = GPT2Model(GPT2Config(n_layer=1, n_positions=tokens)).eval()
    ids = torch.randint(900, (1, tokens))
    with torch.no_grad():
        model(ids)
    peak = peak_bytes(lambda: ValueZeroing(model, find_layers(model)).attribute(ids, token=-1), "cpu")
    print("unknown" if peak is None else f"{tokens} tokens: {peak / 1e6:.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""python -m tests.benchmarks.long_row TOKENS: the memory that one row of a GPT-2 layer takes beyond a forward pass."""

from __future__ import annotations

import resource
import sys

import torch
from transformers import GPT2Config, GPT2Model

from captum_vz import ValueZeroing, find_layers


def main(tokens: int) -> None:
    """Print the peak memory."""
    model = GPT2Model(GPT2Config(n_layer=1, n_positions=tokens)).eval()
    ids = torch.randint(900, (1, tokens))
    with torch.no_grad():
        model(ids)
    before = peak()
    ValueZeroing(model, find_layers(model)).attribute(ids, token=-1)
    print(f"{tokens} tokens: {(peak() - before) / 1024:.0f} MB")


def peak() -> int:
    """The largest resident size of this process so far, in KiB, as Linux counts."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(int(sys.argv[1]))

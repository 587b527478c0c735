"""python -m tests.benchmarks.folding Gemma2 64: products and CPU time of the maps of one layer, packed and folded.

Names are those of configs of transformers without "Config". Width 768, feed-forward 3072, 12 heads, one thread.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from captum_vz import ValueZeroing, find_layers
from captum_vz._engine import traced_replays
from tests.benchmarks.row_floor import cpu_seconds

ROUNDS = 5
SIZE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def main(name: str, tokens: int) -> None:
    """Print both, for the form that is taken and for packed pairs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZE)
    config.head_dim = 64
    model = getattr(transformers, f"{name}Model")(config).eval()
    method, ids = ValueZeroing(model, find_layers(model)), torch.randint(2, 99, (1, tokens))

    def run(only: str | None) -> str:
        with traced_replays(only) as traces:
            method.attribute(ids)
        assert traces[0].replay is not None
        return traces[0].replay.name

    products = {}
    for only in ("packed pairs", None):
        with FlopCounterMode(display=False) as counter:
            form = run(only)
        products[only] = counter.get_total_flops() / 1e9
    rounds = [[cpu_seconds(lambda only=only: run(only)) for only in products] for _ in range(ROUNDS)]
    before, after = map(median, zip(*rounds, strict=True))
    print(
        f"{name}, {tokens} tokens, {form}: {products['packed pairs']:.1f} -> {products[None]:.1f} GFLOP, "
        f"{before / after:.2f} times as fast as packed pairs"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

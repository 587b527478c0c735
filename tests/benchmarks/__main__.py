"""Print how long the maps take, beside the definition, the floor and a plain forward pass.

python -m tests.benchmarks                      # bert-base and gpt2 at 16, 32, 64, 128 tokens on this CPU
python -m tests.benchmarks --models llama-1b --tokens 128 1024 --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import platform

import torch

from captum_vz import ValueZeroing
from tests.benchmarks.contenders import floor, sequential
from tests.benchmarks.measure import medians
from tests.benchmarks.memory import memory_by_depth
from tests.benchmarks.models import SIZES, build, token_ids

HEADS = (
    "tokens",
    "maps",
    "row",
    "forward",
    "sequential",
    "floor",
    "seq/maps",
    "maps/(floor+fwd)",
    "row/fwd",
)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["bert-base", "gpt2"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest-sequential", type=int, default=128, help="skip the definition for more tokens")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    where = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor() or platform.machine()
    print(
        f"torch {torch.__version__}, {where}, {options.threads} threads, {options.dtype}; "
        f"median of {options.rounds} rounds"
    )
    for name in options.models:
        depth = len(SIZES[name].layers(build(SIZES[name], dtype, options.device)))
        print(f"\n{name}: seconds for all {depth} layers\n" + " ".join(f"{head:>18}" for head in HEADS))
        for tokens in options.tokens:
            with_definition = tokens <= options.longest_sequential
            row = one_length(name, tokens, dtype, options.device, options.rounds, with_definition)
            print(f"{tokens:>18} " + " ".join(f"{value:>18.3f}" for value in row), flush=True)
        memory_by_depth(name, options.tokens[-1], dtype, options.device, options.threads)


def one_length(
    name: str,
    tokens: int,
    dtype: torch.dtype,
    device: str,
    rounds: int,
    with_definition: bool,
) -> tuple[float, ...]:
    """A row of the table, without its first entry."""
    size = SIZES[name]
    model = build(size, dtype, device)
    layers = size.layers(model)
    explain = ValueZeroing(model, layers)
    ids = token_ids(tokens, device)
    pairs = tokens * (tokens + 1) // 2 if size.causal else tokens * tokens
    contenders = {
        "maps": lambda: explain.attribute(ids),
        "row": lambda: explain.attribute(ids, token=-1),
        "forward": lambda: model(ids),
    }
    contenders["floor"] = floor(size, len(layers), pairs, dtype, device, 512 if device == "cpu" else 16384)
    if with_definition:
        contenders["sequential"] = sequential(model, layers, size, ids)
    seconds = medians(contenders, rounds, device)
    definition = seconds.get("sequential", float("nan"))
    return (
        seconds["maps"],
        seconds["row"],
        seconds["forward"],
        definition,
        seconds["floor"],
        definition / seconds["maps"],
        seconds["maps"] / (seconds["floor"] + seconds["forward"]),
        seconds["row"] / seconds["forward"],
    )


if __name__ == "__main__":
    main()

"""Print what each method starts on a device: kernels and synchronisations of one more layer, beyond the forward pass.

The counts are exact on any machine, without a GPU (tests/rehearsal). Views start no kernel. "reads" are the times that
the host waits for a result of the device, "uploads" the copies from the host.

python -m tests.benchmarks.launches
python -m tests.benchmarks.launches --methods ALTI GlobEnc --models BERT
"""

from __future__ import annotations

import argparse

from tests.rehearsal.launches import MODELS, cost
from tests.rehearsal.test_launches import BOUNDS

HEADS = ("kernels", "of which views", "reads", "uploads", "to reach", "reads")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.launches", description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=sorted({method for method, _ in BOUNDS}))
    parser.add_argument("--models", nargs="+", choices=MODELS)
    options = parser.parse_args()
    print(f"{'per layer':32} " + " ".join(f"{head:>15}" for head in HEADS))
    shown = set()
    for (method, model), bound in BOUNDS.items():
        if method not in (options.methods or [method]) or model not in (options.models or [model]):
            continue
        found = cost(method, model)
        rows = [(f"{method}, {model}", found, bound.target or ())]
        if model not in shown:
            rows.insert(0, (f"forward pass, {model}", cost(None, model), ()))
            shown.add(model)
        for name, numbers, target in rows:
            print(f"{name:32} " + " ".join(f"{number:15.1f}" for number in (*numbers, *target)), flush=True)


if __name__ == "__main__":
    main()

"""Compare ValueZeroing with a naive twin on every model type of transformers, and write RESULTS.md.

python -m tests.sweep                         # sentences of seven tokens, and the first of them: the first table
python -m tests.sweep --long                  # 36, 29 and 20 tokens, for types that are packed: the second table
python -m tests.sweep --types bert gpt2       # prints rows, writes no table
python -m tests.sweep --resume rows.jsonl     # keeps rows in this file, and skips types that it has
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.sweep.compare import describe
from tests.sweep.model_type import sweep_type
from tests.sweep.rows import Row, outcomes_of_types, packed_types, write_table

BYTES = 8 << 30


def main() -> None:
    """Sweep over the model types, each in a process of its own."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__, formatter_class=formatter)
    parser.add_argument("--long", action="store_true", help="long sentences: the second table")
    parser.add_argument("--types", nargs="+", help="only these model types; no table is written")
    parser.add_argument("--seconds", type=int, default=240, help="the time limit of one model type")
    parser.add_argument("--processes", type=int, default=1, help="how many model types run at the same time")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a file to keep rows in, one file for each table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model_types = arguments.types or (packed_types() if arguments.long else list(MODEL_MAPPING_NAMES))
    kept = Kept(arguments.resume)
    left = [model_type for model_type in model_types if model_type not in kept.by_type]
    for model_type, rows in in_own_processes(left, arguments.long, arguments.seconds, arguments.processes):
        kept.add(model_type, rows)
        print(*rows, sep="\n", flush=True)
    all_rows = [row for model_type in model_types for row in kept.by_type[model_type]]
    print(dict(Counter(outcomes_of_types(all_rows).values())))
    print("stacks, one example:", dict(Counter(row.alone for row in all_rows if row.alone)))
    print("replays:", dict(Counter(row.way for row in all_rows if row.way)))
    if not arguments.types:
        versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
        write_table(all_rows, arguments.long, versions)


@dataclass
class Kept:
    """The rows of each model type that is done, also in a file if there is one."""

    path: Path | None
    by_type: dict[str, list[Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text().splitlines():
                model_type, rows = json.loads(line)
                self.by_type[model_type] = [Row(**row) for row in rows]

    def add(self, model_type: str, rows: list[Row]) -> None:
        self.by_type[model_type] = rows
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps([model_type, [asdict(row) for row in rows]]) + "\n")


def in_own_processes(
    model_types: list[str], long: bool, seconds: int, processes: int
) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each model type, also if it crashes, runs out of memory or takes too long."""
    waiting = list(reversed(model_types))
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                model_type = waiting.pop()
                receiver, process = _start(model_type, long)
                running[receiver] = model_type, process, time.monotonic() + seconds
            deadline = min(end for _, _, end in running.values())
            ready = wait(list(running), timeout=max(0, deadline - time.monotonic()))
            late = [receiver for receiver, (_, _, end) in running.items() if end <= time.monotonic()]
            for receiver in ready or late:
                assert isinstance(receiver, Connection)
                model_type, process, _ = running.pop(receiver)
                rows = [Row(model_type, "", "not built", note=f"takes more than {seconds} seconds")]
                yield model_type, _received(receiver, model_type) if ready else rows
                process.kill()
                process.join()
    finally:
        for _, process, _ in running.values():
            process.kill()


def _start(model_type: str, long: bool) -> tuple[Connection, BaseProcess]:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(sender, model_type, long))
    process.start()
    sender.close()
    return receiver, process


def _received(receiver: Connection, model_type: str) -> list[Row]:
    try:
        rows: list[Row] = receiver.recv()
    except EOFError:
        return [Row(model_type, "", "not built", note="its process died")]
    return rows


def _work(sender: Connection, model_type: str, long: bool) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            rows = sweep_type(model_type, long)
        except Exception as error:  # one type that crashes must not end the sweep
            rows = [Row(model_type, "", "not run", note=describe(error))]
    sender.send(rows)


if __name__ == "__main__":
    main()

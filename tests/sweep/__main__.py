"""Run the whole sweep by hand: `python -m tests.sweep` writes RESULTS.md, `--types bert gpt2` only prints."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.sweep.compare import describe
from tests.sweep.model_type import sweep_type
from tests.sweep.rows import Row, outcomes_of_types, write_table

BYTES = 8 << 30


def main() -> None:
    """Sweep over the model types that are asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--types", nargs="+", help="only these model types; the table is not written")
    parser.add_argument("--seconds", type=int, default=240, help="what one model type may take")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for model_type in arguments.types or MODEL_MAPPING_NAMES:
        for row in in_own_process(model_type, arguments.seconds):
            rows.append(row)
            print(row, flush=True)
    print(dict(Counter(outcomes_of_types(rows).values())))
    if not arguments.types:
        write_table(rows, f"transformers {transformers.__version__} and torch {torch.__version__}")


def in_own_process(model_type: str, seconds: int) -> list[Row]:
    """The rows of one model type, whatever it does to its process, its memory and the clock."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(sender, model_type))
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()
        return [Row(model_type, "", "not built", note=f"takes more than {seconds} seconds")]
    except EOFError:
        return [Row(model_type, "", "not built", note="its process died")]
    finally:
        process.kill()
        process.join()


def _work(sender: Connection, model_type: str) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            rows = sweep_type(model_type)
        except Exception as error:  # a crash of one type is a line of the table, not the end of the sweep
            rows = [Row(model_type, "", "not run", note=describe(error))]
    sender.send(rows)


if __name__ == "__main__":
    main()

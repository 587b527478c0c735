"""Print the CPU time and the memory that the results of a large study take: 8 million rows with their intervals.

OMP_NUM_THREADS=1 python -m tests.benchmarks.summaries             # 20 methods x 5 models x 10,000 sentences x 8 layers
OMP_NUM_THREADS=1 python -m tests.benchmarks.summaries --sentences 1250 --resamples 99

The study is written first, with random scores. Its results are then written by a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from captum_vz._files import write_whole
from captum_vz.study import METHODS, METRICS, Example, Study
from captum_vz.study.folder import Stamp, blocks_of, claim, made_of, part_path, read_examples, to_parquet
from captum_vz.study.folder.reading import collect, paired_differences, summarise
from captum_vz.study.results import write_results
from captum_vz.study.scoring.identity import code_identity
from captum_vz.study.scoring.rows import COLUMNS

FIXED = {"captum_vz": "0", "content_only": False}
TOKENS = 12
CHOSEN = ["cue_dot", "cue_ap", "blank_out"]


def write_study(folder: Path, models: int, methods: int, layers: int, sentences: int) -> int:
    """Write a study with random numbers, and return the number of its rows."""
    rng = np.random.default_rng(0)
    words = tuple(f"word{place}" for place in range(TOKENS))
    examples = [Example(f"sentence {n}", words, 3, (1,), group=f"paradigm {n % 5}") for n in range(sentences)]
    names = list(METHODS)[:methods]
    codes = {name: code_identity(METHODS[name].rows) for name in names}
    measures = {name: code_identity(METRICS[name].values) for name in CHOSEN}
    settings, blocks = claim(folder, FIXED, [f"model {n}" for n in range(models)], codes, measures, examples, 64)
    rows = 0
    for block in blocks_of(settings):
        some = read_examples(folder, block)
        for model in settings["models"]:
            count = len(some) * len(names) * layers
            each = len(names) * layers
            columns: dict[str, pa.Array] = {name: pa.nulls(count, kind) for name, kind in COLUMNS.items()}
            columns["example"] = pa.array(np.repeat([one.id for one in some], each))
            columns["group"] = pa.array(np.repeat([one.group for one in some], each))
            columns["method"] = pa.array(np.tile(np.repeat(names, layers), len(some)))
            columns["layer"] = pa.array(np.tile(np.arange(layers), len(some) * len(names)).astype(np.int32))
            ends = pa.array(np.arange(count + 1) * TOKENS, pa.int32())
            columns["tokens"] = pa.ListArray.from_arrays(ends, pa.array(words * count))
            columns["scores"] = pa.ListArray.from_arrays(ends, pa.array(rng.random(count * TOKENS)))
            columns |= {name: pa.array(rng.random(count)) for name in CHOSEN}
            stamp = Stamp("weights", made_of(settings, model, block), False, codes, measures, True)
            write_whole(part_path(folder, settings, model, block), to_parquet(pa.table(columns), stamp))
            rows += count
    assert len(blocks) == len(blocks_of(settings))
    return rows


def tell(what: str, before: float) -> None:
    """Print the CPU time since `before`, and the most memory of this process so far."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{what}: {time.process_time() - before:.1f} s of CPU time, {memory:.2f} GB", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.summaries", description=__doc__)
    for name, number in {"models": 5, "methods": 20, "layers": 8, "sentences": 10_000, "resamples": 1999}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--folder", type=Path, help="of a study that this program has written")
    options = parser.parse_args()
    if options.folder is not None:
        before = time.process_time()
        study = Study(options.folder)
        found = collect(study.folder, study.settings)
        tell("read", before)
        methods = list(study.settings["methods"])
        lines = len(summarise(found, methods, 0.95, options.resamples))
        tell(f"read and summarised in {lines:,} lines", before)
        lines = len(paired_differences(found, methods, 0.95, options.resamples))
        tell(f"with {lines:,} paired differences", before)
        before = time.process_time()
        write_results(options.folder, 0.95, options.resamples)
        tell("once more, with all files and figures", before)
        return
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        rows = write_study(Path(folder), options.models, options.methods, options.layers, options.sentences)
        print(f"{rows:,} rows, written in {time.time() - begun:.0f} s", flush=True)
        again = ["--folder", folder, "--resamples", str(options.resamples)]
        subprocess.run([sys.executable, "-m", "tests.benchmarks.summaries", *again], check=True)


if __name__ == "__main__":
    main()

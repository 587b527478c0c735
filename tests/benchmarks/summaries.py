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

from captum_vz.study import METHODS, METRICS, Example, Study
from captum_vz.study.folder import blocks_of, changing, claim, code_identity, read_examples, stem_of
from captum_vz.study.folder.tables import TABLES, collect, paired_differences, summarise, write_table
from captum_vz.study.results import write_results

TOKENS = 12
CHOSEN = ["cue_dot", "cue_ap", "blank_out"]


def write_study(folder: Path, models: int, methods: int, layers: int, sentences: int) -> int:
    """Write a study with random numbers, and return the number of its rows."""
    rng = np.random.default_rng(0)
    words = tuple(f"word{place}" for place in range(TOKENS))
    examples = [Example(f"sentence {n}", words, 3, (1,), group=f"paradigm {n % 5}") for n in range(sentences)]
    names = list(METHODS)[:methods]
    codes = {name: code_identity(METHODS[name]) for name in names}
    measures = {name: code_identity(METRICS[name].values) for name in CHOSEN}
    both = {"methods": codes, "metrics": measures}
    blocks, rows = claim(folder, [f"model {n}" for n in range(models)], both, examples, 64), 0
    with changing(folder) as settings:
        metrics = dict.fromkeys(names, measures)
        settings["holds"]["all"] = {"weights": "", "methods": codes, "metrics": metrics, "made_by": {}}
        for block in blocks_of(settings):
            some, each = read_examples(folder, block), len(names) * layers
            count = len(some) * each
            keys = {
                "example": np.repeat([one.id for one in some], each),
                "method": np.tile(np.repeat(names, layers), len(some)),
                "layer": np.tile(np.arange(layers, dtype=np.int32), len(some) * len(names)),
            }
            ends = pa.array(np.arange(count + 1) * TOKENS, pa.int32())
            scores = {name: pa.nulls(count, kind) for name, kind in zip(*_columns("scores"), strict=True)}
            scores |= {name: pa.array(column) for name, column in keys.items()}
            scores["tokens"] = pa.ListArray.from_arrays(ends, pa.array(words * count))
            values = {name: pa.array(np.tile(column, len(CHOSEN))) for name, column in keys.items()}
            values |= {
                "metric": pa.array(np.repeat(CHOSEN, count)),
                "skipped": pa.nulls(count * len(CHOSEN), pa.string()),
            }
            for model in settings["models"]:
                scores["scores"] = pa.ListArray.from_arrays(ends, pa.array(rng.random(count * TOKENS)))
                values["value"] = pa.array(rng.random(count * len(CHOSEN)))
                stem = stem_of(settings, model, block)
                files = {
                    name: write_table(folder, f"{name}/{stem}", pa.table(table, TABLES[name]))
                    for name, table in (("scores", scores), ("values", values))
                }
                settings["parts"].setdefault(model, {})[str(block.number)] = {
                    "holds": "all",
                    "again": [],
                    "files": files,
                }
                rows += count
    assert len(blocks) == len(blocks_of(Study(folder).settings))
    return rows


def _columns(table: str) -> tuple[list[str], list[pa.DataType]]:
    return TABLES[table].names, TABLES[table].types


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
        lines = len(summarise(found, study.settings, 0.95, options.resamples))
        tell(f"read and summarised in {lines:,} lines", before)
        lines = len(paired_differences(found, study.settings, 0.95, options.resamples))
        tell(f"with {lines:,} paired differences", before)
        before = time.process_time()
        write_results(options.folder, CHOSEN, 0.95, options.resamples)
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

"""`python tutorials/paper`: the three evaluations of Mohebbi et al. 2023, of one model or several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # the folder's parent, so that a checkout needs no installation of this package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import PartialState

from captum_vz.errors import ArgumentError
from captum_vz.study import Example, load_plugin, select_blimp
from captum_vz.study.examples import evenly
from captum_vz.subjects import model_sources
from captum_vz.testbed import agreement_sentences
from paper.evaluations import reproduce

DESCRIPTION = """Measures every method by cue alignment, probing, faithfulness by blank-out, sanity checks and patching,
and writes tables, figures and a report to a folder. If it is started again, it continues there. Under
`accelerate launch`, the processes share the work. A causal model reads the text up to the target; the row of its last
token is scored, and sentences whose cue comes later are skipped."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    found = argparse.ArgumentParser(prog="python tutorials/paper", description=DESCRIPTION)
    data = found.add_mutually_exclusive_group(required=True)
    data.add_argument("--blimp", type=Path, metavar="FOLDER", help="BLiMP's data folder: its held-out pairs")
    data.add_argument("--grammar", type=int, metavar="N", help="how many sentences of the package's own grammar")
    found.add_argument("--prefix", default="", metavar="TEXT", help="as of captum-vz study, for causal models")
    found.add_argument("--limit", type=int, metavar="N", help="the most sentences, evenly spaced")
    found.add_argument("--folder", type=Path, required=True, help="the folder of the results")
    found.add_argument("--model", nargs="+", default=["agreement"], help="names, folders or Hugging Face ids")
    found.add_argument("--methods", nargs="+", metavar="METHOD", help="of captum_vz.study.METHODS, or of a plugin")
    found.add_argument("--plugin", type=Path, nargs="+", default=[], metavar="FILE", help="Python files that are run")
    found.add_argument("--controls", type=int, metavar="N", help="sentences of the controls (default: 40 at most)")
    found.add_argument("--batch-size", type=int, default=32, metavar="N", help="(default: %(default)s)")
    found.add_argument("--engine", choices=["local", "accelerate", "ray"], help="as of captum-vz study")
    found.add_argument("--quiet", action="store_true", help="no progress bar, and no report on stdout")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluations and print the report. Returns the exit status: 2 after an error, which is one line."""
    options = parser().parse_args(arguments)
    try:
        for path in options.plugin:
            load_plugin(path)
        models = model_sources(options.model)
        if options.blimp is None:
            examples = [Example.from_record(record) for record in agreement_sentences(options.grammar)]
            about = f"{len(examples):,} sentences of the package's own grammar. None was dropped before the study."
        else:
            tokenizers = [(one() if callable(one) else one)[1] for one in models.values()]
            selection = select_blimp(options.blimp, tokenizers, prefix=options.prefix)
            examples, about = selection.examples, str(selection)
        if options.limit is not None and options.limit < len(examples):
            about += f" {options.limit:,} of these, evenly spaced."
            examples = evenly(examples, options.limit)
        found = reproduce(
            models,
            examples,
            options.folder,
            options.methods,
            batch_size=options.batch_size,
            quiet=options.quiet,
            about=about,
            controls=options.controls,
            engine=options.engine,
            title="the grammar" if options.blimp is None else "BLiMP, held out",
        )
    except (ArgumentError, ValueError, OSError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paper: stopped. The same command continues from here.", file=sys.stderr)
        return 130
    if PartialState().is_main_process and not options.quiet:
        print(f"{found}\n\ntables, figures and this report: {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

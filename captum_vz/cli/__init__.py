"""The command `captum-vz`, or `python -m captum_vz`: what is typed, and one line on stderr for each error or remark."""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import NoReturn

from captum_vz import __version__
from captum_vz._names import meant
from captum_vz._start import INTERRUPTED, started, tell
from captum_vz.cli.options import COMMANDS, GONE
from captum_vz.errors import RefusedError, needs_extra, renamed

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    The status is 0; 2 after an error, with one line on stderr that says what to change; or 130 after Ctrl-C.
    """
    names: dict[str, str] = {}
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # the terminal may not encode a token's characters
        typed = list(sys.argv[1:] if arguments is None else arguments)
        options = parsed(typed)
        options.names = names = _names(options.command)
        options.command_line = ["captum-vz", *typed]  # pictures carry it
        with needs_extra(f"captum-vz {options.command}", "study"):
            module = import_module(f"captum_vz.cli.{COMMANDS[options.command].module}")
        started()
        with _remarks_as_lines(names):
            getattr(module, options.command)(options)
        if sys.stdout is not None:  # a shell may have closed it
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has all that it wants
        _leave_stdout()
    except KeyboardInterrupt as stop:
        tell(str(stop) or "stopped.")
        return INTERRUPTED
    except RefusedError as error:
        tell(renamed(error, names))
        return 2
    # Models raise these types for inputs they cannot use. A library of an extra may be missing.
    except (AssertionError, IndexError, MemoryError, ModuleNotFoundError, RuntimeError, ValueError) as error:
        tell(str(error) or type(error).__name__)
        return 2
    except OSError as error:
        tell(f"cannot use {error.filename or 'stdout'}: {error.strerror or error}.")
        _leave_stdout()
        return 2
    return 0


@contextmanager
def _remarks_as_lines(names: dict[str, str]) -> Iterator[None]:
    """Print each warning for users once, as one line on stderr, and no warning for developers."""
    told = set()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if category is UserWarning and str(message) not in told:
            told.add(str(message))
            tell(renamed(str(message), names))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def _leave_stdout() -> None:
    """Close stdout, so that Python does not try to write to it again when it ends."""
    if sys.stdout is not None:
        with suppress(OSError):
            sys.stdout.close()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help whose names, such as "alti-layer", stay on one line, so that they can be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage that argparse prints."""
        self.exit(2, f"captum-vz: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    found = _Parser(
        prog="captum-vz",
        description="Which token does each token draw on?",
        epilog='examples:\n  captum-vz explain "the pictures of some hat [MASK] scaring marcus."\n'
        "  captum-vz COMMAND --help    options and examples of a command",
        formatter_class=_HelpFormatter,
    )
    found.add_argument("--version", action="version", version=f"captum-vz {__version__}")
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    width = min(shutil.get_terminal_size().columns, 100) - 2
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.help,
            description=textwrap.fill(command.description, width),
            epilog="\n".join(["examples:", *(f"  captum-vz {example}" for example in command.examples)]),
            formatter_class=_HelpFormatter,
        )
        shared = {settings.get("dest") for settings in command.options.values()} - {None}
        one_of = {dest: sub.add_mutually_exclusive_group() for dest in shared}  # argparse refuses empty groups
        for option, settings in command.options.items():
            one_of.get(settings.get("dest"), sub).add_argument(option, **settings)
    return found


def parsed(typed: Sequence[str]) -> argparse.Namespace:
    """The options that were typed. After help, it exits with status 0; after a wrong option with 2, and one line."""
    commands, first = parser(), typed[0] if typed else "--help"
    try:
        if first in GONE:
            commands.exit(2, f"captum-vz: {first} is no command any more: {GONE[first]}.\n")
        if first[:1] != "-" and first not in COMMANDS:
            names = ", ".join(COMMANDS)
            commands.error(f"there is no command {first!r}{meant([first], COMMANDS)}. Pass one of {names}")
        options, rest = commands.parse_known_args(typed or [first])
        if rest:
            wrong = [one.partition("=")[0] for one in rest if one.startswith("-")]
            known = [name for name in COMMANDS[first].options if name.startswith("-")]
            hint = meant(wrong, known) if wrong else " (put a text of several words between quotes)"
            commands.prog = f"captum-vz {first}"
            commands.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    except SystemExit:
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
    return options


def _names(command: str) -> dict[str, str]:
    """The options of a command by the names that Python gives them."""
    options = [option for option in COMMANDS[command].options if option.startswith("--")]
    names = {option[2:].replace("-", "_"): option for option in options}
    return names | ({"text_pair": "--pair"} if "--pair" in options else {})

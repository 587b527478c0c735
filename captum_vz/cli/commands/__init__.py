"""The commands, and what happens to their errors and remarks: one line each on stderr."""

from __future__ import annotations

import argparse
import io
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

from captum_vz import __version__
from captum_vz._names import meant
from captum_vz._start import tell
from captum_vz.cli.commands.compare import add_compare
from captum_vz.cli.commands.explain import add_demo, add_explain
from captum_vz.cli.commands.generate import add_generate
from captum_vz.cli.commands.study import add_study, with_config
from captum_vz.cli.commands.verify import add_verify
from captum_vz.cli.options import CommandError, HelpFormatter
from captum_vz.errors import ArgumentError, renamed

COMMANDS: Final = {
    "explain": add_explain,
    "compare": add_compare,
    "generate": add_generate,
    "study": add_study,
    "verify": add_verify,
    "demo": add_demo,
}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 with one line on stderr that says what to change."""
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout is not None:  # a shell may have closed it
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has all that it wants
        _leave_stdout()
    except CommandError as error:
        tell(str(error))
        return error.status
    # The package refuses inputs with a kind of AssertionError. Models raise these types for inputs they cannot use.
    except (AssertionError, IndexError, MemoryError, RuntimeError, ValueError) as error:
        tell(str(error) or type(error).__name__)
        return 2
    except OSError as error:
        tell(f"cannot use {error.filename or 'stdout'}: {error.strerror or error}.")
        _leave_stdout()
        return 2
    return 0


def option_names(sub: argparse.ArgumentParser) -> dict[str, str]:
    """The option of a command for each argument of the package, for :func:`captum_vz.errors.renamed`."""
    found = {action.dest: max(action.option_strings, key=len) for action in sub._actions if action.option_strings}
    return found | ({"text_pair": found["pair"]} if "pair" in found else {})


@contextmanager
def _remarks_as_lines(names: Mapping[str, str]) -> Iterator[None]:
    """Print each warning for users once, as one line on stderr, and no warning for developers."""
    told = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning and str(message) not in told:
            told.add(str(message))
            tell(renamed(str(message), names))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def _run(arguments: Sequence[str]) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode a token's characters
    commands = parser()
    if not arguments:
        commands.print_help()
        return
    try:
        options = _parsed(commands, arguments)
        if options.command == "study" and options.config is not None:
            known = vars(options).keys() - {"command", "config", "parser", "run"}
            options = _parsed(commands, with_config(options.config, arguments, known))
    except SystemExit:  # after --help, or after an error of the arguments
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
    options.command_line = ["captum-vz", *arguments]  # pictures carry it
    options.names = option_names(options.parser)
    try:
        with _remarks_as_lines(options.names):
            options.run(options)
    except ArgumentError as error:
        raise CommandError(renamed(error, options.names)) from error


def _parsed(commands: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        names = ", ".join(COMMANDS)
        commands.error(f"there is no command {arguments[0]!r}{meant(arguments[:1], COMMANDS)}. Pass one of {names}")
    options, rest = commands.parse_known_args(arguments)
    if rest:
        wrong = [one.partition("=")[0] for one in rest if one.startswith("-")]
        known = re.findall(r"(?<![\w-])--[a-z][\w-]*", options.parser.format_help())
        hint = meant(wrong, known) if wrong else " (put a text of several words between quotes)"
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return options


def _leave_stdout() -> None:
    """Close stdout, so that Python does not try to write to it again when it ends."""
    if sys.stdout is not None:
        with suppress(OSError):
            sys.stdout.close()


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
        formatter_class=HelpFormatter,
    )
    found.add_argument("--version", action="version", version=f"captum-vz {__version__}")
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS.values():
        add(commands)
    return found

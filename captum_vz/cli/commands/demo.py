"""`captum-vz demo`: a page in the browser."""

from __future__ import annotations

import argparse
from typing import Any, Final

from captum_vz.cli.options import CommandError, add_command, positive

EXAMPLES: Final = (
    "demo",
    "demo --port 8080 --model ./my-model --open",
    "demo --host 0.0.0.0 --max-tokens 64",
)


def add_demo(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "demo",
        run,
        help="explain texts on a page in the browser",
        description="Serves a page on this machine until Ctrl-C. Needs the extra demo. No request leaves the machine.",
        examples=EXAMPLES,
    )
    sub.add_argument(
        "--model",
        nargs="+",
        default=[],
        help="further models that the page offers: folders, or Hugging Face ids that this machine has downloaded",
    )
    sub.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address (default: %(default)s, this machine only). At another address, visitors can choose "
        "among the offered models only",
    )
    sub.add_argument("--port", type=positive, help="the port (default: the first free one from 7860)")
    sub.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="the longest text (default: %(default)s)"
    )
    sub.add_argument("--open", action="store_true", help="open the page in a browser")


def run(options: argparse.Namespace) -> None:
    """Serve the page."""
    try:
        from captum_vz.demo import serve

        serve(
            options.model,
            host=options.host,
            port=options.port,
            max_tokens=options.max_tokens,
            open_browser=options.open,
        )
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error

"""How tests start the command line."""

import re
from typing import Any

import pytest

from captum_vz.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of the command: one line on stderr, and nothing on stdout."""
    try:
        status: Any = main(list(arguments))
    except SystemExit as end:  # argparse exits like this
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert re.fullmatch(r"captum-vz: [^\n]+\n", err), err
    return err

"""The command line as tests start it."""

import re
from typing import Any

import pytest

from captum_vz.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which the command ends, and nothing else."""
    try:
        status: Any = main(list(arguments))
    except SystemExit as end:  # argparse's way
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert re.fullmatch(r"captum-vz: [^\n]+\n", err), err
    return err

"""The command `captum-vz`, or `python -m captum_vz`."""

from collections.abc import Sequence

from captum_vz._start import INTERRUPTED, started, tell

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    The status is 0; 2 after an error, with one line on stderr that says what to change; or 130 after Ctrl-C.
    """
    try:
        from captum_vz.cli.commands import run

        started()
        return run(arguments)
    except KeyboardInterrupt:
        tell("stopped.")
        return INTERRUPTED

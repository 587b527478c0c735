"""The command `captum-vz`, or `python -m captum_vz`."""

from captum_vz.cli.command import main

__all__ = ["main"]

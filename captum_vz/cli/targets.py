"""Which token `--target` means."""

from __future__ import annotations

from captum_vz.cli.errors import CommandError
from captum_vz.study import targets


def find_target(wanted: str | None, tokens: list[str], masks: list[bool], special: list[bool]) -> int:
    """The position of the token that `wanted` names, see :func:`captum_vz.study.targets.find_target`."""
    try:
        return targets.find_target(wanted, tokens, masks, special)
    except ValueError as error:
        raise CommandError(f"--{error}") from error

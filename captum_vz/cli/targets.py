"""Which token `--target` means."""

from __future__ import annotations

from captum_vz.cli.errors import CommandError


def find_target(wanted: str | None, tokens: list[str], masks: list[bool], special: list[bool]) -> int:
    """The position of the token that `wanted` names, by its position or as it is written.

    None is the first mask, or, where there is none, the last token that is not the tokenizer's own ([SEP], </s>).
    """
    if wanted is None:
        return masks.index(True) if any(masks) else max(i for i, own in enumerate(special) if not own)
    count = len(tokens)
    if wanted.lstrip("-").isdecimal():
        position = int(wanted)
        if not -count <= position < count:
            raise CommandError(
                f"--target {position} is out of range: there are {count} tokens, positions {-count} to {count - 1}."
            )
        return position % count
    places = [i for i, token in enumerate(tokens) if token == wanted]
    places = places or [i for i, token in enumerate(tokens) if token.casefold() == wanted.casefold()]
    if not places:
        raise CommandError(f"--target {wanted!r} is none of the tokens: {' '.join(tokens)}")
    if len(places) > 1:
        raise CommandError(
            f"--target {wanted!r} stands at the positions {', '.join(map(str, places))}: pass one of these."
        )
    return places[0]

"""Interactive pages of what a command or the demo has computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from captum_vz.app.explanation import Explanation
from captum_vz.visualization import View, view


def explanation_view(title: str, found: Sequence[Explanation]) -> View:
    """The maps of one text by one or several methods, with their rollouts.

    Value Zeroing has its distances where they were computed, so that the page shows how much there was to divide.
    Methods without layer maps have one row, the row of the explained token. They are shown only if no method has maps.

    Args:
        title: The heading.
        found: The explanations of the same token of the same text.
    """
    first = found[0]
    with_maps = [one for one in found if one.maps]
    if not with_maps:
        rows = {one.method: {one.scope or "scores": one.scores[None]} for one in found}
        named = [first.tokens[first.token]]
        sides: dict[str, Any] = {"columns": first.tokens, "column_words": first.words, "special": first.special}
        return view(rows, named, **sides, offset=first.token, token=0, title=title)
    maps = {one.method: one.distances or one.maps for one in with_maps}
    rollouts = {one.method: one.rollout for one in with_maps if one.rollout is not None}
    layer = -1 if first.layer is None else first.layer
    depths = {len(one.maps) + (one.method in rollouts) for one in with_maps}
    shown = layer if len(depths) == 1 else 0
    return view(
        maps,
        first.tokens,
        rollout=rollouts or None,
        words=first.words,
        special=first.special,
        token=first.token,
        layer=shown,
        title=title,
    )

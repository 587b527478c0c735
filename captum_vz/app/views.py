"""Interactive pages of what a command or the demo has computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from captum_vz.app.explanation import Explanation
from captum_vz.generation import GenerationAttribution
from captum_vz.visualization import View, view


def explanation_view(title: str, found: Sequence[Explanation]) -> View:
    """The maps of one text by one or several methods, with their rollouts.

    Methods without layer maps have one row, that of the explained token. They are shown only if no method has maps.

    Args:
        title: The heading.
        found: The explanations of the same token of the same text.
    """
    first = found[0]
    with_maps = [one for one in found if one.maps]
    if not with_maps:
        rows = {one.method: {one.scope or "scores": one.scores[None]} for one in found}
        named = [first.tokens[first.token]]
        return view(rows, named, columns=first.tokens, offset=first.token, token=0, title=title)
    maps = {one.method: one.maps for one in with_maps}
    rollouts = {one.method: one.rollout for one in with_maps if one.rollout is not None}
    layer = -1 if first.layer is None else first.layer
    depths = {len(one.maps) + (one.method in rollouts) for one in with_maps}
    shown = layer if len(depths) == 1 else 0
    return view(maps, first.tokens, rollout=rollouts or None, token=first.token, layer=shown, title=title)


def generation_view(title: str, found: GenerationAttribution, layer: int, mask: Tensor) -> View:
    """The scores of a generated text: new tokens by prompt tokens and earlier new tokens, in each layer.

    Args:
        title: The heading.
        found: The result.
        layer: The layer that is shown at first, from 0.
        mask: The prompt tokens that are left out, `(m,)`.
    """
    kept = (~mask).nonzero()[:, 0]
    scores = torch.cat([found.scores[:, kept], found.prefix], dim=1)
    maps = {name: scores[..., index] for index, name in enumerate(found.layers)}
    prompt = [found.prompt.labels[i] for i in kept.tolist()]
    columns = [*prompt, *found.generated.labels]
    return view(maps, found.generated.labels, columns=columns, offset=len(prompt), token=0, layer=layer, title=title)

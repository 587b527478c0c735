"""The picture and the view of an explanation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure

from captum_vz.methods import METHODS
from captum_vz.visualization import View, draw_comparison, draw_maps, view


def family_of(name: str) -> str:
    """What kind of method a name is of, for pictures that keep kinds together: empty if the name is unknown."""
    method = METHODS.get(name)
    if method is None:
        return ""
    if method.joins:
        return "joins layers"
    if method.explains_output:
        return "explains the output"
    return "a layer" if method.maps is not None else "without a model"


def draw_explanation(found: Any, **options: Any) -> Figure:
    """The maps of all layers and their rollout, or rows. See :meth:`captum_vz.result.Explanation.plot`."""
    part, tokens = found.first, found.tokens
    if len(found.parts) > 1 or found.truth is not None:
        families = {name: family_of(name) for name in found.parts}
        look: dict[str, Any] = {"truth": found.truth, "scopes": found.scopes, "families": families}
        return draw_comparison(found.shares, tokens, found.token, **(look | options))
    title = part.method.title
    rows = {name: scores.double().cpu() for name, scores in part.named_rows().items()}
    if part.is_signed:
        look = {"scale": "shared", "title": f"{title} on the output"}
        return draw_comparison(rows, tokens, found.token, "score of a token", **(look | options))
    if part.maps.layers:
        # Rows sum to 1, so pictures of any two texts have the same scale.
        look = {"scale": "root", "vmax": 1.0, "label": "share of the row (rows sum to 1)"}
        heading = f"{title}: the maps of the layers, and their rollout"
        return draw_maps(part.named_maps(bool(found.windows)), tokens, found.token, title=heading, **(look | options))
    if len(rows) > 1:
        heading = ", ".join(filter(None, [title, part.scope]))
        return draw_comparison(rows, tokens, found.token, **({"title": heading} | options))
    scopes, families = {part.name: part.scope}, {part.name: family_of(part.name)}
    look = {"scopes": scopes, "families": families}
    return draw_comparison({part.name: found.scores.double().cpu()}, tokens, found.token or 0, **(look | options))


def explanation_view(title: str, found: Any, about: Mapping[str, str] | None = None) -> View:
    """The maps of one text by one or several methods, with their rollouts.

    Value Zeroing has its distances, so that the page shows how much there was to divide. Methods without layer maps
    show their rows. They are shown only if no method has maps.
    """
    told: dict[str, Any] = {"title": title, "subtitle": found.prediction, "about": about}
    with_maps = [one for one in found.parts.values() if one.maps.layers]
    if not with_maps:
        rows = {
            one.name: {one.scope or "scores": torch.stack([row.scores for row in one.rows])}
            for one in found.parts.values()
        }
        named = list(found.first.named_rows())
        sides: dict[str, Any] = {"columns": found.tokens, "column_words": found.words, "special": found.special}
        if found.rows[0].token is not None and len(named) == 1:
            named, sides["offset"] = [found.tokens[found.rows[0].token]], found.rows[0].token
        return view(rows, named, **sides, token=0, **told)
    maps = {one.name: one.named_maps(bool(found.windows), distances=True) for one in with_maps}
    part = found.first
    # Who asks for joined maps sees them first. All others see a layer.
    layer = len(part.maps.layers) if part.layer is None and part.maps.rollout is not None else -1
    layer = layer if part.layer is None else part.layer
    shown = layer if len({len(one) for one in maps.values()}) == 1 and not found.windows else 0
    sides = {"words": found.words or None, "special": found.special or None}
    return view(maps, found.tokens, **sides, token=found.token, layer=shown, **told)

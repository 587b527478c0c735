"""The pictures of an explained text."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from captum_vz.app.explanation import Explanation
from captum_vz.study import METHODS, Table
from captum_vz.visualization import draw_maps


def draw_explanation(found: Explanation) -> Figure:
    """The maps of all layers and their rollout, or the scores of a method without layer maps."""
    if not found.maps:
        scores = {found.method: found.scores.double().cpu()}
        return Table(tuple(found.tokens), found.token, scores, found.layer or 0, {}, {found.method: found.scope}).plot()
    panels = {f"layer {index}": one for index, one in enumerate(found.maps)}
    if found.rollout is not None:
        panels["rollout"] = found.rollout
    # Rows sum to 1, so pictures of any two texts have the same scale.
    look: dict[str, Any] = {"scale": "root", "vmax": 1.0, "label": "share of the row (rows sum to 1)"}
    title = f"{METHODS[found.method].title}: the maps of the layers, and their rollout"
    return draw_maps(panels, found.tokens, found.token, title=title, **look)

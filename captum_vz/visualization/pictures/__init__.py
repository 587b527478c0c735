"""Figures of maps and scores, their descriptions, and what their files say about their origin."""

from captum_vz.visualization.pictures.audio import draw_audio
from captum_vz.visualization.pictures.comparison import draw_comparison
from captum_vz.visualization.pictures.description import Description, describe
from captum_vz.visualization.pictures.maps import draw_maps
from captum_vz.visualization.pictures.provenance import (
    add_provenance,
    read_provenance,
    save_figure,
    weights_fingerprint,
)
from captum_vz.visualization.pictures.route import draw_route
from captum_vz.visualization.pictures.rows import draw_row

__all__ = [
    "Description",
    "add_provenance",
    "describe",
    "draw_audio",
    "draw_comparison",
    "draw_maps",
    "draw_route",
    "draw_row",
    "read_provenance",
    "save_figure",
    "weights_fingerprint",
]

"""Pictures of maps and scores: figures, interactive pages, records for Captum's `visualize_text`, lines of text."""

from captum_vz.visualization.forms import save_html, terminal_text, text_record
from captum_vz.visualization.pictures.files import (
    Description,
    add_provenance,
    describe,
    read_provenance,
    save_figure,
    weights_fingerprint,
)
from captum_vz.visualization.pictures.maps import draw_maps
from captum_vz.visualization.pictures.route import draw_route
from captum_vz.visualization.pictures.rows import draw_comparison, draw_row
from captum_vz.visualization.pictures.signals import draw_audio, draw_image, image_grid
from captum_vz.visualization.tokens import readable_tokens
from captum_vz.visualization.view import View, three_steps, view

__all__ = [
    "Description",
    "View",
    "add_provenance",
    "describe",
    "draw_audio",
    "draw_comparison",
    "draw_image",
    "draw_maps",
    "draw_route",
    "draw_row",
    "image_grid",
    "read_provenance",
    "readable_tokens",
    "save_figure",
    "save_html",
    "terminal_text",
    "text_record",
    "three_steps",
    "view",
    "weights_fingerprint",
]

"""Pictures of maps and scores: figures, interactive pages, records for Captum's `visualize_text`, lines of text.

================== ================================== ========================================
function           takes                              returns
================== ================================== ========================================
`draw_maps`        maps `(out, in)` and the tokens    a matplotlib figure: a grid of maps
`draw_row`         scores `(in,)` of each layer       a figure: one token, layer by layer
`draw_comparison`  scores `(in,)` of each method      a figure: methods, with a truth
`draw_route`       maps of all layers, one token      a figure: the strongest paths
`view`             maps of all layers and the tokens  an interactive page, a `View`
`draw_image`       scores of patches, an image        a figure: a panel for each layer
`draw_audio`       a waveform and scores of frames    a figure: sound and bars
`describe`         a figure                           its text and its table
`add_provenance`   a figure, a model and more         the figure, whose files say their origin
`read_provenance`  a PNG or SVG file                  what the file says
`save_figure`      any figure of matplotlib           a file with this metadata
`image_grid`       scores of patches, an image        what Captum's `visualize_image_attr` takes
`text_record`      scores `(in,)` and the tokens      a record for Captum's `visualize_text`
`save_html`        records                            a page
`terminal_text`    scores `(in,)` and the tokens      lines of text, with or without colour
`readable_tokens`  token ids                          the tokens as readable strings
`three_steps`      nothing                            the definition of Value Zeroing as a diagram
================== ================================== ========================================
"""

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

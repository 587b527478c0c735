"""Pictures of maps and scores: figures, records for Captum's `visualize_text`, text for terminals, interactive pages.

================= ================================ ========================================
function          takes                            returns
================= ================================ ========================================
`draw_maps`       maps `(out, in)` and the tokens  a matplotlib figure
`view`            maps `(out, in)` and the tokens  an interactive page, a `View`
`text_record`     scores `(in,)` and the tokens    a record for Captum's `visualize_text`
`terminal_text`   scores `(in,)` and the tokens    lines of text, with or without colour
`readable_tokens` token ids                        the tokens as readable strings
================= ================================ ========================================
"""

from captum_vz.visualization.maps import draw_maps
from captum_vz.visualization.records import text_record
from captum_vz.visualization.terminal import terminal_text
from captum_vz.visualization.tokens import readable_tokens
from captum_vz.visualization.view import View, view

__all__ = ["View", "draw_maps", "readable_tokens", "terminal_text", "text_record", "view"]

"""Pictures of maps and scores: a figure, a record for Captum's `visualize_text`, text for a terminal.

================= ================================ ========================================
function          takes                            returns
================= ================================ ========================================
`draw_maps`       maps `(out, in)` and the tokens  a matplotlib figure
`text_record`     scores `(in,)` and the tokens    a record for Captum's `visualize_text`
`terminal_text`   scores `(in,)` and the tokens    lines of text, with or without colour
`readable_tokens` token ids                        the tokens as readable strings
================= ================================ ========================================
"""

from captum_vz.visualization.maps import draw_maps
from captum_vz.visualization.records import text_record
from captum_vz.visualization.terminal import terminal_text
from captum_vz.visualization.tokens import readable_tokens

__all__ = ["draw_maps", "readable_tokens", "terminal_text", "text_record"]

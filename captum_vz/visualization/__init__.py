"""Maps and scores to look at: as a figure, in Captum's own `visualize_text`, in a terminal.

================= ================================ ========================================
function          takes                            gives
================= ================================ ========================================
`draw_maps`       maps `(out, in)` and the tokens  a matplotlib figure
`text_record`     scores `(in,)` and the tokens    a record for Captum's `visualize_text`
`terminal_text`   scores `(in,)` and the tokens    lines of text, coloured or not
`readable_tokens` token ids                        the tokens as a person reads them
================= ================================ ========================================
"""

from captum_vz.visualization.maps import draw_maps
from captum_vz.visualization.records import text_record
from captum_vz.visualization.terminal import terminal_text
from captum_vz.visualization.tokens import readable_tokens

__all__ = ["draw_maps", "readable_tokens", "terminal_text", "text_record"]

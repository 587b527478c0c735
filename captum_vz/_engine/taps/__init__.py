"""Places where attention can be read.

A tap turns an attention call into an `AttentionCall` and hands it to the handler of the thread. A new place is one
class, and one entry in `TAPS`.
"""

from captum_vz._engine.taps.functions import SdpaByNameTap, SdpaTap, TransformersTap
from captum_vz._engine.taps.handler import AttentionTap
from captum_vz._engine.taps.projection import ProjectionTap

TAPS: tuple[AttentionTap, ...] = (TransformersTap(), SdpaTap(), SdpaByNameTap(), ProjectionTap())

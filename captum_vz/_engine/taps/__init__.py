"""Places where attention can be read, one file each.

A tap turns an attention call into an `AttentionCall` and hands it to the handler of the thread. A new place is one file
with one class, and one entry in `TAPS`.
"""

from captum_vz._engine.taps.handler import AttentionTap
from captum_vz._engine.taps.projection import ProjectionTap
from captum_vz._engine.taps.sdpa import SdpaByNameTap, SdpaTap
from captum_vz._engine.taps.transformers import TransformersTap

TAPS: tuple[AttentionTap, ...] = (TransformersTap(), SdpaTap(), SdpaByNameTap(), ProjectionTap())

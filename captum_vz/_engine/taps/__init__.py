"""Places where attention can be read.

A tap is a function of modules and `Changes`. It lets attention calls of these modules reach the handler of the thread,
and notes all that it changes. Threads without a handler compute as ever.
"""

from captum_vz._engine.taps.handler import tap_sdpa, tap_sdpa_by_name, tap_transformers
from captum_vz._engine.taps.projection import tap_projections

TAPS = (tap_transformers, tap_sdpa, tap_sdpa_by_name, tap_projections)

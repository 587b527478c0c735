"""Ways to run a layer with values zeroed, one file each.

A new way is one file with one class, and one entry in `REPLAYS`. The first entry that holds for a layer gives its map.
"""

from captum_vz._engine.replay.base import Replay
from captum_vz._engine.replay.folded.replay import FoldedReplay
from captum_vz._engine.replay.packed import PackedReplay
from captum_vz._engine.replay.sequences import SequenceReplay
from captum_vz._engine.replay.windows import WindowReplay

REPLAYS: tuple[Replay, ...] = (
    FoldedReplay(),
    PackedReplay(),
    PackedReplay(first_tensor_only=True),
    SequenceReplay(),
    SequenceReplay(search_axes=True),
    WindowReplay(),
)

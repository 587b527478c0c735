"""No method starts more kernels, or waits for the device more often, than it did. Counts are exact."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.rehearsal.device import AVAILABLE
from tests.rehearsal.launches import LARGE, cost

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices made in Python")

MAPS, ROLLOUT, ATTENTION, NORMS, ALTI = (110, 5), (170, 5), (25, 3), (80, 4), (140, 5)


class Bound(NamedTuple):
    """The most kernels and reads of one more layer beyond the forward pass, and the targets of both."""

    kernels: float
    reads: float
    target: tuple[int, int] | None = None


# To lower a bound, take the numbers of `python -m tests.benchmarks.launches`. Views count as kernels.
BOUNDS = {
    ("ValueZeroing", "BERT"): Bound(102, 3, MAPS),
    ("ValueZeroing", "GPT-2"): Bound(104, 3, MAPS),
    ("ValueZeroing", "LLaMA"): Bound(110, 3, MAPS),
    ("ValueZeroing, one row", "BERT"): Bound(105, 3, MAPS),
    ("ValueZeroing, one row", "GPT-2"): Bound(104, 3, MAPS),
    ("ValueZeroing, one row", "LLaMA"): Bound(110, 3, MAPS),
    ("ValueZeroingRollout", "BERT"): Bound(110, 3, ROLLOUT),
    ("ValueZeroingRollout", "GPT-2"): Bound(112, 3, ROLLOUT),
    ("ValueZeroingRollout", "LLaMA"): Bound(118, 3, ROLLOUT),
    ("LayerAttention", "BERT"): Bound(17, 1, ATTENTION),
    ("LayerAttention", "GPT-2"): Bound(12, 1, ATTENTION),
    ("LayerAttention", "LLaMA"): Bound(6, 1, ATTENTION),
    ("LayerAttentionNorm", "BERT"): Bound(56, 2, NORMS),
    ("LayerAttentionNorm", "GPT-2"): Bound(45, 2, NORMS),
    ("LayerAttentionNorm", "LLaMA"): Bound(43, 2, NORMS),
    ("ALTI", "BERT"): Bound(115, 4, ALTI),
    ("ALTI", "GPT-2"): Bound(98, 4, ALTI),
    ("ALTI", "LLaMA"): Bound(96, 4, ALTI),
    ("GlobEnc", "BERT"): Bound(123, 4, ALTI),
    ("ALTILogit", "GPT-2"): Bound(139, 4, ALTI),
    ("ALTILogit", "LLaMA"): Bound(136, 4, ALTI),
    # One more layer of the encoder and of the decoder. Their parts are three attentions, so the target is 1.5 x 3 ALTI.
    ("ALTIPlus", "T5"): Bound(362, 14, (630, 22)),
    # These run backward, too: 64 passes of a row at once. No target is stated.
    ("HiddenTokenAttribution, one row", "BERT"): Bound(122, 0),
    ("HiddenTokenAttribution, one row", "GPT-2"): Bound(121, 0),
    ("HiddenTokenAttribution, one row", "LLaMA"): Bound(179, 0),
    # The same for more windows and more patches.
    ("ValueZeroing", "Swin"): Bound(955, 31),
    ("ValueZeroing", LARGE): Bound(955, 31),
}


@pytest.mark.parametrize(("method", "model"), BOUNDS)
def test_launches_of_a_layer(method: str, model: str) -> None:
    found, bound = cost(method, model), BOUNDS[method, model]
    assert found.kernels <= bound.kernels
    assert found.reads <= bound.reads

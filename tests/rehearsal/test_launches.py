"""No method starts more kernels, or waits for the device more often, than it did. Counts are exact."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.rehearsal.device import AVAILABLE, ELSEWHERE
from tests.rehearsal.launches import LARGE, Counter, Launches, cost

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
    ("LayerAttention", "BERT"): Bound(17, 2, ATTENTION),
    ("LayerAttention", "GPT-2"): Bound(12, 2, ATTENTION),
    ("LayerAttention", "LLaMA"): Bound(6, 2, ATTENTION),
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


# The device itself


def test_mixed_devices_raise() -> None:
    for mix in (
        lambda here, there: there + here,
        lambda here, there: here + there,
        lambda here, there: there @ here,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: here.copy_(there).add_(there),
        lambda here, there: here[there.long()],
        lambda here, there: torch.zeros(()).add_(there.sum()),
        lambda here, there: nn.functional.embedding(there.long(), here),
        lambda here, there: torch.randn(2, generator=torch.Generator(), device=ELSEWHERE),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mix(torch.ones(2, 2), torch.ones(2, 2, device=ELSEWHERE))


def test_what_cuda_allows() -> None:
    x = torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    for mix in (
        lambda here, there: there * torch.tensor(2.0),
        lambda here, there: there[torch.tensor([1, 0])],
        lambda here, there: torch.where(there > 0, there, torch.tensor(0.0)),
        lambda here, there: there.copy_(here),
    ):
        found = mix(x, x.to(ELSEWHERE))
        assert found.device == ELSEWHERE
        assert torch.equal(found.cpu(), mix(x, x.clone()))


def test_known_counts() -> None:
    for program, expected in (
        (lambda x: x.view(3, 2).t()[0].add_(1), Launches(4, 3, 0, 0)),
        (lambda x: bool((x > 0).all()), Launches(3, 0, 1, 0)),
        (lambda x: x[x > 0], Launches(2, 0, 1, 0)),  # the host waits for the number of chosen entries
        (lambda x: x.masked_fill_(x > 0, 1), Launches(2, 0, 0, 0)),
        (lambda x: x.__setitem__(x > 0, torch.ones(5, device=ELSEWHERE)), Launches(3, 0, 1, 0)),
        (lambda x: x.cpu(), Launches(1, 0, 1, 0)),
        (lambda x: torch.tensor([1, 2], device=ELSEWHERE), Launches(1, 0, 0, 1)),
        (lambda x: torch.ones(2), Launches()),
    ):
        x = torch.arange(6.0).view(2, 3).to(ELSEWHERE)
        with Counter() as counter:
            program(x)
        assert counter.launches == expected

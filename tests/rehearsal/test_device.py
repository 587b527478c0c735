"""The device made of CPU memory behaves as CUDA does, and counts are those of known programs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.rehearsal.device import AVAILABLE, ELSEWHERE
from tests.rehearsal.launches import Counter, Launches

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices made in Python")


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

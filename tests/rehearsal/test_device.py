"""The device made of CPU memory behaves as CUDA does, and counts are those of known programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.rehearsal.counts import Counter, Launches
from tests.rehearsal.device import AVAILABLE, ELSEWHERE

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices made in Python")


def test_tensors_are_plain() -> None:
    x = torch.arange(6.0).view(2, 3).to(ELSEWHERE)
    parameter = nn.Parameter(x)
    assert (type(x), type(parameter)) == (torch.Tensor, nn.Parameter)
    assert (str(x.device), x.is_cpu, parameter.device) == ("elsewhere:0", False, ELSEWHERE)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: there + here,
        lambda here, there: here + there,
        lambda here, there: there @ here,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: here.copy_(there).add_(there),
        lambda here, there: there.mul_(here),
        lambda here, there: here[there.long()],
        lambda here, there: torch.zeros(()).add_(there.sum()),
        lambda here, there: nn.functional.embedding(there.long(), here),
        lambda here, there: torch.randn(2, generator=torch.Generator(), device=ELSEWHERE),
    ],
)
def test_mixed_devices_raise(mix: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="device"):
        mix(torch.ones(2, 2), torch.ones(2, 2, device=ELSEWHERE))


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: there * torch.tensor(2.0),
        lambda here, there: torch.tensor(2.0) * there,
        lambda here, there: there[torch.tensor([1, 0])],
        lambda here, there: torch.where(there > 0, there, torch.tensor(0.0)),
        lambda here, there: there.copy_(here),
    ],
)
def test_what_cuda_allows(mix: Callable[..., Any]) -> None:
    x = torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    found = mix(x, x.to(ELSEWHERE))
    assert found.device == ELSEWHERE
    assert torch.equal(found.cpu(), mix(x, x.clone()))


def test_numpy_is_refused() -> None:
    with pytest.raises(TypeError, match="numpy"):
        torch.ones(2, device=ELSEWHERE).numpy()


def test_views_share_memory() -> None:
    x = torch.zeros(2, 3, device=ELSEWHERE)
    x.t()[1:].reshape(-1, 2)[0].fill_(5)
    x.view(6)[3:].unfold(0, 2, 1)[1, 1] = 7
    x.detach()[0, 0] = 9
    assert x.tolist() == [[9, 5, 0], [0, 5, 7]]


def test_copies_are_deep() -> None:
    x = torch.arange(6.0, device=ELSEWHERE).view(2, 3)
    copied, row = copy.deepcopy([x, x[1]])
    copied.add_(1)
    assert (x.tolist(), copied.tolist()) == ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    assert row.tolist() == [4, 5, 6]


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda module: module.to(torch.bfloat16)])
def test_moved_modules_convert(convert: Callable[[nn.Module], nn.Module]) -> None:
    here = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    there = convert(copy.deepcopy(here).to(ELSEWHERE)).float()
    x = torch.randn(2, 3)
    torch.testing.assert_close(there(x.to(ELSEWHERE)).cpu(), here(x), rtol=0, atol=0.1)


def test_gradients_stay_on_the_device() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.GELU(), nn.Linear(4, 1))
    there, x = copy.deepcopy(model).to(ELSEWHERE), torch.randn(1, 2, 5)
    for one, given in ((model, x), (there, x.to(ELSEWHERE))):
        one(given).square().sum().backward()
    for one, other in zip(there.parameters(), model.parameters(), strict=True):
        assert one.grad.device == ELSEWHERE
        torch.testing.assert_close(one.grad.cpu(), other.grad)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: x + 1, Launches(1, 0, 0, 0)),
        (lambda x: x.view(3, 2).t()[0].add_(1), Launches(4, 3, 0, 0)),
        (lambda x: x.sum().item(), Launches(2, 0, 1, 0)),
        (lambda x: bool((x > 0).all()), Launches(3, 0, 1, 0)),
        (lambda x: x.nonzero(), Launches(1, 0, 1, 0)),
        (lambda x: x[x > 0], Launches(2, 0, 1, 0)),  # the host waits for the number of chosen entries
        (lambda x: x.masked_fill_(x > 0, 1), Launches(2, 0, 0, 0)),
        (lambda x: x.__setitem__(x > 0, torch.ones(5, device=ELSEWHERE)), Launches(3, 0, 1, 0)),
        (lambda x: x.cpu(), Launches(1, 0, 1, 0)),
        (lambda x: torch.tensor([1, 2], device=ELSEWHERE), Launches(1, 0, 0, 1)),
        (lambda x: x.where(x > 0, 0), Launches(3, 0, 0, 0)),
        (lambda x: torch.ones(2), Launches()),
    ],
)
def test_known_counts(program: Callable[[Any], Any], expected: Launches) -> None:
    x = torch.arange(6.0).view(2, 3).to(ELSEWHERE)
    with Counter() as counter:
        program(x)
    assert counter.launches == expected

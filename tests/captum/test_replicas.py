"""DataParallel's protocol, as far as one CPU shows it: replicas in threads of their own, their shares in order.

DataParallel itself wants a GPU for each replica. Replicas can be made and run by hand; what cannot be had here is two
of them on different devices, so the order of their shares is tested on the function that puts them in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz._engine.capture.forward_pass import _join
from tests.captum.configurations import METHODS, ONE_THREAD_METHODS, tensors
from tests.captum.footprint import footprint
from tests.reference.families import FAMILIES

each_method = pytest.mark.parametrize("method", [one for one in METHODS if one not in ONE_THREAD_METHODS])


def replica_of(network: nn.Module) -> nn.Module:
    """A copy as torch.nn.parallel.replicate wires it: it shares hooks and has plain tensors in place of parameters."""
    copies = {module: module._replicate_for_data_parallel() for module in network.modules()}
    for module, copy in copies.items():
        copy._former_parameters = OrderedDict()
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:
                setattr(copy, name, parameter.detach())
                copy._former_parameters[name] = parameter.detach()
    return copies[network]


def in_replicas(model: nn.Module, count: int) -> Callable[..., list[Any]]:
    """A forward function that runs equal shares of its batch on replicas, each in a thread of its own."""

    def forward(**inputs: Tensor) -> list[Any]:
        shares = zip(*(value.tensor_split(count) for value in inputs.values()), strict=True)
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(replica_of(model), **dict(zip(inputs, share, strict=True))) for share in shares]
            return [future.result() for future in futures]

    return forward


@pytest.mark.parametrize("token", [None, 2, slice(1, 3), [2, 0, 1]])
@pytest.mark.parametrize("family", ["bert", "gpt2", "albert"])
@each_method
def test_replica_map_equals_model_map(method: Any, family: str, token: Any) -> None:
    case = FAMILIES[family].case
    before = footprint(case.model)
    expected = method(case.model, case.layers).attribute(case.inputs, token=token)
    answer = method(in_replicas(case.model, 1), case.layers).attribute(case.inputs, token=token)
    assert type(answer) is type(expected)
    for one, other in zip(tensors(answer), tensors(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert footprint(case.model) == before


@each_method
def test_half_precision_replicas(method: Any) -> None:
    case = FAMILIES["bert"].build(torch.bfloat16)
    expected = method(case.model, case.layers).attribute(case.inputs)
    answer = method(in_replicas(case.model, 1), case.layers).attribute(case.inputs)
    for one, other in zip(tensors(answer), tensors(expected), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@each_method
def test_two_replicas_on_one_device(method: Any) -> None:
    # Shares are told apart by their devices, as Captum does; on one device nobody knows which comes first.
    case = FAMILIES["bert"].build()
    before = footprint(case.model)
    with pytest.raises(AssertionError, match=r"more than one replica of layer 0 on cpu.* device_ids"):
        method(in_replicas(case.model, 3), case.layers).attribute(case.inputs)
    assert footprint(case.model) == before


@each_method
def test_error_in_a_replica(method: Any) -> None:
    case = FAMILIES["bert"].build()
    before = footprint(case.model)
    with pytest.raises(AssertionError, match="token 99 is out of range"):
        method(in_replicas(case.model, 1), case.layers).attribute(case.inputs, token=99)
    assert footprint(case.model) == before


@pytest.mark.parametrize("method", ONE_THREAD_METHODS)
def test_methods_of_one_thread_refuse_replicas(method: Any) -> None:
    case = FAMILIES["bert"].build()
    before = footprint(case.model)
    with pytest.raises(AssertionError, match="For DataParallel, pass the module that it wraps"):
        method(in_replicas(case.model, 1), case.layers).attribute(case.inputs)
    assert footprint(case.model) == before


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_shares_follow_the_device_ids(order: tuple[int, ...]) -> None:
    # All on the CPU; only the keys are what DataParallel's devices would be. The first stands for the CPU itself.
    shares = [torch.full((size, 2), float(size)) for size in (1, 2, 3)]
    later = [torch.full((size, 2), 10.0 * size) for size in (1, 2, 3)]
    devices = [torch.device("cpu"), torch.device("cuda", 5), torch.device("cuda", 2)]
    finished = {devices[place]: [(0, shares[place]), (1, later[place])] for place in order}
    runs = _join(finished, [None, 5, 2])
    assert [index for index, _ in runs] == [0, 1]
    assert torch.equal(runs[0][1], torch.cat(shares))
    assert torch.equal(runs[1][1], torch.cat(later))


def test_several_devices_need_device_ids() -> None:
    share = [(0, torch.zeros(1, 2))]
    with pytest.raises(AssertionError, match="Device IDs must be provided with multiple devices"):
        _join({torch.device("cuda", 0): share, torch.device("cuda", 1): share}, None)

"""DataParallel: its module is explained, and a function that runs replicas in threads of their own is refused."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz.errors import RefusedError
from tests.captum.configurations import METHODS
from tests.captum.footprint import footprint
from tests.reference.families import FAMILIES


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
    return copies[network]


@pytest.mark.parametrize("method", METHODS)
def test_replicas_are_refused(method: Any) -> None:
    case = FAMILIES["bert"].build()
    before = footprint(case.model)

    def forward(**inputs: Tensor) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(replica_of(case.model), **inputs).result()

    with pytest.raises(RefusedError, match=r"did not run layer 0 .* that forward_func calls in this thread"):
        method(forward, case.layers).attribute(case.inputs)
    assert footprint(case.model) == before


def test_module_of_several_devices() -> None:
    case = FAMILIES["bert"].build()
    parallel = nn.DataParallel(case.model)
    parallel.device_ids = [0, 1]  # as on two GPUs
    with pytest.warns(UserWarning, match="its module is explained, on one device"):
        found = ValueZeroing(parallel, case.layers).attribute(case.inputs)
    for one, other in zip(found, ValueZeroing(case.model, case.layers).attribute(case.inputs), strict=True):
        assert torch.equal(one, other)

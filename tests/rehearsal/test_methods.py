"""Every method on another device gives the numbers of the CPU, on the device of its inputs, and mixes no devices."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import captum_vz as vz
from captum_vz._engine.numerics import tensors_in
from captum_vz.attr import __all__ as public
from tests.engine.compare import assert_same
from tests.rehearsal.device import AVAILABLE, ELSEWHERE
from tests.rehearsal.subjects import METHODS, SUBJECTS, Subject, moved, subject

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices made in Python")

OTHERS = {"AttentionBlock", "LayerMaps", "LogitTerms", "MapAggregation", "MapRun", "ModelFreeAttribution", "Wanted"}
PAIRS = [(family, method) for family in SUBJECTS for method in METHODS]


def answer(method: str, one: Subject) -> list[Tensor] | str:
    """The answer as a list of tensors, or what the method says instead of one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return tensors_in(METHODS[method](one))
        except (vz.ArgumentError, vz.RefusedError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_methods_on_another_device(family: str, method: str) -> None:
    here = subject(family)
    expected, found = answer(method, here), answer(method, here.elsewhere())
    if isinstance(expected, str):
        assert found == expected
        return
    assert not isinstance(found, str), found
    assert {one.device for one in found} == {ELSEWHERE}
    for one, other in zip(moved(found, torch.device("cpu")), expected, strict=True):
        assert_same(one, other, here.tolerance * max(1, other.abs().max().item()))


def test_no_method_is_left_out() -> None:
    assert {name.split(",")[0] for name in METHODS} == set(public) - OTHERS

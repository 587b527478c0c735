"""Every form of `target` that Captum knows answers what slicing the whole map answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.captum.configurations import CONFIGURATIONS, Configuration

# Positions that hold a token in every example of every case; tensors are as many as the examples.
TARGETS: dict[str, Any] = {
    "int": 2,
    "negative int": -5,
    "tensor of no dimension": torch.tensor(1),
    "tensor of one entry": torch.tensor([2]),
    "tuple of one": (1,),
    "tuple of two": (2, 0),
    "tuple of two, negative": (-5, -5),
    "list of ints": [2, 0, 1],
    "list of negative ints": [-5, 1, -5],
    "tensor of ints": torch.tensor([1, 2, 0]),
    "list of tuples of one": [(0,), (2,), (1,)],
    "list of tuples of two": [(1, 0), (2, 2), (-5, 1)],
}


def for_batch(target: Any, batch: int) -> Any:
    """A target for each example of a batch of this size."""
    several = isinstance(target, list) or (isinstance(target, Tensor) and target.numel() > 1)
    return target[:batch] if several else target


def sliced(full: Tensor, target: Any) -> Tensor:
    """What `target` names, picked from the whole map one example at a time."""
    targets = target.tolist() if isinstance(target, Tensor) else target
    if isinstance(targets, list) and len(targets) == 1:
        targets = targets[0]
    answers = []
    for b in range(len(full)):
        one = targets[b] if isinstance(targets, list) else targets
        answers.append(full[b][one])  # a tuple indexes row, then source
    return torch.stack(answers)


@pytest.mark.parametrize("form", TARGETS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_a_target_gives_what_slicing_gives(configuration: Configuration, form: str) -> None:
    target = for_batch(TARGETS[form], configuration.case.batch)
    answers = configuration.maps(target=target)
    fulls = configuration.maps()
    assert len(answers) == len(fulls)
    for answer, full in zip(answers, fulls, strict=True):
        assert answer.is_contiguous()
        torch.testing.assert_close(answer, sliced(full, target), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_one_list_for_each_example_is_the_same_as_examples_one_by_one(configuration: Configuration) -> None:
    rows = [2, 0, 1][: configuration.case.batch]
    for answer, *singles in zip(
        configuration.maps(target=rows), *(configuration.maps(target=row) for row in rows), strict=True
    ):
        for b, single in enumerate(singles):
            torch.testing.assert_close(answer[b], single[b], rtol=1e-10, atol=1e-13)

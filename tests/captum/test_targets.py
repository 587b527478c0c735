"""`token` and `target`: each form answers what slicing the whole map answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingRollout, find_layers
from captum_vz.errors import ArgumentError
from tests.captum.configurations import CONFIGURATIONS, Configuration
from tests.reference.families import FAMILIES

# Positions that hold a token in each of the three examples.
TOKENS: list[tuple[Any, Any]] = [
    (2, 2),
    (-5, -5),
    (np.int64(2), 2),
    (torch.tensor(1), 1),
    ([2, 0, 1], [2, 0, 1]),
    ([-5, 1, -5], [-5, 1, -5]),
    ([np.int32(2), 0, torch.tensor(1)], [2, 0, 1]),
    (torch.tensor([1, 2, 0], dtype=torch.uint8), [1, 2, 0]),
    (np.array([1, 2, 0]), [1, 2, 0]),
    *((form([[1, 2], [0, -5], [2, 2]]), [[1, 2], [0, -5], [2, 2]]) for form in (list, torch.tensor)),
    (torch.tensor([[1], [0], [2]]), [[1], [0], [2]]),
    (slice(0, 3), slice(0, 3)),
    (slice(None, 4, 2), slice(None, 4, 2)),
]
# Indices of an output (batch, tokens, d), with the rows that they name.
TARGETS: list[tuple[Any, Any]] = [
    (2, 2),
    (torch.tensor([2]), 2),
    ((1,), 1),
    ((2, 9), 2),
    ((-5, -32), -5),
    ([2, 0, 1], [2, 0, 1]),
    (torch.tensor([1, 2, 0]), [1, 2, 0]),
    ([(1, 0), (2, 31), (-5, 1)], [1, 2, -5]),
]


def sliced(full: Tensor, rows: Any) -> Tensor:
    """The rows of the whole map, picked one example at a time."""
    return torch.stack([full[b][rows[b] if isinstance(rows, list) else rows] for b in range(len(full))])


def assert_rows(found: Tensor, full: Tensor, rows: Any) -> None:
    assert found.is_contiguous()
    torch.testing.assert_close(found, sliced(full, rows), rtol=1e-10, atol=1e-13)


def test_every_form_of_token_and_target() -> None:
    configuration = Configuration(ValueZeroing, layers=1)
    whole = configuration.run()
    for token, rows in TOKENS:
        assert_rows(configuration.run(token=token), whole, rows)
    for target, rows in TARGETS:
        assert_rows(configuration.run(target=target), whole, rows)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_each_class_on_one_form(configuration: Configuration) -> None:
    rows = [2, 0, 1][: configuration.case.batch]
    fulls = configuration.maps()
    for answers in (configuration.maps(token=rows), configuration.maps(target=[(row, 3) for row in rows])):
        assert len(answers) == len(fulls)
        for answer, full in zip(answers, fulls, strict=True):
            assert_rows(answer, full, rows)


def test_a_batch_of_one() -> None:
    case = FAMILIES["bert"].case.example(0)
    method = ValueZeroing(case.model, case.layers[1])
    full = method.attribute(case.inputs)
    assert_rows(method.attribute(case.inputs, token=[4]), full, [4])
    assert_rows(method.attribute(case.inputs, token=[[4, 0, -1]]), full, [[4, 0, -1]])
    with pytest.raises(ArgumentError, match="has 3 entries"):
        method.attribute(case.inputs, token=[4, 0, 1])


def classifier() -> tuple[nn.Module, list[nn.Module], Tensor]:
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    model = BertForSequenceClassification(config).eval()
    return model, find_layers(model), torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])


@pytest.mark.parametrize("method", [LayerAttention, ValueZeroingRollout])
def test_a_class_is_refused(method: Any) -> None:
    model, layers, ids = classifier()
    for target in (1, 99, torch.tensor([0, 1]), (1, 0)):
        with pytest.raises(ArgumentError, match="axis of the layer's"):
            method(model, layers).attribute(ids, target=target)
    assert method(model, layers[:1]).attribute(ids, token=0) is not None


WRONG: list[tuple[str, Any, str]] = [
    ("target", (7, 0), "range in axis 1"),
    ("target", (0, 32), "range in axis 2"),
    ("target", [(0, 1), (0, 1), (0, -33)], r"target is \(0, -33"),
    ("target", (0, 1, 2), "2 axes after the"),
    ("target", [0, 1], "target has 2"),
    ("target", (slice(0, 2), 3), "whose first index"),
    *(("target", wrong, "not index an output") for wrong in ((), "the", True, [0, (1, 2), 2])),
    ("target", torch.tensor([0.0, 1.0, 2.0]), r"a tensor \(3,\)"),
    ("token", 7, "token 7 is out of"),
    ("token", -8, "token -8 is out of"),
    ("token", [0, 1, 7], "token 7 is out of"),
    ("token", [[0], [1], [-8]], "token -8 is out of"),
    ("token", [0, 1], "token has 2 entries"),
    ("token", torch.tensor([0]), "token has 1 entries"),
    ("token", slice(5, 5), "selects none of the"),
    ("token", (1, 2), r"token is \(1, 2\)"),
    *(("token", wrong, "no output tokens") for wrong in ([], [[0, 1], [0], [1]], [0, [1], 2], 1.0, True, [1, True, 2])),
    ("token", np.bool_(True), "no output tokens"),
    ("token", torch.tensor([True]), "no output tokens"),
    ("token", torch.zeros(3, 2, 2, dtype=torch.long), "which names no output tokens"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout])
def test_bad_tokens_and_targets_are_named(method: Any) -> None:
    for name, value, message in WRONG:
        with pytest.raises(ArgumentError, match=message):
            Configuration(method).run(**{name: value})


def test_token_and_target_together() -> None:
    with pytest.raises(ArgumentError, match="were passed"):
        Configuration(ValueZeroing).run(token=1, target=(1, 2))

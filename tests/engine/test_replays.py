"""Both ways to replay give the same, and the fast one is the one that is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from captum_vz import ValueZeroing
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.replay.packed import PackedPairs
from captum_vz._engine.replay.sequences import WholeSequences
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, SEQUENCE_TO_SEQUENCE, naive_value_zeroing

ATTENTIONS = [(name, "self") for name in FAMILIES]
ATTENTIONS += [(name, "cross") for name, family in SEQUENCE_TO_SEQUENCE.items() if family.cross]
each_attention = pytest.mark.parametrize(("name", "attention"), ATTENTIONS)


def forbid(way: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise CannotReplayError("not to be used here")

    monkeypatch.setattr(way, "__init__", refuse)


@each_attention
def test_every_family_is_replayed_as_packed_pairs(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES[name].case
    forbid(WholeSequences, monkeypatch)
    maps = ValueZeroing(case.model, case.layers, attention=attention).attribute(case.inputs)
    for index, layer_map in enumerate(maps):
        assert_same(layer_map, naive_value_zeroing(case, index, attention=attention))


@each_attention
def test_every_family_can_be_replayed_as_whole_sequences(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FAMILIES[name].case
    of = ValueZeroing(case.model, case.layers, attention=attention)
    some = ValueZeroing(case.model, case.layers, attention=attention, heads=[0, 2], distance="l1", normalize=False)
    groups = {"feature_mask": torch.arange(of.attribute(case.inputs)[0].shape[2])[None] // 2}
    row = {"target": [2, 1, 0][: case.batch], **groups, "perturbations_per_eval": 2}

    def answers() -> list[Any]:
        return [of.attribute(case.inputs), of.attribute(case.inputs, **row), some.attribute(case.inputs, **groups)]

    packed = answers()
    forbid(PackedPairs, monkeypatch)
    for whole, expected in zip(answers(), packed, strict=True):
        assert_same(whole, expected)


def test_what_no_way_can_replay_says_why_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES["bert"].case
    forbid(PackedPairs, monkeypatch)
    forbid(WholeSequences, monkeypatch)
    message = (
        r"BertLayer cannot be replayed: .*packed pairs: not to be used here; .*whole sequences: not to be used here"
    )
    with pytest.raises(AssertionError, match=message):
        ValueZeroing(case.model, case.layers).attribute(case.inputs)

"""What a map costs: one token costs one row, and only maps outlive their layer."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz import ValueZeroing, ValueZeroingRollout
from captum_vz._engine import traced_replays
from captum_vz._engine.capture import LayerRecord, Recorder
from captum_vz._engine.numerics import ResultsOfPass
from captum_vz._engine.taps.handler import AttentionCall
from captum_vz.functional import rollout
from tests.benchmarks.measure import operations
from tests.engine.parameters import quick
from tests.reference import FAMILIES, Case

BATCH, TOKENS = 4, 24
each_family = pytest.mark.parametrize("name", quick(["bert", "gpt2", "albert", "bart-decoder"], "bert"))

ONE_ROW: dict[str, Any] = {
    "int": 5,
    "negative": -3,
    "tensor": torch.tensor(5),
    "list": [5, 2, 7, 1],
    "tensors": torch.tensor([5, 2, 7, 1]),
    "lists": [[5], [2], [7], [1]],
    "slice": slice(5, 6),
}


def case_of(name: str, tokens: int = TOKENS) -> tuple[Case, dict[str, Tensor]]:
    ids = torch.randint(4, 60, (BATCH, tokens))
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :5]} if "decoder" in name else {"input_ids": ids}
    return FAMILIES[name].case, inputs


@cache
def operations_of_a_map(name: str) -> int:
    case, inputs = case_of(name)
    return operations(lambda: ValueZeroing(case.model, case.layers).attribute(inputs))


@pytest.mark.parametrize("form", ONE_ROW)
@pytest.mark.parametrize("name", quick(["bert", "gpt2"], "bert"))
def test_cost_of_each_token_form(name: str, form: str) -> None:
    case, inputs = case_of(name)
    plain = operations(lambda: case.model(**inputs))
    row = operations(lambda: ValueZeroing(case.model, case.layers).attribute(inputs, token=ONE_ROW[form]))
    assert row < 2.5 * plain
    assert row < operations_of_a_map(name) / 3


@each_family
def test_cost_grows_with_tokens(name: str) -> None:
    def cost(tokens: int, target: Any) -> int:
        case, inputs = case_of(name, tokens)
        if "decoder" in name:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        plain = operations(lambda: case.model(**inputs))
        # Without the folded replay, whose cost also depends on sources. tests/engine_folded counts it.
        with traced_replays("packed pairs, first tensor only" if "decoder" in name else "packed pairs"):
            return operations(lambda: ValueZeroing(case.model, case.layers).attribute(inputs, token=target)) - plain

    assert cost(24, -1) < 2.5 * cost(12, -1)
    assert 3 * cost(12, None) < cost(24, None) < 4.5 * cost(12, None)


def test_hidden_sources_cost_nothing() -> None:
    case, inputs = case_of("bert")
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[:, TOKENS // 2 :] = 0
    of = ValueZeroing(case.model, case.layers)
    whole = operations(lambda: of.attribute(inputs))
    padded = operations(lambda: of.attribute({**inputs, "attention_mask": mask}))
    assert padded < whole / 2.2

    causal, inputs = case_of("llama")
    plain = operations(lambda: causal.model(**inputs))
    last = operations(lambda: ValueZeroing(causal.model, causal.layers).attribute(inputs, token=-1)) - plain
    first = operations(lambda: ValueZeroing(causal.model, causal.layers).attribute(inputs, token=0)) - plain
    assert first < last / 2


def test_other_layers_cost_nothing() -> None:
    case, inputs = case_of("bert")
    plain = operations(lambda: case.model(**inputs))
    one = operations(lambda: ValueZeroing(case.model, case.layers[1]).attribute(inputs)) - plain
    three = operations(lambda: ValueZeroing(case.model, case.layers).attribute(inputs)) - plain
    assert 3 * one == three


def test_ignored_mixing_costs_nothing() -> None:
    case, inputs = case_of("bert")
    of = ValueZeroingRollout(case.model, case.layers)
    told_so = ValueZeroingRollout(case.model, case.layers, other_mixing="ignore")
    maps = ValueZeroing(case.model, case.layers).attribute(inputs)
    product = operations(lambda: rollout(maps))
    told = operations(lambda: told_so.attribute(inputs))
    assert told == operations_of_a_map("bert") + product
    assert told < operations(lambda: of.attribute(inputs))


@each_family
@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout])
def test_no_tensor_outlives_its_layer(method: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = case_of(name)
    if hasattr(case.model.config, "use_cache"):
        inputs = {**inputs, "use_cache": False}  # the user's own cache keeps keys and values
    kept: list[weakref.ref[Tensor]] = []

    begin, attend = Recorder.__init__, Recorder.on_attention

    def watched_begin(self: Recorder, record: LayerRecord) -> None:
        assert not any(one() is not None for one in kept)
        begin(self, record)

    def watched_attend(self: Recorder, call: AttentionCall) -> tuple[Tensor, Tensor]:
        answer = attend(self, call)
        one = self.record.attentions[-1]
        kept.extend(weakref.ref(x) for x in (one.weights, one.values, one.context) if x is not None)
        return answer

    monkeypatch.setattr(Recorder, "__init__", watched_begin)
    monkeypatch.setattr(Recorder, "on_attention", watched_attend)
    gc.disable()  # the collector of cycles would free them too late
    try:
        method(case.model, case.layers).attribute(inputs)
    finally:
        gc.enable()
    assert kept
    assert not any(one() is not None for one in kept)


def test_results_of_single_layers_are_freed() -> None:
    """Two kinds of layers may take turns, each with its mask. So what a layer computed is kept for the next two."""
    results, mask = ResultsOfPass(), torch.ones(2)
    results.of(torch.neg, (mask,), [mask])
    kept = weakref.ref(mask)
    del mask
    alive = []
    for _ in range(4):
        results.end_layer()
        alive.append(kept() is not None)
    assert alive == [True, True, False, False]

"""A layer that runs several times in one call: related runs are one, of others one is chosen, or all are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from captum_vz import (
    HiddenTokenAttribution,
    LayerAttention,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
    find_layers,
)
from captum_vz.errors import ArgumentError, RefusedError
from tests.captum.footprint import footprint
from tests.engine.blocks import WIDTH, Block, sequences, zeroed_one_by_one
from tests.engine.compare import assert_same
from tests.reference import FAMILIES

UNRELATED = "{} times, on inputs"
METHODS = [ValueZeroing, ValueZeroingRollout, HiddenTokenAttribution]


def two_texts() -> tuple[Any, Callable[..., Tensor], Tensor, Tensor]:
    """A bi-encoder: its case, the function, and two batches of texts of other lengths."""
    case = FAMILIES["bert"].case
    ids = torch.randint(1, 12, (2, 15), generator=torch.Generator().manual_seed(1))

    def similarity(x: Tensor, y: Tensor) -> Tensor:
        return torch.cosine_similarity(*(case.model(one).last_hidden_state.mean(1) for one in (x, y)))

    return case, similarity, ids[:, :7], ids[:, 7:]


@pytest.mark.parametrize("method", METHODS)
def test_bi_encoder(method: Any) -> None:
    case, similarity, x, y = two_texts()
    before = footprint(case.model)
    with pytest.raises(RefusedError, match=UNRELATED.format(2)):
        method(similarity, case.layers).attribute((x, y))
    with pytest.raises(RefusedError, match=UNRELATED.format(2)):  # also with the same text twice
        method(similarity, case.layers[1]).attribute((x, x))
    for run, text in ((0, x), (1, y), (-1, y)):
        if method is HiddenTokenAttribution and run:
            with pytest.raises(ArgumentError, match="gradients start at"):
                method(similarity, case.layers).attribute((x, y), run=run)
            continue
        found = method(similarity, case.layers).attribute((x, y), run=run)
        expected = method(case.model, case.layers).attribute(text)
        assert_same(found[run] if isinstance(found, tuple) else found, expected)
        found = method(similarity, case.layers).attribute((x, y), run=run, token=2)
        expected = method(case.model, case.layers).attribute(text, token=2)
        assert_same(found[run] if isinstance(found, tuple) else found, expected)
    assert footprint(case.model) == before


def test_effect_in_a_bi_encoder() -> None:
    case, similarity, x, y = two_texts()
    with pytest.raises(RefusedError, match=UNRELATED.format(2)):
        ValueZeroingEffect(similarity, case.layers).attribute((x, y))
    with torch.no_grad():
        fixed = [case.model(one).last_hidden_state.mean(1) for one in (y, x)]
    for run, text in enumerate((x, y)):

        def alone(text: Tensor, other: Tensor) -> Tensor:
            return torch.cosine_similarity(case.model(text).last_hidden_state.mean(1), other)

        effect = ValueZeroingEffect(alone, case.layers)
        expected = effect.attribute(text, additional_forward_args=fixed[run])
        found = ValueZeroingEffect(similarity, case.layers).attribute((x, y), run=run)
        assert_same(found[run], expected)
        assert not found[1 - run].any()


def test_difference_to_a_reference() -> None:
    block, x = Block(), sequences(2)
    reference = sequences(4)[2:]
    method = ValueZeroing(lambda x: block(x) - block(reference), block)
    with pytest.raises(RefusedError, match=UNRELATED.format(2)):
        method.attribute(x)
    assert_same(method.attribute(x, run=0), zeroed_one_by_one(block, x))
    assert_same(method.attribute(x, run=-1), zeroed_one_by_one(block, reference))
    with pytest.raises(ArgumentError, match="run is 2, but"):
        method.attribute(x, run=2)
    with pytest.raises(ArgumentError, match="run is True"):
        method.attribute(x, run=True)


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention, ValueZeroingEffect])
@pytest.mark.parametrize("run", [None, 0, -1])
def test_parts_of_a_batch(method: Any, run: int | None) -> None:
    case, _, x, _ = two_texts()

    def loop(x: Tensor) -> Tensor:
        return torch.cat([case.model(one).last_hidden_state[:, 0, 0] for one in x.split(1)])

    arguments = {} if method is ValueZeroingEffect else {"token": 2}
    with pytest.raises(RefusedError, match="but inputs has 2"):
        method(loop, case.layers).attribute(x, run=run, **arguments)
    with pytest.raises(ArgumentError, match="but inputs has 2"):
        method(lambda x: case.model(x[:1]).last_hidden_state[:, 0, 0], case.layers).attribute(x, **arguments)


class Between(nn.Module):
    """Runs one block three times, with a norm between the runs."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH).double()

    def given(self, x: Tensor) -> Tensor:
        return self.norm(self.block(self.norm(self.block(x))) + x)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.given(x))


@pytest.mark.parametrize("run", [None, 0, -1])
def test_related_runs_are_one(run: int | None) -> None:
    model, x = Between(), sequences(2)
    found = ValueZeroing(model, model.block).attribute(x, run=run)
    assert_same(found, zeroed_one_by_one(model.block, model.given(x).detach()))


def test_related_runs_between_which_nothing_changes() -> None:
    """A second call, to see which runs are related, is not needed, although something writes into the output."""
    block, x = Block(), sequences(2)
    calls: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        return block(block(x).mul_(torch.ones(1)))

    found = ValueZeroing(forward, block).attribute(x)
    assert len(calls) == 1
    assert_same(found, zeroed_one_by_one(block, block(x).detach()))


def test_related_and_unrelated_runs() -> None:
    """Each of two inputs runs through the block three times."""
    model, x, y = Between(), sequences(2), sequences(4)[2:]
    method = ValueZeroing(lambda x, y: model(x) - model(y), model.block)
    with pytest.raises(RefusedError, match=UNRELATED.format(6)):
        method.attribute((x, y))
    for run, one in enumerate((x, y)):
        assert_same(method.attribute((x, y), run=run), zeroed_one_by_one(model.block, model.given(one).detach()))


def test_run_on_what_an_unrelated_layer_returned() -> None:
    first, second, x = Block(), Block(), sequences(2)
    method = ValueZeroing(lambda x: first(x) + first(second(-x)), [first, second])
    with pytest.raises(RefusedError, match=UNRELATED.format(2)):
        method.attribute(x)
    with pytest.raises(ArgumentError, match="are not related"):
        method.attribute(x, run=0)


def test_runs_of_a_random_function() -> None:
    block, x = Block(), sequences(2)
    method = ValueZeroing(lambda x: block(x) - block(x + torch.randn_like(x)), block)
    with pytest.raises(RefusedError, match=UNRELATED.format(2)):
        method.attribute(x)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="that of this draw"):
        found = method.attribute(x, run=1)
    torch.manual_seed(3)
    assert_same(found, zeroed_one_by_one(block, x + torch.randn_like(x)))

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return block(x) - block(x + torch.randn_like(x))

    found = ValueZeroing(seeded, block).attribute(x, run=1)
    torch.manual_seed(3)
    assert_same(found, zeroed_one_by_one(block, x + torch.randn_like(x)))
    method = ValueZeroing(lambda x: block(x + random.random()) - block(x), block)
    with pytest.raises(RefusedError, match=UNRELATED.format(2)):
        method.attribute(x)
    calls = count()
    method = ValueZeroing(lambda x: block(x + next(calls)) - block(x), block)
    with pytest.raises(RefusedError, match="second call gave it"):
        method.attribute(x)


def test_runs_of_generation() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=20)
    model, ids = GPT2LMHeadModel(config).double().eval(), torch.tensor([[1, 2, 3, 4]])

    def generate(ids: Tensor) -> Tensor:
        return model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)

    layers = find_layers(model)
    with pytest.raises(RefusedError, match=UNRELATED.format(3)):
        ValueZeroing(generate, layers).attribute(ids)
    assert_same(ValueZeroing(generate, layers).attribute(ids, run=0), ValueZeroing(model, layers).attribute(ids))
    cache = model(ids[:, :2]).past_key_values  # would grow with each call
    with pytest.raises(RefusedError, match="filled key-value"):
        ValueZeroing(model, layers[1]).attribute(ids[:, 2:], additional_forward_args=(cache,), run=0)
    assert cache.get_seq_length(1) == 2

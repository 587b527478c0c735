"""The definition that maps are verified with: it zeroes the projected value row, wherever the row goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz.verification.definition import NoDefinitionError
from captum_vz.verification.recorded import DefinedMap, defined_map, plain_run
from tests.engine.blocks import WIDTH, Block, Convolution, Projections, block_of, sequences, zeroed_one_by_one
from tests.engine.compare import assert_same


def defined(
    block: nn.Module, *inputs: Tensor, dtype: Any = None, most: int = 99, attention: str = "self"
) -> DefinedMap:
    x = inputs[0]
    run = plain_run(lambda: block(*inputs), [block])[0]
    return defined_map(run, attention, (len(x), x.shape[1], x.shape[1]), dtype, None, most)


class SharedKey(Projections):
    """The keys are the values too."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, _ = self.heads(x)
        context = nn.functional.scaled_dot_product_attention(query, key, key, mask)
        return self.output(context.transpose(1, 2).flatten(2))


class ValueInAGate(Projections):
    """The values that are projected once also gate the context."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.heads(x)
        context = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return self.output(((1 + value.tanh()) * context).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("block", [Block, lambda: Block(after=Convolution()), lambda: block_of(ValueInAGate())])
def test_equals_a_hook_on_the_projection(block: Any) -> None:
    layer, x = block(), sequences(2)
    found = defined(layer, x)
    assert found.at_projection
    assert found.reproduced < 1e-12
    assert_same(found.scores, zeroed_one_by_one(layer, x, normalize=False), 1e-14)


def test_shared_projection_is_zeroed_in_the_attention() -> None:
    layer, x = block_of(SharedKey()), sequences(2)
    found = defined(layer, x)
    assert not found.at_projection
    assert_same(found.scores, ValueZeroing(layer, layer, normalize=False).attribute(x), 1e-14)
    everywhere = zeroed_one_by_one(layer, x, value="attention.key", normalize=False)
    assert (found.scores - everywhere).abs().max() > 1e-3


def test_some_sources_are_evenly_spaced() -> None:
    layer, x = Block(), sequences(2, 9)
    found = defined(layer, x, most=3)
    assert found.sources == [0, 4, 8]
    assert_same(found.scores, zeroed_one_by_one(layer, x, normalize=False)[..., found.sources], 1e-14)


def test_model_is_left_as_found() -> None:
    layer, x = Block(), sequences(2)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    defined(layer.float(), x.float(), dtype=torch.float64)
    assert {value.dtype for value in layer.state_dict().values()} == {torch.float32}
    for name, value in layer.double().state_dict().items():
        assert_same(value, before[name], 1e-7)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in layer.modules())


def test_hooks_are_removed_after_an_error() -> None:
    layer = Block()
    with pytest.raises(ZeroDivisionError):
        plain_run(lambda: layer(sequences(2)) / 0 + 1 / 0, [layer])
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert torch.backends.mha.get_fastpath_enabled()


def test_layer_without_attention_has_none() -> None:
    layer = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(NoDefinitionError, match="no matrix product"):
        defined(layer, sequences(2))


def test_decoder_of_equal_lengths() -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True).double().eval()
    x, memory = sequences(2), sequences(2).flip(0) + 1
    for attention in ("self", "cross"):
        found = defined(layer, x, memory, attention=attention)
        expected = ValueZeroing(layer, layer, attention=attention, normalize=False).attribute((x, memory))
        assert_same(found.scores, expected, 1e-13)

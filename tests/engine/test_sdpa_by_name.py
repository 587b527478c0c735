"""The tap for `scaled_dot_product_attention` that is imported by name, against reruns with one value zeroed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from captum_vz import LayerAttention, ValueZeroing
from captum_vz._engine.taps.functions import _Mode
from tests.engine.blocks import Block, block_of, mask_of_window, sequences, zeroed_one_by_one
from tests.engine.by_attribute import OnClass, OnModule
from tests.engine.by_name import ByName, InAMethod
from tests.engine.compare import assert_same
from tests.reference import FAMILIES


def modes_on(seen: list[bool]) -> None:
    """Note whether the tap's mode is on."""
    seen.append(any(isinstance(mode, _Mode) for mode in _get_current_function_mode_stack()))


@pytest.mark.parametrize("kind", [ByName, InAMethod, OnModule, OnClass])
@pytest.mark.parametrize("masked", [False, True])
def test_map_equals_the_twin(kind: type[nn.Module], masked: bool) -> None:
    block, x = block_of(kind()), sequences(2)
    mask = (mask_of_window(6, window=3),) if masked else ()
    found = ValueZeroing(block, block).attribute((x, *mask))
    assert_same(found, zeroed_one_by_one(block, x, *mask), tolerance=1e-12)
    assert_same(ValueZeroing(block, block).attribute((x, *mask), token=2), found[:, 2])


def test_attention_weights_are_read() -> None:
    block, x = block_of(ByName()), sequences(2)
    mask = mask_of_window(6, window=3)
    query, key, _ = block.attention.heads(block.attention_norm(x))
    expected = (query @ key.mT / 2 + mask).softmax(-1).mean(1)
    assert_same(LayerAttention(block, block).attribute((x, mask)), expected)


def test_no_mode_stays() -> None:
    block, x = block_of(ByName()), sequences(2)
    ValueZeroing(block, block).attribute(x)
    assert not _get_current_function_mode_stack()


def test_no_mode_stays_after_errors() -> None:
    block, x = block_of(ByName()), sequences(2)

    def failing(x: Tensor) -> Tensor:
        block(x)
        raise KeyboardInterrupt

    def distance(clean: Tensor, changed: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        ValueZeroing(failing, block).attribute(x)
    with pytest.raises(ZeroDivisionError):
        ValueZeroing(block, block, distance=distance).attribute(x)
    with pytest.raises(RuntimeError):
        ValueZeroing(block, block).attribute(x[..., :3])
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("name", ["home-made", "torch", "bert", "imported"])
def test_mode_is_on_where_needed(name: str) -> None:
    """A mode is asked at each function of torch, which takes time."""
    inputs: dict[str, Tensor] | Tensor = sequences(2)
    model: nn.Module = block_of(ByName()) if name == "imported" else Block()
    layer = model
    if name == "torch":
        model = layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).double().eval()
    elif name == "bert":
        case = FAMILIES["bert"].case
        model, layer, inputs = case.model, case.layers[0], case.inputs
    seen: list[bool] = []
    with layer.register_forward_pre_hook(lambda *args: modes_on(seen)):
        ValueZeroing(model, layer).attribute(inputs)
    assert seen == [name == "imported"]


def test_another_function_of_that_name() -> None:
    """A function of the user's own under torch's name is no attention that can be read."""

    class Sharper(OnModule):
        def __init__(self) -> None:
            super().__init__()
            torchs = self.attend
            self.attend = lambda query, *rest, **kwargs: torchs(3 * query, *rest, **kwargs)

    block = block_of(Sharper())
    assert block(sequences(2)).dtype == torch.float64
    with pytest.raises(AssertionError, match="called no attention that can be read"):
        ValueZeroing(block, block).attribute(sequences(2))

"""`values=`: layers that compute attention in their own code, whose values the user names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from captum_vz import Rollout, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from tests.engine.blocks import HEADS, WIDTH, Projections, block_of, sequences, without_value_of, zeroed_one_by_one
from tests.engine.compare import assert_same
from tests.engine.manual_attention import Annotated, Einsum, InBlock, NanoGPT, Windows, manual, twin

pytestmark = pytest.mark.all_cases  # each is another layer


def last_third(projected: Tensor) -> Tensor:
    return projected[..., 2 * WIDTH :]


STYLES: dict[str, tuple[type[nn.Module], Callable[[Any], Any]]] = {
    "packed": (NanoGPT, lambda block: (block.attention.c_attn, last_third)),
    "packed, by its weight": (NanoGPT, lambda block: (block.attention.c_attn.weight, last_third)),
    "in a list": (Annotated, lambda block: block.attention.linears[2]),
    "einsum": (Einsum, lambda block: (block.attention.w_v, lambda projected: projected.transpose(1, 2))),
    "windows": (Windows, lambda block: (block.attention.qkv.weight, last_third)),
    "in the block": (InBlock, lambda block: block.to_v),
}
each_style = pytest.mark.parametrize(("style", "values"), STYLES.values(), ids=STYLES)


@each_style
def test_styles_of_attention(style: Any, values: Any) -> None:
    block, x = manual(style), sequences(2, 8)
    with pytest.raises(UnsupportedLayerError, match=r"True .*values="):
        ValueZeroing(block, block).attribute(x)
    expected = twin(block, x)
    for given in (values(block), [values(block)], values):
        assert_same(ValueZeroing(block, block, values=given, normalize=False).attribute(x), expected)
    row = ValueZeroing(block, block, values=values, normalize=False).attribute(x, token=3, perturbations_per_eval=2)
    assert_same(row, expected[:, 3])
    assert not any(module._forward_hooks for module in block.modules())
    assert not torch.overrides._get_current_function_mode_stack()
    block, x = block.bfloat16(), x.bfloat16()
    half = ValueZeroing(block, block, values=values, normalize=False).attribute(x)
    assert_same(half, twin(block.float(), x.float()), 1e-4)


def by_head(projected: Tensor) -> Tensor:
    return last_third(projected).unflatten(-1, (HEADS, -1))


def packed_by_head(block: Any) -> Any:
    return block.attention.c_attn, by_head


def test_single_heads() -> None:
    block, x = manual(NanoGPT), sequences(2)
    method = ValueZeroing(block, block, values=packed_by_head, heads=[1, 3], normalize=False)
    zeroed = [slice(2 * WIDTH + head * WIDTH // HEADS, 2 * WIDTH + (head + 1) * WIDTH // HEADS) for head in (1, 3)]
    expected = torch.stack([one_source(block, x, zeroed, source) for source in range(x.shape[1])], -1)
    assert_same(method.attribute(x), expected, 1e-9)


@torch.no_grad()
def one_source(block: Any, x: Tensor, columns: list[slice], source: int) -> Tensor:
    def zero(module: nn.Module, inputs: Any, projected: Tensor) -> Tensor:
        projected = projected.clone()
        for own in columns:
            projected[:, source, own] = 0
        return projected

    clean = block(x)
    with block.attention.c_attn.register_forward_hook(zero):
        return 1 - torch.cosine_similarity(block(x), clean, dim=-1)


def test_masked_sources() -> None:
    block, x = manual(Annotated), sequences(2)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = False
    found = ValueZeroing(block, block, values=STYLES["in a list"][1], normalize=False).attribute(x, None, (mask,))
    assert_same(found, twin(block, x, mask))
    assert found[1, :, 4:].max() < 1e-30  # some products round the rows of a batch differently


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([manual(NanoGPT), manual(InBlock), manual(Einsum)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)

    def values(self, layer: Any) -> Any:
        style = InBlock if isinstance(layer, InBlock) else type(layer.attention)
        return next(find(layer) for one, find in STYLES.values() if one is style)


def test_rollouts() -> None:
    model, x = Stack(), sequences(2)
    maps = ValueZeroing(model, list(model.layers), values=[model.values(layer) for layer in model.layers])
    rollout = ValueZeroingRollout(model, model.layers, values=model.values, other_mixing="ignore")
    found = rollout.attribute(x)
    assert_same(found, Rollout(maps, other_mixing="ignore").attribute(x))
    first, second, third = maps.attribute(x)
    assert_same(found, third @ second @ first)
    # What else mixes tokens cannot be told from attention that has no module of its own.
    rollout.other_mixing = "refuse"
    with pytest.raises(UnsupportedLayerError, match="mix their tokens in"):
        rollout.attribute(x)
    rollout.layer, rollout.maps.values = [model.layers[0]], model.values
    assert_same(rollout.attribute(x), first)


def test_effects() -> None:
    model, x = Stack(), sequences(2)
    layers = [model.layers[0], model.layers[1]]
    found = ValueZeroingEffect(model, layers, values=model.values).attribute(x, target=3)
    with torch.no_grad():
        for source in range(x.shape[1]):
            clean = model(x)[:, 3]
            for layer in layers:
                layer.attention.source = source
            assert_same(found[:, source], clean - model(x)[:, 3])
            for layer in layers:
                layer.attention.source = None


NO_VALUES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "all of it": (lambda block: block.attention.c_attn, "in another way"),
    "queries": (lambda block: (block.attention.c_attn, lambda x: x[..., :WIDTH]), "in another way|no other token"),
    "keys and values": (lambda block: (block.attention.c_attn, lambda x: x[..., WIDTH:]), "in another way"),
    "the norm before": (lambda block: block.attention_norm, "in another way"),
    "the output projection": (lambda block: block.attention.c_proj, "no other token"),
    "the feed-forward": (lambda block: block.feed_forward[0], "no other token"),
    "the weights": (lambda block: block.attention.attn_dropout, r"returned \(2, 4, 6, 6\)"),
    "heads before tokens": (
        lambda block: (block.attention.c_attn, lambda x: by_head(x).transpose(1, 2)),
        "have this shape",
    ),
    "a copy": (lambda block: (block.attention.c_attn, lambda x: last_third(x) * 1), "selects a copy"),
    "one token": (lambda block: (block.attention.c_attn, lambda x: x[:, 0]), r"selects \(2, 48\)"),
    "no tensor": (lambda block: (block.attention.c_attn, lambda x: None), "selects NoneType"),
    "what does not run": (lambda block: block.spare, "did not run once"),
    "a buffer's name": (lambda block: "attention.c_attn", "is of type str"),
    "another's part": (lambda block: nn.Linear(2, 2), "no part of the"),
    "the layer": (lambda block: block, "no part of the"),
    "a list of two": (lambda block: [[block.attention.c_attn] * 2, []], "values lists a part of"),
}


@pytest.mark.parametrize(("values", "message"), NO_VALUES.values(), ids=NO_VALUES)
def test_what_is_no_value(values: Any, message: str) -> None:
    block = manual(NanoGPT)
    block.spare = nn.Linear(2, 2)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises((ArgumentError, UnsupportedLayerError), match=message):
            ValueZeroing(block.to(dtype), block, values=values).attribute(sequences(2).to(dtype))


class Hooked(Einsum):
    """TransformerLens: a module that changes nothing returns the values, with tokens or with heads second."""

    def __init__(self, heads_second: bool) -> None:
        super().__init__()
        self.hook_v, self.heads_second = nn.Identity(), heads_second

    def cut(self, value: Tensor) -> Tensor:
        axes = (1, 2) if self.heads_second else (0, 0)
        return super().cut(self.hook_v(value.transpose(*axes)).transpose(*axes))


@pytest.mark.parametrize(("count", "heads_second"), [(3, False), (HEADS, True)])
def test_hook_of_four_axes(heads_second: bool, count: int) -> None:
    """With as many tokens as heads, nothing else says which come second."""
    block, x = block_of(Hooked(heads_second)), sequences(2, count)
    part = block.attention.hook_v
    with pytest.raises(UnsupportedLayerError, match="tokens or heads"):
        ValueZeroing(block, block, values=part).attribute(x)
    select = (lambda v: v.transpose(1, 2)) if heads_second else (lambda v: v)
    found = ValueZeroing(block, block, values=(part, select), normalize=False).attribute(x)
    assert_same(found, twin(block, x))


def test_a_part_that_runs_twice() -> None:
    class Twice(Annotated):
        def forward(self, x: Tensor, mask: Any = None) -> Tensor:
            return super().forward(x) + super().forward(x.flip(-1))

    block = manual(Twice)
    with pytest.raises(UnsupportedLayerError, match="several times in"):
        ValueZeroing(block, block, values=block.attention.linears[2]).attribute(sequences(2))


class Attend(Projections):
    """Calls torch's function in a form of its own."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(self.attend(*self.heads(x)).transpose(1, 2).flatten(2))


def in_unequal_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([sdpa(part, key, value) for part in query.split(4, 2)], 2)


def loudest_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    order = key.norm(dim=-1, keepdim=True).argsort(2).expand_as(key)
    return sdpa(query, key.gather(2, order), value.gather(2, order))


def heads_as_examples(*parts: Tensor) -> Tensor:
    return sdpa(*(one.flatten(0, 1) for one in parts)).unflatten(0, (-1, HEADS))


FORMS = [in_unequal_parts, loudest_first, heads_as_examples]


@pytest.mark.parametrize(("attend", "batch"), [(heads_as_examples, 1), *((one, 2) for one in FORMS)])
def test_named_values_of_an_attention_that_is_seen(attend: Any, batch: int) -> None:
    """The attention is seen in another order, or in parts that do not fit together, but not the named values."""
    block, x = block_of(Attend(attend)), sequences(batch, 6)
    values = block.attention.value
    if attend is in_unequal_parts:
        for method, options in ((ValueZeroing, {}), (ValueZeroingEffect, {"target": (1, 2)})):
            with pytest.raises(UnsupportedLayerError, match="of different sizes"):
                method(block, block).attribute(x, **options)
    assert_same(ValueZeroing(block, block, values=values).attribute(x), zeroed_one_by_one(block, x))
    found = ValueZeroingEffect(block, block, values=values).attribute(x, (1, 2))
    clean = block(x)[:, 1, 2]
    for source in range(6):
        with without_value_of(source, values):
            assert_same(found[:, source], clean - block(x)[:, 1, 2])


@pytest.mark.parametrize("named", [False, True])
def test_remedy_for_one_projection_of_three(named: bool) -> None:
    """Both messages name the values as the argument takes them, and with them the map is right."""
    block, x = manual(NanoGPT), sequences(2)
    with pytest.raises(UnsupportedLayerError, match=r"values=\(layer") as caught:
        ValueZeroing(block, block, values=block.attention.c_attn if named else None).attribute(x)
    said = re.search(r"values=(\(layer.*?:\]\))", str(caught.value))
    assert said is not None
    method = ValueZeroing(block, block, values=eval(said[1], {"layer": block}), normalize=False)
    assert_same(method.attribute(x), twin(block, x))


def test_named_values_in_half_precision() -> None:
    block = block_of(Attend(lambda *parts: sdpa(*(one.bfloat16() for one in parts)).float())).float()
    for values in (None, block.attention.value):
        with pytest.raises(RefusedError, match="its code compute"):
            ValueZeroing(block, block, values=values).attribute(sequences(2).float())

"""Layers that do more than transformers' layers: inside the attention, with further arguments, with a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from captum_vz import LayerAttentionNorm, ValueZeroing
from captum_vz.errors import UnsupportedLayerError
from tests.engine.blocks import (
    HEADS,
    WIDTH,
    Block,
    Conditioned,
    Reader,
    SelfAttention,
    as_added,
    direction,
    eager_attention_forward,
    mask_of_window,
    scale_each_position,
    sequences,
    zeroed_one_by_one,
)
from tests.engine.compare import assert_same
from tests.engine.parameters import quick


def gate_by_input(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return attention.output(context * attention.query(x).sigmoid())


def gate_by_context(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return attention.output(context) * context.sigmoid()


def gate_in_place(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return attention.output(context.mul_(attention.query(x).sigmoid()))


def norm_before_the_projection(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return attention.output(nn.functional.layer_norm(context, (WIDTH,)))


def residual_and_norm_inside(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x + attention.output(context), (WIDTH,))


def no_projection(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return context


def projection_without_a_module(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return context @ attention.output.weight.T


def two_projections(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return attention.output(context) + attention.key(context)


def projection_thrown_away(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    attention.key(context)
    return attention.output(context)


def shift_of_the_projection(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return attention.output(context) + 1e-3


def heads_that_talk(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return attention.output(context.unflatten(-1, (HEADS, -1)).flip(-2).cumsum(-2).flatten(-2))


def neighbours_inside(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return attention.output(context + context.roll(1, dims=1))


FINISHES = [
    gate_by_input,
    gate_by_context,
    gate_in_place,
    norm_before_the_projection,
    residual_and_norm_inside,
    no_projection,
    projection_without_a_module,
    two_projections,
    projection_thrown_away,
    shift_of_the_projection,
    heads_that_talk,
    neighbours_inside,
]


@pytest.mark.parametrize(("batch", "tokens"), quick([(1, 6), (2, 6), (1, 20)], (2, 6)))
@pytest.mark.parametrize("finish", FINISHES, ids=lambda finish: finish.__name__)
def test_attention_modules_that_do_more(
    finish: Callable[[SelfAttention, Tensor, Tensor], Tensor], batch: int, tokens: int
) -> None:
    block, x, mask = Block(finish=finish), sequences(batch, tokens), mask_of_window(tokens, window=3)
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))
    assert_same(ValueZeroing(block, block).attribute((x, mask)), zeroed_one_by_one(block, x, mask))


def direction_of_the_projection(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return direction(context @ attention.output.weight.T)


def direction_with_neighbours(attention: SelfAttention, context: Tensor, x: Tensor) -> Tensor:
    return direction_of_the_projection(attention, context, x) + context.roll(1, dims=1)


class NormOfAttention(Block):
    """A block without a residual connection around the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention.output = nn.Linear(WIDTH, WIDTH, bias=False).double()
        self.norm.eps = 1e-300

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.feed_forward(self.norm(self.attention(self.attention_norm(x), mask)))


class AttentionAlone(NormOfAttention):
    """A block that is an attention without residual connection and norm."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attention(self.attention_norm(x), mask)


@pytest.mark.parametrize(
    "block",
    [
        Block(finish=direction_of_the_projection),
        Block(finish=direction_with_neighbours),
        NormOfAttention(),
        AttentionAlone(),
    ],
    ids=["module", "neighbours", "norm", "alone"],
)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 6), (2, 20)])
def test_value_that_is_nearly_all(block: Block, batch: int, tokens: int) -> None:
    x, mask = sequences(batch, tokens), torch.full((1, 1, tokens, tokens), -30.0, dtype=torch.float64)
    mask[..., 2] = 0  # all other weights are 1e-13
    found = ValueZeroing(block, block, normalize=False).attribute((x, mask))
    assert_same(found, zeroed_one_by_one(block, x, mask, normalize=False))


def test_group_that_is_all() -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = LlamaModel(LlamaConfig(**size, vocab_size=50, initializer_range=0.2)).eval()
    ids, attention = torch.arange(48)[None], model.layers[0].self_attn

    def attend(ids: Tensor) -> Tensor:
        """The attention alone, without its block."""
        x = model.embed_tokens(ids)
        mask = torch.full((48, 48), torch.finfo(x.dtype).min).triu(1)[None, None]
        return attention(model.layers[0].input_layernorm(x), model.rotary_emb(x, ids), mask)[0]

    found = ValueZeroing(attend, attention, normalize=False).attribute(ids, feature_mask=ids // 3)
    # A context of zeros has no direction. The distance is 0.5, and no rounding error is normalized.
    assert_same(found[:, :3, :3], found.new_full((1, 3, 3), 0.5), tolerance=1e-6)


class GatedProjection(nn.Module):
    """The projection of NeoMME: a submodule that takes the context and the attention's input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, context: Tensor, x: Tensor) -> Tensor:
        return self.output(context * self.gate(x).sigmoid())


def test_projection_with_a_gate() -> None:
    block, x = Block(finish=lambda attention, context, x: attention.output(context, x)), sequences(2)
    block.attention.add_module("output", GatedProjection().double())
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))
    with pytest.raises(AssertionError, match="has no output projection that can be recognised"):
        LayerAttentionNorm(block, block).attribute(x)


class Skipping(Block):
    """Some positions skip the attention. A switch that does not depend on the context decides."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        on = x[..., :1] > 0
        y = x + on * self.attention(self.attention_norm(x), mask)
        return y + self.feed_forward(self.norm(y))


class ParallelSkipping(Block):
    """The same, with the feed-forward layer parallel to the attention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        on = x[..., :1] > 0
        return x + on * self.attention(self.attention_norm(x), mask) + self.feed_forward(self.norm(x))


@pytest.mark.filterwarnings("ignore:.*row.* zero")
@pytest.mark.parametrize("last", [1.0, -1.0])
# All numbers of rows, because the last rows of a product may be rounded in another way.
@pytest.mark.parametrize(
    ("batch", "tokens"), quick([*zip(cycle((1, 2)), range(3, 19)), (1, 20), (2, 20)], (1, 5), (2, 8), (2, 20))
)
@pytest.mark.parametrize("kind", [Skipping, ParallelSkipping])
def test_positions_that_skip_the_attention(kind: type[Block], batch: int, tokens: int, last: float) -> None:
    block, x = kind(), sequences(batch, tokens)
    x[:, 0, 0], x[:, -1, 0] = 1, last
    on = x[..., 0] > 0
    layer_map = ValueZeroing(block, block).attribute(x)
    assert not layer_map[~on].any()
    assert_same(layer_map[on], zeroed_one_by_one(block, x)[on])


@pytest.mark.parametrize("layer", ["attention", "attention.output"])
def test_attention_module_as_layer(layer: str) -> None:
    block, x = Block(), sequences(2)
    if layer == "attention":
        expected = zeroed_one_by_one(block.attention, block.attention_norm(x), value="value")
        assert_same(ValueZeroing(block, block.attention).attribute(x), expected)
    else:
        with pytest.raises(AssertionError, match="layer Linear called no attention"):
            ValueZeroing(block, block.attention.output).attribute(x)


def scale_each_example(x: Tensor, condition: Tensor) -> Tensor:
    return x * condition[:, None, :]


def scale_by_column(x: Tensor, condition: Tensor) -> Tensor:
    return x * condition[..., None]


def scale_by_length(x: Tensor, condition: Tensor) -> Tensor:
    return x * (1 + (torch.arange(x.shape[1]) < condition[:, None]))[..., None]


def scale_sequence_first(x: Tensor, condition: Tensor) -> Tensor:
    return x * condition.transpose(0, 1)


# The shape of the further tensor, from (batch, tokens). The shape alone does not identify the axes.
CONDITIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int, int], tuple[int, ...]]]] = {
    "each example": (scale_each_example, lambda batch, tokens: (batch, WIDTH)),
    "all examples": (scale_each_example, lambda batch, tokens: (1, WIDTH)),
    "each position": (scale_each_position, lambda batch, tokens: (batch, tokens, WIDTH)),
    "position of all": (scale_each_position, lambda batch, tokens: (1, tokens, WIDTH)),
    "table of positions": (scale_each_position, lambda batch, tokens: (tokens, WIDTH)),
    "number a position": (scale_by_column, lambda batch, tokens: (batch, tokens)),
    "length": (scale_by_length, lambda batch, tokens: (batch,)),
    "sequence first": (scale_sequence_first, lambda batch, tokens: (tokens, batch, WIDTH)),
}


SHAPES = [(1, 6), (3, 6), (4, 4), (16, 16), (3, WIDTH), (WIDTH, 3), (1, 1), (5, 1)]


@pytest.mark.parametrize(("batch", "tokens"), quick(SHAPES, (3, 6), (4, 4)))
@pytest.mark.parametrize("kind", CONDITIONS)
def test_further_argument(kind: str, batch: int, tokens: int) -> None:
    use, shape = CONDITIONS[kind]
    condition = torch.rand(shape(batch, tokens), dtype=torch.float64) + 0.5
    if kind == "length":
        condition = torch.randint(1, tokens + 1, (batch,))
    block, x = Conditioned(use), sequences(batch, tokens)
    of, expected = ValueZeroing(block, block), zeroed_one_by_one(block, x, condition)
    assert_same(of.attribute((x, condition)), expected)
    assert_same(of.attribute((x, condition), token=0), expected[:, 0])


@pytest.mark.parametrize("batch", [1, 3, HEADS])
def test_mask_for_each_head(batch: int) -> None:
    visible = torch.rand(batch, HEADS, HEADS, HEADS) < 0.5
    visible |= torch.eye(HEADS, dtype=torch.bool)
    mask = as_added(visible)
    block, x = Block(), sequences(batch, HEADS)
    assert_same(ValueZeroing(block, block).attribute((x, mask)), zeroed_one_by_one(block, x, mask))


@pytest.mark.parametrize("tokens", [6, 20])
def test_tokens_that_skip_themselves(tokens: int) -> None:
    visible = ~torch.eye(tokens, dtype=torch.bool).expand(2, 1, -1, -1).clone()
    visible[1, ..., -2:] = False  # these tokens are padding
    mask = as_added(visible)
    block, x = Block(), sequences(2, tokens)
    expected = zeroed_one_by_one(block, x, mask)
    expected[1, -2:] = 0
    layer_map = ValueZeroing(block, block).attribute((x, mask))
    assert_same(layer_map, expected)
    assert not layer_map.diagonal(dim1=1, dim2=2).any()


@pytest.mark.parametrize(("tokens", "sources"), [(5, 5), (5, 8), (8, 5)])
@pytest.mark.parametrize("hidden", [0, 2])
def test_cross_attention_module_as_layer(tokens: int, sources: int, hidden: int) -> None:
    """Hidden sources of a cross-attention are no padding of its targets."""
    reader = Reader().double().eval()
    x, memory = sequences(2, tokens), sequences(2, sources) + 1
    visible = torch.ones(2, 1, tokens, sources, dtype=torch.bool)
    visible[:, ..., sources - hidden :] = False
    visible[1, ..., 3:] = False
    mask = as_added(visible)
    expected = zeroed_one_by_one(reader, x, mask, memory, value="value", normalize=False, sources=sources)
    assert (expected.sum(-1) > 0).all()
    assert_same(ValueZeroing(reader, reader, normalize=False).attribute((x, mask, memory)), expected)


class Thrice(nn.Module):
    """Passes its states as queries and as memory, as Funnel does: the same tensor, or a copy."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.reader = Reader()
        self.copies = copies

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.reader(x, mask, x.clone() if self.copies else x)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_states_given_twice(dtype: torch.dtype, copies: bool) -> None:
    model, x = Thrice(copies).to(dtype).eval(), sequences(2).to(dtype)
    mask = torch.zeros(2, 1, 1, 6, dtype=dtype)
    mask[1, ..., 4:] = torch.finfo(dtype).min
    found = ValueZeroing(model, model.reader).attribute((x, mask))
    assert found[1, :4, :4].all()
    assert not found[1, 4:].any()


def test_layer_that_counts_positions() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(1, 1 + x.shape[1])[:, None]

    for batch in (1, 2):
        block, x = Block(after=Counting()), sequences(batch)
        assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))


def test_attention_called_by_keyword() -> None:
    class ByKeyword(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            names = ("query", "key", "value")
            parts = {name: getattr(self, name)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in names}
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            context, _ = attend(module=self, attention_mask=mask, dropout=0.0, **parts)
            return self.output(context.flatten(2))

    block, x = Block(), sequences(2)
    block.attention.__class__ = ByKeyword
    assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))


def sharp_eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return eager_attention_forward(module, 3 * query, key, value, attention_mask, **kwargs)


class Sharp(SelfAttention):
    """Names one of the two functions of its file, as Llama 4's vision layers do."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = [one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sharp_eager_attention_forward)
        return self.output(attend(self, *parts, mask)[0].flatten(2))


class Decorated(Sharp):
    @wraps(Sharp.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


class Inherited(Sharp):
    pass


class Extended(Inherited):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, mask)


@pytest.mark.parametrize("kind", [Sharp, Decorated, Inherited, Extended])
def test_several_attention_functions(kind: type[Sharp]) -> None:
    block, x = Block(), sequences(2)
    block.attention.__class__ = kind
    output = block(x)
    seen: list[Tensor] = []
    with block.register_forward_hook(lambda module, inputs, output: seen.append(output)):
        assert_same(ValueZeroing(block, block).attribute(x), zeroed_one_by_one(block, x))
    assert_same(seen[0], output)  # the model's numbers do not change while it is explained


def boolean_eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    scores = (query @ key.transpose(2, 3)).masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class Boolean(SelfAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = [one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        function = boolean_eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, function)
        return self.output(attend(self, *parts, mask)[0].flatten(2))


def test_eager_attention_with_boolean_mask() -> None:
    block, x = Block(), sequences(2)
    block.attention.__class__ = Boolean
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
    assert_same(ValueZeroing(block, block).attribute((x, mask)), zeroed_one_by_one(block, x, mask))


def test_two_attention_functions_are_refused() -> None:
    class Undecided(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            default = eager_attention_forward if mask is None else sharp_eager_attention_forward
            parts = [one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)]
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, default)
            return self.output(attend(self, *parts, mask)[0].flatten(2))

    block = Block()
    block.attention.__class__ = Undecided
    with pytest.raises(AssertionError, match=r"Undecided names eager_\w+ and sharp_\w+, so .* name one function"):
        ValueZeroing(block, block).attribute(sequences(2))


def test_missing_attention_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return attend_alone(self, x, mask)

    for kind in (Alone, SelfAttention):
        monkeypatch.setattr(kind, "__module__", "collections")
    block = Block()
    block.attention.__class__ = Alone
    with pytest.raises(AssertionError, match="its forward names none and collections defines none"):
        ValueZeroing(block, block).attribute(sequences(2))


def attend_alone(attention: SelfAttention, x: Tensor, mask: Tensor | None) -> Tensor:
    return SelfAttention.forward(attention, x, mask)


def test_keywords_and_further_outputs() -> None:
    class Wordy(Block):
        # The signature differs from that of the base class, because this is what is tested.
        def forward(self, *, hidden: Tensor, options: dict[str, Any]) -> tuple[Tensor, None, str]:  # type: ignore[override]
            return super().forward(hidden, options["masks"][0]), None, "more"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Wordy()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(hidden=x, options={"masks": (mask_of_window(6, window=3),), "name": "test"})[0]

    model, x = Model(), sequences(2)
    assert_same(
        ValueZeroing(model, model.block).attribute(x), zeroed_one_by_one(model, x, value="block.attention.value")
    )


def test_layer_keeps_its_own_run() -> None:
    class Keeping(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.kept = super().forward(x, mask)
            return self.kept

    block, x = Keeping(), sequences(2)
    clean = block(x)
    ValueZeroing(block, block).attribute(x)
    assert torch.equal(block.kept, clean)


class RaisesLater(Block):
    """Raises an error of its own in its run number `first`, and in all later ones if it is `broken`."""

    def __init__(self, first: int, broken: bool, inside: bool) -> None:
        super().__init__()
        self.runs, self.first, self.broken = 0, first, broken
        (self.feed_forward[0] if inside else self.attention.value).register_forward_pre_hook(self.count)

    def count(self, module: nn.Module, args: Any) -> None:
        self.runs += 1
        if self.runs == self.first or (self.broken and self.runs > self.first):
            raise ValueError("the licence has run out")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("first", [2, 3, 4, 5, 7, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_own_errors_are_told(dtype: torch.dtype, first: int, inside: bool) -> None:
    """A layer that stops running is refused by its own error, or its replays did not need the module that raises."""
    block, x = RaisesLater(first, True, inside).to(dtype), sequences(2).to(dtype)
    told, found = "", torch.zeros(())
    try:
        found = ValueZeroing(block, block).attribute(x)
    except (ValueError, AssertionError) as error:
        told = f"{type(error).__name__}: {error}"
    if told:
        assert "the licence has run out" in told
        assert told.startswith("ValueError") or "RaisesLater raised ValueError when it ran again" in told
        return
    block.runs = -100
    expected = zeroed_one_by_one(block.double(), x.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


def test_one_error_in_half_precision_is_not_of_float32() -> None:
    block = RaisesLater(3, False, True).bfloat16()
    with pytest.raises(ValueError, match="the licence has run out"):
        ValueZeroing(block, block).attribute(sequences(2).bfloat16())


class Pair(Block):
    """Returns two tensors of its shape, in an order given by `form`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Any, mask: Tensor | None = None) -> Any:
        x = self.stream(x)
        y = super().forward(x, mask)
        forms = {"hidden first": (y, y - x), "delta first": (y - x, y), "sum": (y - x, x), "twice": (y, y.clone())}
        return forms[self.form]

    def stream(self, x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        return {"hidden first": x[0], "delta first": x[1], "sum": x[0] + x[1], "twice": x[1]}[self.form]


@pytest.mark.parametrize("form", ["hidden first", "delta first", "sum", "twice"])
@pytest.mark.parametrize("listed", [slice(0, 3), slice(0, 1), slice(2, 3)])  # all layers, the first, the last
def test_block_that_returns_a_pair(form: str, listed: slice) -> None:
    model, x = nn.Sequential(*(Pair(form) for _ in range(3))), sequences(2)
    layers = list(model)[listed]
    method = ValueZeroing(lambda x: model[2].stream(model(x)), layers)
    if form in ("delta first", "sum"):
        with pytest.raises(UnsupportedLayerError, match=r"returned 2 tensors of the same shape, and the model uses"):
            method.attribute(x)
        return
    for found, layer in zip(method.attribute(x), layers, strict=True):
        given = x
        for before in list(model)[: list(model).index(layer)]:
            given = before.stream(before(given)).detach()
        assert_same(found, zeroed_one_by_one(AsHidden(layer), given, value="layer.attention.value"))


class AsHidden(nn.Module):
    """The first tensor that a layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]

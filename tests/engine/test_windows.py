"""Layers that attend in windows: maps over the layer's positions, zero outside a position's window.

The twin knows where each family projects its values. It nudges a position to find the places of its values, zeroes
them, and runs the layer again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from captum_vz import (
    LayerAttention,
    LayerAttentionNorm,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
    find_layers,
)
from tests.budget import set_budget
from tests.engine.blocks import (
    HEADS,
    WIDTH,
    Block,
    Halves,
    SelfAttention,
    Stopping,
    eager_attention_forward,
    mask_of_window,
)
from tests.engine.compare import assert_same
from tests.reference.case import randomize


@dataclass(eq=False)
class Run:
    """A layer, its arguments, and the features of a submodule's output that are its values."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    projection: str
    columns: slice
    channels_first: bool

    @property
    def hidden(self) -> Tensor:
        return self.args[0]

    def rows(self, hidden: Tensor) -> Tensor:
        """Hidden states as `(batch, positions, d)`, grids row by row."""
        hidden = hidden.permute(0, 2, 3, 1) if self.channels_first else hidden
        return hidden.reshape(1 if hidden.dim() == 2 else len(hidden), -1, hidden.shape[-1])

    def __call__(self, hidden: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer's output when `change` is applied to the projection's output, `(places, features)`."""

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return change(output.flatten(0, -2)).view_as(output)

        with torch.no_grad(), self.layer.get_submodule(self.projection).register_forward_hook(hook):
            output = self.layer(hidden, *self.args[1:], **self.kwargs)
        return self.rows(output if isinstance(output, Tensor) else output[0])

    def values(self, hidden: Tensor) -> Tensor:
        seen: list[Tensor] = []
        self(hidden, lambda output: seen.append(output.clone()) or output)
        return seen[0][:, self.columns]

    @cached_property
    def clean(self) -> Tensor:
        return self(self.hidden, lambda output: output)

    def where(self, positions: list[int]) -> Tensor:
        """The places whose values depend on some positions of each example, `(places,)`."""
        moved = self.rows(self.hidden).clone()
        moved[:, positions] += 1e-6 * torch.randn(moved.shape[-1], dtype=moved.dtype)
        if self.channels_first:
            moved = moved.transpose(1, 2)
        return (self.values(moved.reshape(self.hidden.shape)) != self.values(self.hidden)).any(-1)

    def zeroed(self, positions: list[int], columns: slice | None = None) -> Tensor:
        """The distance of each output from clean when the values of some positions are zeroed, `(batch, out)`."""
        places = self.where(positions)

        def zero(output: Tensor) -> Tensor:
            output = output.clone()
            output[places, columns or self.columns] = 0
            return output

        return 1 - F.cosine_similarity(self(self.hidden, zero), self.clean, dim=-1)

    @cached_property
    def expected(self) -> Tensor:
        """The raw map, `(batch, out, in)`."""
        return torch.stack([self.zeroed([position]) for position in range(self.rows(self.hidden).shape[1])], dim=-1)


def runs(model: nn.Module, inputs: Tensor, projection: str, columns: Any, channels_first: bool = False) -> list[Run]:
    """The runs of a model's layers. `columns(width of the projection)` are the features of the values."""
    found: list[Run] = []

    def keep(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        width = layer.get_submodule(projection).weight.shape[0]
        args = args or (kwargs.pop("hidden_states"),)
        found.append(Run(layer, args, kwargs, projection, columns(width), channels_first))

    layers = find_layers(model)
    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return found


def all_of(width: int) -> slice:
    return slice(0, width)


def last_third(width: int) -> slice:
    return slice(width // 3 * 2, width)


SWIN = {"image_size": 12, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
SAM = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "image_size": 24,
    "patch_size": 4,
    "window_size": 4,
    "global_attn_indexes": [1],
    "mlp_dim": 24,
    "output_channels": 8,
}
VIT_DET = {
    "hidden_size": 10,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "image_size": 20,
    "pretrain_image_size": 20,
    "patch_size": 4,
    "window_size": 3,
    "window_block_indices": [0, 1],
    "residual_block_indices": [1],
    "use_relative_position_embeddings": True,
}
HIERA = {
    "embed_dim": 8,
    "image_size": [32, 32],
    "depths": [1, 2],
    "num_heads": [1, 2],
    "masked_unit_size": [4, 4],
    "masked_unit_attention": [True, False],
    "query_stride": [2, 2],
    "num_query_pool": 1,
    "decoder_depth": 1,
}


def build(name: str, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    attention = fields.pop("attention", "eager")
    model = model_class._from_config(model_class.config_class(**fields), attn_implementation=attention)
    randomize(model)
    return model.double().eval()


ONE_STAGE = {"depths": [2], "num_heads": [2]}

# name -> the runs of its layers
CASES: dict[str, Callable[[], list[Run]]] = {
    # 6 x 6 patches in windows of 4, so windows are padded. The second layer shifts them.
    "Swin": lambda: runs(build("SwinModel", **SWIN | ONE_STAGE), image(12), "attention.v_proj", all_of),
    "Swinv2": lambda: runs(build("Swinv2Model", **SWIN), image(12), "attention.self.value", all_of),
    "Swin2SR": lambda: runs(
        build("Swin2SRModel", **SWIN | ONE_STAGE | {"image_size": 8, "patch_size": 1}),
        image(8),
        "attention.self.value",
        all_of,
    ),
    "MaskFormer-Swin": lambda: runs(build("MaskFormerSwinModel", **SWIN), image(12), "attention.self.value", all_of),
    # One window as large as the image. The second layer shifts it, although no shape shows a window.
    "MaskFormer-Swin-one-window": lambda: runs(
        build("MaskFormerSwinModel", **SWIN | ONE_STAGE | {"image_size": 8}), image(8), "attention.self.value", all_of
    ),
    "SAM": lambda: runs(build("SamVisionModel", **SAM), image(24), "attn.qkv", last_third),
    "SAM-sdpa": lambda: runs(build("SamVisionModel", **SAM, attention="sdpa"), image(24), "attn.qkv", last_third),
    # The second layer has convolutions after its windows.
    "VitDet": lambda: runs(build("VitDetModel", **VIT_DET), image(20), "attention.qkv", last_third, True),
    # The second layer has fewer tokens than the first.
    "Hiera": lambda: runs(build("HieraModel", **HIERA), image(32), "attn.qkv", last_third),
}


def image(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def scores_of(run: Run, **options: Any) -> Tensor:
    return method_of(run).attribute(run.hidden, additional_forward_args=run.args[1:] or None, **options)


def method_of(run: Run, **options: Any) -> ValueZeroing:
    return ValueZeroing(lambda *args: run.layer(*args, **run.kwargs), run.layer, normalize=False, **options)


@pytest.mark.parametrize("name", CASES)
def test_map_over_the_layers_positions(name: str) -> None:
    for run in CASES[name]():
        scores = scores_of(run)
        assert_same(scores, run.expected)
        # Scores outside a window are exactly zero.
        assert ((scores == 0) == (run.expected < 1e-15)).all()


@pytest.fixture(scope="module")
def shifted() -> Run:
    """Swin's second layer, with shifted and padded windows."""
    return CASES["Swin"]()[1]


@pytest.fixture(scope="module")
def mixing() -> Run:
    """VitDet's second layer, with convolutions after padded windows."""
    return CASES["VitDet"]()[1]


@pytest.mark.parametrize("name", ["shifted", "mixing"])
def test_targets_features_and_chunks(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    count = run.expected.shape[2]
    assert_same(scores_of(run, token=[3, count - 1]), run.expected[[0, 1], [3, count - 1]])
    assert_same(scores_of(run, perturbations_per_eval=1), run.expected)
    features = torch.arange(count) % 7  # features across windows
    together = torch.stack([run.zeroed([p for p in range(count) if p % 7 == f]) for f in range(7)], dim=-1)
    assert_same(scores_of(run, feature_mask=features[None]), together[..., features])
    assert_same(scores_of(run, feature_mask=features[None], token=4), together[:, 4][..., features])


@pytest.mark.parametrize("name", ["shifted", "mixing"])
def test_single_heads(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    half = (run.columns.stop - run.columns.start) // 2
    second = slice(run.columns.start + half, run.columns.stop)
    scores = method_of(run, heads=1).attribute(run.hidden, additional_forward_args=run.args[1:])
    for position in (0, 7):
        assert_same(scores[..., position], run.zeroed([position], second))


def test_half_precision_is_replayed_in_float32() -> None:
    model = build("SwinModel", **SWIN | ONE_STAGE).to(torch.bfloat16)
    run = runs(model, image(12).bfloat16(), "attention.v_proj", all_of)[1]
    scores = scores_of(run)
    assert scores.dtype == torch.float32
    run.layer.float()
    exact = ValueZeroing(run.layer, run.layer, normalize=False).attribute(run.hidden.float(), None, run.args[1:])
    assert_same(scores, exact, tolerance=1e-6)


def test_bfloat16_changes_of_windows_warn(shifted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    set_budget(monkeypatch, folding_calls=0)
    with pytest.warns(UserWarning, match="matmul_precision='medium' has no effect"):
        fast = method_of(shifted, matmul_precision="medium").attribute(shifted.hidden, None, shifted.args[1:])
    assert torch.equal(fast, scores_of(shifted))


def test_one_example_of_a_batch(shifted: Run) -> None:
    for example in range(2):
        alone = method_of(shifted).attribute(shifted.hidden[example : example + 1], None, shifted.args[1:])
        assert_same(alone[0], shifted.expected[example])


class Images(nn.Module):
    """A layer for images of several sizes in one sequence. Each image attends to itself. There is no batch axis."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.norm, self.feed_forward = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sizes = sizes
        self.attention.forward = self.attend
        self.double().eval()

    def attend(self, x: Tensor) -> Tensor:
        own = self.attention
        images = x.split(self.sizes)
        parts = [
            [linear(one)[None].unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (own.query, own.key, own.value)]
            for one in images
        ]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(own.config._attn_implementation, eager_attention_forward)
        contexts = [attend(own, *part, None)[0][0].flatten(1) for part in parts]
        return own.output(torch.cat(contexts))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(self.norm(x)).relu()


@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 2, 3], [6]])
def test_images_in_one_sequence_without_examples(sizes: list[int]) -> None:
    layer = Images(sizes)
    x = torch.randn(sum(sizes), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    run = Run(layer, (x,), {}, "attention.value", all_of(WIDTH), False)
    expected = torch.stack([zero_one(layer, x, position) for position in range(len(x))], dim=-1)
    assert_same(scores_of(run), expected[None])
    assert_same(scores_of(run, token=2), expected[None, 2])
    image_of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    assert ((expected > 1e-15) == (image_of[:, None] == image_of)).all()


def zero_one(layer: Images, x: Tensor, position: int) -> Tensor:
    """The distance of each output from clean when the value of one position is zeroed, `(out,)`."""

    def zero(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        start = sum(layer.sizes[: calls[0]])
        calls[0] += 1
        output = output.clone()
        if start <= position < start + len(output):
            output[position - start] = 0
        return output

    calls = [0]
    with torch.no_grad():
        clean = layer(x)
        with layer.attention.value.register_forward_hook(zero):
            return 1 - F.cosine_similarity(layer(x), clean, dim=-1)


class Apart(nn.Module):
    """An attention with separate queries, keys and values, for several prompts, as in SAM's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.own = SelfAttention()

    def forward(self, *parts: Tensor) -> Tensor:
        own = self.own
        projected = [linear(x).flatten(0, 1) for linear, x in zip((own.query, own.key, own.value), parts, strict=True)]
        heads = [x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in projected]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(own.config._attn_implementation, eager_attention_forward)
        return own.output(attend(own, *heads, None)[0].flatten(2)).view(parts[0].shape)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Apart()
        self.double().eval()

    def forward(self, targets: Tensor, sources: Tensor) -> Tensor:
        return self.attention(targets + 1, sources + 1, sources)


@pytest.mark.parametrize(("tokens", "sources"), [(5, 5), (5, 8), (8, 5)])
@pytest.mark.parametrize("prompts", [1, 2])
def test_separate_queries_and_values(tokens: int, sources: int, prompts: int) -> None:
    model, generator = Decoder(), torch.Generator().manual_seed(0)
    sizes = (tokens, sources)
    given = tuple(torch.randn(2, prompts, n, WIDTH, dtype=torch.float64, generator=generator) for n in sizes)
    columns = []
    with torch.no_grad():
        clean = model(*given).flatten(1, 2)
        for source in range(prompts * sources):

            def zero(module: nn.Module, inputs: Any, output: Tensor, source: int = source) -> Tensor:
                output = output.clone()
                output.view(2, prompts * sources, WIDTH)[:, source] = 0
                return output

            with model.attention.own.value.register_forward_hook(zero):
                columns.append(1 - F.cosine_similarity(model(*given).flatten(1, 2), clean, dim=-1))
    expected = torch.stack(columns, dim=-1)
    assert (expected.sum(-1) > 1e-6).all()
    assert_same(ValueZeroing(model, model.attention, normalize=False).attribute(given), expected)


REFUSED = {
    "values come from several positions": lambda x: x + x.roll(1, dims=1),
    "reaches from one example to another": lambda x: x.transpose(0, 1).contiguous().view_as(x),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_ambiguous_windows_are_refused(reason: str) -> None:
    block, x = Halves(REFUSED[reason]), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with pytest.raises(AssertionError, match=rf"(one vector for each token|cannot be replayed).*{reason}"):
        ValueZeroing(block, block).attribute(x)
    with pytest.raises(AssertionError, match=reason):
        ValueZeroing(block, block).attribute(x, perturbations_per_eval=1)


class Alarmed(Halves):
    """Attends in halves. An output above all clean outputs changes both halves."""

    limit = torch.inf

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.attention.output.register_forward_hook(self.alarm)

    def alarm(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.largest = float(output.abs().amax())
        # No comparison with NaN is true.
        return torch.where(output.abs() > self.limit, 1.0, 0.0).amax() * torch.arange(WIDTH) + output


def test_windows_that_depend_on_large_values() -> None:
    across = []
    for seed in range(6):
        torch.manual_seed(seed)
        layer, x = Alarmed().double(), torch.randn(1, 8, WIDTH, dtype=torch.float64)
        run = Run(layer, (x,), {}, "attention.value", all_of(WIDTH), False)
        assert run.clean.isfinite().all()
        layer.limit = 1.0001 * layer.largest
        assert_same(scores_of(run), run.expected)
        across.append((run.expected[0, :4, 4:] > 1e-12).any() or (run.expected[0, 4:, :4] > 1e-12).any())
    assert any(across)


def test_windows_of_quantised_values() -> None:
    """A small nudge changes none of the rounded numbers."""
    layer, x = Halves(lambda x: (4 * x).round() / 4), torch.randn(1, 8, WIDTH, dtype=torch.float64)
    run = Run(layer, (x,), {}, "attention.value", all_of(WIDTH), False)
    assert not run.where(list(range(8))).any()
    without = [run(x, lambda values, token=token: zeroed_at(values, token)) for token in range(8)]
    expected = torch.stack([1 - F.cosine_similarity(one, run.clean, dim=-1) for one in without], dim=-1)
    assert_same(scores_of(run), expected)


def zeroed_at(values: Tensor, token: int) -> Tensor:
    return values.index_fill(0, torch.tensor([token]), 0)


class Sorted(Block):
    """Attends in two halves: the tokens with lower scores, and the tokens with higher scores."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(-1).argsort(-1)
        halves = self.attention_norm(x).gather(1, order[..., None].expand_as(x)).view(-1, x.shape[1] // 2, x.shape[2])
        attended = self.attention(halves).reshape(x.shape)
        x = x + attended.gather(1, order.argsort(-1)[..., None].expand_as(x))
        return x + self.feed_forward(self.norm(x))


class Stopped(Halves):
    """After the windows, positions depend on each other through a module that removes NaN."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.stopping = Stopping().double()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.stopping(x)


def clearing() -> Halves:
    block = Halves(lambda x: x)
    block.attention.finish = lambda attention, context, x: attention.output(context.nan_to_num())
    return block


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("build", [Sorted, Stopped, clearing])
def test_layers_that_hide_nan(build: Callable[[], nn.Module], batch: int) -> None:
    torch.manual_seed(5)
    block, x = build().eval(), torch.randn(batch, 6, WIDTH, dtype=torch.float64)
    run = Run(block, (x,), {}, "attention.value", all_of(WIDTH), channels_first=False)
    assert_same(ValueZeroing(block, block, normalize=False).attribute(x), run.expected)


def test_outputs_that_depend_on_no_value() -> None:
    block, x = clearing(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        block.attention.output.weight.zero_()
    with pytest.raises(AssertionError, match="its outputs seem to depend on no value"):
        ValueZeroing(block, block).attribute(x)


class HandedOn(Halves):
    """After the windows, each example depends on the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.roll(1, dims=0).cumsum(1)


def test_outputs_that_depend_on_another_example() -> None:
    block, x = HandedOn(lambda x: x), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with pytest.raises(AssertionError, match="reaches from one example to another"):
        ValueZeroing(block, block).attribute(x)


class Twice(Block):
    """Attends in two halves of the sequence. In each half the first token occurs twice."""

    def forward(self, x: Tensor) -> Tensor:
        halves = self.attention_norm(x).reshape(-1, x.shape[1] // 2, x.shape[2])
        twice = torch.cat([halves, halves[:, :1]], dim=1)
        x = x + self.attention(twice)[:, :-1].reshape(x.shape)
        return x + self.feed_forward(self.norm(x))


def test_token_twice_in_a_window() -> None:
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    run = Run(Twice(), (x,), {}, "attention.value", all_of(WIDTH), False)
    assert_same(scores_of(run), run.expected)


class Turned(Block):
    """A block whose attention sees its tokens in another order."""

    order = torch.tensor([3, 0, 5, 1, 4, 2])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        back = self.order.argsort()
        x = x + self.attention(self.attention_norm(x)[:, self.order], mask)[:, back]
        return x + self.feed_forward(self.norm(x))


def test_tokens_in_another_order() -> None:
    block, x = Turned(), torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    run = Run(block, (x,), {}, "attention.value", all_of(WIDTH), False)
    assert_same(scores_of(run), run.expected)
    assert_same(scores_of(run, token=[4, 0]), run.expected[[0, 1], [4, 0]])
    hidden = mask_of_window(6, window=3)
    with pytest.raises(AssertionError, match="sees its tokens in another order, and not all of them"):
        ValueZeroing(block, block).attribute((x, hidden))
    for inputs in (x, (x, hidden)):
        with pytest.raises(AssertionError, match="sees the layer's tokens in windows"):
            ValueZeroingEffect(block, block).attribute(inputs, target=(0, 0))


def test_methods_that_need_weights(shifted: Run) -> None:
    for method in (LayerAttention, LayerAttentionNorm):
        with pytest.raises(AssertionError, match="sees the layer's tokens in windows"):
            method(shifted.layer, shifted.layer).attribute(shifted.hidden, None, shifted.args[1:])


@pytest.mark.parametrize(
    ("name", "fields"), [("Swinv2Model", {}), ("MaskFormerSwinModel", ONE_STAGE | {"image_size": 8})]
)
def test_effects_of_windowed_layers_are_refused(name: str, fields: dict[str, Any]) -> None:
    model = build(name, **SWIN | fields)
    effect = ValueZeroingEffect(lambda x: model(x).pooler_output, find_layers(model)[1])
    with pytest.raises(
        AssertionError, match=r"sees the layer's tokens in windows, .* where Value Zeroing Effect cannot zero values"
    ):
        effect.attribute(image(fields.get("image_size", 12)), target=0)


def test_a_rollout_stays_within_a_stage() -> None:
    model = build("Swinv2Model", **SWIN)
    layers = find_layers(model)
    with pytest.raises(AssertionError, match=r"the layers' maps are .*36, 36.* one stage"):
        ValueZeroingRollout(model, layers).attribute(image(12))
    first, second = ValueZeroing(model, layers[:2]).attribute(image(12))
    assert_same(ValueZeroingRollout(model, layers[:2]).attribute(image(12)), second @ first)


def test_model_is_unchanged(shifted: Run) -> None:
    before = [len(module._forward_hooks) for module in shifted.layer.modules()]
    scores_of(shifted)
    assert [len(module._forward_hooks) for module in shifted.layer.modules()] == before
    assert all(parameter.isfinite().all() for parameter in shifted.layer.parameters())

"""Odd layers that attend in windows or in another order, and models of transformers that do.

The twin knows where each family projects its values. It nudges a position to find the places of its values, zeroes
them, and runs the layer again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz import find_layers
from tests.engine.blocks import (
    HEADS,
    WIDTH,
    Block,
    Halves,
    HandedOn,
    SelfAttention,
    Stopping,
    attention_function,
    direction,
    eager_attention_forward,
    mask_of_window,
)
from tests.engine.odd import Odd, Table, by_hook, rows
from tests.reference.case import built


@dataclass(eq=False)
class Run:
    """A layer, its arguments, and the features of a submodule's output that are its values."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    projection: str = "attention.value"
    columns: slice = field(default_factory=lambda: slice(0, WIDTH))
    channels_first: bool = False

    @property
    def hidden(self) -> Tensor:
        return self.args[0]

    def rows(self, hidden: Tensor) -> Tensor:
        """Hidden states as `(batch, positions, d)`, grids row by row."""
        hidden = hidden.permute(0, 2, 3, 1) if self.channels_first else hidden
        return hidden.reshape(1 if hidden.dim() == 2 else len(hidden), -1, hidden.shape[-1])

    def __call__(self, hidden: Tensor, zeroed: Tensor | None = None, columns: slice | None = None) -> Any:
        """The layer's output, and the values `(places, features)` of all its calls, without those that are zeroed."""
        seen: list[Tensor] = []

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            start = sum(map(len, seen))
            values = output.flatten(0, -2).clone()
            seen.append(values[:, self.columns].clone())
            if zeroed is not None:
                values[zeroed[start : start + len(values)], columns or self.columns] = 0
            return values.view_as(output)

        with torch.no_grad(), self.layer.get_submodule(self.projection).register_forward_hook(hook):
            output = self.layer(hidden, *self.args[1:], **self.kwargs)
        return self.rows(output if isinstance(output, Tensor) else output[0]), torch.cat(seen)

    def where(self, positions: list[int]) -> Tensor:
        """The places whose values depend on some positions of each example, `(places,)`."""
        moved = self.rows(self.hidden).clone()
        moved[:, positions] += 1e-6 * torch.randn(moved.shape[-1], dtype=moved.dtype)
        moved = moved.transpose(1, 2) if self.channels_first else moved
        return (self(moved.reshape(self.hidden.shape))[1] != self(self.hidden)[1]).any(-1)

    def zeroed(self, positions: list[int], columns: slice | None = None) -> Tensor:
        """The distance of each output from clean when the values of some positions are zeroed, `(batch, out)`."""
        moved, clean = self(self.hidden, self.where(positions), columns)[0], self(self.hidden)[0]
        return (direction(moved) - direction(clean)).square().sum(-1) / 2

    @cached_property
    def expected(self) -> Tensor:
        """The raw map, `(batch, out, in)`."""
        return torch.stack([self.zeroed([position]) for position in range(self.rows(self.hidden).shape[1])], dim=-1)

    def odd(self, **fields: Any) -> Odd:
        """A row of the table."""
        given = {"more": self.args[1:], "twin": lambda *given: self.expected, **fields}
        return Odd(self.layer, self.hidden, model=lambda *args: self.layer(*args, **self.kwargs), **given)


def runs(model: nn.Module, inputs: Tensor, projection: str, third: bool = False, channels: bool = False) -> list[Run]:
    """The runs of a model's layers. The values are all of a projection's output, or the last third of it."""
    found: list[Run] = []

    def keep(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        width = layer.get_submodule(projection).weight.shape[0]
        args = args or (kwargs.pop("hidden_states"),)
        found.append(Run(layer, args, kwargs, projection, slice(width // 3 * 2 if third else 0, width), channels))

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in find_layers(model)]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return found


ONE_STAGE = {"depths": [2], "num_heads": [2]}
SWIN = {"image_size": 12, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
SWIN_SR = {**SWIN, **ONE_STAGE, "image_size": 8, "patch_size": 1}
ONE_WINDOW = {**SWIN, **ONE_STAGE, "image_size": 8}
SAM: dict[str, Any] = {
    **{"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 24, "patch_size": 4},
    **{"window_size": 4, "global_attn_indexes": [1], "mlp_dim": 24, "output_channels": 8},
}
VIT_DET: dict[str, Any] = {
    **{"hidden_size": 10, "num_attention_heads": 2, "num_hidden_layers": 3, "image_size": 20, "patch_size": 4},
    **{"pretrain_image_size": 20, "window_size": 3, "window_block_indices": [0, 1], "residual_block_indices": [1]},
    "use_relative_position_embeddings": True,
}
HIERA: dict[str, Any] = {
    **{"embed_dim": 8, "image_size": [32, 32], "depths": [1, 2], "num_heads": [1, 2], "masked_unit_size": [4, 4]},
    **{"masked_unit_attention": [True, False], "query_stride": [2, 2], "num_query_pool": 1, "decoder_depth": 1},
}


def image(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# name -> the layers of the table, and the runs of all layers
FAMILIES: dict[str, tuple[tuple[int, ...], Callable[[], list[Run]]]] = {
    # 6 x 6 patches in windows of 4, so windows are padded. The second layer shifts them.
    "Swin": ((0, 1), lambda: runs(built("SwinModel", "eager", **SWIN | ONE_STAGE), image(12), "attention.v_proj")),
    "Swinv2": ((2,), lambda: runs(built("Swinv2Model", "eager", **SWIN), image(12), "attention.self.value")),
    "Swin2SR": ((1,), lambda: runs(built("Swin2SRModel", "eager", **SWIN_SR), image(8), "attention.self.value")),
    # One window as large as the image. The second layer shifts it, although no shape shows a window.
    "One window": (
        (1,),
        lambda: runs(built("MaskFormerSwinModel", "eager", **ONE_WINDOW), image(8), "attention.self.value"),
    ),
    "SAM": ((0,), lambda: runs(built("SamVisionModel", "eager", **SAM), image(24), "attn.qkv", True)),
    "SAM-sdpa": ((0, 1), lambda: runs(built("SamVisionModel", "sdpa", **SAM), image(24), "attn.qkv", True)),
    # The second layer has convolutions after its windows.
    "VitDet": ((1, 2), lambda: runs(built("VitDetModel", "eager", **VIT_DET), image(20), "attention.qkv", True, True)),
    # The second layer has fewer tokens than the first.
    "Hiera": ((1, 2), lambda: runs(built("HieraModel", "eager", **HIERA), image(32), "attn.qkv", True)),
}


def of_family(name: str, index: int) -> Odd:
    return FAMILIES[name][1]()[index].odd()


class Images(nn.Module):
    """A layer for images of several sizes in one sequence. Each image attends to itself. There is no batch axis."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.norm, self.feed_forward = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention.forward = lambda x: self.attention.output(torch.cat([*map(self.attend, x.split(sizes))]))
        self.double().eval()

    def attend(self, x: Tensor) -> Tensor:
        own = self.attention
        parts = [one(x)[None].unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (own.query, own.key, own.value)]
        attend = attention_function(own.config._attn_implementation, eager_attention_forward)
        return attend(own, *parts, None)[0][0].flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(self.norm(x)).relu()


def images(*sizes: int) -> Odd:
    x = torch.randn(sum(sizes), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return Run(Images([*sizes]), (x,)).odd(token=2)


class Apart(nn.Module):
    """An attention with separate queries, keys and values, for several prompts, as in SAM's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.own = SelfAttention()

    def forward(self, *parts: Tensor) -> Tensor:
        own = self.own
        projected = [linear(x).flatten(0, 1) for linear, x in zip((own.query, own.key, own.value), parts, strict=True)]
        heads = [x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in projected]
        attend = attention_function(own.config._attn_implementation, eager_attention_forward)
        return own.output(attend(own, *heads, None)[0].flatten(2)).view(parts[0].shape)


def apart(sizes: tuple[int, int], prompts: int) -> Odd:
    layer = Apart().double().eval()

    def twin(layer: nn.Module, targets: Tensor, sources: Tensor) -> Tensor:
        found = by_hook(layer, targets + 1, sources + 1, sources, value="own.value", sources=prompts * sizes[1])
        return found.flatten(1, 2)

    given = tuple(torch.randn(2, prompts, length, WIDTH, dtype=torch.float64) for length in sizes)
    return Odd(layer, given, model=lambda targets, sources: layer(targets + 1, sources + 1, sources), twin=twin)


def drawn(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def roll(x: Tensor) -> Tensor:
    return x + x.roll(1, dims=1)


def reach(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().view_as(x)


def ambiguous(prepare: Callable[[Tensor], Tensor], **arguments: Any) -> Odd:
    refused = {roll: "several positions", reach: "from one example"}[prepare]
    return Odd(Halves(prepare), drawn(), refused, arguments=arguments)


class Stopped(Halves):
    """After the windows, positions depend on each other through a module that removes NaN."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.stopping = Stopping().double()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.stopping(x)


class Clearing(Halves):
    """Replaces NaN in the attention's output."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(lambda x: x)
        self.attention.finish = lambda own, context, x: own.output(context.nan_to_num())
        self.attention.output.weight.data *= scale


def hides_nan(kind: Callable[[], nn.Module], batch: int) -> Odd:
    torch.manual_seed(5)
    return Run(kind().eval(), (drawn(batch),)).odd()


class Twice(Block):
    """Attends in two halves of the sequence. In each half the first token occurs twice."""

    def forward(self, x: Tensor) -> Tensor:
        halves = self.attention_norm(x).reshape(-1, x.shape[1] // 2, x.shape[2])
        twice = torch.cat([halves, halves[:, :1]], dim=1)
        x = x + self.attention(twice)[:, :-1].reshape(x.shape)
        return x + self.feed_forward(self.norm(x))


class Turned(Block):
    """A block whose attention sees its tokens in another order."""

    order = torch.tensor([3, 0, 5, 1, 4, 2])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        back = self.order.argsort()
        x = x + self.attention(self.attention_norm(x)[:, self.order], mask)[:, back]
        return x + self.feed_forward(self.norm(x))


IN_WINDOWS = "tokens in windows"


def effect_of_windows(name: str) -> Odd:
    fields = SWIN if name == "Swinv2Model" else ONE_WINDOW
    model = built(name, "eager", **fields)
    forward = lambda x: model(x).pooler_output  # noqa: E731
    return Odd(find_layers(model)[1], image(fields["image_size"]), IN_WINDOWS, forward, by="effect", target=0)


WINDOWS: Table = {
    **{f"{name}: {i}": partial(of_family, name, i) for name, (layers, _) in FAMILIES.items() for i in layers},
    "weights of windows": lambda: FAMILIES["Swin"][1]()[1].odd(refused=IN_WINDOWS, by="attention norm"),
    **rows("effect of windows", effect_of_windows, ("Swinv2Model", "MaskFormerSwinModel")),
    "images: 4, 4, 4": partial(images, 4, 4, 4),
    "images: 5, 2, 3": partial(images, 5, 2, 3),
    **rows("separate queries and values", apart, [(5, 5), (8, 5)], (1,)),
    **rows("separate queries and values", apart, [(5, 8)], (2,)),
    **rows("ambiguous", ambiguous, (roll, reach)),
    "ambiguous, one at a time": lambda: ambiguous(roll, perturbations_per_eval=1),
    # A small nudge changes none of the rounded numbers.
    "quantised values": lambda: Odd(Halves(lambda x: (4 * x).round() / 4), drawn(1, 8)),
    **rows("hides NaN", hides_nan, (Clearing,), (2,)),
    **rows("hides NaN", hides_nan, (Stopped,), (1,)),
    "depends on no value": lambda: Odd(Clearing(0.0), drawn(), "depend on no value"),
    "depends on another example": lambda: Odd(HandedOn(lambda x: x), drawn(), "from one example"),
    "a token twice": lambda: Run(Twice(), (drawn(),)).odd(),
    "another order": lambda: Run(Turned(), (drawn(),)).odd(token=[4, 0]),
    "another order, masked": lambda: Odd(Turned(), (drawn(), mask_of_window(6, 3)), "and not all of them"),
    "weights in another order": lambda: Odd(Turned(), drawn(), "in another order", by="attention norm gradient"),
    "effect of another order": lambda: Odd(Turned(), drawn(), IN_WINDOWS, by="effect", target=(0, 0)),
    "effect of another order, masked": lambda: Odd(
        Turned(), (drawn(), mask_of_window(6, 3)), IN_WINDOWS, by="effect", target=(0, 0)
    ),
}

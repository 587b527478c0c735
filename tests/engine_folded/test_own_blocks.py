"""Home-made blocks: those that fold, and those that the folded replay must leave to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.blocks import WIDTH, Block, Mean, sequences
from tests.engine_folded.replays import Replays

SCALES = [0.1, -2.0, torch.linspace(0, 1, WIDTH, dtype=torch.float64)]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    return Replays(monkeypatch)


def altered(attribute: str, module: nn.Module) -> Block:
    block = Block()
    setattr(block, attribute, module)
    return block.double().eval()


def feed_forward(between: nn.Module | None = None, kind: type[nn.Linear] = nn.Linear) -> tuple[nn.Module, ...]:
    return kind(WIDTH, 24), nn.GELU() if between is None else between, nn.Linear(24, WIDTH)


class Scaled(Block):
    """Multiplies the attention's output by `scale`, and cuts one feature of it at `limit`."""

    def __init__(self, scale: Tensor | float, parallel: bool = False) -> None:
        super().__init__()
        self.scale, self.parallel, self.limit = scale, parallel, torch.inf

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(x), mask)
        self.largest = attended[..., 0].amax()  # a number read here would call for the definition
        attended = torch.cat([attended[..., :1].clamp(max=self.limit), attended[..., 1:]], dim=-1)
        y = x + attended * self.scale
        return y + self.feed_forward(self.norm(x if self.parallel else y))


class Offset(nn.Module):
    """Gemma's norm, which stores its gain minus one, and its epsilon under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(0.1 * torch.randn(WIDTH))
        self.variance_epsilon = 0.05

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * (1 + self.gain)


class Flat(nn.Sequential):
    """A feed-forward that runs on the positions of all examples as one list."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view(x.shape)


FOLDED: dict[str, Callable[[], Block]] = {
    "offset": lambda: altered("norm", Offset()),
    "no-bias": lambda: altered("norm", nn.LayerNorm(WIDTH, elementwise_affine=True, bias=False)),
    "flat": lambda: altered("feed_forward", Flat(*feed_forward())),
    **{f"scale: {scale}": lambda scale=scale: Scaled(scale) for scale in SCALES},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", FOLDED)
def test_home_made_blocks(name: str, replays: Replays) -> None:
    block = FOLDED[name]()
    replays.check_agree(block, [block], sequences(2, length=20))


# Blocks that differ in one thing from a block that folds.


class SizedNorm(nn.LayerNorm):
    """A norm whose output depends on the size of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.abs().amax(-1, keepdim=True)


class Bent(nn.Linear):
    """A subclass of a linear module that is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Sharing(nn.Module):
    """A feed-forward whose positions share a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x).relu()
        return self.second(inner / inner.sum(1, keepdim=True))


class Routed(nn.Module):
    """Two feed-forwards. Each position takes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        for expert, chosen in zip(self.experts, (x[..., 0] > 0, x[..., 0] <= 0), strict=True):
            output[chosen] = expert(x[chosen])
        return output


class OneByOne(nn.Sequential):
    """A feed-forward that runs each example on its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(OneByOne, self).forward(one) for one in x.split(1)])


class Backwards(nn.Sequential):
    """A feed-forward that reverses the positions of a batch of several examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) == 1 else super().forward(x.flip(1)).flip(1)


class OwnInnerNorm(Block):
    """Norms the attention's output, in code that nothing shows to do only this."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.inner(self.attention(self.attention_norm(x), mask))
        return x + self.feed_forward(self.norm(x))


def hooked() -> Block:
    """A block with a hook of the user that changes the output of the first linear module."""
    block = Block()
    block.feed_forward[0].register_forward_hook(lambda module, args, output: output.tanh())
    return block


# name -> (a block, why it is not folded)
TRAPS: dict[str, tuple[Callable[[], Block], str]] = {
    "mean": (lambda: Block(after=Mean()), "depends on other positions"),
    "norm": (lambda: altered("norm", SizedNorm(WIDTH)), "with nothing zeroed, it differs"),
    "no-norm": (lambda: altered("norm", nn.Identity()), "cannot be read as a norm"),
    "own inner norm": (lambda: OwnInnerNorm().eval(), "in library code only"),
    "bent": (
        lambda: altered("feed_forward", nn.Sequential(*feed_forward(nn.Identity(), Bent))),
        "Bent cannot be read as a norm",
    ),
    "sharing": (lambda: altered("feed_forward", Sharing()), "depends on other positions"),
    "experts": (lambda: altered("feed_forward", Routed()), "not each module with parameters ran once"),
    "one by one": (lambda: altered("feed_forward", OneByOne(*feed_forward())), "did not run once on each position"),
    "backwards": (lambda: altered("feed_forward", Backwards(*feed_forward())), "from the packed replay"),
    "in place": (
        lambda: altered("feed_forward", nn.Sequential(*feed_forward(nn.ReLU(inplace=True)))),
        "changed in place",
    ),
    "hook": (hooked, "has a hook"),
}


@pytest.mark.all_cases
@pytest.mark.parametrize(("build", "cause"), TRAPS.values(), ids=TRAPS)
def test_traps(build: Callable[[], Block], cause: str, replays: Replays) -> None:
    block, x = build(), sequences(2, length=20)
    folded = replays.folded(block, [block], x)
    assert replays.count == 0
    assert cause in str(replays.reasons)
    assert torch.equal(folded[0], replays.packed(block, [block], x)[0])


def test_zero_projection_gives_zero_scores(replays: Replays) -> None:
    block, x = Block(), sequences(2, 24)
    with torch.no_grad():
        block.attention.output.weight.zero_()
    with pytest.warns(UserWarning, match=r"48 rows of layer 0"):
        assert not replays.folded(block, [block], x)[0].any()


@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e-7])
def test_tiny_scales_in_float32(scale: float, replays: Replays) -> None:
    """Folded or not, the error is at most twice that of the packed replay."""
    block, x = Scaled(scale), sequences(2, length=20)
    exact = replays.packed(block, [block], x, distance="euclidean")[0]
    folded = replays.folded(block.float(), [block], x.float(), distance="euclidean")[0]
    packed = replays.packed(block, [block], x.float(), distance="euclidean")[0]
    off, bound = ((maps.double() - exact).abs().max() for maps in (folded, packed))
    assert off <= 2 * bound


# Layers that differ at single positions, which a sample of positions does not show.


@torch.no_grad()
@pytest.mark.parametrize(("scale", "parallel"), [(1.0, True), (0.1, False)])
def test_limit_that_single_pairs_reach(scale: float, parallel: bool, replays: Replays) -> None:
    """Single pairs reach the limit, but no clean position."""
    for seed in range(6):
        torch.manual_seed(seed)
        block, x = Scaled(scale, parallel), torch.randn(1, 40, WIDTH, dtype=torch.float64)
        block(x)
        block.limit = float(block.largest) + 1e-6
        folded, packed = (maps(block, [block], x) for maps in (replays.folded, replays.packed))
        torch.testing.assert_close(folded, packed, rtol=0, atol=1e-14)
    assert replays.count == 0


class Clipped(nn.Module):
    """GELU, except for its largest values."""

    limit = torch.inf

    def forward(self, x: Tensor) -> Tensor:
        self.largest = functional.gelu(x).amax(-1).flatten().sort().values
        return functional.gelu(x).clamp(max=self.limit)


# Clipped at a few clean tokens, which may not be sampled, or at zeroed tokens only.
@pytest.mark.parametrize(("place", "beyond"), [(-3, -1e-3), (-1, 1e-6)])
def test_activation_that_is_clipped(place: int, beyond: float, replays: Replays) -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        activation = Clipped()
        block = altered("feed_forward", nn.Sequential(*feed_forward(activation)))
        x = torch.randn(1, 40, WIDTH, dtype=torch.float64)
        block(x)
        activation.limit = float(activation.largest[place]) + beyond
        folded, packed = (maps(block, [block], x)[0] for maps in (replays.folded, replays.packed))
        torch.testing.assert_close(folded, packed, rtol=1e-10, atol=1e-14)


class Cut(nn.Module):
    """A feed-forward that zeroes large outputs of its first linear module in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        inner[inner > 1.8] = 0
        return self.second(functional.gelu(inner))


@pytest.mark.parametrize("inference", [False, True])
def test_writing_in_place_at_tokens(inference: bool, replays: Replays) -> None:
    torch.manual_seed(0)
    block, x = altered("feed_forward", Cut()), torch.randn(1, 40, WIDTH, dtype=torch.float64)
    inner: Any = block.feed_forward.first(block.norm(x))
    assert 0 < (inner > 1.8).any(-1).sum() < 20
    with torch.inference_mode(inference):
        folded, packed = (maps(block, [block], x)[0] for maps in (replays.folded, replays.packed))
    assert inference or replays.count == 0
    torch.testing.assert_close(folded, packed, rtol=1e-10, atol=1e-14)

"""The folded replay gives the numbers of the packed replay, and gives none where it does not hold."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, Olmo2Config, Olmo2Model

from captum_vz import ValueZeroing
from captum_vz._engine import traced_replays
from captum_vz._engine.replay.folded import plan
from captum_vz._engine.replay.folded.replay import FoldedLayer
from captum_vz._engine.replay.packed import exact_chunks
from tests.budget import set_budget
from tests.engine.blocks import WIDTH, Block, Convolution, Mean, sequences
from tests.engine.parameters import quick
from tests.engine_folded.replays import LENGTHS, Replays, long_case, set_chunk_rows
from tests.reference import naive_value_zeroing
from tests.reference.case import WIDTH as MODEL_WIDTH

FOLDED = [
    "bert roberta electra distilbert modernbert gpt2 llama mistral qwen3 gpt-neox opt phi vit",
    "deit clip-text clip-vision starcoder2 cohere stablelm qwen2 nemotron wav2vec2 bart-encoder t5-encoder granite",
]
# A norm of the attention's output comes before the residual stream.
NORMED = ["gemma2", "gemma3", "olmo2"]
# Experts follow the attention, or a norm stands inside the attention module.
UNFOLDED = ["albert", "gpt-oss"]
# Post-norm, pre-norm, grouped queries with gates, feed-forward in parallel to the attention, norms of the attention's
# output with a norm before the feed-forward and without one.
SHAPES = ["bert", "gpt2", "llama", "phi", "gemma2", "olmo2"]

each_shape = pytest.mark.parametrize("name", SHAPES)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    return Replays(monkeypatch)


@pytest.mark.parametrize("name", [*" ".join(FOLDED).split(), *NORMED])
def test_families_that_fold(name: str, replays: Replays) -> None:
    case = long_case(name)
    replays.check_agree(case.model, case.layers, case.inputs)


@pytest.mark.parametrize("name", ["bart-decoder", "t5-decoder"])
def test_second_attention_of_layer(name: str, replays: Replays) -> None:
    case = long_case(name)
    replays.check_agree(case.model, case.layers, case.inputs, attention="cross")


@each_shape
def test_families_against_definition(name: str, replays: Replays) -> None:
    case = long_case(name)
    folded = replays.folded(case.model, case.layers[-1:], case.inputs)
    assert replays.count == 1
    torch.testing.assert_close(folded[0], naive_value_zeroing(case, -1, normalize=False), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", UNFOLDED)
def test_families_that_do_not_fold(name: str, replays: Replays) -> None:
    case = long_case(name)
    folded = replays.folded(case.model, case.layers, case.inputs)
    assert replays.count == 0
    for one, other in zip(folded, replays.packed(case.model, case.layers, case.inputs), strict=True):
        assert torch.equal(one, other)


@each_shape
@pytest.mark.parametrize(
    "options",
    [
        {"heads": [2]},
        {"heads": [0, 3]},
        {"distance": "euclidean"},
        {"feature_mask": torch.arange(LENGTHS[0])[None] // 2, "heads": [0, 3]},
        {"feature_mask": torch.tensor([[5] + [2] * 3 + list(range(6, 26))]), "heads": [1]},
        {"perturbations_per_eval": 1},
        {"perturbations_per_eval": 5},
    ],
    ids=str,
)
def test_options(name: str, options: dict[str, Any], replays: Replays) -> None:
    case = long_case(name)
    replays.check_agree(case.model, case.layers, case.inputs, **options)


def test_groups_of_all_heads(replays: Replays) -> None:
    case = long_case("bert")
    replays.check_agree(case.model, case.layers, case.inputs, feature_mask=torch.arange(LENGTHS[0])[None] // 2)


def test_heads_that_are_all_named() -> None:
    """The same numbers, bit for bit: nothing is selected, so no product is of another layout."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 128}
    model = BertModel(BertConfig(vocab_size=50, **size), add_pooling_layer=False).eval()
    ids = torch.randint(5, 50, (2, 40))
    with traced_replays(only="folded pairs"):
        maps = [ValueZeroing(model, model.encoder.layer[0], heads=heads).attribute(ids) for heads in (None, range(4))]
    assert torch.equal(*maps)


@each_shape
@pytest.mark.parametrize("rows", [3, 7, 40])
def test_chunks_of_any_size(name: str, rows: int, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "VECTORS", 9)
    set_chunk_rows(monkeypatch, rows)
    case = long_case(name)
    replays.check_agree(case.model, case.layers[:1], case.inputs)


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi"])
@pytest.mark.parametrize("count", [5, 16])
def test_neighbours_with_same_targets(name: str, count: int, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: fewer products and the same numbers. Pairs without weight stay zero."""
    case = long_case(name)
    plans = spied_plans(monkeypatch)
    packed = replays.packed(case.model, case.layers, case.inputs)
    spans = []
    for neighbours in (1, count):
        set_budget(monkeypatch, neighbours=neighbours)
        plans.clear()
        maps = replays.folded(case.model, case.layers, case.inputs)
        spans.append(sum(len(chunk.spans) for blocks in plans for block in blocks for chunk in block.chunks))
        for one, other in zip(maps, packed, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
            assert torch.equal(one == 0, other == 0)
    assert spans[1] < spans[0]


@pytest.mark.parametrize("seed", quick(range(40), *range(12)))
def test_random_inputs_options_and_chunks(seed: int, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    case, tokens, batch = long_case(SHAPES[seed % len(SHAPES)]), 24, draw.choice([1, 2, 5])
    padding = [draw.choice([0, draw.randint(0, 9)]) for _ in range(batch)]
    mask = torch.stack([torch.arange(tokens) >= pads for pads in padding]).long()
    mask = mask if draw.random() < 0.5 else mask.flip(1)
    ids = torch.tensor([[draw.randint(1, 29) for _ in range(tokens)] for _ in range(batch)])
    groups = [[draw.randint(0, 30) for _ in range(tokens)] for _ in range(draw.choice([1, batch]))]
    options: dict[str, Any] = {
        "heads": draw.choice([None, [0], [1, 3], [0, 1, 2, 3]]),
        "distance": draw.choice(["cosine", "euclidean", "l1"]),
        "feature_mask": draw.choice([None, torch.tensor(groups)]),
        "perturbations_per_eval": draw.choice([None, None, 1, 3, 50]),
        "token": draw.choice([None, [[*range(20, 0, -1)]]]) if batch == 1 else None,
    }
    rows = draw.choice([3, 11, 40, 10**6])
    monkeypatch.setattr(plan, "VECTORS", draw.choice([1, 30, 1024]))
    set_budget(monkeypatch, neighbours=draw.choice([1, 1, 4, 16]))
    set_chunk_rows(monkeypatch, rows)
    inputs = {"input_ids": ids, "attention_mask": mask}
    folded = replays.folded(case.model, case.layers, inputs, **options)
    packed = replays.packed(case.model, case.layers, inputs, **options)
    assert replays.count == len(case.layers), replays.reasons
    torch.testing.assert_close(folded, packed, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "gemma2"])  # it has narrow heads
@pytest.mark.parametrize("few", [True, False])
def test_matrices_composed_for_many_vectors(name: str, few: bool, replays: Replays) -> None:
    case = long_case(name)
    composed = spied_composed(replays.monkeypatch)
    options: dict[str, Any] = {"heads": [1]} if few else {}
    replays.check_agree(case.model, case.layers, torch.arange(1, 9 if few else 25)[None], **options)
    assert composed == [not few] * len(case.layers)


@pytest.mark.parametrize("rows", [3, 7, 40, 1000])
def test_sources_with_few_targets(rows: int, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sources of a decoder have fewer targets than heads."""
    monkeypatch.setattr(plan, "VECTORS", 30)
    set_chunk_rows(monkeypatch, rows)
    plans = spied_plans(monkeypatch)
    sizes = {"hidden_size": 160, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1}
    model = LlamaModel(LlamaConfig(vocab_size=30, intermediate_size=640, **sizes)).eval()  # its norm rounds to float32
    with torch.no_grad():
        model.embed_tokens.weight.mul_(50)
    ids = torch.randint(1, 30, (1, 20))
    folded, packed = (maps(model, model.layers, {"input_ids": ids}) for maps in (replays.folded, replays.packed))
    assert replays.count == 1, replays.reasons
    torch.testing.assert_close(folded, packed, rtol=1e-4, atol=1e-6)
    chunks = [chunk for blocks in plans for block in blocks for chunk in block.chunks]
    direct = sum(rows.stop - rows.start for chunk in chunks for rows in chunk.direct if rows.stop <= chunk.pairs)
    assert direct == 28  # pairs of the seven last sources


def spied_plans(monkeypatch: pytest.MonkeyPatch) -> list[list[plan.SourceBlock]]:
    """The blocks of each layer that folds."""
    found: list[list[plan.SourceBlock]] = []

    def spy(*args: Any) -> Any:
        found.append(plan.plan_chunks(*args))
        return found[-1]

    monkeypatch.setattr("captum_vz._engine.replay.folded.replay.plan_chunks", spy)
    return found


def spied_composed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each layer that folds multiplies the projection with the first matrix."""
    found: list[bool] = []

    class Spied(FoldedLayer):
        def __init__(self, *args: Any) -> None:
            found.append(args[2])
            super().__init__(*args)

    monkeypatch.setattr("captum_vz._engine.replay.folded.replay.FoldedLayer", Spied)
    return found


@each_shape
def test_few_rows_are_not_folded(name: str, replays: Replays) -> None:
    case = long_case(name)
    replays.folded(case.model, case.layers, case.inputs, token=3)
    assert replays.count == 0
    assert not replays.reasons  # it is not tried


def test_threshold_of_users(replays: Replays) -> None:
    replays.monkeypatch.undo()
    config = BertConfig(
        vocab_size=9, hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_hidden_layers=1
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    for tokens, count in ((24, 0), (48, 1)):
        replays.folded(model, model.encoder.layer, torch.ones(1, tokens, dtype=torch.long))
        assert replays.count == count
        assert not replays.reasons


@each_shape
def test_half_precision(name: str, replays: Replays) -> None:
    case = long_case(name)
    model = case.model.to(torch.bfloat16)
    folded = replays.folded(model, case.layers, case.inputs)
    assert replays.count == len(case.layers), replays.reasons
    for one, other in zip(folded, replays.packed(model, case.layers, case.inputs), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_layers_of_torch(batch_first: bool, norm_first: bool, replays: Replays) -> None:
    layer = nn.TransformerEncoderLayer(MODEL_WIDTH, 4, 48, batch_first=batch_first, norm_first=norm_first)
    layer = layer.double().eval()
    x = torch.randn((2, 20, MODEL_WIDTH) if batch_first else (20, 2, MODEL_WIDTH), dtype=torch.float64)
    replays.check_agree(layer, [layer], x)


def test_model_is_unchanged(replays: Replays) -> None:
    case = long_case("bert")
    before = {name: dict(vars(module)) for name, module in case.model.named_modules()}
    replays.folded(case.model, case.layers, case.inputs)
    assert replays.count == len(case.layers)
    after = {name: dict(vars(module)) for name, module in case.model.named_modules()}
    assert {name: set(entries) for name, entries in before.items()} == {
        name: set(entries) for name, entries in after.items()
    }


# Blocks that differ in one thing from a block that folds.


class Halved(nn.Module):
    """Halves the residual stream after the attention, as a layer scale of one half does."""

    def forward(self, x: Tensor) -> Tensor:
        return -x / 2


class Scaled(nn.LayerNorm):
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


class Flat(nn.Sequential):
    """A feed-forward that runs on the positions of all examples as one list."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view(x.shape)


def feed_forward() -> tuple[nn.Module, nn.Module, nn.Module]:
    return nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)


def altered(attribute: str, module: nn.Module) -> Block:
    block = Block()
    setattr(block, attribute, module)
    return block.double().eval()


def hooked() -> Block:
    """A block with a hook of the user that changes the output of the first linear module."""
    block = Block()
    block.feed_forward[0].register_forward_hook(lambda module, args, output: output.tanh())
    return block


TRAPS = {
    "convolution": lambda: Block(after=Convolution()),
    "mean": lambda: Block(after=Mean()),
    "norm": lambda: altered("norm", Scaled(WIDTH)),
    "no-norm": lambda: altered("norm", nn.Identity()),
    "bent": lambda: altered("feed_forward", nn.Sequential(Bent(WIDTH, 24), nn.Linear(24, WIDTH))),
    "sharing": lambda: altered("feed_forward", Sharing()),
    "experts": lambda: altered("feed_forward", Routed()),
    "one by one": lambda: altered("feed_forward", OneByOne(*feed_forward())),
    "backwards": lambda: altered("feed_forward", Backwards(*feed_forward())),
    "in place": lambda: altered(
        "feed_forward", nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(inplace=True), nn.Linear(24, WIDTH))
    ),
    "hook": hooked,
    "tanh": lambda: Block(finish=lambda attention, context, x: attention.output(context).tanh()),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_traps(trap: str, replays: Replays) -> None:
    block = TRAPS[trap]()
    x = sequences(2, length=20)
    folded = replays.folded(block, [block], x)
    assert replays.count == 0
    assert replays.reasons
    assert "too few" not in str(replays.reasons)
    assert torch.equal(folded[0], replays.packed(block, [block], x)[0])


class Offset(nn.Module):
    """Gemma's norm, which stores its gain minus one, and its epsilon under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(0.1 * torch.randn(WIDTH))
        self.variance_epsilon = 0.05

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * (1 + self.gain)


@pytest.mark.parametrize(
    "block",
    [
        Block(),
        Block(after=Halved()),
        altered("norm", Offset()),
        altered("norm", nn.LayerNorm(WIDTH, elementwise_affine=True, bias=False)),
        altered("feed_forward", Flat(*feed_forward())),
    ],
    ids=["plain", "halved", "offset", "no-bias", "flat"],
)
def test_home_made_blocks(block: Block, replays: Replays) -> None:
    replays.check_agree(block, [block], sequences(2, length=20))


def test_zero_projection_gives_zero_scores(replays: Replays) -> None:
    block, x = Block(), sequences(2, 24)
    with torch.no_grad():
        block.attention.output.weight.zero_()
    with pytest.warns(UserWarning, match=r"48 rows of layer 0 \(Block\) are zero"):
        assert not replays.folded(block, [block], x)[0].any()


class CutFeature(Block):
    """Cuts one feature of the attention's output at a limit that single pairs reach, but no clean position."""

    limit = torch.inf

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(x), mask)
        self.largest = attended[..., 0].amax()  # a number read here would call for the definition
        attended = torch.cat([attended[..., :1].clamp(max=self.limit), attended[..., 1:]], dim=-1)
        return x + attended + self.feed_forward(self.norm(x if self.parallel else x + attended))


@torch.no_grad()
@pytest.mark.parametrize("parallel", [True, False])
def test_limit_that_single_pairs_reach(parallel: bool, replays: Replays) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        block, x = CutFeature(parallel), torch.randn(1, 40, WIDTH, dtype=torch.float64)
        block(x)
        block.limit = float(block.largest) + 1e-6
        folded, packed = (maps(block, [block], x) for maps in (replays.folded, replays.packed))
        torch.testing.assert_close(folded, packed, rtol=0, atol=1e-14)
    assert replays.count == 0


# Norms of the attention's output. Pairs of which too little is left are replayed one by one.


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_pairs_that_cancel_before_a_norm(name: str, replays: Replays) -> None:
    case = long_case(name)
    ran: list[int] = []

    def spy(problem: Any, pairs: Any, target: Tensor, group: Tensor) -> Any:
        ran.append(len(target))
        return exact_chunks(problem, pairs, target, group)

    replays.monkeypatch.setattr("captum_vz._engine.replay.folded.replay.exact_chunks", spy)
    inputs, projection = {"input_ids": torch.arange(1, 13)[None]}, case.layers[0].self_attn.v_proj
    given: list[Tensor] = []
    with projection.register_forward_pre_hook(lambda module, args: given.append(args[0][0])), torch.no_grad():
        case.model(**inputs)
    # The values of all tokens but the first are small, so nearly all of each context comes from the first.
    wanted = torch.full((12, 1), 0.1, dtype=torch.float64).index_fill(0, torch.tensor(0), 1e3)
    with torch.no_grad():
        projection.weight.copy_((torch.linalg.pinv(given[0]) @ wanted @ projection.weight[:, :1].T).T)
    folded = replays.folded(case.model, case.layers[:1], inputs)
    assert replays.count == 1, replays.reasons
    assert ran == [12]
    expected = naive_value_zeroing(replace(case, inputs=inputs), 0, normalize=False)
    torch.testing.assert_close(folded[0], expected, rtol=0, atol=1e-8)


def test_threshold_with_norm_of_attention(replays: Replays) -> None:
    replays.monkeypatch.undo()
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = Olmo2Model(Olmo2Config(vocab_size=99, pad_token_id=0, eos_token_id=1, **size)).eval()
    for tokens, count in ((48, 0), (128, 1)):
        replays.folded(model, model.layers, torch.arange(2, tokens + 2)[None] % 99)
        assert replays.count == count
        assert not replays.reasons
        replays.count = 0


class OwnInnerNorm(Block):
    """Norms the attention's output, in code that nothing shows to do only this."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.inner(self.attention(self.attention_norm(x), mask))
        return x + self.feed_forward(self.norm(x))


def test_norm_of_attention_in_own_code(replays: Replays) -> None:
    block = OwnInnerNorm().eval()
    replays.folded(block, [block], sequences(2, length=20))
    assert replays.count == 0
    assert "library code only" in str(replays.reasons)


# Layers that differ at single positions, which a sample of positions does not show.


@pytest.mark.parametrize("where", ["mlp", "mlp.c_fc", "mlp.act", "mlp.c_proj", "ln_2", "attn.c_proj"])
@pytest.mark.parametrize("position", [7, 23])
def test_hook_at_one_position(where: str, position: int, replays: Replays) -> None:
    case = long_case("gpt2")

    def ablate(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        if output.dim() == 3:
            output[:, position : position + 1] = 0
        return output

    case.layers[1].get_submodule(where).register_forward_hook(ablate)
    folded = replays.folded(case.model, case.layers[1:2], case.inputs)
    assert replays.count == 0
    torch.testing.assert_close(folded[0], naive_value_zeroing(case, 1, normalize=False), rtol=0, atol=1e-10)


def test_hook_of_layer(replays: Replays) -> None:
    case = long_case("gpt2")

    def steer(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, 7] += 3
        return output

    case.layers[0].register_forward_hook(steer)
    by_definition = replays.folded(case.model, case.layers[:1], case.inputs)
    assert replays.count == 0
    expected = naive_value_zeroing(case, 0, normalize=False)
    torch.testing.assert_close(by_definition[0], expected, rtol=0, atol=1e-10)


class Clipped(nn.Module):
    """GELU, except for its largest values."""

    limit = torch.inf

    def forward(self, x: Tensor) -> Tensor:
        self.largest = functional.gelu(x).amax(-1).flatten().sort().values
        return functional.gelu(x).clamp(max=self.limit)


# Clipped at a few clean tokens, which may not be sampled, or at zeroed tokens only.
@pytest.mark.parametrize(("place", "beyond"), [(-3, -1e-3), (-1, 1e-6)])
@pytest.mark.parametrize("seed", range(8))
def test_activation_that_is_clipped(seed: int, place: int, beyond: float, replays: Replays) -> None:
    torch.manual_seed(seed)
    activation = Clipped()
    block = altered("feed_forward", nn.Sequential(nn.Linear(WIDTH, 24), activation, nn.Linear(24, WIDTH)))
    x = torch.randn(1, 40, WIDTH, dtype=torch.float64)
    block(x)
    activation.limit = float(activation.largest[place]) + beyond
    folded, packed = (maps(block, [block], x)[0] for maps in (replays.folded, replays.packed))
    torch.testing.assert_close(folded, packed, rtol=1e-10, atol=1e-14)


class Switched(Block):
    """A block whose attention is switched off at a few tokens."""

    bound = torch.inf

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask) * (x[..., :1] < self.bound)
        return x + self.feed_forward(self.norm(x))


@pytest.mark.parametrize("seed", range(6))
def test_attention_switched_off_at_tokens(seed: int, replays: Replays) -> None:
    torch.manual_seed(seed)
    block, x = Switched(), torch.randn(1, 40, WIDTH, dtype=torch.float64)
    block.bound = float(x[..., 0].flatten().sort().values[-3])
    with pytest.warns(UserWarning, match=r"3 rows of layer 0 \(Switched\) are zero"):
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


def test_writing_in_place_at_tokens(replays: Replays) -> None:
    torch.manual_seed(0)
    block, x = altered("feed_forward", Cut()), torch.randn(1, 40, WIDTH, dtype=torch.float64)
    inner = block.feed_forward.first(block.norm(x))
    folded = replays.folded(block, [block], x)
    assert 0 < (inner > 1.8).any(-1).sum() < 20
    assert replays.count == 0
    assert torch.equal(folded[0], replays.packed(block, [block], x)[0])


def test_writing_in_place_in_inference_mode(replays: Replays) -> None:
    torch.manual_seed(0)
    block, x = altered("feed_forward", Cut()), torch.randn(1, 40, WIDTH, dtype=torch.float64)
    with torch.inference_mode():
        folded, packed = (maps(block, [block], x)[0] for maps in (replays.folded, replays.packed))
    torch.testing.assert_close(folded, packed, rtol=1e-10, atol=1e-14)


def test_another_default_dtype(replays: Replays) -> None:
    block, x = Block(), sequences(1, length=300)
    torch.set_default_dtype(torch.bfloat16)  # which cannot represent 299
    try:
        replays.folded(block, [block], x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert replays.count == 1, replays.reasons

"""The folded replay gives the numbers of the packed replay, and gives none where it does not hold."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Dinov2Config, LlamaConfig, LlamaModel, Olmo2Model
from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention

from captum_vz import ValueZeroing, find_layers
from captum_vz._engine import traced_replays
from captum_vz._engine.replay.folded import FoldedLayer, plan
from captum_vz._engine.replay.packed import exact_chunks
from tests.budget import set_budget
from tests.captum.footprint import footprint
from tests.engine.blocks import Block, sequences
from tests.engine.parameters import sampled
from tests.engine_folded.replays import LENGTHS, Replays, long_case, set_chunk_rows
from tests.reference import FAMILIES, naive_value_zeroing
from tests.reference.case import WIDTH as MODEL_WIDTH
from tests.reference.case import Attention, Family
from tests.reference.families import ENCODER_SIZE
from tests.reference.inputs import noise, padded_tokens

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


@pytest.mark.all_cases
@pytest.mark.parametrize("name", sampled([*" ".join(FOLDED).split(), *NORMED], *SHAPES))
def test_families_that_fold(name: str, replays: Replays) -> None:
    case = long_case(name)
    replays.check_agree(case.model, case.layers, case.inputs)
    if name in SHAPES:
        (last,) = replays.folded(case.model, case.layers[-1:], case.inputs)
        torch.testing.assert_close(last, naive_value_zeroing(case, -1, normalize=False), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["bart-decoder", "t5-decoder"])
def test_second_attention_of_layer(name: str, replays: Replays) -> None:
    case = long_case(name)
    replays.check_agree(case.model, case.layers, case.inputs, attention="cross")


IMAGES: dict[str, Any] = {**ENCODER_SIZE, "image_size": 16, "patch_size": 4}
PATCHES = Attention("attention.v_proj", "attention.o_proj")
OLDER = Attention("attention.attention.value", "attention.output.dense")  # the names of transformers 5.16
IN_DINO = PATCHES if hasattr(Dinov2Attention(Dinov2Config()), "v_proj") else OLDER
# They multiply the attention's output by a scale before they add it to the residual stream.
SCALED = {
    "dinov2": Family("Dinov2Model", IMAGES | {"use_swiglu_ffn": True}, "encoder.layer", IN_DINO, mask=None),
    "beit": Family("BeitModel", IMAGES | {"layer_scale_init_value": 0.1}, "layers", PATCHES, mask=None),
    "granite": replace(FAMILIES["granite"], config=FAMILIES["granite"].config | {"residual_multiplier": 0.22}),
}


@pytest.mark.parametrize("name", SCALED)
def test_layer_scale_is_folded(name: str, replays: Replays) -> None:
    inputs = padded_tokens(LENGTHS) if name == "granite" else {"pixel_values": noise(2, 3, 16, 16)}
    case = replace(SCALED[name], inputs=lambda: inputs).build()
    replays.check_agree(case.model, case.layers, case.inputs)
    replays.check_agree(case.model, case.layers, case.inputs, heads=[0, 3])
    folded = replays.folded(case.model, case.layers[1:2], case.inputs)
    torch.testing.assert_close(folded[0], naive_value_zeroing(case, 1, normalize=False), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", UNFOLDED)
def test_families_that_do_not_fold(name: str, replays: Replays) -> None:
    case = long_case(name)
    folded = replays.folded(case.model, case.layers, case.inputs)
    assert replays.count == 0
    for one, other in zip(folded, replays.packed(case.model, case.layers, case.inputs), strict=True):
        assert torch.equal(one, other)


def test_heads_that_are_all_named() -> None:
    """The same numbers, bit for bit: nothing is selected, so no product is of another layout."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 128}
    model = BertModel(BertConfig(vocab_size=50, **size), add_pooling_layer=False).eval()
    ids = torch.randint(5, 50, (2, 40))
    with traced_replays(only="folded pairs"):
        maps = [ValueZeroing(model, model.encoder.layer[0], heads=heads).attribute(ids) for heads in (None, range(4))]
    assert torch.equal(*maps)


@pytest.mark.parametrize(("name", "count"), [("gpt2", 5), ("llama", 16)])
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


@pytest.mark.all_cases
@pytest.mark.parametrize("seed", sampled(range(40), *range(3)))
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


@pytest.mark.parametrize("name", ["bert", "llama", "olmo2"])  # gemma2 has narrow heads
@pytest.mark.parametrize("few", [True, False])
def test_matrices_composed_for_many_vectors(name: str, few: bool, replays: Replays) -> None:
    case = long_case(name)
    composed = spied_composed(replays.monkeypatch)
    options: dict[str, Any] = {"heads": [1]} if few else {}
    replays.check_agree(case.model, case.layers, torch.arange(1, 9 if few else 25)[None], **options)
    assert composed == [not few] * len(case.layers)


@pytest.mark.parametrize("rows", [3, 1000])
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

    monkeypatch.setattr("captum_vz._engine.replay.folded.plan_chunks", spy)
    return found


def spied_composed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each layer that folds multiplies the projection with the first matrix."""
    found: list[bool] = []

    class Spied(FoldedLayer):
        def __init__(self, *args: Any) -> None:
            found.append(args[2])
            super().__init__(*args)

    monkeypatch.setattr("captum_vz._engine.replay.folded.FoldedLayer", Spied)
    return found


def test_few_rows_are_not_folded(replays: Replays) -> None:
    case = long_case("bert")
    before = footprint(case.model)
    replays.folded(case.model, case.layers, case.inputs, token=3)
    assert replays.count == 0
    assert not replays.reasons  # it is not tried
    replays.folded(case.model, case.layers, case.inputs)
    assert replays.count == len(case.layers)
    assert footprint(case.model) == before


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


# Norms of the attention's output. Pairs of which too little is left are replayed one by one.


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_pairs_that_cancel_before_a_norm(name: str, replays: Replays) -> None:
    case = long_case(name)
    ran: list[int] = []

    def spy(problem: Any, pairs: Any, target: Tensor, group: Tensor) -> Any:
        ran.append(len(target))
        return exact_chunks(problem, pairs, target, group)

    replays.monkeypatch.setattr("captum_vz._engine.replay.folded.exact_chunks", spy)
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


@pytest.mark.parametrize(
    ("model_class", "lengths"), [(BertModel, (24, 48)), (Olmo2Model, (48, 128))], ids=["bert", "norm of attention"]
)
def test_threshold_of_users(model_class: Any, lengths: tuple[int, int], replays: Replays) -> None:
    replays.monkeypatch.undo()
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = model_class(model_class.config_class(vocab_size=150, pad_token_id=0, eos_token_id=1, **size)).eval()
    for tokens, count in zip(lengths, (0, 1), strict=True):
        replays.folded(model, find_layers(model), torch.arange(2, tokens + 2)[None])
        assert replays.count == count
        assert not replays.reasons


# Layers that differ at single positions, which a sample of positions does not show.


@pytest.mark.parametrize("where", ["mlp", "mlp.c_fc", "mlp.act", "mlp.c_proj", "ln_2", "attn.c_proj", ""])
def test_hook_at_one_position(where: str, replays: Replays) -> None:
    """A hook of a submodule, or of the layer itself."""
    case = long_case("gpt2")

    def ablate(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        if output.dim() == 3:
            output[:, 23:24] = 0.5 * output[:, 23:24].flip(-1)
        return output

    case.layers[1].get_submodule(where).register_forward_hook(ablate)
    folded = replays.folded(case.model, case.layers[1:2], case.inputs)
    assert replays.count == 0
    torch.testing.assert_close(folded[0], naive_value_zeroing(case, 1, normalize=False), rtol=0, atol=1e-10)


def test_another_default_dtype(replays: Replays) -> None:
    block, x = Block(), sequences(1, length=300)
    torch.set_default_dtype(torch.bfloat16)  # which cannot represent 299
    try:
        replays.folded(block, [block], x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert replays.count == 1, replays.reasons

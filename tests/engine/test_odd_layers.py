"""Odd layers: their maps are right, or they are refused, and all is left as found. And what else holds for some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.models.swin import modeling_swin

from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
from captum_vz._engine.capture.layer_runner import LayerRunner
from captum_vz._engine.structure import layout
from captum_vz.errors import UnsupportedLayerError
from tests.engine.blocks import Block, Reader, SelfAttention, sequences, zeroed_one_by_one
from tests.engine.compare import assert_same
from tests.engine.odd import Odd
from tests.engine.odd_attentions import ATTENTIONS
from tests.engine.odd_blocks import BLOCKS, Extended, Sharp
from tests.engine.odd_changes import CHANGED, Does
from tests.engine.odd_torch import LAYERS, asks_for_weights, drawn, without_heads
from tests.engine.odd_windows import FAMILIES, ONE_STAGE, SWIN, WINDOWS, Run, image, runs
from tests.reference.case import built

pytestmark = pytest.mark.all_cases  # each is another layer

TABLE = ATTENTIONS | BLOCKS | CHANGED | LAYERS | WINDOWS


def state_of(odd: Odd) -> list[Any]:
    """What no attribution may change: functions of torch, hooks, gradients, numbers."""
    switches = F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    modules = odd.layer.modules()
    hooks = [(len(one._forward_hooks), len(one._forward_pre_hooks), vars(one).get("forward")) for one in modules]
    tensors = [*odd.layer.state_dict().values(), *(one for one in odd.given if isinstance(one, Tensor))]
    return [switches, hooks, [one.grad for one in odd.layer.parameters()], [one.tolist() for one in tensors]]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TABLE)
def test_right_or_refused(name: str) -> None:
    odd = TABLE[name]()
    with odd.around():
        before = state_of(odd)
        if odd.refused:
            for by in odd.by.split():
                with pytest.raises(odd.error, match=odd.refused):
                    odd.attribute(by)
            assert state_of(odd) == before
            return
        found = odd.attribute()
        assert state_of(odd) == before
        of_token = None if odd.token is None else odd.attribute(token=odd.token)
    expected = odd.twin(odd.layer, *odd.given)
    size = expected.sum(-1, keepdim=True).clamp_min(1e-6)  # rows of small changes are as exact as others
    assert_same(found / size, expected / size, odd.tolerance)
    assert not found[expected == 0].any()
    if of_token is not None:
        assert_same(of_token, expected[range(len(found)), odd.token])


@pytest.mark.parametrize("name", ["Swin", "SAM"])
def test_windows_of_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, counted = FAMILIES[name][1]()[1], []
    own = LayerRunner.run
    monkeypatch.setattr(LayerRunner, "run", lambda *given, **more: (counted.append(1), own(*given, **more))[1])
    together = run.odd().attribute()
    assert len(counted) <= 12
    counted.clear()
    assert_same(run.odd().attribute(perturbations_per_eval=3), together)
    monkeypatch.setattr(layout, "FEWEST_COPIES", 10**9)
    counted.clear()
    alone = run.odd().attribute()
    assert len(counted) > 24
    assert_same(together, alone)
    assert torch.equal(together == 0, alone == 0)


def test_copies_that_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is trusted may exchange the examples of a batch after the attention. Then each copy runs alone."""
    own = modeling_swin.window_reverse
    monkeypatch.setattr(modeling_swin, "window_reverse", lambda *given: own(*given).flip(0))
    run = runs(built("SwinModel", "eager", **SWIN | ONE_STAGE), image(12)[:1], "attention.v_proj")[0]
    assert_same(run.odd().attribute(), run.expected)


def test_no_row_hides_another() -> None:
    assert len(TABLE) == sum(map(len, (ATTENTIONS, BLOCKS, CHANGED, LAYERS, WINDOWS))) > 200


@pytest.fixture(scope="module", params=["Swin", "VitDet"])
def windows(request: pytest.FixtureRequest) -> Run:
    """The second layer of Swin, with shifted and padded windows, or of VitDet, with convolutions after them."""
    return FAMILIES[request.param][1]()[1]


def test_windows_targets_features_chunks(windows: Run) -> None:
    odd, count = windows.odd(), windows.expected.shape[2]
    assert_same(odd.attribute(token=[3, count - 1]), windows.expected[[0, 1], [3, count - 1]])
    assert_same(odd.attribute(perturbations_per_eval=1), windows.expected)
    features = torch.arange(count) % 7  # features across windows
    together = torch.stack([windows.zeroed([p for p in range(count) if p % 7 == f]) for f in range(7)], dim=-1)
    assert_same(odd.attribute(feature_mask=features[None]), together[..., features])
    assert_same(odd.attribute(feature_mask=features[None], token=4), together[:, 4][..., features])


def test_windows_of_single_heads(windows: Run) -> None:
    half = (windows.columns.stop - windows.columns.start) // 2
    second = slice(windows.columns.start + half, windows.columns.stop)
    scores = windows.odd(options={"heads": 1}).attribute()
    for position in (0, 7):
        assert_same(scores[..., position], windows.zeroed([position], second))


def test_windows_of_one_example(windows: Run) -> None:
    for example in range(2):
        alone = Run(windows.layer, (windows.hidden[example : example + 1], *windows.args[1:]), windows.kwargs)
        assert_same(alone.odd().attribute()[0], windows.expected[example])


def test_windows_in_half_precision() -> None:
    model = built("SwinModel", "eager", **SWIN | ONE_STAGE).to(torch.bfloat16)
    run = runs(model, image(12).bfloat16(), "attention.v_proj")[1]
    scores = run.odd().attribute()
    assert scores.dtype == torch.float32
    run.layer.float()
    exact = Run(run.layer, (run.hidden.float(), *run.args[1:]), run.kwargs).odd().attribute()
    assert_same(scores, exact, tolerance=1e-6)


def test_a_rollout_stays_within_a_stage() -> None:
    model = built("Swinv2Model", "eager", **SWIN)
    layers = find_layers(model)
    with pytest.raises(AssertionError, match="layers' maps are"):
        ValueZeroingRollout(model, layers).attribute(image(12))
    first, second = ValueZeroing(model, layers[:2]).attribute(image(12))
    assert_same(ValueZeroingRollout(model, layers[:2]).attribute(image(12)), second @ first)


@torch.no_grad()
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


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float64, True), (torch.bfloat16, False)])
def test_states_given_twice(dtype: torch.dtype, copies: bool) -> None:
    """States are passed as queries and as memory, as Funnel does: the same tensor, or a copy."""
    reader, x = Reader().to(dtype).eval(), sequences(2).to(dtype)
    mask = torch.zeros(2, 1, 1, 6, dtype=dtype)
    mask[1, ..., 4:] = torch.finfo(dtype).min
    model = lambda x, mask: reader(x, mask, x.clone() if copies else x)  # noqa: E731
    found = ValueZeroing(model, reader).attribute((x, mask))
    assert found[1, :4, :4].all()
    assert not found[1, 4:].any()


@pytest.mark.parametrize("kind", [Sharp, Extended])
def test_numbers_stay_while_explained(kind: type[Sharp]) -> None:
    block, x = Block(), sequences(2)
    block.attention.__class__ = kind
    output, seen = block(x), []
    with block.register_forward_hook(lambda module, inputs, output: seen.append(output)):
        ValueZeroing(block, block).attribute(x)
    assert_same(seen[0], output)


def test_missing_attention_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return attend_alone(self, x, mask)

    for kind in (Alone, SelfAttention):
        monkeypatch.setattr(kind, "__module__", "collections")
    block = Block()
    block.attention.__class__ = Alone
    with pytest.raises(UnsupportedLayerError, match="shows its weights"):
        ValueZeroing(block, block).attribute(sequences(2))


def attend_alone(attention: SelfAttention, x: Tensor, mask: Tensor | None) -> Tensor:
    return SelfAttention.forward(attention, x, mask)


def test_layer_keeps_its_own_run() -> None:
    class Keeping(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.kept = super().forward(x, mask)
            return self.kept

    block, x = Keeping(), sequences(2)
    clean = block(x)
    ValueZeroing(block, block).attribute(x)
    assert torch.equal(block.kept, clean)


class Pair(Block):
    """Returns two tensors of its shape, first the hidden states."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Any, mask: Tensor | None = None) -> Any:
        x = self.stream(x)
        y = super().forward(x, mask)
        return (y, y - x) if self.form == "hidden first" else (y, y.clone())

    def stream(self, x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        return x[0] if self.form == "hidden first" else x[1]


class AsHidden(nn.Module):
    """The first tensor that a layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(("form", "listed"), [("hidden first", slice(0, 3)), ("twice", slice(2, 3))])
def test_block_that_returns_a_pair(form: str, listed: slice) -> None:
    model, x = nn.Sequential(*(Pair(form) for _ in range(3))), sequences(2)
    method = ValueZeroing(lambda x: model[2].stream(model(x)), list(model)[listed])
    for found, index in zip(method.attribute(x), range(3)[listed], strict=True):
        given = x if index == 0 else model[index - 1].stream(model[:index](x)).detach()
        assert_same(found, zeroed_one_by_one(AsHidden(model[index]), given, value="layer.attention.value"))


def test_multihead_attention_with_weights() -> None:
    odd = asks_for_weights(uses=False)
    attention, block = odd.attribute("attention"), odd.layer
    torch.testing.assert_close(attention, block.seen)  # the block gets the weights that it asks for
    with torch.no_grad():
        block(*odd.given)
    torch.testing.assert_close(attention, block.seen)  # and the same weights as without an attribution


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    layer, x, outputs = nn.Sequential(Does(without_heads)), drawn().to(dtype), []
    exact = layer(x.double())
    ValueZeroing(lambda x: outputs.append(layer(x)), layer).attribute(x)
    error = (outputs[0].double() - exact).abs() / exact.abs().clamp_min(1e-3)
    assert error.max() < torch.finfo(dtype).eps

"""Weights of long texts are computed for the rows that are asked for: the same numbers, and memory linear in tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from captum_vz import LayerAttention, LayerAttentionGradient, ValueZeroing, find_layers
from captum_vz._engine import capture, numerics
from captum_vz._engine.numerics import RowWeights, all_weights, budget_of, weighted_values, weights_at
from captum_vz.attr import _base
from tests.captum.footprint import footprint
from tests.engine.parameters import quick
from tests.reference import FAMILIES, FIRST_FAMILIES, naive_attention_maps, naive_value_zeroing_maps

TOKENS, WIDTH, HEADS = 512, 32, 4
WITHOUT_SDPA = {"gemma2"}  # soft caps are more than scaled_dot_product_attention computes
each_family = pytest.mark.parametrize(
    "name", quick([name for name in FIRST_FAMILIES if name not in WITHOUT_SDPA], "bert", "gpt2", "llama")
)


def chunks_of(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, *modules: Any) -> None:
    for module in modules:
        monkeypatch.setattr(module, "budget_of", lambda device: replace(budget_of(device), chunk_bytes=chunk_bytes))


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk holds few rows of weights, so that those of tiny texts do not fit in one."""
    chunks_of(monkeypatch, 1 << 10, numerics)


@each_family
def test_maps_and_rows_equal_the_naive_twin(name: str, few_rows: None) -> None:
    case = FAMILIES[name].build(attn_implementation="sdpa")
    expected = naive_value_zeroing_maps(case)
    maps = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    rows = ValueZeroing(case.model, case.layers).attribute(case.inputs, token=1)
    for found, row, twin in zip(maps, rows, expected[-len(maps) :], strict=True):
        torch.testing.assert_close(found, twin, rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(row, twin[:, 1], rtol=1e-8, atol=1e-11)


@each_family
def test_attention_equals_the_naive_twin(name: str, few_rows: None) -> None:
    case = FAMILIES[name].build(attn_implementation="sdpa")
    expected = naive_attention_maps(FAMILIES[name].case)
    maps = LayerAttention(case.model, case.layers).attribute(case.inputs)
    for found, twin in zip(maps, expected[-len(maps) :], strict=True):
        torch.testing.assert_close(found, twin, rtol=1e-6, atol=1e-9)  # the twin's softmax may be in float32


@pytest.mark.parametrize("intervention", ["mean", "knockout"])
def test_interventions(intervention: str, few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES["llama"].build(attn_implementation="sdpa")
    maps = ValueZeroing(case.model, case.layers, intervention=intervention).attribute(case.inputs)
    monkeypatch.undo()
    for found, whole in zip(
        maps, ValueZeroing(case.model, case.layers, intervention=intervention).attribute(case.inputs), strict=True
    ):
        torch.testing.assert_close(found, whole, rtol=1e-8, atol=1e-11)


def test_gradients_reach_the_weights(few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES["gpt2"].build(attn_implementation="sdpa")
    method = LayerAttentionGradient(lambda **inputs: case.model(**inputs)[0].sum(1), case.layers)
    maps = method.attribute(case.inputs, target=0)
    monkeypatch.undo()
    for found, whole in zip(maps, method.attribute(case.inputs, target=0), strict=True):
        assert torch.equal(found, whole)


def masks() -> dict[str, Tensor | None]:
    shown = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    shown[1, ..., 5:] = False
    blind = torch.ones(7, 7, dtype=torch.bool).tril(-1)  # the first token sees nothing
    return {
        "none": None,
        "tokens": shown,
        "pairs": blind,
        "heads": torch.randn(4, 7, 7, dtype=torch.float64),
        "added": torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~blind, -torch.inf),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", *masks()])
def test_rows_are_torchs(name: str, dtype: torch.dtype, few_rows: None) -> None:
    causal, mask = name == "causal", masks().get(name)
    query, key, values = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    query, key, values = (x.to(dtype) for x in (query, key, values))
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    with torch.no_grad():
        context, weights = weighted_values(query, key, mask, 0.3, causal, values)
    assert isinstance(weights, RowWeights)
    expected = functional.scaled_dot_product_attention(
        query, key, values, mask, is_causal=causal, scale=0.3, enable_gqa=True
    )
    close: dict[str, float] = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(context.transpose(1, 2), expected, **close)
    batch, out = torch.tensor([1, 0, 1]), torch.tensor([6, 0, 2])
    whole = all_weights(weights)
    assert whole.dtype == dtype and whole.shape == weights.shape == (2, 4, 7, 7)
    torch.testing.assert_close(weights_at(weights, batch, out), whole[batch, :, out], **close)
    torch.testing.assert_close((whole @ values.repeat_interleave(2, 1)), expected, **close)


def test_writes_of_the_layer_change_no_weights(few_rows: None) -> None:
    """The queries of the record are a copy: a layer may reuse the memory of its own."""

    class Reusing(Causal):
        def attend(self, query: Tensor, key: Tensor, values: Tensor) -> Tensor:
            query, key = query.clone(), key.clone()
            context = super().attend(query, key, values)
            query.zero_()
            key.zero_()
            return context

    torch.manual_seed(0)
    plain, x = Causal().double().eval(), torch.randn(1, 9, WIDTH, dtype=torch.float64)
    reusing = Reusing().double().eval()
    reusing.load_state_dict(plain.state_dict())
    expected = ValueZeroing(plain, plain).attribute(x)
    torch.testing.assert_close(ValueZeroing(reusing, reusing).attribute(x), expected)


class Causal(nn.Module):
    """A block of unknown code that calls torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, query: Tensor, key: Tensor, values: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, values, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.into(x).chunk(3, -1))
        x = x + self.output(self.attend(*parts).transpose(1, 2).flatten(2))
        return x + self.narrow(self.wide(self.norm(x)).relu())


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest result has. Bytes are left out: `keep_freed_memory` asks for some."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype != torch.uint8]
        self.numbers = max([self.numbers, *sizes])
        return result


def gpt2() -> nn.Module:
    return GPT2Model(GPT2Config(n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=TOKENS, vocab_size=50))


def llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "vocab_size": 50}
    return LlamaModel(LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=2, **sizes))


@pytest.mark.parametrize("build", [gpt2, llama, Causal])
def test_a_row_makes_no_tensor_of_all_pairs(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the weights of a head, nor a mask. In the pass, the model's attention is computed by the package."""
    chunks_of(monkeypatch, 1 << 18, numerics)
    model = build().eval()
    given = torch.randn(1, TOKENS, WIDTH) if build is Causal else torch.randint(50, (1, TOKENS))
    method = ValueZeroing(model, model if build is Causal else find_layers(model))
    with Largest() as largest:
        method.attribute(given, token=-1)
    assert 0 < largest.numbers < TOKENS**2


def test_long_layers_have_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = FAMILIES["gpt2"].case
    method = ValueZeroing(case.model, case.layers)
    method.attribute(case.inputs, show_progress=True)
    assert "layer 0" not in capsys.readouterr().err
    chunks_of(monkeypatch, 1 << 12, capture)
    method.attribute(case.inputs, show_progress=True)
    shown = capsys.readouterr().err
    assert "Value Zeroing attribution, layer 0: " in shown and "Value Zeroing attribution, layer 1: " in shown
    method.attribute(case.inputs)
    assert not capsys.readouterr().err


def test_interrupted_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come at any chunk. The model is as before, the bars are closed, and a new call gives the same map."""
    case = FAMILIES["gpt2"].build(attn_implementation="sdpa")
    before, method = footprint(case.model), ValueZeroing(case.model, case.layers)
    chunks_of(monkeypatch, 1 << 12, capture)
    expected, bars = method.attribute(case.inputs), list[Any]()

    class Bar:
        def __init__(self, _: None = None, desc: str = "", total: int = 0, leave: bool = True) -> None:
            self.total, self.counts, self.open = total, list[float](), True
            bars.append(self)

        def update(self, count: float = 1) -> None:
            self.counts.append(count)
            if len(bars) == 3 and len(self.counts) == 3:
                raise KeyboardInterrupt

        def close(self, *error: object) -> None:
            self.open = False

        __enter__, __exit__ = (lambda self: self), close

    monkeypatch.setattr(_base, "progress", Bar)
    with pytest.raises(KeyboardInterrupt):
        method.attribute(case.inputs, show_progress=True)
    assert footprint(case.model) == before
    model, first, _ = bars
    assert sum(model.counts) == 1 and len(first.counts) > 3 and sum(first.counts) == first.total
    assert not any(bar.open for bar in bars)
    for again, found in zip(method.attribute(case.inputs), expected, strict=True):
        assert torch.equal(again, found)

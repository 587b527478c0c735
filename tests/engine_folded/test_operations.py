"""Floating-point operations of a map, counted and compared with a formula for each replay.

T tokens, d features, D features inside the feed-forward, H heads. One layer, one sentence, one chunk. A product of
(n, a) with (a, b) counts 2 n a b.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2Model,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
)

from captum_vz import ValueZeroing
from captum_vz._engine import numerics, traced_replays
from captum_vz._engine.replay.folded.plan import LEAST_SHARE, SAMPLED_TARGETS
from captum_vz._engine.replay.packed import BLOCK
from tests.budget import set_budget
from tests.engine.parameters import sampled
from tests.engine_folded.replays import set_chunk_rows

Build = Callable[[], tuple[torch.nn.Module, torch.nn.Module]]

PACKED = "packed pairs"
T, d, D, H = 40, 48, 160, 4
SIZE = {"vocab_size": 50, "hidden_size": d, "num_attention_heads": H, "num_hidden_layers": 1}


def bert() -> tuple[torch.nn.Module, torch.nn.Module]:
    model = BertModel(BertConfig(**SIZE, intermediate_size=D), add_pooling_layer=False).eval()
    return model, model.encoder.layer[0]


def gpt2() -> tuple[torch.nn.Module, torch.nn.Module]:
    model = GPT2Model(GPT2Config(**SIZE, n_inner=D, use_cache=False)).eval()
    return model, model.h[0]


def llama() -> tuple[torch.nn.Module, torch.nn.Module]:
    model = LlamaModel(LlamaConfig(**SIZE, intermediate_size=D, use_cache=False)).eval()
    return model, model.layers[0]


# How many matrices the feed-forward begins with, and whether the attention is causal.
MODELS = [(bert, 1, False), (gpt2, 1, True), (llama, 2, True)]
each_model = pytest.mark.parametrize(("build", "firsts", "causal"), MODELS)


@pytest.fixture(autouse=True)
def one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk_rows(monkeypatch, 10**6)


def operations(build: Build, only: str | None = None, tokens: int = T, **options: int) -> int:
    """The operations of a map by one replay or by all, and of the model's own pass through the layer.

    Rotary positions are left out, which transformers 5.16 computes by a product.
    """
    model, layer = build()
    with traced_replays(only), FlopCounterMode(display=False) as counter:
        ValueZeroing(model, layer).attribute(torch.arange(tokens)[None], **options)
    rotary = [sum(counts.values()) for name, counts in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(rotary)


def forward(tokens: int, firsts: int) -> int:
    # Projections, weights, and context.
    return 2 * tokens * 4 * d * d + 2 * (2 * tokens * tokens * d) + feed_forward(tokens, firsts)


def feed_forward(rows: int, firsts: int) -> int:
    return 2 * rows * (firsts + 1) * d * D


def packed(pairs: int, targets: int, firsts: int) -> int:
    used = pairs + targets + 2  # each target runs unchanged, one of them twice, one with another context
    rows = used + BLOCK - used % BLOCK
    return 2 * rows * d * d + feed_forward(rows, firsts)


@each_model
def test_packed_replay(build: Build, firsts: int, causal: bool) -> None:
    pairs = T * (T + 1) // 2 if causal else T * T
    expected = forward(T, firsts) + packed(pairs, T, firsts)
    assert operations(build, PACKED) == expected


@each_model
@pytest.mark.parametrize("only", [None, PACKED])
def test_one_row(build: Build, firsts: int, causal: bool, only: str | None) -> None:
    expected = forward(T, firsts) + packed(T, 1, firsts)
    assert operations(build, only, token=T - 1) == expected


@each_model
def test_definition(build: Build, firsts: int, causal: bool) -> None:
    zeroed = 2 * T * T * d  # the context of one run
    runs = 2 + (T - 1).bit_length()  # unchanged, all positions perturbed, once a digit: to test the order of values
    expected = forward(T, firsts) + runs * 3 * 2 * T * d * d  # projections only
    expected += (1 + T) * (forward(T, firsts) - zeroed)  # unchanged, and with each source zeroed, on known weights
    assert operations(build, "definition") == expected


@each_model
# For many sources, the first matrix is multiplied with the projection once.
@pytest.mark.parametrize(("tokens", "composed"), [(16, False), (T, True)])
def test_folded_replay(
    build: Build, firsts: int, causal: bool, tokens: int, composed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tokens * (tokens + 1) // 2 if causal else tokens * tokens
    traced = SAMPLED_TARGETS + 1 + 1  # some targets, one known row of the chunk, and one that is NaN
    rows = pairs + tokens + 1  # each target with nothing zeroed, and one known row
    vectors = H * tokens
    targets = range(1, tokens + 1) if causal else [tokens] * tokens  # of each source
    # A source with fewer targets than heads is multiplied for each target.
    direct = 0 if composed else sum(count for count in targets if count < H)
    multiplied = sum(min(count, H) for count in targets)
    expected = forward(tokens, firsts)
    expected += 2 * traced * d * d + feed_forward(traced, firsts)
    expected += 2 * tokens * d * d  # the attention's output of each target
    expected += 2 * tokens * d * d + 2 * d * d  # the same for changed contexts, and the loss
    expected += 2 * tokens * d * d  # W_O times each head of each source
    expected += 2 * H * (pairs + 1) * d  # sums of these vectors
    expected += firsts * 2 * d * D  # W times beta
    expected += firsts * (2 * d * d * D + 2 * vectors * d // H * D if composed else 2 * multiplied * d * D)
    expected += firsts * 2 * H * (pairs + 1 - direct) * D  # sums of these vectors
    expected += 2 * rows * D * d  # the last matrix
    assert operations(build, None, tokens) == expected


def test_folded_replay_saves_a_third() -> None:
    folded, without = (operations(bert, only) for only in (None, PACKED))
    assert folded < 2 / 3 * without


def forms(build: Build, tokens: int) -> tuple[int, int, int]:
    """The operations of the form that is chosen, of packed pairs, and of folded pairs."""
    counts = [operations(build, None, tokens), operations(build, PACKED, tokens=tokens)]
    with pytest.MonkeyPatch.context() as patch:
        set_budget(patch, folding_calls=-1e18)  # folds always
        return counts[0], counts[1], operations(build, None, tokens)


def gemma2() -> tuple[torch.nn.Module, torch.nn.Module]:
    """With norms of the attention's output."""
    config = Gemma2Config(**SIZE, intermediate_size=D, num_key_value_heads=2, head_dim=16, use_cache=False)
    model = Gemma2Model(config).eval()
    return model, model.layers[0]


def narrow() -> tuple[torch.nn.Module, torch.nn.Module]:
    """With many heads and a feed-forward as wide as the hidden states."""
    sizes = {**SIZE, "num_attention_heads": 12}
    model = LlamaModel(LlamaConfig(**sizes, intermediate_size=d, use_cache=False)).eval()
    return model, model.layers[0]


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("build", "tokens"),
    sampled(product([bert, gpt2, llama, gemma2, narrow], [4, 16, 24, 48]), (bert, 16), (llama, 48), (gemma2, 48)),
)
def test_chosen_form_is_not_dearer(build: Build, tokens: int) -> None:
    chosen, without, folded = forms(build, tokens)
    assert chosen in (without, folded)
    assert chosen <= without
    if folded < 0.8 * without:
        assert chosen == folded


def test_folds_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, without, folded = forms(bert, T)
    products = 2 * (T * T + T) * (d * d + 2 * d * D)
    saved = without - folded - LEAST_SHARE * products
    for calls, only in ((0.97 * saved, None), (1.03 * saved, PACKED)):
        expected = operations(bert, only)
        with monkeypatch.context() as patch:
            set_budget(patch, folding_calls=calls)
            assert operations(bert) == expected
    assert operations(bert) < operations(bert, PACKED)


def test_calls_cost_more_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    here, elsewhere = numerics.BUDGETS["cpu"], numerics.OTHER_DEVICES
    assert 0 < here.folding_calls / (2 * 768 * 3072) < 200  # rows of bert-base's first matrix
    assert 100 * here.folding_calls < elsewhere.folding_calls

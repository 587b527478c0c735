"""Counted floating-point operations of a map: the formulas, for each way. They do not depend on the clock.

T tokens, d features, D of them inside the feed-forward, H heads; one layer, one sentence, one chunk. A product of
(n, a) with (a, b) counts 2 n a b.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from captum_vz import ValueZeroing
from captum_vz._engine import value_zeroing
from captum_vz._engine.numerics.budget import budget_of
from captum_vz._engine.replay.folded.replay import FEW
from captum_vz._engine.replay.packed import UNUSED_ROWS
from tests.budget import set_budget
from tests.engine_folded.replays import set_chunk_rows

Build = Callable[[], tuple[torch.nn.Module, torch.nn.Module]]

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


# How many matrices the feed-forward begins with, and which targets see a source.
MODELS = [(bert, 1, False), (gpt2, 1, True), (llama, 2, True)]
each_model = pytest.mark.parametrize(("build", "firsts", "causal"), MODELS)


@pytest.fixture(autouse=True)
def one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk_rows(monkeypatch, 10**6)


def operations(
    build: Build,
    ways: int,
    monkeypatch: pytest.MonkeyPatch,
    precision: str = "exact",
    tokens: int = T,
    **options: int,
) -> int:
    """What a map costs if the first `ways` are left out, the model's own pass through the layer included."""
    model, layer = build()
    # torch counts its own products, not oneDNN's, which are as many.
    with monkeypatch.context() as patch, torch.backends.mkldnn.flags(enabled=False):
        patch.setattr(value_zeroing, "REPLAYS", value_zeroing.REPLAYS[ways:])
        with FlopCounterMode(display=False) as counter:
            ValueZeroing(model, layer, precision=precision).attribute(torch.arange(tokens)[None], **options)
    return counter.get_total_flops()


def forward(tokens: int, firsts: int) -> int:
    # Projections, weights, context, and the check that these weights make this context.
    return 2 * tokens * 4 * d * d + 3 * (2 * tokens * tokens * d) + feed_forward(tokens, firsts)


def feed_forward(rows: int, firsts: int) -> int:
    return 2 * rows * (firsts + 1) * d * D


def general(pairs: int, targets: int, firsts: int) -> int:
    rows = pairs + targets + 2 + UNUSED_ROWS  # each target runs unchanged, one of them twice; and some of another context
    return 2 * rows * d * d + feed_forward(rows, firsts)


@each_model
def test_the_general_way(build: Build, firsts: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = T * (T + 1) // 2 if causal else T * T
    expected = forward(T, firsts) + general(pairs, T, firsts)
    expected += 2 * T * d * causal  # a first token's context, of which nothing is left, is summed anew
    assert operations(build, 1, monkeypatch) == expected


@each_model
@pytest.mark.parametrize("ways", [0, 1])
def test_one_row(build: Build, firsts: int, causal: bool, ways: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = forward(T, firsts) + general(T, 1, firsts)
    assert operations(build, ways, monkeypatch, token=T - 1) == expected


@each_model
def test_whole_sequences(build: Build, firsts: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = 1 + T + 4  # of the sentence: unchanged, with each source zeroed, and four of these alone
    zeroed = 2 * T * T * d  # what the context of one copy loses
    runs = 2 + (T - 1).bit_length()  # as it was, all of it nudged, once a digit: to see whose values they are
    expected = forward(T, firsts) + runs * 3 * 2 * T * d * d  # of the projections
    expected += copies * (forward(T, firsts) + zeroed)
    assert operations(build, 3, monkeypatch) == expected


@each_model
@pytest.mark.parametrize("precision", ["exact", "fast"])
# Of few sources, each vector goes through the first matrix; for many, it is multiplied with the projection once.
@pytest.mark.parametrize(("tokens", "composed"), [(16, False), (T, True)])
def test_the_fast_lane(
    build: Build,
    firsts: int,
    causal: bool,
    precision: str,
    tokens: int,
    composed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("captum_vz._engine.replay.folded.replay.has_fast_bfloat16", lambda device: True)
    monkeypatch.setattr("captum_vz._engine.numerics.matmul.STEP", 1)  # else up to 15 rows are added to each product
    counts = [tokens - source for source in range(tokens)] if causal else [tokens] * tokens
    vector = 1 / H if composed else 1  # what one costs, in rows of the first matrix
    folded = [count for count in counts if count > H * (vector + count / d)]
    rest = [count for count in counts if count not in folded]
    traced = FEW + 1 + 1  # a few targets, one known row of the chunk, and one that is NaN
    known = tokens + 1  # each target with nothing taken, and one with all of it
    pairs, of_folded, of_rest = sum(counts) + known, sum(folded) + known, sum(rest)
    vectors = H * len(folded)
    expected = forward(tokens, firsts)
    expected += 2 * traced * d * d + feed_forward(traced, firsts)
    expected += 2 * tokens * d * d  # the attention's output of every target
    expected += 2 * tokens * d * d + 2 * d * d  # and of the changed ones, and of what these lose
    expected += 2 * tokens * d * d  # W_O, on each source's heads
    expected += 2 * H * pairs * d  # their sums
    expected += firsts * 2 * d * D  # W, on beta
    expected += firsts * (2 * d * d * D + 2 * vectors * d // H * D if composed else 2 * vectors * d * D)  # on vectors
    expected += firsts * 2 * H * of_folded * D  # their sums
    expected += firsts * 2 * of_rest * d * D  # W, on the pairs of sources with few of them
    expected += 2 * pairs * D * d  # the last matrix
    assert operations(build, 0, monkeypatch, precision, tokens) == expected


def test_the_fast_lane_needs_fewer_than_two_thirds(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = (operations(bert, ways, monkeypatch) for ways in (0, 1))
    assert fast < 2 / 3 * slow


@pytest.mark.parametrize(("precision", "share"), [("exact", 1), ("fast", 2)])
def test_the_fast_lane_is_taken_if_it_saves_more_than_its_calls_cost(
    precision: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captum_vz._engine.replay.folded.replay.has_fast_bfloat16", lambda device: True)
    # Of the rows of the first matrix: one a pair, less a sum over each source's vectors and what its values cost;
    # once, the attention's projection with that matrix, and two runs of all targets.
    rows = T * T - T * H * (T / d + 1 / H) - d - 2 * T
    saved = share * rows * 2 * d * D
    for calls, ways in ((0.98 * saved, 0), (1.02 * saved, 1)):
        expected = operations(bert, ways, monkeypatch, precision)
        with monkeypatch.context() as patch:
            set_budget(patch, folding_calls=calls)
            assert operations(bert, 0, monkeypatch, precision) == expected
    assert operations(bert, 0, monkeypatch, precision) < operations(bert, 1, monkeypatch, precision)


def test_calls_cost_more_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    here, elsewhere = (budget_of(torch.device(kind)).rows_to_save(768 * 3072) for kind in ("cpu", "meta"))
    assert 0 < here < 200  # rows of bert-base's first matrix
    assert 100 * here < elsewhere

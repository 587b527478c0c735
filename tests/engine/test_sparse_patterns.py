"""Attention in sparse patterns (Longformer, LED, LongT5, BigBird), in float64.

The twins compute a layer's attention token by token, each over the list of tokens that it sees.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference.case import randomize

# These models compute the softmax in float32, whatever their dtype.
SOFTMAX = 1e-7
TOKENS, HEADS, WIDTH, WINDOW = 8, 4, 16, 4
IDS = torch.tensor([[5, 9, 3, 7, 8, 4, 6, 2], [6, 2, 7, 3, 9, 1, 1, 1]])
REAL = IDS != 1
SINGLES = [[j] for j in range(TOKENS)]
GLOBAL = torch.zeros_like(REAL).index_fill(1, torch.tensor([0, 3]), True)

LONGFORMER = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "attention_window": [WINDOW] * 2,
    "pad_token_id": 1,
}
SIDE = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 24}
LED = {
    **{f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in SIDE.items()},
    **{name: LONGFORMER[name] for name in ("vocab_size", "attention_window", "pad_token_id")},
    "d_model": WIDTH,
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
}
LONGT5 = {
    "vocab_size": 50,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": HEADS,
    "local_radius": WINDOW - 2,  # a block is longer by one
    "pad_token_id": 1,
}
SPARSE = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1, "pad_token_id": 0}
BIGBIRD = {**LONGFORMER, **SPARSE, "sep_token_id": 1}
BIGBIRD_PEGASUS = {**LED, **SPARSE, "max_position_embeddings": 64}

Zero = Callable[[Tensor], Tensor]  # some rows of values (tokens, d)


def model_of(name: str, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}Model")
    model = model_class(model_class.config_class(**config))
    randomize(model)
    return model.double().eval()


def encoder_of(name: str, **config: Any) -> nn.Module:
    return model_of(name, **config).get_encoder()


@torch.no_grad()
def given_to(layer: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """The arguments of a layer."""
    kept: list[Any] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        kept.append((args, kwargs))

    with layer.register_forward_pre_hook(keep, with_kwargs=True):
        model(**inputs)
    return kept[0]


def hidden_states(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def states_before(layer: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The hidden states that a layer is given, `(batch, tokens, d)`."""
    args, kwargs = given_to(layer, model, inputs)
    return args[0] if args else kwargs["hidden_states"]


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """The context `(d,)` of one token over the tokens that it sees. `bias (head, in)` is added to the scores."""
    heads = []
    for head in range(HEADS):
        own = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        scores = keys[:, own] @ query[own]
        heads.append((scores if bias is None else scores + bias[head]).softmax(0) @ values[:, own])
    return torch.cat(heads)


def without(zeroed: Iterable[int], head: int | None, values: Tensor) -> Tensor:
    values = values.clone()
    own = slice(None) if head is None else slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
    for source in zeroed:
        values[source, own] = 0
    return values


def longformer_context(attention: Any, everywhere: Tensor, x: Tensor, real: Tensor, zero: Zero) -> Tensor:
    """The contexts `(tokens, d)` of one example `x (tokens, d)`. Contexts of padding are zero."""
    near = [attention.query(x), attention.key(x), zero(attention.value(x))]
    far = [attention.query_global(x), attention.key_global(x), zero(attention.value_global(x))]
    contexts = torch.zeros_like(x)
    for i in range(len(x)):
        if not real[i]:
            continue
        queries, keys, values = far if everywhere[i] else near
        in_reach = [j for j in range(len(x)) if everywhere[i] or everywhere[j] or abs(i - j) <= WINDOW // 2]
        seen = [j for j in in_reach if real[j]]
        contexts[i] = attend(queries[i] / math.sqrt(WIDTH // HEADS), keys[seen], values[seen])
    return contexts


def longformer_output(layer: Any, everywhere: Tensor, example: int, x: Tensor, real: Tensor, zero: Zero) -> Tensor:
    contexts = longformer_context(layer.attention.self, everywhere[example] & real, x, real, zero)
    attended = layer.attention.output(contexts, x)
    return layer.output(layer.intermediate(attended), attended)


def led_output(layer: Any, everywhere: Tensor, example: int, x: Tensor, real: Tensor, zero: Zero) -> Tensor:
    attention = layer.self_attn
    contexts = longformer_context(attention.longformer_self_attn, everywhere[example] & real, x, real, zero)
    attended = layer.self_attn_layer_norm(x + attention.output(contexts))
    return layer.final_layer_norm(attended + layer.fc2(layer.activation_fn(layer.fc1(attended))))


def longt5_output(layer: Any, table: Tensor, example: int, x: Tensor, real: Tensor, zero: Zero) -> Tensor:
    """The output of a layer, with the first layer's `table (bucket, head)` of position biases."""
    normed, attention = layer.layer[0].layer_norm(x), layer.layer[0].LocalSelfAttention
    queries, keys, values = attention.q(normed), attention.k(normed), zero(attention.v(normed))
    contexts = torch.zeros_like(x)
    for i in range(len(x)):
        seen = [j for j in range(len(x)) if real[j] and abs(i - j) < WINDOW - 1]
        if seen:
            distance = torch.tensor(seen) - i
            bias = table[T5Attention._relative_position_bucket(distance, num_buckets=len(table))].T
            contexts[i] = attend(queries[i], keys[seen], values[seen], bias)
    return layer.layer[-1](x + attention.o(contexts))


@torch.no_grad()
def expected_map(
    output: Callable[..., Tensor],
    states: Tensor,
    groups: Sequence[Sequence[int]] = SINGLES,
    head: int | None = None,
) -> Tensor:
    """`output(example, states, real, zero)` with each group's values zeroed, `(batch, out, group)`."""
    maps = []
    for example, (x, real) in enumerate(zip(states, REAL, strict=True)):
        clean = output(example, x, real, partial(without, [], None))
        moved = [output(example, x, real, partial(without, group, head)) for group in groups]
        columns = [1 - torch.cosine_similarity(one, clean, dim=-1) for one in moved]
        there = torch.stack([real[group].any() for group in groups])
        maps.append(torch.stack(columns, dim=-1) * real[:, None] * there)
    return torch.stack(maps)


@pytest.mark.parametrize("having_some", [[], [0, 1]], ids=["windows", "global tokens"])
@pytest.mark.parametrize("name", ["Longformer", "LED"])
def test_maps_equal_the_twins(name: str, having_some: list[int]) -> None:
    everywhere = torch.zeros_like(GLOBAL)
    everywhere[having_some] = GLOBAL[having_some]
    model = model_of("Longformer", **LONGFORMER) if name == "Longformer" else encoder_of("LED", **LED)
    output = longformer_output if name == "Longformer" else led_output
    inputs = {"input_ids": IDS, "attention_mask": REAL.long(), "global_attention_mask": everywhere.long()}
    layers = find_layers(model)
    for layer, layer_map in zip(layers, ValueZeroing(model, layers, normalize=False).attribute(inputs), strict=True):
        expected = expected_map(partial(output, layer, everywhere), states_before(layer, model, inputs))
        assert_same(layer_map, expected, tolerance=SOFTMAX)
        assert (expected.amax(-1)[REAL] > 1e-4).all()


@pytest.mark.parametrize("name", ["Longformer", "LED"])
def test_global_tokens_in_some_examples(name: str) -> None:
    """Longformer's code treats the others of such a batch in its own way. The maps are those of single examples."""
    everywhere = GLOBAL.clone()
    everywhere[1] = False
    model = model_of("Longformer", **LONGFORMER) if name == "Longformer" else encoder_of("LED", **LED)
    inputs = {"input_ids": IDS, "attention_mask": REAL.long(), "global_attention_mask": everywhere.long()}
    together = ValueZeroing(model, find_layers(model)).attribute(inputs)
    for example in range(len(IDS)):
        length = int(REAL[example].sum())
        alone = {name: x[example : example + 1, :length] for name, x in inputs.items()}
        for found, expected in zip(together, ValueZeroing(model, find_layers(model)).attribute(alone), strict=True):
            assert_same(found[example : example + 1, :length, :length], expected, tolerance=SOFTMAX)


def test_words_in_a_single_head() -> None:
    model = model_of("Longformer", **LONGFORMER)
    layer = find_layers(model)[0]
    inputs = {"input_ids": IDS, "attention_mask": REAL.long(), "global_attention_mask": GLOBAL.long()}
    words = torch.tensor([[0, 0, 1, 2, 2, 3, 4, 4]])
    scores = ValueZeroing(model, layer, heads=2, normalize=False).attribute(inputs, feature_mask=words)
    groups = [[0, 1], [2], [3, 4], [5], [6, 7]]
    output = partial(longformer_output, layer, GLOBAL)
    expected = expected_map(output, states_before(layer, model, inputs), groups, head=2)
    assert_same(scores, expected[..., words[0]] * REAL[:, None, :], tolerance=SOFTMAX)


def test_longt5s_local_layers_equal_the_twins() -> None:
    model = encoder_of("LongT5", **LONGT5)
    inputs = {"input_ids": IDS, "attention_mask": REAL.long()}
    layers: Any = find_layers(model)
    maps = ValueZeroing(model, layers, normalize=False).attribute(inputs)
    table = layers[0].layer[0].LocalSelfAttention.relative_attention_bias.weight
    for layer, layer_map in zip(layers, maps, strict=True):
        states = states_before(layer, model, inputs)
        expected = expected_map(partial(longt5_output, layer, table), states)
        assert_same(layer_map, expected, tolerance=SOFTMAX)
        assert (expected.amax(-1)[REAL] > 1e-4).all()


def wide_and_full() -> tuple[nn.Module, nn.Module]:
    """A Longformer whose window is longer than its inputs, and a RoBERTa with the same weights."""
    wide = model_of("Longformer", **LONGFORMER | {"attention_window": [2 * TOKENS] * 2})
    full = model_of("Roberta", **LONGFORMER)
    missing = full.load_state_dict(wide.state_dict(), strict=False).missing_keys
    assert not missing
    return wide, full


INPUTS = {"input_ids": IDS, "attention_mask": REAL.long()}


@pytest.mark.parametrize("inputs", [INPUTS, IDS[:1], (IDS[:1],)], ids=["mapping", "ids", "tuple"])
@pytest.mark.parametrize("method", quick([ValueZeroing, ValueZeroingRollout], ValueZeroing))
def test_window_over_all_tokens(method: type[ValueZeroing], inputs: Any) -> None:
    """Padding that the model appends is not in the maps."""
    models = wide_and_full()
    words = torch.tensor([[0, 0, 1, 1, 2, 3, 3, 4]])
    for arguments in ({}, {"token": -4}, {"token": 2, "feature_mask": words}, {"feature_mask": words}):
        found, expected = (method(m, find_layers(m)).attribute(inputs, **arguments) for m in models)
        assert_same(found, expected, tolerance=SOFTMAX)


def test_effects_leave_out_added_padding() -> None:
    wide, full = wide_and_full()
    for words in (None, torch.tensor([[0, 0, 1, 1, 2, 3, 3, 4]])):
        found, expected = (
            ValueZeroingEffect(lambda m=m, **inputs: m(**inputs).last_hidden_state[:, 0, 0], find_layers(m)).attribute(
                INPUTS, feature_mask=words
            )
            for m in (wide, full)
        )
        assert_same(found, expected, tolerance=SOFTMAX)


def test_targets_after_the_inputs() -> None:
    wide, _ = wide_and_full()
    with pytest.raises(AssertionError, match="token 8 is out of range"):
        ValueZeroing(wide, find_layers(wide)[0]).attribute(INPUTS, token=TOKENS)
    with pytest.raises(AssertionError, match=r"feature_mask is \(1, 9\), but the layer's attention has 2"):
        ValueZeroing(wide, find_layers(wide)[0]).attribute(INPUTS, feature_mask=torch.arange(9)[None])


def test_own_padding_stays() -> None:
    """Every example has padding, and the model adds more."""
    model = model_of("Longformer", **LONGFORMER)
    layers = find_layers(model)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[:, 5:] = 0
    ids = torch.cat([IDS, IDS[:, :1]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    scores = ValueZeroing(model, layers[0]).attribute(inputs)
    assert scores.shape == (2, 9, 9)
    short = ValueZeroing(model, layers[0]).attribute({"input_ids": ids[:, :5], "attention_mask": mask[:, :5]})
    assert_same(scores[:, :5, :5], short, tolerance=SOFTMAX)
    assert not scores[:, 5:].any() and not scores[:, :, 5:].any()


def test_tokens_that_a_function_appends() -> None:
    """The appended tokens are no padding, although the inputs are shorter than the sequence."""
    model = model_of("Longformer", **LONGFORMER)
    method = partial(ValueZeroing, layer=find_layers(model))
    words = model.get_input_embeddings()(IDS)

    def with_prompt(given: Tensor) -> Any:
        return model(inputs_embeds=torch.cat([given, words[:, 5:]], dim=1))

    assert_same(method(with_prompt).attribute(words[:, :5]), method(model).attribute({"inputs_embeds": words}))


@contextmanager
def without_value_of(source: int, *projections: nn.Module, axis: int = 1) -> Iterator[None]:
    """Zero one row of the output of value projections."""

    def zero(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.index_fill(axis, torch.tensor(source), 0)

    with ExitStack() as hooks:
        for projection in projections:
            hooks.enter_context(projection.register_forward_hook(zero))
        yield


@pytest.mark.parametrize("name", ["BigBird", "BigBirdPegasus"])
def test_bigbirds_sparse_mode(name: str) -> None:
    """The twin reruns each layer with one row of its value projection zeroed."""
    model = model_of(name, **BIGBIRD) if name == "BigBird" else encoder_of(name, **BIGBIRD_PEGASUS)
    count = 19  # fewer than 15 tokens see all tokens; the model appends one
    ids = torch.randint(2, 50, (2, count), generator=torch.Generator().manual_seed(0))
    real = torch.arange(count) < torch.tensor([[count], [count - 3]])
    inputs = {"input_ids": ids, "attention_mask": real.double()}
    layers = find_layers(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # only rows of padding are zero
        maps = ValueZeroing(model, layers, normalize=False).attribute(inputs)
    both = real[:, :, None] & real[:, None, :]
    for layer, layer_map in zip(layers, maps, strict=True):
        args, kwargs = given_to(layer, model, inputs)
        attention = next(one for one in layer.modules() if type(one).__name__.endswith("BlockSparseAttention"))
        columns = []
        with torch.no_grad():
            clean = hidden_states(layer(*args, **kwargs))
            for source in range(count):
                with without_value_of(source, attention.get_submodule("value")):
                    moved = hidden_states(layer(*args, **kwargs))
                columns.append(1 - torch.cosine_similarity(moved, clean, dim=-1)[:, :count])
        assert_same(layer_map, torch.stack(columns, dim=-1) * both, tolerance=SOFTMAX)
        assert (layer_map[both] == 0).any()  # some tokens do not see each other


def test_effects_and_half_precision() -> None:
    model = model_of("Longformer", **LONGFORMER)
    layers: Any = find_layers(model)
    inputs = {"input_ids": IDS, "attention_mask": REAL.long(), "global_attention_mask": GLOBAL.long()}

    def score(**inputs: Tensor) -> Tensor:
        return model(**inputs).last_hidden_state[:, 0, 0]

    effects = []
    attention = layers[1].attention.self
    with torch.no_grad():
        for source in range(TOKENS):
            with without_value_of(source, attention.value, attention.value_global, axis=0):
                effects.append(score(**inputs))
        expected = (score(**inputs)[:, None] - torch.stack(effects, dim=1)) * REAL
    assert_same(ValueZeroingEffect(score, layers[1]).attribute(inputs), expected, tolerance=SOFTMAX)

    exact = ValueZeroing(model, layers[0]).attribute(inputs)
    half = ValueZeroing(model.to(torch.bfloat16), layers[0]).attribute(inputs)
    assert half.dtype == torch.float32
    assert_same(half.double(), exact, tolerance=0.05)  # the layer's input was rounded
    assert all(not module._forward_hooks for module in model.modules())


def test_summaries_of_tokens_are_refused() -> None:
    """The values of LongT5's transient global tokens are computed from many tokens."""
    model: Any = encoder_of("LongT5", **LONGT5, encoder_attention_type="transient-global", global_block_size=2)
    layer: Any = find_layers(model)[0]
    message = "projects values several times in one run: .* those of summaries of many"
    named = layer.layer[0].TransientGlobalSelfAttention.v
    for values in (None, named):
        with pytest.raises(AssertionError, match=f"LongT5TransientGlobalAttention of the layer LongT5Block {message}"):
            ValueZeroing(model, layer, values=values).attribute({"input_ids": IDS, "attention_mask": REAL.long()})


def test_weights_of_sparse_attention_are_refused() -> None:
    model = model_of("Longformer", **LONGFORMER)
    with pytest.raises(
        AssertionError, match="LongformerSelfAttention cannot be read: its family computes attention inl"
    ):
        LayerAttention(model, find_layers(model)[0]).attribute(IDS[:1])

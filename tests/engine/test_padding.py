"""Tokens that nobody sees: padding if the inputs say so or if they see nothing, and else tokens as all others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_vz import LayerAttention, ValueZeroing, find_layers, verify
from tests.engine.blocks import (
    HEADS,
    WIDTH,
    Block,
    Projections,
    SelfAttention,
    as_added,
    attention_function,
    block_of,
    eager_attention_forward,
    sequences,
    zeroed_one_by_one,
)
from tests.engine.compare import assert_same
from tests.engine.odd import by_call
from tests.reference.case import built

pytestmark = pytest.mark.all_cases  # each is another layer

TOKENS = 5
PLACE = torch.arange(TOKENS)
BACK = PLACE[:, None] - PLACE  # how far a source lies before its target
ITSELF, CAUSAL = BACK == 0, BACK >= 0
ALL = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
FIRST, LAST = (PLACE[:, None] == place for place in (0, TOKENS - 1))
# What each token sees. Some token, which sees others, is seen by none.
PATTERNS = {
    "strictly causal": BACK > 0,
    "strictly causal, first token sees itself": (BACK > 0) | FIRST & ITSELF,
    "strictly anti-causal": BACK < 0,
    "window with a gap": (BACK >= 2) & (BACK <= 3) | (PLACE[:, None] < 2) & (PLACE == 0),
    "first token hidden": ALL & (PLACE != 0),
    "middle token hidden": ALL & (PLACE != 2),
    "last tokens hidden": ALL & (PLACE < 3),
    "graph": torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [1, 0, 1, 0, 0]]).bool(),
}


def without_a_word(method: ValueZeroing, inputs: Any, **arguments: Any) -> Tensor:
    """A map. Only rows of tokens that see nothing may be warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*rows of layer 0 .* are zero")
        scores: Tensor = method.attribute(inputs, **arguments)
        return scores


class Masked(Projections):
    """Attention by torch's function with a mask of its own."""

    def __init__(self, visible: Tensor) -> None:
        super().__init__()
        self.visible = visible

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        context = functional.scaled_dot_product_attention(*self.heads(x), attn_mask=self.visible)
        return self.output(context.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("name", "batch"), [("first token hidden", 1), *((name, 2) for name in PATTERNS)])
def test_patterns_hide_no_tokens(name: str, batch: int) -> None:
    layer, x = block_of(Masked(PATTERNS[name])), sequences(batch, TOKENS)
    expected = zeroed_one_by_one(layer, x).nan_to_num(0)
    assert (expected.sum(-1) > 0).equal(PATTERNS[name].any(-1).expand(batch, -1))
    method = ValueZeroing(layer, layer)
    assert_same(without_a_word(method, x), expected)
    for token in (0, -1):
        assert_same(without_a_word(method, x, token=token), expected[:, token])
    assert batch > 1 or verify(layer, x, layer).passed


@pytest.mark.parametrize("name", ["strictly causal", "first token hidden", "graph"])
def test_patterns_with_padding(name: str) -> None:
    """The last two tokens of the second example are padding."""
    visible = PATTERNS[name].expand(2, 1, -1, -1).clone()
    visible[1, ..., 3:] = False
    real = torch.tensor([[1] * TOKENS, [1] * 3 + [0] * 2])
    block, x, mask = Block(), sequences(2, TOKENS), as_added(visible)
    found = ValueZeroing(lambda x, mask, real: block(x, mask), block, normalize=False).attribute((x, mask, real))
    seeing = visible[:, 0].any(-1) & real.bool()  # in this block, a token that sees nothing has equal weights
    assert_same(found[seeing], zeroed_one_by_one(block, x, mask, normalize=False)[seeing])
    assert not found[1, 3:].any()


@pytest.mark.parametrize(
    ("name", "norm_first"), [("strictly causal", True), ("middle token hidden", False), ("first token hidden", True)]
)
def test_masks_of_torch_layers(name: str, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=norm_first).double().eval()
    hides = ~(PATTERNS[name] | (FIRST | LAST) & ITSELF)  # torch's layers return NaN for a token that sees nothing
    x, padding = sequences(2, TOKENS), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    found = ValueZeroing(layer, layer, normalize=False).attribute(x, additional_forward_args=(hides,))
    assert_same(found, by_call(layer, x, hides))
    found = ValueZeroing(layer, layer, normalize=False).attribute(x, additional_forward_args=(hides, padding))
    expected = by_call(layer, x, hides, padding)
    assert_same(found[~padding], expected[~padding].nan_to_num(0))
    assert not found[padding].any()


@pytest.mark.parametrize(("tokens", "by_head"), [(2, False), (TOKENS, True)])
def test_tokens_that_see_nothing_have_equal_weights(by_head: bool, tokens: int) -> None:
    """A finite number hides sources. They have weight where it hides all of them, as does one that no token sees."""
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).double().eval(), sequences(2, tokens)
    sees = (BACK > 0)[:tokens, :tokens].expand(4, -1, -1).clone()  # no token sees the last one
    if by_head:
        sees[:] = True
        sees[:, 1] = FIRST[:tokens, 0]  # the second token sees the first one
        sees[0, 1] = False  # with the other heads
    bias = as_added(sees).clamp_min(-1e9).repeat(2, 1, 1)
    found = ValueZeroing(layer, layer, normalize=False).attribute(x, additional_forward_args=(bias,))
    assert_same(found, by_call(layer, x, bias))


SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
MODELS: dict[str, Mapping[str, Any]] = {
    "Bert": SIZES,
    "Llama": SIZES,
    "OpenAIGPT": {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4},
    "RoFormer": SIZES | {"embedding_size": 16},
    "XLNet": {"vocab_size": 40, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24},
}
INLINE = ("OpenAIGPT", "RoFormer", "XLNet")
IDS = torch.tensor([[5, 9, 3, 7, 8], [6, 2, 7, 3, 9]])
MASKS = {
    "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
    "left": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]],
    "middle": [[1, 1, 0, 1, 1], [1, 1, 0, 1, 1]],
    "one example": [[1, 1, 1, 0, 0]],
}


def model_of(name: str) -> nn.Module:
    model: nn.Module = built(f"{name}Model", **MODELS[name])
    return model


@pytest.mark.parametrize(
    ("name", "padding"),
    [("Bert", "one example"), ("Bert", "middle"), ("Llama", "left"), ("OpenAIGPT", "right"), ("XLNet", "right")],
)
def test_masks_of_tokens_mark_padding(name: str, padding: str) -> None:
    """Whether the mask is an input, or only the forward function knows it."""
    model, mask = model_of(name), torch.tensor(MASKS[padding])
    layers, ids = find_layers(model), IDS[: len(mask)]

    def forward(given: Tensor) -> Any:
        return model(given, attention_mask=mask)

    for method in (ValueZeroing,) if name in INLINE else (ValueZeroing, LayerAttention):
        for found in (
            method(model, layers).attribute({"input_ids": ids, "attention_mask": mask}),
            method(forward, layers).attribute(ids),
        ):
            for one in found:
                assert one.any(-1).equal(mask.bool())
                assert not (one.any(1) & ~mask.bool()).any()


def pairs(visible: Tensor) -> Tensor:
    return as_added(visible.expand(2, 1, -1, -1))


# XLNet's mask of pairs has other axes, and hides no token from itself. Its manual shows this one.
PAIRS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "Bert": lambda: {"attention_mask": pairs(PATTERNS["first token hidden"])},
    "Llama": lambda: {"attention_mask": pairs(CAUSAL & (PLACE != TOKENS - 1))},
    "RoFormer": lambda: {"attention_mask": pairs(PATTERNS["graph"])},
    "XLNet": lambda: {"perm_mask": (PLACE == TOKENS - 1).double().expand(2, TOKENS, -1)},
}


@pytest.mark.parametrize("name", PAIRS)
def test_masks_of_pairs_hide_no_tokens(name: str) -> None:
    model = model_of(name)
    inputs = {"input_ids": IDS, **PAIRS[name]()}
    assert all(one.any(-1).all() for one in ValueZeroing(model, find_layers(model)).attribute(inputs))
    report = verify(model, inputs)
    assert report.passed, str(report)


class Cut(SelfAttention):
    """Its eager function cuts a mask that is longer than the keys (Falcon-H1 in transformers 4.57)."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = (linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        longer = functional.pad(x.new_ones(x.shape[1], x.shape[1]).triu(1) * -1e9, (0, 1), value=-1e9)[None, None]
        attend = attention_function(self.config._attn_implementation, cutting_eager_attention_forward)
        return self.output(attend(self, *parts, longer)[0].flatten(2))


def cutting_eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    return eager_attention_forward(module, query, key, value, attention_mask[..., : key.shape[2]], **kwargs)


def test_mask_that_is_longer_than_the_keys() -> None:
    torch.manual_seed(0)
    block, x = block_of(Cut()), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    found = ValueZeroing(block, block).attribute(x)
    assert_same(found, zeroed_one_by_one(block, x))
    assert not found.triu(1).any()
    assert not LayerAttention(block, block).attribute(x).triu(1).any()

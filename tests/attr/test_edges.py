"""Effects of edges: what a decision loses if one token alone is not given a value, in one layer or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroingEffect
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.testbed import load_model
from tests.engine.compare import assert_same
from tests.reference import FAMILIES
from tests.reference.effects import case_of, naive_edges

ROW = 2  # a token that is no padding in any example


def read(output: Any) -> Tensor:
    """A difference of two numbers at another token than the one that loses values, where the model lets it see this."""
    hidden: Tensor = output.last_hidden_state[:, -1]
    return hidden[:, 3] - 0.5 * hidden[:, 5]


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "gemma2"])
def test_edges_equal_a_hook_that_changes_one_row(name: str) -> None:
    case = FAMILIES[name].case
    heads = range(case.family.attention.heads)
    expected = torch.stack([naive_edges(case, layer, read, heads, ROW) for layer in range(len(case.layers))], 1)
    assert expected.abs().max() > 1e-3
    method = ValueZeroingEffect(case.model, case.layers, rows="target", by_layer=True)
    for most in (None, 2):
        assert_same(method.attribute(case.inputs, read, token=ROW, perturbations_per_eval=most), expected)


@contextmanager
def hidden(layers: Sequence[nn.Module], row: int, source: int) -> Iterator[None]:
    """While the block runs, token `row` does not attend to `source` in these layers."""

    def hide(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        mask = kwargs["attention_mask"].clone()
        mask[:, :, row, source] = torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True))
        yield


@pytest.mark.parametrize("window", [1, 2, 3])
def test_knockout_equals_a_mask(window: int) -> None:
    """Attention knockout of an edge is an entry of the mask of these layers."""
    case = FAMILIES["llama"].build(attn_implementation="eager").example(0)
    model, layers, row = case.model, case.layers, 5
    method = ValueZeroingEffect(model, layers, intervention="knockout", rows="target", by_layer=True, window=window)
    found = method.attribute(case.inputs, read, token=row)
    with torch.no_grad():
        clean = read(model(**case.inputs))
        for number in range(len(layers)):
            around = layers[max(0, number - (window - 1) // 2) : number + window // 2 + 1]
            for source in range(row):
                with hidden(around, row, source):
                    assert_same(found[:, number, source], clean - read(model(**case.inputs)), 1e-6)


def test_one_layer_is_a_layer_of_all() -> None:
    case = FAMILIES["llama"].case
    whole = ValueZeroingEffect(case.model, case.layers, rows="target", by_layer=True)
    found = whole.attribute(case.inputs, read, token=ROW)
    for number, layer in enumerate(case.layers):
        one = ValueZeroingEffect(case.model, layer, rows="target").attribute(case.inputs, read, token=ROW)
        assert_same(found[:, number], one)
    wide = ValueZeroingEffect(case.model, case.layers, rows="target", by_layer=True, window=2 * len(case.layers))
    together = ValueZeroingEffect(case.model, case.layers, rows="target").attribute(case.inputs, read, token=ROW)
    for number in range(len(case.layers)):
        assert_same(wide.attribute(case.inputs, read, token=ROW)[:, number], together)


def test_all_rows_by_layer_are_the_layers_alone() -> None:
    case = FAMILIES["bert"].case
    found = ValueZeroingEffect(case.model, case.layers, by_layer=True).attribute(case.inputs, read)
    for number, layer in enumerate(case.layers):
        assert_same(found[:, number], ValueZeroingEffect(case.model, layer).attribute(case.inputs, read))


def test_tokens_before_the_row_lose_nothing() -> None:
    """In a causal model, a decision at another token before it does not change, and later sources have no edge."""
    model, tokenizer = load_model("causal")
    inputs = tokenizer("the pictures of some hat", return_tensors="pt")
    method = ValueZeroingEffect(model, rows="target", by_layer=True)
    assert not method.attribute(inputs, target=(2, 5), foil=(2, 9), token=4).any()
    assert not method.attribute(inputs, target=(3, 5), foil=(3, 9))[..., 4:].any()


def test_each_example_has_its_row() -> None:
    case = FAMILIES["llama"].case
    method = ValueZeroingEffect(case.model, case.layers, rows="target", by_layer=True)
    rows = [2, 0, 1]
    found = method.attribute(case.inputs, read, token=rows)
    for example, row in enumerate(rows):
        assert_same(found[example], method.attribute(case.inputs, read, token=row)[example])
        alone = method.attribute(case.example(example).inputs, read, token=row)
        if case.inputs["attention_mask"][example].all():
            assert_same(found[example], alone[0])


def test_function_runs_one_example_at_a_time() -> None:
    case = FAMILIES["llama"].case

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        return read(case.model(input_ids=ids, attention_mask=mask))

    given = case.inputs["input_ids"], case.inputs["attention_mask"]
    options: dict[str, Any] = {"rows": "target", "by_layer": True}
    alone = ValueZeroingEffect(forward, case.layers, **options).attribute(given[0], None, given[1], token=[2, 1, 0])
    together = ValueZeroingEffect(case.model, case.layers, **options).attribute(case.inputs, read, token=[2, 1, 0])
    assert_same(alone, together)


def _effect(**options: Any) -> Callable[..., Any]:
    case = FAMILIES["llama"].case
    return partial(ValueZeroingEffect(case.model, case.layers, **options).attribute, case.inputs, read)


def test_refusals() -> None:
    for options, arguments, message in (
        ({}, {"token": 2}, 'pass rows="target"'),
        ({"rows": "target"}, {}, "one output token of"),
        ({"rows": "target"}, {"token": slice(0, 2)}, "one output token of"),
        ({"rows": "one"}, {}, "'all' or 'target'"),
        ({"window": 2}, {}, "by_layer=True"),
        ({"window": 0, "by_layer": True}, {}, "at least 1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            _effect(**options)(**arguments)
    bloom = case_of("bloom")
    with pytest.raises(RefusedError, match='Pass rows="all"'):
        ValueZeroingEffect(bloom.model, bloom.layers, rows="target").attribute(bloom.inputs, read, token=1)

"""Grades for maps of Value Zeroing, computed by the learner."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from captum_vz import LayerAttention, ValueZeroing, find_layers
from captum_vz._engine import AttentionBlock, AttentionSite
from captum_vz.attr import LayerMaps
from captum_vz.errors import ArgumentError
from captum_vz.functional import cosine_distance, normalize_rows
from captum_vz.testbed.check.verdict import Verdict, judge
from captum_vz.testbed.model import load_model

#: The sentence of the exercises if no `inputs` are passed. Its target is the mask.
SENTENCE = "the pictures of some hat [MASK] scaring marcus."

SWAPPED = (
    "rows and columns are swapped. Row i holds the sources of output token i: zero the value of token j, and look at "
    "how far the output of token i moves."
)
UNNORMALIZED = "these are the distances themselves. Divide each row by its sum."
SIMILARITY = "these are similarities. The distance is 1 - cos, which is 0 for a token that changes nothing."
NO_RESIDUAL = (
    "the residual connection is forgotten. The distance is measured at the output of the attention. Take the output of "
    "the whole layer."
)
ATTENTION = "these are attention weights. Value Zeroing measures how far the output moves without a value."
EUCLIDEAN = "this is the Euclidean distance. The exercise asks for the cosine distance."
SOFTMAX = "the row is divided by a softmax. Divide the distances by their sum."
LARGEST = "the row is divided by its largest entry. Divide it by its sum."
LENGTH = "the row is divided by its Euclidean length. Divide it by its sum."
SELF = "the token itself is left out. The value of a token counts for its own output, too."


class Task(NamedTuple):
    """A model, its inputs, one layer, and the output token whose row is asked for."""

    model: Any
    inputs: Any
    layers: list[nn.Module]
    layer: nn.Module
    token: int | None


def value_zeroing_row(
    yours: Any,
    inputs: Any = None,
    *,
    model: Any = None,
    layer: int | nn.Module = -1,
    token: int | None = None,
    hint: bool = False,
) -> Verdict:
    r"""Grade a row of Value Zeroing, :math:`\hat C_{ij}` for one output token i.

    It recognizes a column in place of a row, distances that are not divided by their sum, similarities, a forgotten
    residual connection, the token itself left out, another divisor, attention weights, another distance, another layer,
    and the row of another token.

    Args:
        yours: The row, `(in,)` or `(1, in)`.
        inputs: One example, as the model takes it. None: the embedded model and :data:`SENTENCE`.
        model: The model.
        layer: The layer, or its index.
        token: The position of the output token i. None is possible without `inputs` only: the mask.
        hint: Whether a wrong answer gets a second hint.

    Returns:
        A verdict.

    Raises:
        ArgumentError: `model` without `inputs`, or `inputs` without `token`.

    >>> from captum_vz import ValueZeroing, find_layers
    >>> from captum_vz.testbed import check, load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer(check.SENTENCE, return_tensors="pt")
    >>> map_ = ValueZeroing(model, find_layers(model)[-1]).attribute(inputs)[0]
    >>> check.value_zeroing_row(map_[6]).passed
    True
    >>> check.value_zeroing_row(map_[:, 6])
    Not yet. value_zeroing_row: rows and columns are swapped. ...
    """
    task = _task(model, inputs, layer, token, needs_token=True)
    right = _map(task)
    row = right[task.token]
    rows = [
        (f"this is the row of output token {other}. Take the row of token {task.token}.", right[other])
        for other in range(len(right))
        if other != task.token
    ]
    mistakes = [
        (SWAPPED, right[:, task.token]),
        (SWAPPED, lambda: normalize_rows(_distances(task)[:, task.token])),
        (SWAPPED, lambda: _distances(task)[:, task.token]),
        ("this is the whole map. Take the row of the output token.", right),
        *((name, lambda wrong=wrong: wrong()[task.token]) for name, wrong in _usual(task)),
        *rows,
    ]
    return judge("value_zeroing_row", yours, row, mistakes, hint=hint)


def value_zeroing_map(
    yours: Any, inputs: Any = None, *, model: Any = None, layer: int | nn.Module = -1, hint: bool = False
) -> Verdict:
    """Grade a map of Value Zeroing, all rows of one layer.

    It recognizes the mistakes of :func:`value_zeroing_row`, columns that are divided by their sums, and steps that are
    forgotten when a learner writes out an `nn.TransformerEncoderLayer`.

    Args:
        yours: The map, `(out, in)` or `(1, out, in)`.
        inputs: One example, as the model takes it. None: the embedded model and :data:`SENTENCE`.
        model: The model.
        layer: The layer, or its index.
        hint: Whether a wrong answer gets a second hint.

    >>> from captum_vz.testbed import check
    >>> check.value_zeroing_map(...)
    Not yet. value_zeroing_map: there is no answer yet. Expected numbers of shape (11, 11).
    You go on with the package's answer. This exercise counts as open.
    """
    task = _task(model, inputs, layer, None)
    right = _map(task)
    mistakes = [
        (SWAPPED, right.mT),
        (SWAPPED, lambda: normalize_rows(_distances(task).mT)),
        (
            "each column is divided by its sum. Divide each row by its sum.",
            lambda: normalize_rows(_distances(task).mT).mT,
        ),
        (
            "the map is divided by one sum. Divide each row by its own.",
            lambda: _distances(task) / _distances(task).sum(),
        ),
        *_usual(task),
    ]
    return judge("value_zeroing_map", yours, right, mistakes, hint=hint)


def _task(model: Any, inputs: Any, layer: Any, token: int | None, needs_token: bool = False) -> Task:
    if model is None and inputs is None:
        model, tokenizer = load_model()
        inputs = tokenizer(SENTENCE, return_tensors="pt")
        token = inputs.tokens().index("[MASK]") if token is None else token
    elif model is None:
        model, _ = load_model()
    elif inputs is None:
        raise ArgumentError("model was passed without inputs: pass the inputs of the exercise too.")
    if needs_token and token is None:
        raise ArgumentError("token is None: pass the position of the output token whose row is graded.")
    layers = find_layers(model)
    return Task(model, inputs, layers, layers[layer] if isinstance(layer, int) else layer, token)


def _map(task: Task, layer: nn.Module | None = None, **options: Any) -> Tensor:
    method = ValueZeroing(task.model, task.layer if layer is None else layer, **options)
    found = method.attribute(task.inputs)
    assert isinstance(found, Tensor)
    if len(found) != 1:
        raise ArgumentError(f"inputs holds {len(found)} examples: pass one example.")
    return found[0]


def _distances(task: Task) -> Tensor:
    return _map(task, normalize=False)


def _usual(task: Task) -> list[tuple[str, Callable[[], Tensor]]]:
    """The mistakes that a map and a row share, with the map that each gives."""
    moved = [_ContextMove(task.model, task.layer, projected) for projected in (False, True)]
    layers = [
        (f"this is layer {index}. The exercise asks for another layer.", lambda other=other: _map(task, other))
        for index, other in enumerate(task.layers)
        if other is not task.layer
    ]
    return [
        (UNNORMALIZED, lambda: _distances(task)),
        (SIMILARITY, lambda: normalize_rows(1 - _distances(task))),
        (SIMILARITY, lambda: 1 - _distances(task)),
        *((NO_RESIDUAL, lambda one=one: one.attribute(task.inputs)[0]) for one in moved),
        (ATTENTION, lambda: LayerAttention(task.model, task.layer).attribute(task.inputs)[0]),
        (EUCLIDEAN, lambda: _map(task, distance="euclidean")),
        (EUCLIDEAN, lambda: normalize_rows(_map(task, distance="euclidean", normalize=False).square())),
        (LARGEST, lambda: _distances(task) / _distances(task).amax(-1, keepdim=True)),
        (LENGTH, lambda: _distances(task) / _distances(task).norm(dim=-1, keepdim=True)),
        (SELF, lambda: normalize_rows(_distances(task).fill_diagonal_(0))),
        (SOFTMAX, lambda: _distances(task).softmax(-1)),
        *layers,
        *_of_torch_layer(task),
    ]


def _of_torch_layer(task: Task) -> list[tuple[str, Callable[[], Tensor]]]:
    """What goes wrong if a learner writes the steps of a post-norm `nn.TransformerEncoderLayer`."""
    if not isinstance(task.layer, nn.TransformerEncoderLayer) or task.layer.norm_first:
        return []
    forgotten = "the residual connection is forgotten"
    named: list[tuple[str, dict[str, Any]]] = [
        (f"{forgotten}: h = norm1(x + attention(x)).", {"first": 0}),
        (f"{forgotten}: y = norm2(h + ff(h)).", {"second": 0}),
        (f"{forgotten}, twice: add x before norm1, and h before norm2.", {"first": 0, "second": 0}),
        ("the feed-forward is missing: y = norm2(h + ff(h)).", {"ff": False}),
        ("the value is zeroed in one head only. Zero it in all.", {"heads": slice(0, 1)}),
    ]
    return [
        (name, partial(lambda method: method.attribute(task.inputs)[0], _TorchLayer(task.model, task.layer, **steps)))
        for name, steps in named
    ]


class _TorchLayer(LayerMaps):
    """A post-norm `nn.TransformerEncoderLayer`, written out: a map in which a step is missing."""

    def __init__(self, forward_func: Any, layer: Any, **steps: Any) -> None:
        super().__init__(forward_func, layer)
        self.steps: dict[str, Any] = {"first": 1, "second": 1, "ff": True, "heads": slice(None)} | steps

    def layer_scores(self, site: AttentionSite, wanted: Any) -> Tensor:
        layer: Any = deepcopy(site.layer.layer).double()
        x = (site.layer.args[0] if site.layer.args else site.layer.kwargs["src"]).double()  # (1, tokens, width)
        attention = layer.self_attn
        projected = linear(x[0], attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (one.unflatten(-1, (attention.num_heads, -1)).transpose(0, 1) for one in projected)

        def output(values: Tensor) -> Tensor:
            context = scaled_dot_product_attention(q, k, values).transpose(0, 1).flatten(1)
            h: Tensor = layer.norm1(self.steps["first"] * x[0] + attention.out_proj(context))
            if not self.steps["ff"]:
                return h
            y: Tensor = layer.norm2(self.steps["second"] * h + layer.linear2(layer.activation(layer.linear1(h))))
            return y

        columns = []
        for j in range(x.shape[1]):
            zeroed = v.clone()
            zeroed[self.steps["heads"], j] = 0
            columns.append(cosine_distance(output(zeroed), output(v)))
        return wanted.pool(torch.stack(columns, dim=1)[None])


class _ContextMove(LayerMaps):
    """How far the attention's own output moves: a row in which the residual connection is forgotten."""

    needs_steps = True

    def __init__(self, forward_func: Any, layer: Any, projected: bool = False) -> None:
        super().__init__(forward_func, layer)
        self.projected = projected

    def layer_scores(self, site: AttentionSite, wanted: Any) -> Tensor:
        weights, values = site.weights(), site.attention.values
        values = values.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
        moved = torch.einsum("bhij,bhjd->bijhd", weights, values)  # what each source gives to each output
        clean = moved.sum(2, keepdim=True)
        left = clean - moved
        if self.projected:
            block = AttentionBlock(site)
            bias = block.projected[:, :, None] - clean.flatten(3) @ block.matrix
            return wanted.pool(cosine_distance(left.flatten(3) @ block.matrix + bias, block.projected[:, :, None]))
        return wanted.pool(cosine_distance(left.flatten(3), clean.flatten(3)))

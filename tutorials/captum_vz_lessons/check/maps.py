"""Grades for Value Zeroing, computed by the learner: rows, maps, cross-attention, and effects on a decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.attr import AttentionBlock, LayerMaps
from captum_vz.errors import ArgumentError
from captum_vz.functional import cosine_distance, normalize_rows
from captum_vz.testbed import load_model
from captum_vz_lessons.check.verdict import LIKENESS, Verdict, exercise, judge, tensor_of

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
ONE_BY_ONE = "the tokens of a group were zeroed one at a time. Zero their values together."
#: An answer with a mistake, computed when it is needed.
Wrong = tuple[str, Callable[[], Tensor]]


class Task(NamedTuple):
    """The layer whose map an exercise asks for."""

    model: Any
    inputs: Any
    layers: list[nn.Module]
    layer: nn.Module
    attention: Any = "self"

    def map(self, layer: nn.Module | None = None, attention: Any = None, **options: Any) -> Tensor:
        """The map of Value Zeroing of this layer, or of another one."""
        one = self.layer if layer is None else layer
        method = ValueZeroing(self.model, one, attention=attention or self.attention, **options)
        found: Tensor = method.attribute(self.inputs)
        if len(found) != 1:
            raise ArgumentError(f"inputs holds {len(found)} examples: pass one example.")
        return found[0]

    def distances(self) -> Tensor:
        """The map before rows are divided by their sums."""
        return self.map(normalize=False)


@exercise(
    "For each source j, compare the layer's outputs with and without the value of j: `1 - "
    "torch.cosine_similarity(without, clean, dim=-1)`. This is column j. Divide each row by its sum. In cross-"
    "attention, sources are tokens of the encoder. In a row, there is one distance for each source."
)
def value_zeroing(
    yours: Any,
    inputs: Any = None,
    *,
    model: Any = None,
    layer: int | nn.Module = -1,
    token: int | None = None,
    attention: str = "self",
) -> Verdict:
    r"""Grade Value Zeroing, :math:`\hat C_{ij}`: a map `(out, in)`, or the row of the output token at position `token`.

    Without `model` and `inputs` (one example), it is the row of the mask in :data:`SENTENCE`, by the embedded model.
    `layer` is a layer or its index. `attention="cross"` asks for the attention of a decoder's layer to the encoder.

    >>> from captum_vz_lessons import check
    >>> map_ = check.maps.task_of()[0].map()
    >>> check.value_zeroing(map_[6]).passed
    True
    >>> check.value_zeroing(map_[:, 6])
    Not yet. value_zeroing: rows and columns are swapped. ...
    """
    task, token = task_of(model, inputs, layer, token, attention)
    right = task.map()
    if token is None:
        wrong: list[tuple[str, Any]] = [
            (SWAPPED, right.mT),
            (SWAPPED, lambda: normalize_rows(task.distances().mT)),
            (
                "each column is divided by its sum. Divide each row by its sum.",
                lambda: task.distances() / task.distances().sum(0),
            ),
            (
                "the map is divided by one sum. Divide each row by its own.",
                lambda: task.distances() / task.distances().sum(),
            ),
            *_usual(task),
        ]
        return judge(yours, right, wrong)
    others = [other for other in range(len(right)) if other != token]
    of_row: list[tuple[str, Any]] = [
        (SWAPPED, lambda: right[:, token]),
        (SWAPPED, lambda: normalize_rows(task.distances()[:, token])),
        (SWAPPED, lambda: task.distances()[:, token]),
        ("this is the whole map. Take the row of the output token.", right),
        *((name, lambda wrong=wrong: wrong()[token]) for name, wrong in _usual(task)),
        *((f"this is the row of output token {one}. Take the row of token {token}.", right[one]) for one in others),
    ]
    return judge(yours, right[token], of_row)


def task_of(
    model: Any = None, inputs: Any = None, layer: Any = -1, token: int | None = None, attention: str = "self"
) -> tuple[Task, int | None]:
    """The layer that is asked for, and the output token whose row is asked for, if it is a row."""
    if model is None and inputs is None:
        model, tokenizer = load_model()
        inputs = tokenizer(SENTENCE, return_tensors="pt")
        token = inputs.tokens().index("[MASK]") if token is None else token
    elif model is None or inputs is None:
        raise ArgumentError("model was passed without inputs, or inputs without model: pass both, or none of them.")
    layers = find_layers(model, "decoder") if attention == "cross" else find_layers(model)
    return Task(model, inputs, layers, layers[layer] if isinstance(layer, int) else layer, attention), token


def _usual(task: Task) -> list[Wrong]:
    """The mistakes that a map and a row share, with the map that each gives."""
    others = [(index, other) for index, other in enumerate(task.layers) if other is not task.layer]
    wrong: list[Wrong] = [
        (UNNORMALIZED, task.distances),
        (SIMILARITY, lambda: normalize_rows(1 - task.distances())),
        (SIMILARITY, lambda: 1 - task.distances()),
        (ATTENTION, lambda: LayerAttention(task.model, task.layer, attention=task.attention).attribute(task.inputs)[0]),
        (EUCLIDEAN, lambda: task.map(distance="euclidean")),
        (EUCLIDEAN, lambda: normalize_rows(task.map(distance="euclidean", normalize=False).square())),
        *(
            (f"this is layer {index}. Take another layer.", lambda other=other: task.map(other))
            for index, other in others
        ),
    ]
    if task.attention == "cross":
        encoder = "this is a map of the encoder. Take a layer of the decoder, with attention='cross'."
        return [
            ("this is the decoder's self-attention. Pass attention='cross'.", lambda: task.map(attention="self")),
            (encoder, lambda: task.map(find_layers(task.model, "encoder")[-1], "self")),
            *wrong,
        ]
    moves = [_ContextMove(task.model, task.layer, projected) for projected in (False, True)]

    def divided(divide: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: divide(task.distances())

    return [
        *wrong,
        *((NO_RESIDUAL, lambda move=move: move.attribute(task.inputs)[0]) for move in moves),
        ("the row is divided by its largest entry. Divide it by its sum.", divided(lambda d: d / d.amax(-1, True))),
        (
            "the row is divided by its Euclidean length. Divide it by its sum.",
            divided(lambda d: d / d.norm(2, -1, True)),
        ),
        ("the row is divided by a softmax. Divide the distances by their sum.", divided(lambda d: d.softmax(-1))),
        (
            "the token itself is left out. The value of a token counts for its own output, too.",
            divided(lambda d: normalize_rows(d.fill_diagonal_(0))),
        ),
        *_of_torch_layer(task),
    ]


def _of_torch_layer(task: Task) -> list[Wrong]:
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

    def of(steps: dict[str, Any]) -> Callable[[], Tensor]:
        return lambda: _TorchLayer(task.model, task.layer, **steps).attribute(task.inputs)[0]

    return [(name, of(steps)) for name, steps in named]


class _TorchLayer(LayerMaps):
    """A post-norm `nn.TransformerEncoderLayer`, written out: a map in which a step is missing."""

    def __init__(self, forward_func: Any, layer: Any, **steps: Any) -> None:
        super().__init__(forward_func, layer)
        self.steps: dict[str, Any] = {"first": 1, "second": 1, "ff": True, "heads": slice(None)} | steps

    def layer_scores(self, site: Any, wanted: Any) -> Tensor:
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
    """How far the attention's own output moves: a map in which the residual connection is forgotten."""

    needs_steps = True

    def __init__(self, forward_func: Any, layer: Any, projected: bool) -> None:
        super().__init__(forward_func, layer)
        self.projected = projected

    def layer_scores(self, site: Any, wanted: Any) -> Tensor:
        weights, values = site.weights(), site.attention.values
        values = values.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
        moved = torch.einsum("bhij,bhjd->bijhd", weights, values).flatten(3)  # what each source gives to each output
        clean = moved.sum(2, keepdim=True)
        left = clean - moved
        if self.projected:
            block = AttentionBlock(site)
            bias = block.projected[:, :, None] - clean @ block.matrix
            left, clean = left @ block.matrix + bias, block.projected[:, :, None]
        return wanted.pool(cosine_distance(left, clean))


@exercise("Take the row's largest entry: `map[row].argmax()`.")
def source_read(yours: Any, model: Any, inputs: Any, row: int) -> Verdict:
    """Grade the source position on which `row` of cross-attention of the last decoder layer draws most.

    `inputs` is one example, with `input_ids` and `decoder_input_ids`.
    """
    best = task_of(model, inputs, attention="cross")[0].map().argmax(1).tolist()
    ids = inputs["input_ids"][0].tolist()
    same = [place for place, one in enumerate(ids) if one == ids[best[row]]]
    mistakes = [
        (f"position {place} holds the same token, and has the smaller share of the row.", place) for place in same
    ]
    mistakes += [(f"this is the position of row {other}.", place) for other, place in enumerate(best)]
    return judge(yours, best[row], mistakes)


@exercise(
    "Compute the number once with all values, and once without the values of token j. The effect of j is the first "
    "minus the second."
)
def effect(
    yours: Any,
    inputs: Any,
    *,
    model: Any,
    target: Any,
    foil: Any = None,
    layers: Any = None,
    together: Sequence[int] = (),
) -> Verdict:
    """Grade the signed effect of each token's values on a decision, see :class:`~captum_vz.ValueZeroingEffect`.

    `model` may be a function that returns the logits, if `layers` are passed. The tokens at positions `together` are
    zeroed together, and each of them has the effect of all.
    """
    layers = find_layers(model) if layers is None else list(layers)

    def of(some: list[nn.Module], groups: Tensor | None = None) -> Tensor:
        method = ValueZeroingEffect(model, some)
        found: Tensor = method.attribute(inputs, target=target, foil=foil, feature_mask=groups)
        return found[0]

    alone = right = of(layers)
    places = list(together)
    if places:
        groups = torch.arange(len(alone))[None]
        groups[0, places] = places[0]
        right = of(layers, groups)
    mistakes: list[tuple[str, Any]] = [
        ("the sign is wrong. The effect is the clean number minus the number without the value.", -right),
        ("the sign is lost. An effect below 0 says that the value speaks against the target.", right.abs()),
        ("the values were zeroed in the last layer only. Zero them in all layers.", lambda: of(layers[-1:])),
        ("the effects are divided by their sum. They are differences of logits.", right / right.sum()),
    ]
    if (found := tensor_of(yours)) is not None and found.numel() == right.numel():
        clean = (found.reshape(-1) + right).mean()  # if these are the numbers without each value
        if clean.abs() > LIKENESS * right.abs().max():
            without = "these are the numbers without each value. Subtract them from the clean number."
            mistakes.append((without, clean - right))
    if places:
        summed = alone.clone()
        summed[places] = alone[places].sum()
        mistakes += [(ONE_BY_ONE, alone), (ONE_BY_ONE, summed)]
    return judge(yours, right, mistakes)

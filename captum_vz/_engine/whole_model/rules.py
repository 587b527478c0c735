"""The rules of AttnLRP. Nonlinearities are replaced while the model runs, other rules change the nodes of its graph."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from threading import get_ident
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_vz._private import node_number, own_parameters, saved_by, without_function_modes
from captum_vz.errors import UnsupportedLayerError
from captum_vz.functional import widen

Node = Any  # of the graph of gradients; torch has no public type for all of them
Gradients = tuple[Tensor | None, ...]
Rule = Callable[[Gradients, Gradients], Gradients]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Functions of single numbers. Those whose graph has the gradient f(x) / x already are not here: relu, abs, prelu.
NONLINEAR: Final = {
    getattr(space, written)
    for name in _words("""
        atan asinh celu clamp clamp_max clamp_min clip cos cosh elu erf exp exp2 expit expm1 gelu hardshrink hardsigmoid
        hardswish hardtanh log1p logsigmoid mish relu6 selu sigmoid silu sin sinh softplus softshrink softsign tanh
        tanhshrink threshold
    """)
    for written in (name, f"{name}_")
    for space in (torch, Tensor, F, torch.special)
    if hasattr(space, written)
}
#: A graph does not show which of these operations wrote to a part of a tensor.
IN_PLACE: Final[dict[Any, Any]] = {
    getattr(Tensor, f"{name}_"): getattr(torch, name)
    for name in ("mul", "multiply", "div", "divide", "true_divide", "pow", "sqrt", "rsqrt", "reciprocal", "addcmul")
} | {Tensor.__imul__: torch.mul, Tensor.__itruediv__: torch.div, Tensor.__ipow__: torch.pow}

# Nodes by the names of their operations, without "Backward" and the number of the overload.
#: Linear operations, choices of entries, and functions with f(cx) = c f(x) for c > 0: their gradient is the rule.
LINEAR: Final = _words("""
    Abs AdaptiveAvgPool1D AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D Add Alias Amax Amin AsStrided AvgPool2D
    AvgPool3D BackwardHookFunction Cat Clone Col2Im ConstantPadNd Copy CopyBackwards CopySlices Cumsum DiagEmbed
    Diagonal Embedding Expand FftC2C FftC2R FftR2C Flip Gather Im2Col Imag Index IndexAdd IndexCopy IndexFill IndexPut
    IndexPutImpl IndexSelect Kthvalue LeakyRelu LogSoftmax MaskedFill MaskedScatter MaskedSelect Max
    MaxPool2DWithIndices MaxPool3DWithIndices Maximum Mean Median Min Minimum NanToNum NativeDropout Neg Permute
    PixelShuffle PixelUnshuffle PreluKernel Real ReflectionPad1D ReflectionPad2D Relu Repeat ReplicationPad1D
    ReplicationPad2D ReshapeAlias Roll Rsub SafeSoftmax Scatter ScatterAdd Select SelectScatter Slice SliceScatter Slope
    Softmax Sort Split SplitWithSizes Squeeze Stack Sub Sum T ToCopy Topk Transpose Tril Triu Unbind Unfold UnsafeSplit
    UnsafeView Unsqueeze UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D View
    ViewAsComplex ViewAsReal ViewCopy Where
""")
#: Products, with the places of their factors among the inputs.
FACTORS: Final = {
    **dict.fromkeys(("Mul", "Mm", "Bmm", "Mv", "Dot", "Linear", "Convolution", "GroupedMm"), (0, 1)),
    "GeneratedBackwardFor_transformers_grouped_mm_fallback_default": (0, 1),
    **dict.fromkeys(("Addmm", "Baddbmm", "Addbmm", "Addmv", "Addr", "Addcmul"), (1, 2)),
    "Trilinear": (0, 1, 2),
}
SCALES: Final = _words("LinalgVectorNorm Norm Reciprocal Rsqrt Sqrt Std Var")  #: scales, which are constants of a norm
SOFTMAX: Final = _words("Softmax SafeSoftmax")  #: functions that make attention weights
#: Attention in one operation: queries, keys, values, and perhaps a bias of the logits.
ATTENTION: Final = re.compile(r"ScaledDotProduct\w*Attention|FlexAttention")


class Slope(torch.autograd.Function):
    """A value f(x) whose gradient is the constant (f(x) - f(0)) / x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, origin: Tensor) -> Tensor:
        """The value. `origin` is f(0)."""
        slope = (widen(value) - widen(origin)) / widen(x)
        ctx.save_for_backward(slope.masked_fill(x == 0, 0).to(x.dtype))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient times the slope."""
        (slope,) = ctx.saved_tensors
        return gradient.to(slope.dtype) * slope, None, None


with_slope: Final[Callable[..., Tensor]] = Slope.apply


def call_with_slopes(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a function of torch. A nonlinear function of single numbers has the gradient of :class:`Slope`."""
    if func in IN_PLACE and any(isinstance(one, Tensor) and one.requires_grad for one in args):
        return args[0].copy_(IN_PLACE[func](args[0].clone(), *args[1:], **kwargs))
    if func not in NONLINEAR:
        return func(*args, **kwargs)
    x, *rest = args if args else (kwargs["input"],)
    named = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
    if not (isinstance(x, Tensor) and x.requires_grad) or "out" in named:
        return func(*args, **kwargs)
    given = x.detach()
    found = with_slope(x, *(func(one, *rest, **named) for one in (given.clone(), torch.zeros_like(given))))
    in_place = func.__name__.endswith("_") or kwargs.get("inplace") or (rest and rest[-1] is True)
    return x.copy_(found) if in_place else found


def whole_activations() -> Callable[[nn.Module, Any, Any], Any]:
    """A hook of all modules: an activation that is written out in several operations has one gradient.

    An activation is a module without submodules that computes each number from the same number of its only input.
    """
    thread = get_ident()
    known: dict[nn.Module, bool] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        x = args[0] if isinstance(args, tuple) and len(args) == 1 else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x is output or get_ident() != thread:
            return None
        if not (x.requires_grad and output.requires_grad):
            return None
        if module not in known:
            own = [one for one in own_parameters(module).values() if one is not None and one.numel() > 1]
            alone = not own and next(module.children(), None) is None and x.shape == output.shape
            known[module] = alone and x.is_floating_point() and _is_elementwise(module, x.detach(), output.detach())
        if not known[module]:
            return None
        with torch.no_grad(), without_function_modes():
            origin = module.forward(torch.zeros_like(x))
        return with_slope(x, output.detach(), origin)

    return hook


@torch.no_grad()
def _is_elementwise(module: nn.Module, x: Tensor, output: Tensor) -> bool:
    """Whether a module gives the same numbers for its input's numbers in another shape and order."""
    try:
        with without_function_modes():
            found = module.forward(x.flatten().flip(0))
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):  # it needs the axes
        return False
    if not isinstance(found, Tensor) or found.shape != (x.numel(),):
        return False
    near = torch.finfo(output.dtype).eps ** 0.5
    return torch.allclose(found.flip(0).view(output.shape).to(output), output, near, near, equal_nan=True)


def change_gradients(root: Node, ends: Iterable[Node], begin: int, constant_weights: bool, name: str) -> bool:
    """Give the nodes of a graph the gradients of the rules. Return whether its `root` depends on any of the `ends`.

    `root` is the node of the explained number, `ends` are those of the explained tensors. Nodes from the number `begin`
    on were not made by the model, and keep their gradients. With `constant_weights`, attention weights are constants.
    UnsupportedLayerError: an operation has no rule. It names the method.
    """
    ends = set(ends)
    moving: dict[Node, bool] = {}
    passing: dict[Node, dict[int, Node]] = {}
    waiting = [root]
    while waiting:
        node = waiting[-1]
        if node not in passing:
            operation = _operation(node, begin)
            inputs = [one for one, _ in node.next_functions]
            places = _passing(node, operation, constant_weights)
            passing[node] = {place: inputs[place] for place in places if inputs[place] is not None}
            if len(places) < len(inputs):
                node.register_hook(_only(places))
            waiting += passing[node].values()
            continue
        waiting.pop()
        if node not in moving:
            changing = {place for place, one in passing[node].items() if moving[one]}
            moving[node] = bool(changing) or node in ends
            operation = _operation(node, begin)
            if changing and operation and operation not in LINEAR:
                rule = _rule(node, operation, changing)
                if rule is None:
                    raise UnsupportedLayerError(_refusal(operation, node.name(), name))
                if rule is not _unchanged:
                    node.register_hook(rule)
    return moving[root]


def _operation(node: Node, begin: int) -> str:
    """The name of a node's operation. Empty: the node is a leaf, or the model did not make it."""
    return "" if node_number(node) >= begin else _without_prefix(node.name())


@cache
def _without_prefix(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name.removeprefix("torch::autograd::"))


def _passing(node: Node, operation: str, constant_weights: bool) -> Sequence[int]:
    """The places of the inputs that get a gradient. The others are constants."""
    if operation in SCALES or (operation == "Pow" and _exponent(node) < 1):
        return ()
    if operation == "Div" or operation in NORMS:
        return (0,)
    if constant_weights and operation in SOFTMAX:
        return ()
    if constant_weights and ATTENTION.match(operation):
        return (2,)
    return range(len(node.next_functions))


def _rule(node: Node, operation: str, moving: set[int]) -> Rule | None:
    """The rule of an operation, of whose inputs those at some places depend on the explained tensors."""
    if operation in FACTORS:
        factors = moving & set(FACTORS[operation])
        return _scaled(dict.fromkeys(factors, 1 / len(factors)))
    if operation == "Pow":
        return None if math.isinf(_exponent(node)) else _scaled({0: 1 / _exponent(node)})
    if operation == "Div":
        return _scaled({})
    if ATTENTION.match(operation):
        # Two products: of queries and keys, and of weights and values.
        of_weights = 1 / (1 + (moving > {2}))
        of_logits = of_weights / (1 + (moving >= {0, 1}))
        return _scaled({0: of_logits, 1: of_logits, 2: of_weights, 3: of_weights})
    if operation in NORMS:
        return NORMS[operation](node)
    return None


def _exponent(node: Node) -> float:
    """The exponent of a power. Infinite: it is no number."""
    exponent = saved_by(node, "exponent")
    return float(exponent) if isinstance(exponent, (int, float)) else math.inf


def _unchanged(given: Gradients, outer: Gradients) -> Gradients:
    return given


def _only(places: Sequence[int]) -> Rule:
    return lambda given, _: tuple(x if place in places else None for place, x in enumerate(given))


def _scaled(factors: Mapping[int, float]) -> Rule:
    """Each gradient times the factor at its place."""
    if all(factor == 1 for factor in factors.values()):
        return _unchanged
    return lambda given, _: tuple(
        x if x is None or place not in factors else x * factors[place] for place, x in enumerate(given)
    )


def _layer_norm(node: Node) -> Rule:
    """A norm of the last axes with a constant scale. The mean is subtracted by all norms but those of squares."""
    scale, weight, shape = saved_by(node, "result2"), saved_by(node, "weight"), saved_by(node, "normalized_shape")
    centred = scale is not None
    scale = saved_by(node, "result1") if scale is None else scale

    def rule(given: Gradients, outer: Gradients) -> Gradients:
        x, gradient = given[0], outer[0]
        if x is None or gradient is None:
            return given
        found = widen(gradient) * (1 if weight is None else weight) * scale
        if centred:
            found = found - found.mean(tuple(range(-len(shape), 0)), keepdim=True)
        return found.to(x.dtype), *given[1:]

    return rule


def _group_norm(node: Node) -> Rule:
    """A norm of groups of channels with a constant scale."""
    scale, weight = saved_by(node, "result2"), saved_by(node, "weight")

    def rule(given: Gradients, outer: Gradients) -> Gradients:
        x, gradient = given[0], outer[0]
        if x is None or gradient is None:
            return given
        found = widen(gradient).reshape(*gradient.shape[:2], -1) * (1 if weight is None else weight[:, None])
        found = found.reshape(*scale.shape, -1) * scale[..., None]
        return (found - found.mean(-1, keepdim=True)).reshape(x.shape).to(x.dtype), *given[1:]

    return rule


def _batch_norm(node: Node) -> Rule | None:
    """With the running statistics, a batch norm is linear."""
    return None if saved_by(node, "training") else _scaled({})


NORMS: Final[dict[str, Callable[[Node], Rule | None]]] = {
    "NativeLayerNorm": _layer_norm,
    "FusedRmsNorm": _layer_norm,
    "NativeGroupNorm": _group_norm,
    "NativeBatchNorm": _batch_norm,
    "CudnnBatchNorm": _batch_norm,
}


def _refusal(operation: str, node: str, name: str) -> str:
    if "Compiled" in operation:
        return (
            f"{name} does not see the operations of a compiled function ({node}). Pass the model without torch.compile."
        )
    return (
        f"{name} has no rule for {operation} ({node}), which forward_func computes between the explained vectors and "
        "its output. Pass a layer above it, or another method, such as TokenAttribution with IntegratedGradients."
    )

"""What the modules of a layer are: whose code they run, and which of them are linear modules or norms.

Linear modules are recognised by their class, norms by what they compute.

A replay can reproduce the clean output and still be wrong for zeroed values: values may be permuted, the context may be
clamped outside its clean range, positions may compete. Modules of torch and transformers do none of this, except for
experts of limited capacity. Code from elsewhere may.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from captum_vz._engine.capture import LayerRecord
from captum_vz._engine.numerics import once_a_pass, results_of_pass
from captum_vz._engine.numerics.tolerance import CannotReplayError, check_reproduced
from captum_vz._engine.taps.changes import is_hooked
from captum_vz._private import BUFFERS, OWN_ATTRIBUTES, accelerate_hook, modules_of, own_parameters

T = TypeVar("T")

# Packages whose classes of modules, and whose functions, count as library code.
CLASSES = ("torch.nn.", "transformers.", "captum_vz._engine.")
FUNCTIONS = (*CLASSES, "torch.", "contextlib.", "accelerate.hooks.")
NOT_SETTINGS = OWN_ATTRIBUTES | {BUFFERS}  # what `nn.Module` itself keeps
# Words in the names of classes whose tokens may compete for experts of limited capacity.
COMPETING = re.compile("expert|router|moe|sparse", re.IGNORECASE)


def once_a_kind(layer: LayerRecord, also: tuple[Any, ...], compute: Callable[..., T], *given: Any) -> T:
    """Return `compute(*given)`, or what it returned for a layer of the same kind and `also` in this pass.

    For what the code of a layer decides and its numbers do not. An error is not kept.
    """
    results, layer.kind = results_of_pass.get(), layer.kind or (_kind(layer),)
    (kind,) = layer.kind
    if results is None or kind is None:
        return compute(*given)
    key = compute, *also, *kind
    if key not in results.of_kinds:
        results.of_kinds[key] = compute(*given)
    found: T = results.of_kinds[key]
    return found


def _kind(layer: LayerRecord) -> tuple[Any, ...] | None:
    """A key. Layers with one key run the same code with the same settings, on arguments of the same form.

    None: the layer has hooks, or its own code holds what may decide and cannot be compared.
    """
    library = is_library_code(layer)
    settings = [_settings(module, library) for module in layer.modules]
    if any(one is None for one in settings) or any(map(is_hooked, layer.modules)):
        return None
    # A parameter of other code that begins with zeros may be a gate that is switched off.
    plain = [library or x.is_meta or bool(x.detach().flatten()[:64].any()) for x in layer.parameters]
    parameters = [*plain, *(x.shape for x in layer.parameters)]
    given = [name for name, x in layer.kwargs.items() if x is not None]
    given += [] if layer.given is None else [layer.given.projection]
    attentions = [(one.shape, one.inline is None) for one in layer.attentions]
    return (*map(type, layer.modules), *settings, *parameters, *given, len(layer.args), *attentions)


def _settings(module: nn.Module, library: bool) -> tuple[Any, ...] | None:
    """The attributes by which a module's code may decide, such as the axis of a softmax or the size of a norm.

    In library code, the index of a layer in its stack and all objects are left out. None: other code holds objects.
    """
    own = [(name, x) for name, x in vars(module).copy().items() if name not in NOT_SETTINGS]
    if library:
        # Two partial functions are never equal, but their texts are.
        texts = [(name, repr(x) if isinstance(x, partial) else x) for name, x in own]
        own = [(name, x) for name, x in texts if name not in ("layer_idx", "layer_id") and _is_setting(x)]
        return (module.training, *own)
    own = [(name, x) for name, x in own if not f"{type(x).__module__}".startswith("transformers.")]  # a config
    plain = all(_is_setting(x) or type(x) is float for _, x in own)
    return (module.training, *own) if plain else None


def _is_setting(x: Any) -> bool:
    if type(x) is tuple:
        return all(map(_is_setting, x))
    return x is None or type(x) in (bool, int, str) or (callable(x) and type(x).__hash__ is not None)


def each_module_runs_once(layer: LayerRecord) -> bool:
    """Whether each module with parameters, except those of the attention, ran once and on all positions.

    Experts do not: each runs on the positions that it is given. Their positions may compete.
    """
    batch, _, out, _ = layer.attentions[0].shape
    inside = {id(module) for one in layer.attentions for module in modules_of(one.module)}
    holders = [m for m in layer.modules if id(m) not in inside and own_parameters(m)]
    matrices = all(x is None or x.dim() <= 2 for module in holders for x in own_parameters(module).values())
    return matrices and all(layer.module_rows.get(id(module)) == [batch * out] for module in holders)


def is_library_code(layer: LayerRecord) -> bool:
    """Whether all code of a layer is torch's and transformers', and no hook changes its output."""
    return not layer.hooks and _are_of_libraries(layer.modules) and not any(map(is_hooked, layer.modules[1:]))


def _are_of_libraries(modules: list[nn.Module]) -> bool:
    """Whether all code of a module and its parts is."""
    known = all(map(partial(once_a_pass, _is_library_class), set(map(type, modules))))
    return known and all(map(_holds_library_code, modules))


def keeps_examples_apart(model: Any) -> bool:
    """Whether the examples of a batch cannot affect each other: a model of transformers, in eval mode, no experts.

    Statistics of a batch (BatchNorm) count in train mode, and where no others were kept. Hooks of Captum's layer
    methods keep or replace outputs of the whole batch.
    """
    model = model.module if type(model) is nn.DataParallel and not is_hooked(model) else model
    if not type(model).__module__.startswith("transformers."):
        return False
    modules = modules_of(model)
    if not _are_of_libraries(modules) or any(is_hooked(module, but="captum.") for module in modules):
        return False
    return not any(
        module.training or COMPETING.search(type(module).__name__) or getattr(module, "running_mean", module) is None
        for module in modules
    )


def _is_library_class(kind: type[nn.Module]) -> bool:
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = [x for one in classes for x in vars(one).values() if isinstance(x, FunctionType)]
    from_library = all(f"{one.__module__}.".startswith(CLASSES) for one in classes)
    return from_library and all(map(_is_library_function, functions))


def _holds_library_code(module: nn.Module) -> bool:
    """Whether the functions that a module holds are library code, and its `forward` is that of its class."""
    own = vars(module).copy()
    held = [own[name] for name in own.keys() - NOT_SETTINGS]
    functions = [x for x in held if callable(x) and not isinstance(x, (nn.Module, Tensor, type))]
    hook = accelerate_hook(module)
    hooks = () if hook is None else (hook, *getattr(hook, "hooks", ()))
    return (
        all(map(_is_library_function, functions))
        # Accelerate's own hooks move inputs and outputs. A module that it released keeps a forward of its own.
        and all(type(one).__module__ == "accelerate.hooks" for one in hooks)
        and ("forward" not in vars(module) or _unwrapped(module.forward) is _unwrapped(type(module).forward))
    )


def _is_library_function(function: Any) -> bool:
    """Whether a function, and all that it wraps, is library code. A wrapper carries the name of what it wraps."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, BuiltinFunctionType):
        return True
    is_function = isinstance(function, FunctionType)
    where = function.__globals__["__name__"] if is_function else type(function).__module__
    wrapped = getattr(function, "__wrapped__", None)
    known = f"{where}.".startswith(FUNCTIONS if is_function else CLASSES)
    return known and (wrapped is None or _is_library_function(wrapped))


def _unwrapped(function: Any) -> Any:
    """What a function wraps. A pass in another thread may have put a cache of ours before the last argument."""
    while isinstance(function, partial) and function.func.__module__.startswith("captum_vz._engine."):
        function = function.args[-1]
    function = inspect.unwrap(function)
    return getattr(function, "__func__", function)


@dataclass(frozen=True)
class Norm:
    """A norm that computes `scale(x) * direction(x) + beta`: LayerNorm, or RMSNorm if it is not centred."""

    module: nn.Module
    gamma: Tensor
    beta: Tensor
    centred: bool
    eps: float

    def direction(self, x: Tensor) -> Tensor:
        """Return the part of the norm that is linear in `x (..., d)`."""
        return self.gamma * self._centre(x)

    def scale(self, x: Tensor) -> Tensor:
        """Return the inverse of the root mean square of (centred) `x (..., d)`, as `(..., 1)`."""
        square = torch.linalg.vector_norm(self._centre(x), dim=-1, keepdim=True).square() / x.shape[-1]
        return (square + self.eps).rsqrt()

    def normed_and_scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the module's output for `x (..., d)`, and the scale `(..., 1)` that it used."""
        if not self.centred:
            return self.module(x), self.scale(x)
        normed, _, scale = torch.native_layer_norm(x, x.shape[-1:], self.gamma, self.beta, self.eps)
        return normed, scale

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


@dataclass(frozen=True)
class NoNorm(Norm):
    """What stands in the place of a norm where there is none: its `module` takes the residual stream itself."""

    @classmethod
    def before(cls, module: nn.Module, x: Tensor) -> NoNorm:
        """The missing norm before a module that is given vectors like `x (..., d)`."""
        one = x.new_ones(x.shape[-1])
        return cls(module, one, torch.zeros_like(one), False, 0.0)

    def direction(self, x: Tensor) -> Tensor:
        return x

    def scale(self, x: Tensor) -> Tensor:
        return torch.ones_like(x[..., :1])


def _holds_numbers(weight: Any) -> TypeGuard[Tensor]:
    """Whether a weight is a plain tensor: not offloaded, and of no other class, which torchao quantises."""
    return type(weight) in (Tensor, nn.Parameter) and not weight.is_meta


def matrix(module: nn.Module) -> Tensor | None:
    """Return the `(in, out)` matrix of a linear module, with or without bias. None for any other module."""
    # Subclasses do not count, because they may store the weight in another form (quantised, adapted).
    kind, weight = type(module), getattr(module, "weight", None)
    if not _holds_numbers(weight):
        return None
    if kind in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return weight.T
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return weight
    return None


def plain_layer_norm(module: nn.Module) -> Norm | None:
    """Return the norm of a `torch.nn.LayerNorm` over the last axis, without probing. None for any other module."""
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        return None
    if not _holds_numbers(module.weight):
        return None
    beta = module.weight.new_zeros(()) if module.bias is None else module.bias
    return Norm(module, module.weight, beta, True, module.eps)


def read_norm(module: nn.Module, x: Tensor, normed: Tensor) -> Norm:
    """Return a norm's parameters, found by probing and not by its name.

    The result is checked on `x (n, d)` and the module's output `normed (n, d)`. CannotReplayError: the module is no
    LayerNorm or RMSNorm.
    """
    named = vars(module).copy().items()
    eps = [value for name, value in named if "eps" in name and isinstance(value, (float, type(None)))]
    if len(eps) != 1:
        kind = type(module).__name__
        raise CannotReplayError(f"{kind} cannot be read as a norm: expected one epsilon, found {len(eps)}")
    epsilon = torch.finfo(x.dtype).eps if eps[0] is None else eps[0]
    signs = x.new_ones(x.shape[-1])  # not rows of x, which has none if all tokens are padding
    signs[1::2] = -1
    beta, probed, shifted = module(torch.stack([torch.zeros_like(signs), signs, signs + 1])).unbind()
    centred = bool((shifted - probed).abs().max() < 1e-3 * (probed - beta).abs().max())
    unit = Norm(module, torch.ones_like(signs), beta, centred, epsilon)
    gamma = (probed - beta) / (unit.direction(signs) * unit.scale(signs))
    norm = Norm(module, gamma, beta, centred, epsilon)
    if len(x):
        check_reproduced(norm.scale(x) * norm.direction(x) + beta, normed)
    return norm

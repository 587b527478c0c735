"""What every method here is made of: Captum's interface, a model, its layers, and their attention, heads and values."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeAlias, TypeVar

import torch
from captum.attr import PerturbationAttribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_vz._engine import ValueProjection, find_layers
from captum_vz._private import modules_of, own_modules, own_parameters, uncompiled
from captum_vz.errors import ArgumentError, UnsupportedLayerError

_Attribute = TypeVar("_Attribute", bound=Callable[..., Any])
# Keywords of Captum's other methods, and what to do where a method here has no such argument.
CAPTUM_KEYWORDS = {
    **dict.fromkeys(("baselines", "layer_baselines", "n_steps", "method", "n_samples", "stdevs"), "Leave it out"),
    **dict.fromkeys(("return_convergence_delta", "sliding_window_shapes", "grad_kwargs"), "Leave it out"),
    **dict.fromkeys(("attribute_to_layer_input", "perturbations_per_eval", "show_progress"), "Leave it out"),
    **dict.fromkeys(("internal_batch_size", "layer_mask"), "Leave it out"),  # or as below
    "nt_samples": "Pass it to NoiseTunnel(method).attribute",
    "attention_mask": "Pass a mapping with input_ids and attention_mask as inputs, or additional_forward_args",
}
OTHER_NAMES = {"internal_batch_size": "perturbations_per_eval", "layer_mask": "feature_mask"}


def logged(attribute: _Attribute) -> _Attribute:
    """Captum's decorator of `attribute`, with types. Keywords of Captum's other methods are refused."""
    takes = inspect.signature(attribute).parameters
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())

    @wraps(attribute)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for keyword in () if open_ended else CAPTUM_KEYWORDS.keys() & (kwargs.keys() - takes.keys()):
            other = OTHER_NAMES.get(keyword)
            remedy = f"Pass {other}" if other in takes else CAPTUM_KEYWORDS[keyword]
            raise ArgumentError(f"{self.get_name()} takes no {keyword}. {remedy}.")
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("captum.log"):
            frame = frame.f_back
        caller = str(frame.f_globals.get("__name__", ""))
        if caller.startswith("captum.concept"):
            # TCAV would multiply a row of tokens with a vector of activations, if both happen to have one length.
            raise ArgumentError(
                f"layer_attr_method is {self.get_name()}, which has scores of tokens, but TCAV needs scores of the "
                "activations of a layer. Leave layer_attr_method None."
            )
        found = attribute(self, *args, **kwargs)
        if caller.startswith("captum.metrics") and not isinstance(found, tuple):
            # sensitivity_max takes the answer for a tuple, and would compare single examples.
            return tuple(found) if isinstance(found, list) else (found,)
        return found

    return log_usage(part_of_slo=True)(checked)


def check_one_of(name: str, value: Any, *allowed: Any) -> None:
    """Refuse a value of an option that is not allowed. Options may be reassigned, so each use checks them again."""
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        raise ArgumentError(f"{name} is {value!r}: pass {' or '.join(map(repr, allowed))}.")


def check_gradients(name: str, model: Any = None) -> None:
    """Refuse inference mode, and a model in train mode, in methods that need gradients."""
    if torch.is_inference_mode_enabled():
        raise ArgumentError(f"{name} needs gradients, but torch.inference_mode() is active. Use torch.no_grad().")
    parts = modules_of(model) if isinstance(model, nn.Module) else []
    if any(one.training for one in parts if not own_modules(one)):  # a wrapper may be in train mode alone
        raise ArgumentError("The model is in train mode. Call model.eval() first.")


def warn(message: str) -> None:
    """Warn at the user's line: the first frame outside Captum and this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("captum", "captum_vz"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class Described:
    """A method whose `repr` names its model, its layers, and the options that differ from their defaults."""

    def __repr__(self) -> str:
        shown = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            given = getattr(self, name, parameter.default)
            if given is parameter.default or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name == "layer":
                shown.append(f"layer={_layers_shown(given, getattr(self, 'forward_func', None))}")
            elif not (isinstance(given, (str, int, float, type(None))) and given == parameter.default):
                shown.append(_shown(given) if name in ("forward_func", "maps") else f"{name}={_shown(given)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _layers_shown(layer: Any, model: Any) -> str:
    """The names of layers in their model. Their classes, if a function runs them."""
    names = {module: name for name, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    each = as_list(layer)
    shown = [names.get(one, _shown(one)) if isinstance(one, nn.Module) else _shown(one) for one in each]
    if each == [layer]:
        return shown[0]
    return f"[{', '.join(shown if len(shown) < 4 else [shown[0], '...', shown[-1]])}]"


def _shown(value: Any) -> str:
    """One value of an option, in a line."""
    if isinstance(value, Tensor):
        return f"Tensor{tuple(value.shape)}"
    if isinstance(value, (str, int, float, list, tuple, type(None), Described)):
        return repr(value)
    if isinstance(value, partial):
        named = [f"{key}={_shown(one)}" for key, one in value.keywords.items()]
        return f"partial({', '.join([_shown(value.func), *named])})"
    return str(getattr(value, "__name__", type(value).__name__))


class ForwardPassAttribution(Described, PerturbationAttribution):
    """Base of the methods that compute scores while `forward_func` runs one or several layers."""

    #: Where the values are, for layers that compute attention in their own code. None: the package finds them.
    values: Any = None

    def __init__(
        self, forward_func: Callable[..., Any], layer: Any = None, device_ids: list[int] | None = None
    ) -> None:
        """See the class for the arguments."""
        PerturbationAttribution.__init__(self, forward_func)
        self.layer = default_layers(forward_func) if layer is None else layer
        self.device_ids = device_ids

    def _layers(self) -> list[nn.Module]:
        """The checked layers."""
        layers = as_layers(self.layer)
        check_forward_func(self.forward_func, layers)
        return layers

    def _check_layer_input(self, attribute_to_layer_input: bool) -> None:
        if attribute_to_layer_input:
            raise ArgumentError(f"{self.get_name()} attributes to tokens. Leave attribute_to_layer_input False.")

    @classmethod
    def get_name(cls) -> str:
        """The name of the class in words, as in Captum, except that acronyms stay in one piece.

        A private class has the name of its first public base.
        """
        known = next(one for one in cls.__mro__ if not one.__name__.startswith("_"))
        return re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", known.__name__)

    @property
    def multiplies_by_inputs(self) -> bool:
        """False, because scores are not multiplied by the inputs."""
        return False

    def attribute_future(self, *args: Any, **kwargs: Any) -> None:
        """Not implemented, because scores are computed while the model runs."""
        raise NotImplementedError(f"attribute_future is not implemented for {type(self).__name__}")


Part: TypeAlias = nn.Module | nn.Parameter
Select: TypeAlias = Callable[[Tensor], Tensor]
Where: TypeAlias = Part | tuple[Part, Select]
Values: TypeAlias = Where | Sequence[Where] | Callable[[nn.Module], Where] | None
Attention: TypeAlias = str | nn.Module | Sequence[nn.Module]
# Classes of modules and of parameters that cannot be explained.
UNREADABLE = {
    "ScriptModule": "was compiled by torch.jit, so its attention cannot be read. Pass the model before that",
    "FSDPModule": "is sharded by FSDP, so it has no parameters when it runs again. Load the model without sharding",
    "DTensor": "is spread over processes (DTensor, tensor parallelism). Load the model by device_map='auto'",
}
# A selection of query heads, for all layers or for one layer.
Heads = int | Sequence[int] | None
FORMS = (
    "pass a submodule or parameter of the layer, or (part, a function that selects the values from its result), or a "
    "list of these if each head has its own. For several layers, pass a list with this for each, or a function of it"
)


def check_forward_func(forward_func: Any, layers: Sequence[nn.Module]) -> None:
    """Refuse what cannot run layers: a tokenizer, a name, or one of the layers in the place of the model."""
    if hasattr(forward_func, "convert_tokens_to_ids"):
        found = f"a tokenizer ({type(forward_func).__name__})"
    elif isinstance(forward_func, nn.Module) and not isinstance(forward_func, nn.ModuleList):
        larger = next((one for one in layers if one is not forward_func and forward_func in modules_of(one)), None)
        if larger is None:
            return
        found = f"{type(forward_func).__name__}, a part of layer ({type(larger).__name__})"
    elif isinstance(forward_func, type) and issubclass(forward_func, nn.Module):
        found = f"the class {forward_func.__name__} and no object of it"
    elif callable(forward_func) and not isinstance(forward_func, nn.Module):
        return
    else:
        found = repr(forward_func) if isinstance(forward_func, str) else f"of type {type(forward_func).__name__}"
    raise ArgumentError(
        f"forward_func is {found}: pass the model, or a function that runs it, first, and the layer second."
    )


def default_layers(forward_func: Any, stack: str | None = None) -> list[nn.Module]:
    """The layers of a model where `layer` is None. `stack` chooses one of several stacks."""
    check_forward_func(forward_func, [])
    if not isinstance(forward_func, nn.Module):
        raise ArgumentError(
            "layer is None, but forward_func is a function, whose layers are not known: pass "
            "layer=captum_vz.find_layers(model), with the model that the function runs."
        )
    try:
        return find_layers(forward_func, stack)
    except ArgumentError as error:
        raise ArgumentError(
            f"layer is None, which means find_layers(model), but {error} Pass layer=find_layers(model, stack)."
        ) from error


def as_list(layer: Any) -> list[Any]:
    """The entries of a list of layers. A single layer becomes a list with one entry."""
    return list(layer) if isinstance(layer, (nn.ModuleList, list, tuple)) else [layer]


def as_layers(layer: Any) -> list[nn.Module]:
    """The checked modules of `layer`, which is a module or a list of modules."""
    layers = as_list(layer)
    wrong = [one for one in layers if not isinstance(one, nn.Module)]
    if wrong or not layers:
        shown = [repr(one) if isinstance(one, (str, int)) else f"of type {type(one).__name__}" for one in wrong]
        raise ArgumentError(
            f"layer is {', '.join(shown) or 'empty'}: pass a module of the model, or a list of modules, such as "
            "captum_vz.find_layers(model)."
        )
    walks = [modules_of(entry) for entry in layers]
    for layer, *parts in walks:
        parameters = [x for one in (layer, *parts) for x in own_parameters(one).values()]
        names = {cls.__name__ for kind in set(map(type, (layer, *parts, *parameters))) for cls in kind.__mro__}
        if found := names & UNREADABLE.keys():
            raise UnsupportedLayerError(f"The layer {type(layer).__name__} {UNREADABLE[max(found)]}.")
        if not type(layer).__call__.__module__.startswith(("torch.", "transformers.")):
            raise UnsupportedLayerError(
                f"The layer {type(layer).__name__} has a __call__ of its own, and hooks see only what forward does. "
                "Move this code to forward."
            )
    if len({id(entry) for entry in layers}) != len(layers):
        raise ArgumentError("layer lists a module more than once. List each once, also if it runs several times.")
    inner = {id(module) for walk in walks for module in walk[1:]}
    inside = [type(entry).__name__ for entry in layers if id(entry) in inner]
    if inside:
        raise ArgumentError(f"layer lists parts of others in it: {', '.join(inside)}. Pass them in separate calls.")
    # A compiled layer wraps the module that runs.
    return [uncompiled(entry) for entry in layers]


def attentions_of_layers(attention: Any, layers: Sequence[nn.Module]) -> list[str]:
    """Which attention of each layer is meant: "self", "cross", or a dot and the name of a module of the layer."""
    if isinstance(attention, str) and attention in ("self", "cross"):
        return [attention] * len(layers)
    entries = as_list(attention)
    entries = [entries] if len(layers) == 1 else entries
    form = (
        "'self', 'cross', or the attention module of the layer, a list if its heads are several modules. For several "
        "layers, pass a list with this for each layer"
    )
    each = [as_list(one) for one in entries]
    if not all(each) or not all(isinstance(part, nn.Module) for parts in each for part in parts):
        shown = repr(attention) if isinstance(attention, str) else f"of type {type(attention).__name__}"
        raise ArgumentError(f"attention is {shown}: pass {form}.")
    if len(each) != len(layers):
        raise ArgumentError(f"attention has {len(each)} modules for {len(layers)} layers: pass {form}.")
    pairs = zip(each, layers, strict=True)
    return [f".{' '.join(_name(part, layer, 'attention', form) for part in parts)}" for parts, layer in pairs]


def values_of_layers(values: Any, layers: Sequence[nn.Module]) -> list[ValueProjection]:
    """Where the values of each layer are. Empty if `values` is None."""
    if values is None:
        return []
    if isinstance(values, list):
        values = [values] if len(layers) == 1 else values
        if len(values) != len(layers):
            raise ArgumentError(f"values has {len(values)} entries for {len(layers)} layers: {FORMS}.")
        return [_row(one, layer) for one, layer in zip(values, layers, strict=True)]
    by_layer = callable(values) and not isinstance(values, nn.Module)
    return [_row(values(layer) if by_layer else values, layer) for layer in layers]


def _row(where: Any, layer: nn.Module) -> ValueProjection:
    if isinstance(where, list) and where:  # each head has a module of its own
        first, *others = [_row(one, layer) for one in where]
        if len({one.projection for one in (first, *others)}) < len(where):
            raise ArgumentError(f"values lists a part of {type(layer).__name__} more than once: {FORMS}.")
        return replace(first, others=tuple(others))
    part, select = where if isinstance(where, tuple) and len(where) == 2 else (where, _itself)
    if not isinstance(part, (nn.Module, nn.Parameter)) or not callable(select):
        raise ArgumentError(f"values is of type {type(where).__name__}: {FORMS}.")
    name = _name(part, layer, "values", FORMS)
    return ValueProjection(name, select=_checked(select, name))


def _name(part: Part, layer: nn.Module, argument: str, forms: str) -> str:
    """The name of a part of a layer."""
    named = (*layer.named_modules(), *layer.named_parameters())
    name = next((name for name, one in named if one is part and name), None)
    if name is None:
        raise ArgumentError(
            f"{argument} is a {type(part).__name__} that is no part of the layer {type(layer).__name__}: {forms}."
        )
    return name


def _checked(select: Select, name: str) -> Select:
    """`select`, whose result has to be a view of values `(batch, in, d)` or `(batch, in, head, d_head)`."""
    axes = (3,) if select is _itself else (3, 4)  # of four axes, `select` has to return the tokens second

    def selected(projected: Tensor) -> Tensor:
        found = select(projected)
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if isinstance(found, Tensor) and found.dim() == 4 not in axes:
            raise UnsupportedLayerError(
                f"{name} returned {shape}, and it is unknown whether tokens or heads come second. Pass "
                "values=(part, lambda v: v) if tokens do, or (part, lambda v: v.transpose(1, 2))."
            )
        if not isinstance(found, Tensor) or found.dim() not in axes:
            raise UnsupportedLayerError(
                f"values selects {shape} from what {name} returned, {tuple(projected.shape)}. Pass (part, function), "
                "which returns a view (batch, tokens, d) or (batch, tokens, heads, d_head)."
            )
        if found.untyped_storage().data_ptr() != projected.untyped_storage().data_ptr():
            raise UnsupportedLayerError(
                f"values selects a copy from what {name} returned. Select a view, by indexing, chunk or unflatten."
            )
        return found

    return selected


def _itself(projected: Tensor) -> Tensor:
    return projected


def select_heads(heads: Any, index: int, layers: int, count: int) -> tuple[int, ...] | None:
    """The selected heads of layer `index` of `layers`, which has `count` heads. None: all heads."""
    if _is_list(heads) and any(entry is None or _is_list(entry) for entry in heads):
        if len(heads) != layers:
            raise ArgumentError(
                f"heads has {len(heads)} selections, one for each layer, but there are {layers} layers. Pass {layers}."
            )
        heads = heads[index]
    if heads is None:
        return None
    chosen = tuple(heads) if _is_list(heads) else (heads,)
    if not chosen or not all(type(head) is int and 0 <= head < count for head in chosen):
        raise ArgumentError(
            f"heads is {heads!r}, but layer {index} has the query heads 0 to {count - 1}: pass an int, a list of ints, "
            "or a list with one selection for each layer."
        )
    return chosen


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def required(method: Callable[..., Any]) -> list[str]:
    """The names of the positional arguments that must be passed."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # functions written in C have none
        return [""]
    return [one.name for one in parameters if one.kind in positional and one.default is inspect.Parameter.empty]


def is_captums(kind: Any) -> bool:
    """Whether a class computes attributions by Captum's own code."""
    return str(getattr(getattr(kind, "attribute", None), "__module__", "")).startswith("captum.")


def unwrapped(method: Any) -> Any:
    """The class or function inside of partials."""
    while isinstance(method, partial):
        method = method.func
    return method

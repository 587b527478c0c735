"""The parts of Captum's interface that all classes of this package share."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from captum.attr import PerturbationAttribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_vz._private import modules_of, own_modules
from captum_vz.attr._call.layers import as_layers, as_list, check_forward_func, default_layers
from captum_vz.errors import ArgumentError

_Attribute = TypeVar("_Attribute", bound=Callable[..., Any])
# Keywords of Captum's other methods, and what to do where a method here has no such argument.
CAPTUM_KEYWORDS = {
    **dict.fromkeys(("baselines", "layer_baselines", "n_steps", "method", "n_samples", "stdevs"), "Leave it out"),
    **dict.fromkeys(("return_convergence_delta", "sliding_window_shapes", "grad_kwargs"), "Leave it out"),
    **dict.fromkeys(("attribute_to_layer_input", "perturbations_per_eval", "show_progress"), "Leave it out"),
    **dict.fromkeys(("internal_batch_size", "layer_mask"), "Leave it out"),
    "nt_samples": "Pass it to NoiseTunnel(method).attribute",
    "attention_mask": "Pass a mapping with input_ids and attention_mask as inputs, or additional_forward_args",
}


def logged(attribute: _Attribute) -> _Attribute:
    """Captum's decorator of `attribute`, with types. Keywords of Captum's other methods are refused."""
    takes = inspect.signature(attribute).parameters
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())

    @wraps(attribute)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for keyword in () if open_ended else CAPTUM_KEYWORDS.keys() & (kwargs.keys() - takes.keys()):
            raise ArgumentError(f"{self.get_name()} takes no {keyword}. {CAPTUM_KEYWORDS[keyword]}.")
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

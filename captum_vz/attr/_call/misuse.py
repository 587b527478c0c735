"""Checks of arguments: mistakes of beginners and of users of Captum's other methods, each named with its remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import LayerPass, LayerRecord, attention_site, find_layers, first_module_holding
from captum_vz._private import modules_of
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError

# What stands for the model in the classes of Captum and of this package.
_MODEL = ("forward_func", "model")

# Keywords of Captum's other methods: why they have no meaning here, and what to do. None: leave the keyword out.
_NO_BASELINE = ("its scores compare with no reference input", None)
_NO_PATH = ("its scores are no mean over steps or samples", None)
_NO_MODEL = ("it runs no model", None)
CAPTUM_KEYWORDS: dict[str, tuple[str, str | None]] = {
    "baselines": _NO_BASELINE,
    "layer_baselines": _NO_BASELINE,
    "n_steps": _NO_PATH,
    "method": _NO_PATH,
    "n_samples": _NO_PATH,
    "stdevs": _NO_PATH,
    "nt_samples": ("it adds no noise", "Pass it to NoiseTunnel(method).attribute"),
    "internal_batch_size": ("the number of copies has another name", "Pass perturbations_per_eval"),
    "return_convergence_delta": ("its scores need not sum to a change of the output", None),
    "layer_mask": ("tokens are grouped by feature_mask", "Pass feature_mask"),
    "sliding_window_shapes": ("each token is one feature", "Leave it out, or pass feature_mask for spans of tokens"),
    "grad_kwargs": ("it passes no options to torch.autograd.grad", None),
    "attention_mask": (
        "this is an argument of forward_func",
        "Pass a mapping with input_ids and attention_mask as inputs, or additional_forward_args=(attention_mask,)",
    ),
    "attribute_to_layer_input": _NO_MODEL,
    "perturbations_per_eval": _NO_MODEL,
    "show_progress": _NO_MODEL,
}


def check_call(attribute: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse keywords of Captum's other methods, and a tensor in the place of `target`.

    Args:
        attribute: The method `attribute` of a class.
        name: The name of the class, in words.
        args: The positional arguments, without `self`.
        kwargs: The keyword arguments.
    """
    takes = inspect.signature(attribute).parameters
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    for keyword in () if open_ended else kwargs.keys() - takes.keys():
        if keyword in CAPTUM_KEYWORDS:
            reason, remedy = CAPTUM_KEYWORDS[keyword]
            if keyword == "internal_batch_size" and "perturbations_per_eval" not in takes:
                reason, remedy = _NO_MODEL
            raise ArgumentError(f"{name} takes no {keyword}, because {reason}. {remedy or f'Leave {keyword} out'}.")
    second = args[1] if len(args) > 1 else None
    second = second[0] if isinstance(second, tuple) and second else second
    if isinstance(second, Tensor) and second.dim() > 1 and "target" in takes:
        raise ArgumentError(
            f"The second positional argument of attribute is target, but it is a tensor {tuple(second.shape)}. Pass "
            "an attention mask as additional_forward_args=(mask,), and baselines by keyword, if the method has any."
        )


def check_one_of(name: str, value: Any, *allowed: Any) -> None:
    """Refuse a value of an option that is not allowed. Options may be reassigned, so each use checks them again."""
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        raise ArgumentError(f"{name} is {value!r}: pass {' or '.join(map(repr, allowed))}.")


def check_numbers(given: Any, run: Any) -> None:
    """Refuse a `perturbations_per_eval` that is not a positive integer or None, and a `run` that is no integer."""
    if run is not None and type(run) is not int:
        raise ArgumentError(f"run is {run!r}: pass an integer (0: the first, -1: the last), or None.")
    if given is not None and not (type(given) is int and given >= 1):
        raise ArgumentError(f"perturbations_per_eval is {given!r}: pass an integer of at least 1, or None.")


def check_forward_func(forward_func: Any, layers: Sequence[nn.Module]) -> None:
    """Refuse what cannot run layers: a tokenizer, a name, or one of the layers in the place of the model."""
    if hasattr(forward_func, "convert_tokens_to_ids"):
        raise ArgumentError(
            f"forward_func is a tokenizer ({type(forward_func).__name__}): pass the model, and the tokenizer's output "
            "as inputs of attribute."
        )
    if isinstance(forward_func, torch.export.ExportedProgram):
        raise ArgumentError("forward_func is an ExportedProgram of torch.export: pass the model before it was traced.")
    if isinstance(forward_func, nn.Module) and not isinstance(forward_func, nn.ModuleList):
        traced = isinstance(forward_func, (torch.jit.ScriptModule, torch.fx.GraphModule))
        if traced and set(modules_of(forward_func)).isdisjoint(layers):
            raise ArgumentError(
                f"forward_func is a {type(forward_func).__name__} of torch.jit, torch.export or torch.fx, which runs "
                "none of the layers: pass the model before it was traced."
            )
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


def check_readable(walks: Sequence[list[nn.Module]]) -> None:
    """Refuse layers whose code is no longer Python's (TorchScript), or whose parameters are elsewhere (FSDP2).

    Each layer comes with its submodules, after it.
    """
    classes = {cls for walk in walks for kind in set(map(type, walk)) for cls in kind.__mro__}
    if torch.jit.ScriptModule not in classes and all(cls.__name__ != "FSDPModule" for cls in classes):
        return
    for walk in walks:
        for module in walk:
            kind = type(walk[0]).__name__
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedLayerError(
                    f"The layer {kind} was compiled by torch.jit (TorchScript), so its attention cannot be read: pass "
                    "the model before torch.jit.script or torch.jit.trace."
                )
            if any(one.__name__ == "FSDPModule" for one in type(module).__mro__):
                raise UnsupportedLayerError(
                    f"The layer {kind} is sharded by FSDP (fully_shard), so it has no parameters when it runs again. "
                    "Load the model without sharding, or spread its layers over devices by device_map='auto'."
                )


def check_no_embeddings(walks: Sequence[list[nn.Module]]) -> None:
    """Refuse embeddings, which are the layers of Captum's gradient methods on text."""
    for walk in walks:
        layer, named = walk[0], "embed" in type(walk[0]).__name__.lower()
        named = named and not any("att" in type(one).__name__.lower() for one in walk)
        if isinstance(layer, nn.Embedding) or (named and any(isinstance(one, nn.Embedding) for one in walk)):
            raise ArgumentError(
                f"layer is an embedding ({type(layer).__name__}), which has no attention: pass Transformer layers, as "
                "captum_vz.find_layers(model) returns them. Captum's own methods explain embeddings: "
                "TokenAttribution(model, LayerIntegratedGradients, tokenizer, layer)."
            )


def check_inputs(inputs: Any) -> None:
    """Refuse inputs other than a tensor, a tuple of tensors or a mapping."""
    advice = "pass a tensor, a tuple of tensors, or a tokenizer's output (tokenizer(text, return_tensors='pt'))"
    if isinstance(inputs, Mapping):
        for name in ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids"):
            if inputs.get(name) is not None and not isinstance(inputs[name], (Tensor, Mapping)):
                raise ArgumentError(f"inputs[{name!r}] is of type {type(inputs[name]).__name__}: {advice}.")
        return
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    wrong = next((type(value).__name__ for value in values if not isinstance(value, Tensor)), None)
    if wrong is not None or not values:
        held = "a tuple with an entry " if isinstance(inputs, tuple) and values else ""
        raise ArgumentError(f"inputs is {held}{'empty' if wrong is None else f'of type {wrong}'}: {advice}.")


def check_no_cache(inputs: Any, further: Any) -> None:
    """Refuse a key-value cache of transformers: it holds examples, which are not repeated for copies of the inputs."""
    if (kind := has_cache(inputs, further)) is not None:
        raise ArgumentError(
            f"The inputs hold a key-value cache ({kind}), which cannot be repeated for copies of the inputs. Pass the "
            "whole sequence, without a cache."
        )


def has_cache(inputs: Any, further: Any) -> str | None:
    """The class of a key-value cache of transformers in the arguments of a call. None: there is none."""
    named = inputs.values() if isinstance(inputs, Mapping) else ()
    values = (*named, *(further if isinstance(further, tuple) else (further,)))
    caches = (x for x in values if any(one.__module__ == "transformers.cache_utils" for one in type(x).__mro__))
    return next((type(one).__name__ for one in caches), None)


def unmasked_padding(ids: Tensor, config: Any, known: Tensor | None = None) -> list[str]:
    """A warning if ids `(batch, tokens)` hold padding at an end, by a model's config. `known`: what the model sees."""
    pads = getattr(config, "pad_token_id", None)
    if type(pads) is not int or not (ids[:, [0, -1]] == pads).any():
        return []
    padding = (ids == pads).int()
    runs = [padding.cumprod(1), padding.flip(1).cumprod(1).flip(1)]
    # A single such token at an end may be the end or the beginning of a text.
    least = 2 if pads in (getattr(config, "eos_token_id", None), getattr(config, "bos_token_id", None)) else 1
    ends = torch.stack([run * (run.sum(1, keepdim=True) >= least) for run in runs]).any(0)
    examples = int((ends if known is None else ends & known).any(1).sum())
    if not examples or padding.all(1).any():
        return []
    return [
        f"{examples} example(s) end or begin with padding (id {pads}) that no mask hides, so it counts as tokens: pass "
        "attention_mask"
    ]


def is_attention_module(record: LayerRecord) -> bool:
    """Whether a layer calls the attention function itself, or is named after attention."""
    named = record.name.lower().endswith(("attention", "attn"))
    return named or any(one.module is record.layer for one in record.attentions)


def refuse_attention_modules(forward: Callable[[], Any], layers: Sequence[nn.Module]) -> None:
    """Refuse attention modules of a block that can be explained. `forward` is called twice.

    Blocks with three attentions (SAM) cannot be explained, so their attention modules are accepted as layers.

    Raises:
        UnsupportedLayerError: The output of a layer is not yet the output of its block.
    """
    roots: list[nn.Module] = []
    with torch.no_grad(), first_module_holding(layers, roots.append):
        forward()
    for layer in layers:
        block = _block_of(roots[0], layer) if roots else None
        if block is not None and _is_explained(forward, block):
            raise UnsupportedLayerError(
                f"The layer {type(layer).__name__} is the attention module of a {type(block).__name__}. Its output "
                "lacks the feed-forward module and often the residual connection, so its map differs from the map of "
                "the block. Pass the whole block, as captum_vz.find_layers(model) returns it."
            )


def _block_of(root: nn.Module, layer: nn.Module) -> nn.Module | None:
    """The block of a stack in `root` that contains `layer` as a part, or None."""
    path = next((name for name, module in root.named_modules() if module is layer), "").split(".")
    for depth in range(len(path)):
        for stack in (None, "encoder", "decoder"):
            with suppress(RefusedError):
                blocks = find_layers(root.get_submodule(".".join(path[:depth])), stack)
                if any(block is layer for block in blocks):
                    return None
                for block in blocks:
                    if any(part is layer for part in block.modules()):
                        return block
    return None


def _is_explained(forward: Callable[[], Any], block: nn.Module) -> bool:
    def find(record: LayerRecord) -> Tensor:
        attention_site(record, "self", streams=True)
        return torch.empty(0)

    with suppress(RefusedError):
        LayerPass([block], find).run(forward)
        return True
    return False


def unwrapped(method: Any) -> Any:
    """The class or function inside of partials."""
    while isinstance(method, partial):
        method = method.func
    return method


def is_captums(kind: Any) -> bool:
    """Whether a class computes attributions by Captum's own code."""
    return str(getattr(getattr(kind, "attribute", None), "__module__", "")).startswith("captum.")


def required(method: Callable[..., Any]) -> list[str]:
    """The names of the positional arguments that must be passed."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # functions written in C have none
        return [""]
    return [one.name for one in parameters if one.kind in positional and one.default is inspect.Parameter.empty]


def check_function(method: Callable[..., Any], takes: str, count: int) -> None:
    """Refuse a function that cannot be called with `count` positional arguments, which `takes` names."""
    try:
        inspect.signature(method).bind_partial(*[None] * count)
        fits = len(required(method)) <= count
    except ValueError:  # functions written in C have no signature
        return
    except TypeError:
        fits = False
    if not fits:
        name = getattr(unwrapped(method), "__name__", type(method).__name__)
        raise ArgumentError(
            f"method is the function {name}{inspect.signature(method)}: pass a function of {takes}, a name, or a "
            "class such as ValueZeroing."
        )


def check_class(method: Any) -> None:
    """Refuse a class, or a partial of one, that a model and its layers do not make a method of.

    Args:
        method: The class. Classes of a user are called with the model, or with the model and its layers.

    Raises:
        ArgumentError: It has no `attribute`; it explains a layer or a neuron that must be named; or it is made of more.
    """
    kind = unwrapped(method)
    name, attribute = kind.__name__, getattr(kind, "attribute", None)
    if not callable(attribute):
        raise ArgumentError(
            f"method is the class {name}, which has no 'attribute': pass a class that has one, such as ValueZeroing."
        )
    needed = required(method)
    if not is_captums(kind):
        ours = kind.__module__.startswith("captum_vz.")
        missing = [one for one in needed if one not in (*_MODEL, "layer")] if ours else needed[2:]
        if missing:
            raise ArgumentError(
                f"method is the class {name}, which is made of {' and '.join(missing)} too: pass an object of it, or a "
                "function of (model, layers) that makes one."
            )
        return
    takes = inspect.signature(kind).parameters
    if "layer" in takes and "target" not in inspect.signature(attribute).parameters:
        raise ArgumentError(
            f"method is {name} of Captum, which explains a layer and not the model's output: pass a class that takes a "
            "target, such as IntegratedGradients."
        )
    if "layer" in takes:
        raise ArgumentError(
            f"method is {name} of Captum, which explains a layer that you name: pass an object, "
            f"captum_vz.TokenAttribution(model, {name}, tokenizer, layer=...), or a class without a layer, such as "
            "IntegratedGradients."
        )
    missing = [one for one in needed if one not in _MODEL]
    if missing:
        raise ArgumentError(
            f"method is {name} of Captum, which is made of {', '.join(missing)}: pass an object, "
            f"captum_vz.TokenAttribution(model, build, tokenizer), where build(model) returns the {name}, or a class "
            "that needs a model only, such as IntegratedGradients."
        )

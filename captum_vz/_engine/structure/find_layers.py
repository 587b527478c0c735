"""Find the Transformer layers of a model by its structure."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from captum_vz.errors import ArgumentError, UnsupportedLayerError

# Names of modules that are named after attention but compute no attention weights: linear attention, and modules that
# mix the streams of a token before an attention.
NO_WEIGHTS = re.compile("linear_?att|lightning|delta|hyper_?connection")


def find_layers(model: nn.Module, stack: str | None = None) -> list[nn.Module]:
    """Return the Transformer layers of a model, in order, found by structure and not by a list of model names.

    A stack is a list of modules (ModuleList, Sequential) in which each member contains an attention module. The list
    contains no other list of this kind. Several lists in one encoder or decoder are joined, such as the stages of a
    hierarchical vision model. A hybrid stack also has layers that mix tokens in another way (recurrent, linear in time,
    convolutional). These layers have no map and are left out.

    Args:
        model: Any PyTorch model.
        stack: "encoder" or "decoder" if the model has both. Or the name of a submodule that holds the stack, or the
            beginning of this name: "vision_tower". None if the model has one stack.

    Returns:
        The layers with attention, in the order of the model. A layer that the model runs several times (ALBERT) is
        listed once.

    Raises:
        ArgumentError: `model` is no module. No stack has this name, or several stacks were found and `stack` does not
            choose one.
        UnsupportedLayerError: No stack was found.

    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> len(find_layers(model)) == model.config.num_hidden_layers
    True
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        found = f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"
        raise ArgumentError(f"model is {found}: pass a model, which is a torch.nn.Module.")
    modules = dict(model.named_modules())
    whole = {name: list(module.children()) for name, module in modules.items() if is_stack(module)}
    # A list that contains another one, such as the list of a hierarchical model's stages, is no stack.
    lists = {name: layers for name, layers in whole.items() if not any(_inside(other, name) for other in whole)}
    for name, module in modules.items():
        # Lists inside a layer hold its parts, one of which may be attention (T5).
        if not any(_inside(name, other) or _inside(other, name) for other in lists | whole):
            attending = [member for member in _members(module) if _has_attention(member)]
            lists |= {name: attending} if attending and name not in whole else {}
    order = list(modules)
    lists = {name: lists[name] for name in sorted(lists, key=order.index)}
    stacks: dict[str, list[nn.Module]] = {}
    for name, layers in lists.items():  # a stack is called by the path of its lists up to the first number
        stack_name = ".".join(takewhile(lambda part: not part.isdigit(), name.split(".")))
        stacks.setdefault(stack_name, []).extend(layers)
    chosen = _called(stack, list(stacks))
    if stacks and not chosen and stack not in ("encoder", "decoder"):
        raise ArgumentError(
            f"stack is {stack!r}, but the stacks of {type(model).__name__} are {', '.join(stacks)}: pass "
            f"{_choices(list(stacks))}."
        )
    stacks = {name: stacks[name] for name in chosen}
    kind = f"{type(model).__name__} has"
    if not stacks:
        if isinstance(model, (torch.jit.ScriptModule, torch.fx.GraphModule)):
            raise UnsupportedLayerError(
                f"{kind} no layers that can be run one by one, because torch.jit, torch.export or torch.fx made it: "
                "pass the model before it was traced."
            )
        raise UnsupportedLayerError(
            f"{kind} no {stack + ' ' if stack else ''}stack of layers with attention: expected a ModuleList or "
            "Sequential whose members contain a module named after attention. "
            + _attentions_alone({} if lists else modules)
        )
    if len(stacks) > 1:
        raise ArgumentError(f"{kind} several stacks of layers: {', '.join(stacks)}. Pass {_choices(chosen)}.")
    return list({id(layer): layer for layers in stacks.values() for layer in layers}.values())


def _attentions_alone(modules: dict[str, nn.Module]) -> str:
    """What to do with a model without a stack of layers. XLM runs the parts of its blocks in its own forward."""
    for name, module in modules.items():
        if _members(module) and all("attention" in type(one).__name__.lower() for one in _members(module)):
            return (
                f"The model runs its attention, {name}, outside of any block. Pass list(model.{name}): maps of these "
                "modules leave out the rest of a block."
            )
    return "Use a list of the model's Transformer blocks instead, such as list(model.encoder.layer)."


def is_stack(module: nn.Module) -> bool:
    """Return whether a module is a list of modules that all contain attention."""
    members = _members(module)
    return bool(members) and all(map(_has_attention, members))


def _members(module: nn.Module) -> list[nn.Module]:
    """Return the members of a list of modules. Any other module has none."""
    return list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []


def _inside(name: str, other: str) -> bool:
    return name.startswith(other + ".") or (other == "" and name != "")


def _has_attention(member: nn.Module) -> bool:
    """Return whether a module contains an attention module, recognised by the name of its class or attribute."""
    skipped: tuple[str, ...] = ()
    for name, module in member.named_modules():
        if not name or name.startswith(skipped):
            continue
        kind, attribute = type(module).__name__.lower(), name.rsplit(".", 1)[-1].lower()
        if NO_WEIGHTS.search(f"{_without_family(module, member).lower()} {attribute}"):
            skipped += (name + ".",)
        elif "attn" in f"{kind} {attribute}" or "attention" in kind:
            return True
    return False


def _without_family(module: nn.Module, member: nn.Module) -> str:
    """Return a class's name without the first words that both classes share.

    "Linear" in the name of a family, as in Kimi Linear, does not mean that its attention is linear.
    """
    words, others = (re.findall("[A-Z]?[^A-Z]+|[A-Z]", type(one).__name__) for one in (module, member))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False)))
    return "".join(words[shared:])


def _called(stack: str | None, names: list[str]) -> list[str]:
    """Return the stacks that `stack` names: their side, or parts of their paths, the last of which may be cut."""
    if stack in (None, "encoder", "decoder"):
        return [name for name in names if stack in (None, _side(name))]
    whole = [name for name in names if f".{stack}." in f".{name}."]
    return whole or [name for name in names if stack and f".{stack}" in f".{name}"]


def _choices(names: list[str]) -> str:
    """Return the shortest values of `stack` that choose one of several stacks, in words."""
    parts = {name: [*name.split("."), name] for name in names}
    short = [next((part for part in parts[name] if _called(part, names) == [name]), name) for name in names]
    return " or ".join(f"stack={one!r}" for one in short) if len(names) > 1 else "None"


def _side(stack_name: str) -> str | None:
    """Return "encoder" or "decoder", whichever occurs in the first part of the path that names one, or None.

    A decoder may be a BERT, whose layers are in its `encoder`.
    """
    parts = stack_name.lower().split(".")
    return next((side for part in parts for side in ("encoder", "decoder") if side in part), None)

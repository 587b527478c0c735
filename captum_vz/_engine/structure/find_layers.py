"""TODO."""

from __future__ import annotations

import re
from itertools import takewhile

from torch import nn

# Mixers that are linear in time are called attention as well, but have no weights; what mixes the streams before an
# attention is called after it.
OTHER = re.compile("linear_?att|lightning|delta|hyper_?connection")


def find_layers(model: nn.Module, stack: str | None = None) -> list[nn.Module]:
    """The Transformer layers of a model, in order, found by structure and not by a list of model names.

    A stack of layers is a list of modules (ModuleList, Sequential) each of which holds an attention module, and no
    list of such modules inside. Lists that stand side by side in one encoder or decoder, as the stages of a
    hierarchical vision model do, are joined. In a hybrid stack, some of whose layers mix their tokens in another way
    (recurrent, linear in time, by convolutions), those that attend are taken: the others have no map.

    Args:
        model: Any PyTorch model.
        stack: "encoder" or "decoder" where a model has both; None where it has only one stack.

    Returns:
        The layers that attend, first layer first. A layer that the model runs several times (ALBERT) is listed once.

    Raises:
        AssertionError: No stack was found, or several, and `stack` does not say which.

    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> len(find_layers(model)) == model.config.num_hidden_layers
    True
    """
    assert stack in (None, "encoder", "decoder"), f"stack is {stack!r}: pass 'encoder', 'decoder' or None."
    modules = dict(model.named_modules())
    found = {name: list(module.children()) for name, module in modules.items() if is_stack(module)}
    # A list that holds another one, such as that of a hierarchical model's stages, is no stack of layers itself.
    lists = {name: layers for name, layers in found.items() if not any(_inside(other, name) for other in found)}
    for name, module in modules.items():
        # Inside of a layer there are lists of its parts, of which one is attention (T5).
        if not any(_inside(name, other) or _inside(other, name) for other in lists | found):
            attending = [member for member in _members(module) if _has_attention(member)]
            lists |= {name: attending} if attending and name not in found else {}
    order = list(modules)
    lists = {name: lists[name] for name in sorted(lists, key=order.index)}
    stacks: dict[str, list[nn.Module]] = {}
    for name, layers in lists.items():
        stacks.setdefault(_stack_name(name), []).extend(layers)
    if stack is not None:
        stacks = {name: layers for name, layers in stacks.items() if _side(name) == stack}
    advice = "pass the layers yourself: a list of the model's Transformer blocks, such as list(model.encoder.layer)"
    kind = f"{type(model).__name__} has"
    assert stacks, (
        f"{kind} no {stack + ' ' if stack else ''}stack of layers with attention: looked for a ModuleList or "
        f"Sequential whose members hold a module named after attention; {advice}."
    )
    assert len(stacks) == 1, (
        f"{kind} several stacks of layers: {', '.join(stacks)}. Pass stack='encoder' or stack='decoder', "
        f"call find_layers on the part you mean (model.get_submodule(name)), or {advice}."
    )
    return list({id(layer): layer for layers in stacks.values() for layer in layers}.values())


def is_stack(module: nn.Module) -> bool:
    """Whether a module is a list of modules all of which hold attention."""
    members = _members(module)
    return bool(members) and all(map(_has_attention, members))


def _members(module: nn.Module) -> list[nn.Module]:
    return list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []


def _inside(name: str, other: str) -> bool:
    """Whether the module called `name` is part of the one called `other`."""
    return name.startswith(other + ".") or (other == "" and name != "")


def _has_attention(member: nn.Module) -> bool:
    """Whether a module holds an attention module, to be told by its class's or its attribute's name."""
    others: tuple[str, ...] = ()
    for name, module in member.named_modules():
        if not name or name.startswith(others):
            continue
        kind, attribute = type(module).__name__.lower(), name.rsplit(".", 1)[-1].lower()
        if OTHER.search(f"{_without_family(module, member).lower()} {attribute}"):
            others += (name + ".",)
        elif "attn" in f"{kind} {attribute}" or "attention" in kind:
            return True
    return False


def _without_family(module: nn.Module, member: nn.Module) -> str:
    """A class's name without the first words that another has as well: Kimi Linear's attention is not linear."""
    words, others = (re.findall("[A-Z]?[^A-Z]+|[A-Z]", type(one).__name__) for one in (module, member))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False)))
    return "".join(words[shared:])


def _stack_name(list_name: str) -> str:
    """What to call the stack that a list of layers belongs to: the path above the first numbered part."""
    parts = list_name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]] if numbers else parts)


def _side(stack_name: str) -> str | None:
    """The side of an encoder-decoder model that a stack is on, by the last part of its path that says so."""
    for part in reversed(stack_name.lower().split(".")):
        for side in ("encoder", "decoder"):
            if side in part:
                return side
    return None

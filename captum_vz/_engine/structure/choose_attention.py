"""Which attention of a recorded layer is explained, and why none can be."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from captum_vz._engine.capture.interventions import AddToValues
from captum_vz._engine.capture.layer_runner import LayerRunner
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.structure.dependence import first_tokens, mixes_outside, reads_other_states, reads_own_states
from captum_vz._engine.structure.find_layers import is_stack
from captum_vz._engine.structure.modules import matrix
from captum_vz._private import modules_of
from captum_vz.errors import RefusedError, UnsupportedLayerError


def merge_parts(layer: LayerRecord) -> None:
    """Merge the calls that one forward makes for parts of its own attention."""
    number = 1
    while number < len(layer.attentions):
        if layer.attentions[number].repeated and reads_own_states(LayerRunner(layer), layer.attentions[number]):
            layer.merge(number)
        else:
            number += 1


def choose_attention(layer: LayerRecord, attention: str) -> AttentionRecord:
    """The record of the attention that is meant.

    `attention` is "self" for the self-attention, which comes first, "cross" for the cross-attention that follows it, or
    a dot and the name of a module of the layer.

    UnsupportedLayerError: the layer called no attention that can be read, or not the one that is asked for.
    """
    name, found = layer.name, layer.attentions
    if layer.projects_more is not None and not found:
        raise UnsupportedLayerError(
            f"{type(layer.projects_more).__name__} of the layer {name} projects values several times in one run: those "
            "of its tokens, and others, such as those of summaries of many tokens. A token is also in these summaries, "
            "so Value Zeroing is not defined for this layer. Use a method without attention, such as TokenAttribution."
        )
    if layer.given is not None and not found:
        raise UnsupportedLayerError(
            f"values names {layer.given.projection} of the layer {name}, which did not run once in a run of the layer "
            "and return values (batch, tokens, d). Name a part that does. If the layer uses the weight of a module in "
            "a function (torchvision's Swin), pass this weight, such as layer.attn.qkv.weight."
        )
    if not found:
        raise UnsupportedLayerError(
            f"The layer {name} called no attention that can be read{_inline_attention(layer)}. Pass a whole "
            "Transformer block that calls torch's scaled_dot_product_attention (flash=True in nanoGPT, fused_attn=True "
            "in timm, attn_flash=True in x-transformers) or transformers' AttentionInterface. Or say where its values "
            f"are: ValueZeroing(model, layer, values={_last_third(layer) or 'layer.attn.to_v'}), with a list if each "
            "head has a module of its own."
        )
    names = attention[1:].split() if attention.startswith(".") else []
    chosen = _of_modules(layer, names) if names else _self_or_cross(layer, attention)
    named = names or ([] if layer.given is None else [one.projection for one in layer.given.parts])
    if len(named) == 1 and (others := _others_like(layer, named[0])):
        layer.warnings.append(
            f"the map is that of {named[0]} alone, without {' and '.join(others[:3])}. If each is a head of one "
            "attention, pass a list of all of them"
        )
    if layer.given is not None and chosen.inline is not None:
        try:
            _check_named_values(layer, chosen)
        except CannotReplayError as error:
            such_as = (third := _last_third(layer)) and f", such as values={third}"
            raise UnsupportedLayerError(
                f"values names {layer.given.projection} of the layer {name}, but these are no values of its "
                f"attention: {error}. Name the part whose rows the attention sums{such_as}."
            ) from error
    if chosen.dropout:
        rate, training = chosen.dropout, chosen.module.training
        advice = "Call model.eval() first." if training else f"Pass dropout_p={rate} if self.training else 0.0."
        mode = "train" if training else "eval"
        raise RefusedError(f"The attention of {name} drops {rate} of its weights in {mode} mode. {advice}")
    return chosen


def _others_like(layer: LayerRecord, name: str) -> list[str]:
    """Modules that are used as `name` is, with another number, such as heads.1.value for heads.0.value."""
    like = re.compile(r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")))
    # A number at the end of a projection's name may tell queries from values.
    projections = [] if name[-1].isdigit() else layer.modules_run
    used = [one.module for one in layer.attentions] if layer.given is None else projections
    named = ((one, module) for one, module in layer.layer.named_modules() if one != name and like.fullmatch(one))
    return [one for one, module in named if any(part in used for part in modules_of(module))]


def _of_modules(layer: LayerRecord, names: Sequence[str]) -> AttentionRecord:
    """The record of the attention that runs in a submodule, or in several that have some heads each."""
    records = [_of_module(layer, name) for name in names]
    places = sorted(layer.attentions.index(one) for one in records)
    if places != [*range(places[0], places[0] + len(names))]:
        raise UnsupportedLayerError(f"{' and '.join(names)} do not attend one after the other.{_advice(layer)}")
    for _ in names[1:]:
        layer.merge(places[0] + 1)
    return layer.attentions[places[0]]


def _of_module(layer: LayerRecord, name: str) -> AttentionRecord:
    parts = set(layer.layer.get_submodule(name).modules())
    found = [one for one in layer.attentions if one.module in parts]
    if len(found) != 1:
        raise UnsupportedLayerError(
            f"{name} of the layer {layer.name} called {len(found)} attentions that can be read in one run, not one."
            + _advice(layer)
        )
    return found[0]


def _self_or_cross(layer: LayerRecord, attention: str) -> AttentionRecord:
    """The record of the self-attention, which comes first, or of the cross-attention that follows it."""
    name, found, is_cross = layer.name, layer.attentions, attention == "cross"
    stacks = len(found) > 1 and any(map(is_stack, modules_of(layer.layer)))
    if len(found) > 2 or stacks:
        advice = "" if stacks else _advice(layer)
        single = " Pass a single Transformer block, such as one of captum_vz.find_layers(model), and not a stack."
        advice = f"{advice} If the layer is a stack of blocks, pass one of them." if advice else single
        raise UnsupportedLayerError(f"The layer {name} called attention {len(found)} times in one run.{advice}")
    if is_cross and len(found) != 2 and _unreadable_before(layer, found[0]) is None:
        raise UnsupportedLayerError(
            f"The layer {name} has no second attention, so there is no cross-attention to explain. Pass "
            "attention='self', or the layers of a decoder that reads an encoder."
        )
    two = len(found) == 2
    lists = [module for module in modules_of(layer.layer) if isinstance(module, nn.ModuleList)] if two else []
    in_list = any({one.module for one in found} <= set(members.children()) for members in lists)
    alike = two and found[0].shape[2:] == found[1].shape[2:]
    if in_list or (alike and reads_own_states(LayerRunner(layer), found[1])):
        kinds = " and ".join(type(one.module).__name__ for one in found)
        raise UnsupportedLayerError(
            f"The layer {name} has two attentions {'in a list' if in_list else 'over its own tokens'}, {kinds}, so its "
            f"second one is no cross-attention.{_advice(layer)}"
        )
    chosen = found[-1 if is_cross else 0]
    unreadable = _unreadable_before(layer, chosen)
    if unreadable is not None:
        raise UnsupportedLayerError(
            f"The layer {name} runs an attention that cannot be read, {unreadable}, before one that can, so it is "
            f"unknown which of them attention={attention!r} means.{_advice(layer)}"
        )
    return chosen


def _advice(layer: LayerRecord) -> str:
    """A space and a sentence that names the attentions of a layer, in the order of their runs. Empty: no names."""
    named = {module: repr(name) for name, module in layer.layer.named_modules() if name}
    modules = [one.module for one in layer.attentions]
    names = [named[one] for one in modules if one in named and modules.count(one) == 1]
    one_of = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    if not names and len(set(modules)) < len(modules):
        return " One module attends several times, so none of its calls can be named. Pass a layer that attends once."
    one_of += ", or a list of those that are heads of one attention" if len(names) > 1 else ""
    return f" Pass attention=layer.get_submodule(name), where name is {one_of}." if names else ""


def _check_named_values(layer: LayerRecord, attention: AttentionRecord) -> None:
    """Refuse values that the user names, unless the layer mixes tokens by sums of them, with weights that stay.

    The first submodule that is given more rows that change than values do is given such sums. CannotReplayError: they
    are queries, keys, or no part of an attention.
    """
    runner, (batch, _, out, sources) = LayerRunner(layer), attention.shape
    in_tokens = any(attention.batch_first(x).shape[:2] == (batch, sources) for x in layer.states)
    if not in_tokens and not layer.rearranges(attention):
        raise CannotReplayError(f"they have {sources} rows in {batch} examples, and no hidden states have this shape")
    for source in dict.fromkeys((0, sources // 2, sources - 1)):
        seen = []
        for strength in (0, 1, 2):
            handler = AddToValues(attention, source, strength)
            output = runner.run(handler)
            seen.append([*handler.given, output])
        for clean, once, twice in zip(*seen, strict=True):
            moved = once - clean
            # Other layouts have more rows (one for each head), other projections have more numbers.
            alone = moved.count_nonzero() <= attention.values[:, 0].numel() or moved.any(-1).sum() <= batch
            if not moved.any() or (alone and min(out, sources) > 1):
                continue
            eps = torch.finfo(attention.values.dtype).eps
            if (twice - once - moved).abs().max() <= 0.01 * moved.abs().max() + 8 * eps * twice.abs().max():
                return
            raise CannotReplayError("the weights, or what the weights multiply, change with them in another way")
    raise CannotReplayError("they change no other token")


def _inline_attention(layer: LayerRecord) -> str:
    """What to add about an attention module whose attention was not seen."""
    if isinstance(layer.layer, torch.fx.GraphModule):
        return " (it was traced by torch.export or torch.fx, so its code calls kernels: pass the model before that)"
    kinds = [type(module).__name__ for module in layer.modules_run if type(module).__name__.endswith("Attention")]
    return f" (its {kinds[-1]} computes attention in an unknown way)" if kinds else ""


def _last_third(layer: LayerRecord) -> str:
    """The values that the only projection of queries, keys and values makes, as `values` takes them. Empty: none."""
    width = layer.first_output.shape[-1]
    names = {module: name for name, module in layer.layer.named_modules()}
    weights = ((one, matrix(one)) for one in layer.modules_run)
    found = [one for one, weight in weights if weight is not None and tuple(weight.shape) == (width, 3 * width)]
    if len(found) != 1 or found[0] not in names:
        return ""
    return f"(layer.get_submodule({names[found[0]]!r}), lambda out: out[..., {2 * width}:])"


def _unreadable_before(layer: LayerRecord, attention: AttentionRecord) -> str | None:
    """The name of an attention that ran before `attention` and could not be read, or None.

    Either a module before it has a class of such a name; or `attention`, the only one, reads other states, and the
    layer's own tokens mix all the same.
    """
    inside = {id(module) for seen in layer.attentions for module in modules_of(seen.module)}
    for module in layer.modules_run:
        if module is attention.module:
            break
        if type(module).__name__.endswith("Attention") and id(module) not in inside:
            parts = set(modules_of(module))
            if not any(seen.module in parts for seen in layer.attentions):
                return type(module).__name__
    alone = len(layer.attentions) == 1 and attention.module is not layer.layer and not layer.rearranges(attention)
    if alone and len(layer.states) > 1:
        runner = LayerRunner(layer)
        own = runner.states[0]
        first = first_tokens(own, attention)
        if reads_other_states(runner, attention) and mixes_outside(runner, own, layer.first_output, [first]):
            return "or something else that mixes its tokens"
    return None

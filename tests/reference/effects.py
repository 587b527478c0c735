"""ValueZeroingEffect in loops: one run of the whole model for each source whose values are zeroed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import FAMILIES, Attention, Case, Family
from tests.reference.case import HEAD_WIDTH, HEADS, LAYERS, WIDTH
from tests.reference.inputs import VOCABULARY
from tests.reference.naive import context_by_hand, record, values_of

SMALL = {"vocab_size": VOCABULARY, "hidden_size": WIDTH}
NEO = {**SMALL, "num_layers": LAYERS, "num_heads": HEADS, "intermediate_size": 48}
NEO["attention_types"] = [[["global"], LAYERS]]
NEO_ATTENTION = Attention("attn.attention.v_proj", "attn.attention.out_proj")
BLOOM_ATTENTION = Attention(
    "self_attention.query_key_value", "self_attention.dense", offset=2 * HEAD_WIDTH, stride=3 * HEAD_WIDTH
)
INLINE = {
    "gpt_neo": Family("GPTNeoModel", NEO, "h", NEO_ATTENTION, causal=True),
    "bloom": Family("BloomModel", {**SMALL, "n_layer": LAYERS, "n_head": HEADS}, "h", BLOOM_ATTENTION, causal=True),
}
# Every kind of stack: encoders, decoders with shared values and with windows, layers that run again, images, sound.
NAMES = ["bert", "gpt2", "llama", "gemma2", "gpt-neox", "albert", "albert-two-in-turn", "modernbert", "vit", "wav2vec2"]
PAIRED = ["bart-encoder", "bart-decoder", "t5-encoder", "t5-decoder", "whisper-decoder"]
WORDS = torch.tensor([[0, 0, 1, 1, 2, 2, 3]])


@cache
def case_of(name: str) -> Case:
    return (FAMILIES | INLINE)[name].case


def read(output: Any) -> Tensor:
    """A difference of two numbers at token 2, which is not padding in any example."""
    hidden: Tensor = output.last_hidden_state[:, 2]
    return hidden[:, 3] - 0.5 * hidden[:, 5]


@contextmanager
def scaled_everywhere(layers: Sequence[nn.Module], site: Attention, gates: Tensor) -> Iterator[None]:
    """While the block runs, these layers' values are scaled by `gates (batch, in)`."""

    def scale(module: nn.Module, args: tuple[Any, ...], values: Tensor) -> Tensor:
        values = values.clone()
        for head in range(site.value_heads):
            values[..., site.columns(head)] = values[..., site.columns(head)] * gates[..., None]
        return values

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.get_submodule(site.value).register_forward_hook(scale))
        yield


def zeroed_everywhere(layers: Sequence[nn.Module], site: Attention, zeroed: Tensor) -> AbstractContextManager[None]:
    """While the block runs, these layers' values are zero where `zeroed (batch, in)` is True."""
    return scaled_everywhere(layers, site, 1.0 - zeroed.double())


@torch.no_grad()
def naive_effect(
    case: Case,
    chosen: Any = slice(None),
    attention: str = "self",
    of: Callable[[Any], Tensor] = read,
    groups: Tensor | None = None,
) -> Tensor:
    """The decrease of the output for each group of sources, `(batch, in)`, by one run of the model each."""
    layers = case.layers[chosen] if isinstance(chosen, slice) else [case.layers[chosen]]
    site = case.family.attention if attention == "self" else case.family.cross
    mask = case.family.mask if attention == "self" else case.family.source_mask
    runs, output = record(case)
    length = values_of(next(run for run in runs if run.layer is layers[0]), site).shape[1]
    real = case.mask(mask, length)
    groups = (torch.arange(length) if groups is None else groups).expand(case.batch, -1)
    result = torch.zeros(case.batch, length, dtype=torch.float64)
    for group in groups.unique():
        zeroed = (groups == group) & real
        with zeroed_everywhere(layers, site, zeroed):
            lost = of(output) - of(case.model(**case.inputs))
        result += lost[:, None] * zeroed
    return result


@torch.no_grad()
def naive_edges(case: Case, layer: int, of: Callable[[Any], Tensor], heads: Sequence[int], row: Any) -> Tensor:
    """The same for one layer, in some heads and for some rows of the context alone, which is computed by hand."""
    site, (runs, output) = case.family.attention, record(case, output_attentions=True)
    values, weights, real = values_of(runs[layer], site), output.attentions[layer], case.mask(case.family.mask, 7)
    result = torch.zeros(case.batch, 7, dtype=torch.float64)
    for source in range(7):
        zeroed = ((torch.arange(7) == source) & real).numpy()

        def give(module: nn.Module, args: tuple[Any, ...], zeroed: Any = zeroed) -> tuple[Tensor]:
            context = args[0].clone()
            context[:, row] = context_by_hand(args[0], weights, values, site, zeroed, heads)[:, row]
            return (context,)

        with case.layers[layer].get_submodule(site.output).register_forward_pre_hook(give):
            result[:, source] = (of(output) - of(case.model(**case.inputs))) * real[:, source]
    return result

"""Tiny random Transformers with inputs, and the names of their value projections, for the naive twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from tests.reference.inputs import padded_tokens

WIDTH, HEADS, LAYERS = 32, 4, 3
HEAD_WIDTH = WIDTH // HEADS
BEFORE_5 = not hasattr(AttentionInterface, "get_interface")  # of transformers
# Their eager attention is inline before transformers 5, so that its weights cannot be read.
SDPA_BEFORE_5 = {
    *("AlbertModel", "BertModel", "DistilBertModel", "ModernBertModel", "NemotronModel", "RobertaModel"),
    *("StableLmModel",),
}


@dataclass(frozen=True)
class Attention:
    """One attention of a layer: the submodules around it, and the features of the projection that are values."""

    value: str  # dotted name, within the layer, of the module whose output holds the values
    output: str  # the same of the module whose input is the context of all heads, concatenated
    heads: int = HEADS  # of queries
    value_heads: int = HEADS  # fewer heads have values of their own for grouped queries
    head_width: int = HEAD_WIDTH
    offset: int = 0  # the output feature at which the values of head 0 begin
    stride: int | None = None  # from the values of one head to those of the next; None: ``head_width``
    weights: str = "attentions"  # the field of the model's output that holds the attention weights

    def columns(self, value_head: int) -> slice:
        """The output features of the ``value`` module that are the values of one head."""
        start = self.offset + value_head * (self.stride or self.head_width)
        return slice(start, start + self.head_width)

    def context(self, head: int) -> slice:
        """The input features of the ``output`` module that are the context of a query head."""
        return slice(head * self.head_width, (head + 1) * self.head_width)

    def value_head(self, head: int) -> int:
        """The head whose values a query head uses. Neighbouring query heads share one."""
        return head // (self.heads // self.value_heads)


@dataclass(frozen=True, eq=False)
class Family:
    """One row of the table: how to build a model, and the names that are needed to zero a value by hand."""

    model: str  # class name in transformers
    config: dict[str, Any]  # settings that make it tiny
    layers: str  # dotted name of the module list that holds the layers
    attention: Attention  # the self-attention of a layer
    causal: bool = False  # whether a position attends only to itself and earlier ones
    cross: Attention | None = None  # the attention to the encoder, in the layers of a decoder
    norm: str | None = None  # dotted name of the norm after the last layer, if there is one
    inputs: Callable[[], dict[str, Tensor]] = (
        padded_tokens  # keyword arguments of the model: a padded batch with a mask
    )
    mask: str | None = "attention_mask"  # the input that says which positions of the layers are real; None: all are
    source_mask: str | None = "attention_mask"  # the same for the positions that ``cross`` attends to

    def build(self, dtype: torch.dtype = torch.float64, attn_implementation: str = "") -> Case:
        """A new model of this family in eval mode with random parameters, and its inputs. Eager by default."""
        model_class = getattr(transformers, self.model)
        config = model_class.config_class(**self.config)
        default = "sdpa" if BEFORE_5 and self.model in SDPA_BEFORE_5 else "eager"
        config._attn_implementation = attn_implementation or default
        with torch.random.fork_rng(devices=[]):
            model = model_class(config).double().eval().requires_grad_(False)
        replace_single_precision_norms(model)
        randomize(model)
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.inputs().items()}
        return Case(self, model.to(dtype), inputs)

    @cached_property
    def case(self) -> Case:
        """The float64 case that tests share. Tests must not change its model."""
        return self.build()


@dataclass(frozen=True, eq=False)
class Case:
    """A model with inputs. ``model(**inputs)`` runs ``layers``, a list without repeated modules."""

    family: Family
    model: nn.Module
    inputs: dict[str, Tensor]
    layers: list[nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", list(self.model.get_submodule(self.family.layers)))

    @property
    def causal(self) -> bool:
        return self.family.causal

    @property
    def batch(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm after the last layer."""
        return self.model.get_submodule(self.family.norm) if self.family.norm else None

    def mask(self, name: str | None, length: int) -> Tensor:
        """Whether each of ``length`` positions is real (not padding) by the named input, ``(batch, length)``."""
        if name is None or name not in self.inputs:
            return torch.ones(self.batch, length, dtype=torch.bool)
        mask = self.inputs[name]
        if mask.shape[1] != length:  # the mask is over samples of sound, the layers are over frames
            mask = self.model._get_feature_vector_attention_mask(length, mask)
        return mask.bool()

    def example(self, index: int) -> Case:
        """The same model on one example of the batch without padding."""
        inputs = {}
        for name, x in self.inputs.items():
            mask = self.inputs.get("decoder_attention_mask" if name.startswith("decoder_") else "attention_mask")
            one = x[index : index + 1]
            inputs[name] = one if mask is None else one[:, mask[index].bool()]
        return replace(self, inputs=inputs)


def built(kind: str, attention: str | None = None, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """A model of transformers by its class name, in eval mode, with random parameters that are always the same."""
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**fields)
    if attention is not None:
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).double().eval()
    randomize(model)
    return model.to(dtype)


SINGLE_PRECISION_NORMS = {
    "RMSNorm": nn.RMSNorm,
    "T5LayerNorm": nn.RMSNorm,
    "CohereLayerNorm": partial(nn.LayerNorm, bias=False),
}


def replace_single_precision_norms(model: nn.Module) -> None:
    """Replaces norms that compute in float32 for any dtype of the model by torch's norms.

    Without this, float32 rounding in a float64 model would hide the differences that the tests look for.
    """
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            for kind, torch_norm in SINGLE_PRECISION_NORMS.items():
                if type(norm).__name__.endswith(kind):
                    setattr(parent, name, torch_norm(norm.weight.shape, eps=1e-6, dtype=torch.float64).eval())


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draws all parameters at random, also biases and norms, which would otherwise be zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if id(parameter) in embeddings:
                parameter.copy_(0.8 * noise)
            elif parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise + (1.0 if name.endswith("weight") else 0.0))
            parameter.requires_grad_(False)

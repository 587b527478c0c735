"""Random small layers of many kinds, with inputs, for the tests of properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PretrainedConfig

from captum_vz import find_layers
from tests.engine.blocks import attention_function, eager_attention_forward
from tests.properties.by_name import AttendByName

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "squared relu": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class Spec:
    """What a home-made layer is made of."""

    heads: int = 2  # of queries
    shared: int = 1  # how many query heads share a value
    head_width: int = 4
    width: int = 8
    inner: int = 12  # features inside the feed-forward layer
    call: str = "torch"  # how attention is called: or "by name" or "transformers"
    norm: str = "pre"  # or "post", "both" or "none"
    rms: bool = False
    activation: str = "gelu"
    feed_forward: str = "plain"  # or "gated", "experts" or "none"
    parallel: bool = False  # whether attention and feed-forward layer read the same input
    hidden: str = "nothing"  # what hides sources: or "later", "window" or "bias" (far sources weigh less)
    padded: bool = False  # whether the examples have different lengths
    context: str = "plain"  # before its projection: or "gate" or "norm"
    after: str = "nothing"  # what comes after the attention: or "scale", "convolution" or "shift"
    bias: bool = True


class Attention(nn.Module):
    """Self-attention of a home-made layer."""

    is_causal = False

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.config = PretrainedConfig()
        self.config._attn_implementation = "eager"
        features, values = spec.heads * spec.head_width, spec.heads // spec.shared * spec.head_width
        self.query, self.key, self.value = (nn.Linear(spec.width, n, spec.bias) for n in (features, values, values))
        self.output = nn.Linear(features, spec.width, spec.bias)
        if spec.context == "gate":
            self.gate = nn.Linear(spec.width, features)
        if spec.context == "norm":
            self.context_norm = nn.LayerNorm(features)
        self.num_key_value_groups = spec.shared

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        spec = self.spec
        linears = (self.query, self.key, self.value)
        query, key, value = (one(x).unflatten(-1, (-1, spec.head_width)).transpose(1, 2) for one in linears)
        if spec.call != "torch" and spec.shared > 1:
            key, value = (one.repeat_interleave(spec.shared, 1) for one in (key, value))
        context = self.attend(query, key, value, mask).flatten(2)
        if spec.context == "gate":
            context = context * self.gate(x).sigmoid()
        if spec.context == "norm":
            context = self.context_norm(context)
        return self.output(context)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        grouped = self.spec.shared > 1 and self.spec.call == "torch"
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
        return context.transpose(1, 2)


class AttentionByName(AttendByName, Attention):
    """The same, with torch's function imported by name."""


class AttentionInterface(Attention):
    """The same, through transformers' AttentionInterface."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        attend = attention_function(self.config._attn_implementation, eager_attention_forward)
        context: Tensor = attend(self, query, key, value, mask)[0]
        return context


ATTENTIONS = {"torch": Attention, "by name": AttentionByName, "transformers": AttentionInterface}


class FeedForward(nn.Module):
    """The feed-forward layer of a home-made layer."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        count = 3 if spec.feed_forward == "experts" else 1
        self.up = nn.ModuleList(nn.Linear(spec.width, spec.inner, spec.bias) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(spec.inner, spec.width, spec.bias) for _ in range(count))
        if spec.feed_forward != "plain":
            self.gate = nn.Linear(spec.width, spec.inner if spec.feed_forward == "gated" else count, spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.spec.activation]
        if self.spec.feed_forward == "gated":
            return self.down[0](act(self.gate(x)) * self.up[0](x))
        outputs = [down(act(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        if self.spec.feed_forward == "experts":
            shares = self.gate(x).softmax(-1)
            return sum(shares[..., i, None] * one for i, one in enumerate(outputs))  # type: ignore[return-value]
        return outputs[0]


class After(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.kind = spec.after
        if spec.after == "scale":
            self.scale = nn.Parameter(torch.rand(spec.width) + 0.5)
        if spec.after == "convolution":
            self.convolution = nn.Conv1d(spec.width, spec.width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "convolution":
            return x + self.convolution(x.mT).mT
        if self.kind == "shift":
            return x + F.pad(x, (0, 0, 1, -1))
        return x * self.scale if self.kind == "scale" else x


class Layer(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.attention, self.after = ATTENTIONS[spec.call](spec), After(spec)
        parts = ["attention"]
        if spec.feed_forward != "none":
            self.feed_forward = FeedForward(spec)
            parts.append("feed_forward")
        # Only modules that run, because some replays are for layers of which each module runs.
        places = {"pre": ["pre"], "post": ["post"], "both": ["pre", "inner"], "none": []}[spec.norm]
        norm = nn.RMSNorm if spec.rms else nn.LayerNorm
        self.norms = nn.ModuleDict({f"{place} {part}": norm(spec.width) for place in places for part in parts})

    def norm(self, place: str, x: Tensor) -> Tensor:
        return self.norms[place](x) if place in self.norms else x

    def attended(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.after(self.attention(x, mask))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attended(self.norm("pre attention", x), mask)
        y = self.norm("post attention", x + self.norm("inner attention", attended))
        if self.spec.feed_forward == "none":
            return y
        more = self.feed_forward(self.norm("pre feed_forward", x if self.spec.parallel else y))
        return self.norm("post feed_forward", y + self.norm("inner feed_forward", more))


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *more)
        return x


@dataclass(repr=False)
class Case:
    """A model, in eval mode and float64, with inputs: a tuple of tensors, or a mapping."""

    kind: str
    model: nn.Module
    layers: list[nn.Module]
    inputs: Any
    lengths: list[int]  # tokens of each example, without padding
    heads: int  # of queries
    attention: str = "self"
    by_position: bool = False  # whether the attention sees windows, so that a twin has to zero values by position
    tokens_first: bool = False  # whether dimension 0 of the inputs is the tokens

    def __repr__(self) -> str:
        about = getattr(self.layers[0], "spec", getattr(self.model, "config", self.layers[0]))
        return f"{self.kind}: {about}, lengths={self.lengths}, heads={self.heads}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def tolerance(self) -> float:
        """By how much scores may differ from the twin's, as a share of the largest score of their row.

        A pass runs the eager attention of transformers, which computes its softmax in float32. SDPA does not.
        """
        config = getattr(self.model, "config", None)
        return 1e-4 if getattr(config, "_attn_implementation", "") == "sdpa" else 1e-8

    @property
    def tokens(self) -> int:
        """The number of tokens, padding included."""
        return max(self.lengths)

    def permuted(self, order: list[int]) -> Any:
        """The inputs with the examples in another order."""
        axis = 1 if self.tokens_first else 0

        def change(x: Any) -> Any:
            many = isinstance(x, Tensor) and x.shape[0 if x.dtype == torch.bool else axis] == len(order) > 1
            return x.index_select(0 if x.dtype == torch.bool else axis, torch.tensor(order)) if many else x

        if isinstance(self.inputs, dict):
            return {name: change(x) for name, x in self.inputs.items()}
        return tuple(change(x) for x in self.inputs)


def mask_of(spec: Spec, lengths: list[int]) -> Tensor | None:
    """The mask of a home-made layer, as it is added to the scores: `(batch or 1, head or 1, out, in)`."""
    count = max(lengths)
    place = torch.arange(count)
    far = place[:, None] - place
    seen = torch.ones(1, 1, count, count, dtype=torch.bool)
    if spec.hidden in ("later", "window"):
        seen = seen & (far >= 0)
    if spec.hidden == "window":
        seen = seen & (far < 3)
    if spec.padded:
        seen = seen & (place < torch.tensor(lengths)[:, None])[:, None, None]
    mask = torch.zeros(seen.shape, dtype=torch.float64)
    if spec.hidden == "bias":
        slopes = 2.0 ** -torch.arange(1, spec.heads + 1, dtype=torch.float64)
        mask = mask - slopes[:, None, None] * far.abs()
    mask = mask.masked_fill(~seen, torch.finfo(torch.float64).min)
    return None if not mask.any() else mask


HOME_MADE: dict[str, dict[str, Any]] = {
    "home-made": {},
    "attention by name": {"call": "by name"},
    "attention interface": {"call": "transformers"},
    "grouped queries": {"shared": 2},
    "post norm": {"norm": "post"},
    "norms before and after": {"norm": "both"},
    "no norm": {"norm": "none"},
    "parallel": {"parallel": True, "norm": "pre", "feed_forward": "plain"},
    "gated feed-forward": {"feed_forward": "gated"},
    "experts": {"feed_forward": "experts"},
    "no feed-forward": {"feed_forward": "none"},
    "causal": {"hidden": "later"},
    "sliding window": {"hidden": "window"},
    "linear biases": {"hidden": "bias"},
    "padding": {"padded": True},
    "gated context": {"context": "gate"},
    "normalized context": {"context": "norm"},
    "layer scale": {"after": "scale"},
    "convolution": {"after": "convolution"},
    "shift": {"after": "shift"},
}
OTHERS = ("torch encoder", "torch encoder, tokens first", "torch decoder", "torch cross-attention", "windows")
LIBRARY: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "gpt2": ("GPT2Model", {}),
    "llama": ("LlamaModel", {}),
    "gemma2": ("Gemma2Model", {"sliding_window": 3}),
    "t5": ("T5EncoderModel", {"d_kv": 3}),
    "vit": ("ViTModel", {"image_size": 4, "patch_size": 2, "num_channels": 1}),
    "mpnet": ("MPNetModel", {}),
}
KINDS = (*HOME_MADE, *OTHERS, *LIBRARY)


@st.composite
def specs(draw: Any, kind: str) -> Spec:
    """A home-made layer of a kind. All that the kind does not fix is random."""
    heads = draw(st.sampled_from([2, 4]))
    spec = Spec(
        heads=heads,
        shared=draw(st.sampled_from([1, 1, heads])),
        head_width=draw(st.integers(1, 5)),
        width=draw(st.integers(3, 10)),
        inner=draw(st.integers(1, 14)),
        call=draw(st.sampled_from(["torch", "torch", "by name", "transformers"])),
        norm=draw(st.sampled_from(["pre", "post", "both"])),
        rms=draw(st.booleans()),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        feed_forward=draw(st.sampled_from(["plain", "gated"])),
        hidden=draw(st.sampled_from(["nothing", "later", "window"])),
        padded=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    return replace(spec, **HOME_MADE[kind])


@st.composite
def cases(draw: Any, kind: str, depth: int = 1) -> Case:
    """A random model of a kind, with inputs."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch = draw(st.integers(1, 3))
    tokens = draw(st.sampled_from([2, 3, 4, 5, 6, 7, 16, 19]))  # the long ones fold
    if kind in HOME_MADE:
        spec = draw(specs(kind))
        lengths = [tokens] + [draw(st.integers(1, tokens)) if spec.padded else tokens for _ in range(batch - 1)]
        model = Stack([Layer(spec) for _ in range(depth)])
        x, mask = torch.randn(batch, tokens, spec.width), mask_of(spec, lengths)
        return _case(kind, model, (x,) if mask is None else (x, mask), lengths, spec.heads)
    return (_other if kind in OTHERS else _library)(draw, kind, depth, batch, tokens)


def _case(kind: str, model: nn.Module, inputs: Any, lengths: list[int], heads: int, **more: Any) -> Case:
    for parameter in model.parameters():  # also norms and biases, which begin as ones and zeros
        parameter.data += 0.2 * torch.randn_like(parameter)
    model = model.double().eval()
    as_double = {True: lambda x: x.double(), False: lambda x: x}
    if isinstance(inputs, dict):
        inputs = {name: as_double[x.is_floating_point()](x) for name, x in inputs.items()}
    else:
        inputs = tuple(as_double[x.is_floating_point()](x) for x in inputs)
    layers = more.pop("layers", None) or list(model.layers)  # type: ignore[arg-type]
    return Case(kind, model, layers, inputs, lengths, heads, **more)


def _other(draw: Any, kind: str, depth: int, batch: int, tokens: int) -> Case:
    heads = draw(st.sampled_from([1, 2, 4]))
    width = heads * draw(st.integers(1, 4))
    width = max(width, 3 * heads)
    x = torch.randn(batch, tokens, width)
    if kind == "windows":
        tokens += tokens % 2
        x = torch.randn(batch, tokens, width)
        spec = Spec(heads=heads, width=width, norm=draw(st.sampled_from(["pre", "post", "both"])))
        return _case(kind, Stack([Halves(spec) for _ in range(depth)]), (x,), [tokens] * batch, heads, by_position=True)
    options: dict[str, Any] = {
        "dim_feedforward": draw(st.integers(1, 12)),
        "activation": draw(st.sampled_from(["relu", "gelu"])),
        "norm_first": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "batch_first": "first" not in kind,
    }
    if "encoder" in kind:
        model = Stack([nn.TransformerEncoderLayer(width, heads, **options) for _ in range(depth)])
        first = "first" in kind
        given = x.transpose(0, 1) if first else x
        return _case(kind, model, (given,), [tokens] * batch, heads, tokens_first=first)
    model = Stack([nn.TransformerDecoderLayer(width, heads, **options) for _ in range(depth)])
    memory = torch.randn(batch, tokens + draw(st.integers(1, 3)), width)
    attention = "cross" if "cross" in kind else "self"
    return _case(kind, model, (x, memory), [tokens] * batch, heads, attention=attention)


class Halves(Layer):
    """A home-made layer whose attention sees each half of the sequence alone."""

    def attended(self, x: Tensor, mask: Tensor | None) -> Tensor:
        halves = x.reshape(-1, x.shape[1] // 2, x.shape[2])
        return self.attention(halves, None).reshape(x.shape)


def _library(draw: Any, kind: str, depth: int, batch: int, tokens: int) -> Case:
    heads = draw(st.sampled_from([2, 4]))
    width, inner = heads * 2 * draw(st.integers(1, 3)), draw(st.integers(1, 16))
    act = draw(st.sampled_from(["gelu", "relu", "silu"]))
    implementation = draw(st.sampled_from(["eager", "sdpa"]))
    if kind in ("t5", "mpnet", "gemma2"):  # these have no other
        implementation = "eager"
    lengths = [tokens] + [draw(st.integers(1, tokens)) for _ in range(batch - 1)]
    mask = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
    inputs = {"input_ids": torch.randint(3, 20, (batch, tokens)) * mask, "attention_mask": mask}
    size: dict[str, Any] = {"vocab_size": 20, "hidden_size": width, "num_hidden_layers": depth, "pad_token_id": 0}
    size |= {"num_attention_heads": heads, "intermediate_size": inner, "max_position_embeddings": 32}
    kind_of, more = LIBRARY[kind]
    if kind in ("llama", "gemma2"):
        more = {**more, "num_key_value_heads": draw(st.sampled_from([1, 2, heads])), "head_dim": 4}
    if kind == "t5":
        more = {**more, "d_ff": inner, "feed_forward_proj": draw(st.sampled_from(["relu", "gated-gelu"]))}
    else:
        more = {**more, "activation_function" if kind == "gpt2" else "hidden_act": act}
    if kind == "vit":
        lengths, inputs = [5] * batch, {"pixel_values": torch.randn(batch, 1, 4, 4)}
    model_class = getattr(transformers, kind_of)
    config = model_class.config_class(**size, **more)
    config._attn_implementation = implementation
    model = model_class(config)
    return _case(kind, model, inputs, lengths, heads, layers=find_layers(model))

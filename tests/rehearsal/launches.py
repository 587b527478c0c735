"""How many kernels a method starts, and how often the host waits for the device. Both are exact, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import captum_vz as vz
from tests.rehearsal.device import ELSEWHERE, NAME, Traffic
from tests.rehearsal.subjects import moved

aten = torch.ops.aten
# Like views, these start no kernel.
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
}


class Launches(NamedTuple):
    """What one run did on the device.

    Attributes:
        kernels: The operations on its tensors, views included.
        views: Those among them that start no kernel: views and allocations.
        reads: How often the host waited for numbers of the device.
        uploads: How often numbers of the host were copied to the device.
    """

    kernels: float = 0
    views: float = 0
    reads: float = 0
    uploads: float = 0

    def minus(self, other: Launches) -> Launches:
        return Launches(*(one - another for one, another in zip(self, other, strict=True)))


class Counter(TorchDispatchMode):
    """Counts the operations inside a `with` block. After the block, `launches` holds the counts."""

    launches = Launches()

    def __enter__(self) -> Counter:
        self._kernels = self._views = 0
        self._reads, self._uploads = Traffic.reads, Traffic.uploads
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        reads, uploads = Traffic.reads - self._reads, Traffic.uploads - self._uploads
        self.launches = Launches(self._kernels, self._views, reads, uploads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        there = device is not None and torch.device(device).type == NAME
        if there or any(isinstance(x, Tensor) and x.device.type == NAME for x in tree_leaves((args, kwargs))):
            self._kernels += 1
            self._views += func in ALLOCATIONS or any(
                answer.alias_info is not None and not answer.alias_info.is_write for answer in func._schema.returns
            )
        return func(*args, **kwargs)


TOKENS = 40
ENCODED, DECODED = 7, 5
# An image of 4 windows, and one of 16.
SIZE, LARGE = 32, "Swin, 16 windows"
Run = Callable[[nn.Module, Any], Any]


def bert(depth: int) -> nn.Module:
    size = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=depth, vocab_size=200, **size))


def gpt2(depth: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=depth, n_head=4, vocab_size=200))


def llama(depth: int) -> nn.Module:
    size = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=depth, vocab_size=200, **size))


def t5(depth: int) -> nn.Module:
    return transformers.T5Model(
        transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=depth, num_heads=4, vocab_size=200)
    )


def swin(depth: int, size: int = SIZE) -> nn.Module:
    config = transformers.SwinConfig(
        depths=[depth], image_size=size, patch_size=4, embed_dim=16, num_heads=[2], window_size=4
    )
    return transformers.SwinModel(config)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    **{"BERT": bert, "GPT-2": gpt2, "LLaMA": llama, "T5": t5},
    **{"Swin": swin, LARGE: partial(swin, size=2 * SIZE)},
}


def maps_of(method: Any, **asked: Any) -> Run:
    return lambda model, given: method(model, vz.find_layers(model)).attribute(given, **asked)


def last_row(model: nn.Module, given: Any) -> Any:
    return vz.HiddenTokenAttribution(model, vz.find_layers(model)[-1]).attribute(given, token=3)


def both_stacks(model: nn.Module, given: Any) -> Any:
    layers = [*vz.find_layers(model, "encoder"), *vz.find_layers(model, "decoder")]
    return vz.ALTIPlus(model, layers).attribute(given)


METHODS: dict[str, Run] = {
    "ValueZeroing": maps_of(vz.ValueZeroing),
    "ValueZeroing, one row": maps_of(vz.ValueZeroing, token=3),
    "ValueZeroingRollout": maps_of(vz.ValueZeroingRollout),
    "LayerAttention": maps_of(vz.LayerAttention),
    "LayerAttentionNorm": maps_of(vz.LayerAttentionNorm),
    "ALTI": maps_of(vz.ALTI),
    "GlobEnc": maps_of(vz.GlobEnc),
    "ALTILogit": maps_of(vz.ALTILogit, target=(3, 5)),
    "ALTIPlus": both_stacks,
    "HiddenTokenAttribution, one row": last_row,
}


def inputs_of(name: str) -> Any:
    if name in ("Swin", LARGE):
        size = SIZE if name == "Swin" else 2 * SIZE
        return torch.randn(1, 3, size, size)
    tokens = torch.arange(5, 5 + TOKENS)[None]
    return {"input_ids": tokens[:, :ENCODED], "decoder_input_ids": tokens[:, :DECODED]} if name == "T5" else tokens


@cache
def cost(method: str | None, name: str) -> Launches:
    """What a method starts for one more layer, beyond the forward pass; None: the forward pass alone.

    Counted at two depths, so that what is done once for a model drops out.
    """
    if method is None:
        return _of_a_layer(name, _forward)
    return _of_a_layer(name, METHODS[method]).minus(cost(None, name))


def _forward(model: nn.Module, given: Any) -> None:
    model(**given) if isinstance(given, dict) else model(given)


def _of_a_layer(name: str, run: Run) -> Launches:
    return Launches(*(one / 2 for one in _counted(name, 4, run).minus(_counted(name, 2, run))))


@torch.no_grad()
def _counted(name: str, depth: int, run: Run) -> Launches:
    torch.manual_seed(0)
    model = MODELS[name](depth).eval().requires_grad_(False).to(ELSEWHERE)
    given = moved(inputs_of(name), ELSEWHERE)
    with Counter() as counter:
        run(model, given)
    return counter.launches

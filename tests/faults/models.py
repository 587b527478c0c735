"""Small models of four kinds, one for each tap, and attributions that go through all that a pass sets up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz import HiddenTokenAttribution, ValueZeroing, ValueZeroingEffect
from tests.engine.blocks import HEADS, WIDTH, block_of
from tests.engine.by_name import ByName
from tests.engine.test_inline_layers import case as inline_case
from tests.reference import FAMILIES

TOKENS = 4


@dataclass
class Subject:
    """A model, an attribution of it, and a plain run."""

    model: nn.Module
    attribute: Callable[[], Any]
    run: Callable[[], Any]

    def scores(self) -> list[Tensor]:
        """The attribution, as a list of tensors."""
        found = self.attribute()
        return [found] if isinstance(found, Tensor) else list(found)


class Remembers(nn.Module):
    """Keeps the length of the last sequence, and a copy of it in a buffer and in a list. It changes no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.lengths = [0]
        self.register_buffer("length", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.tokens = self.lengths[0] = x.shape[1]
        self.length.fill_(x.shape[1])
        return torch.zeros_like(x)


def _bert(method: Any, implementation: str = "sdpa", **options: Any) -> Subject:
    case = FAMILIES["bert"].build(torch.float32, implementation)
    ids = torch.arange(3, 3 + TOKENS)[None]
    explain = method(case.model, case.layers[:2], **options)
    return Subject(case.model, lambda: explain.attribute(ids), lambda: case.model(ids).last_hidden_state)


def _torchs(method: Any, **keywords: Any) -> Subject:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    x = torch.randn(2, TOKENS, WIDTH)
    explain = method(model, model.layers)
    return Subject(model, lambda: explain.attribute(x, **keywords), lambda: model(x))


def _by_name() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(block_of(ByName()), block_of(ByName())).requires_grad_(False)
    model[0].after = Remembers()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    model(x)
    explain = ValueZeroing(model, list(model))
    return Subject(model, lambda: explain.attribute(x), lambda: model(x))


def _inline() -> Subject:
    model, inputs = inline_case("XLNet")
    inputs = {name: x[:, :TOKENS] for name, x in inputs.items()}
    explain = ValueZeroing(model, list(model.layer)[:1])
    return Subject(model, lambda: explain.attribute(inputs), lambda: model(**inputs).last_hidden_state)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "transformers": lambda: _bert(ValueZeroing),
    "torch": lambda: _torchs(ValueZeroing),
    "by name": _by_name,
    "inline": _inline,
    "copies of the model": lambda: _torchs(ValueZeroingEffect, target=(1, 0)),
    "gradients": lambda: _bert(HiddenTokenAttribution, "eager"),
}

"""Random numbers outside the explained layers: a map is that of its draw, with a warning. Dropout is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import ViTMAEConfig, ViTMAEModel

from captum_vz import ALTI, LayerAttention, LayerAttentionNorm, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.errors import RefusedError
from tests.engine.blocks import WIDTH, Block, sequences
from tests.engine.compare import assert_same
from tests.reference.families import FAMILIES

DRAWN = "that of this draw"


@pytest.mark.parametrize("method", [LayerAttention, LayerAttentionNorm, ALTI, ValueZeroing, ValueZeroingEffect])
def test_dropout_before_the_layers_is_refused(method: Any) -> None:
    case = FAMILIES["bert"].build()
    case.model.embeddings.dropout.p = 0.1
    case.model.embeddings.dropout.train()
    options = {"target": (1, 2)} if method is ValueZeroingEffect else {}
    for forward in (case.model, lambda **inputs: case.model(**inputs).last_hidden_state):
        with pytest.raises(RefusedError, match="and has dropout"):
            method(forward, case.layers).attribute(case.inputs, **options)


class Noisy(nn.Module):
    """Two blocks, the second of which gets what `draw` makes of the output of the first."""

    def __init__(self, draw: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.draw, self.after = draw, after
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.second(self.draw(self.first(x))))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout without training=": lambda x: dropout(x, 0.1),
    "numpy": lambda x: x * torch.from_numpy(np.random.rand(WIDTH)),
    "order": lambda x: x[:, torch.randperm(x.shape[1])],
}


@pytest.mark.parametrize("name", DRAWS)
def test_map_is_that_of_its_draw(name: str) -> None:
    model, x = Noisy(DRAWS[name]), sequences(2)
    given: list[Tensor] = []
    model.second.register_forward_pre_hook(lambda module, args: given.append(args[0].clone()))
    with pytest.warns(UserWarning, match=DRAWN):
        found = ValueZeroing(model, model.second).attribute(x)
    assert_same(found, ValueZeroing(model.second, model.second).attribute(given[0]))
    with pytest.raises(RefusedError, match="unchanged copy"), pytest.warns(UserWarning, match=DRAWN):
        ValueZeroingEffect(model, model.second).attribute(x, target=(1, 2))


def test_module_in_train_mode_is_named() -> None:
    model, x = Noisy(DRAWS["order"]), sequences(2)
    model.norm = nn.BatchNorm1d(WIDTH)
    with pytest.warns(UserWarning, match="norm is in train"):
        ValueZeroing(lambda x: model(x), model.second).attribute(x)


@pytest.mark.filterwarnings("error")
def test_numbers_drawn_after_the_layers() -> None:
    model, x = Noisy(lambda x: x, after=DRAWS["order"]), sequences(2)
    assert ValueZeroing(model, model.second).attribute(x).any()


def test_function_that_runs_once() -> None:
    model, rest = Noisy(DRAWS["order"]), iter([sequences(2)])
    with pytest.warns(UserWarning, match=DRAWN):
        assert ValueZeroing(lambda x: model(next(rest)), model.second).attribute(sequences(2)).any()


def test_patches_drawn_at_random() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = ViTMAEModel(ViTMAEConfig(image_size=16, patch_size=4, **sizes)).double().eval()
    layers, pixels = find_layers(model), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    with pytest.warns(UserWarning, match="choose the tokens"):
        ValueZeroing(model, layers).attribute(pixels)

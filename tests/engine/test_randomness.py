"""Random numbers in what the explained layers are given: refused, unless each call draws the same."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import ViTMAEConfig, ViTMAEModel

from captum_vz import (
    ALTI,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    LayerALTI,
    LayerAttention,
    LayerAttentionNorm,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
    find_layers,
)
from captum_vz.errors import RefusedError
from tests.engine.blocks import WIDTH, Block, sequences
from tests.engine.compare import assert_same
from tests.reference.families import FAMILIES

METHODS = [LayerAttention, LayerAttentionNorm, LayerALTI, ValueZeroing]
ROLLOUTS = [ALTI, AttentionFlow, AttentionRollout, GlobEnc, ValueZeroingRollout]
ANOTHER = r"each call of forward_func gives .* another input\. "


def with_dropout() -> tuple[Any, nn.Module]:
    """A BERT whose dropout after the embeddings was left in train mode."""
    case = FAMILIES["bert"].build()
    case.model.embeddings.dropout.p = 0.1
    case.model.embeddings.dropout.train()
    return case, case.model


def seeded(model: Callable[..., Any], **inputs: Any) -> Any:
    torch.manual_seed(3)
    return model(**inputs)


@pytest.mark.parametrize("method", [*METHODS, *ROLLOUTS])
def test_embeddings_in_train_mode(method: Any) -> None:
    case, model = with_dropout()
    message = rf"embeddings\.dropout \(Dropout\) draws random numbers in train mode, so {ANOTHER}Call model"
    with pytest.raises(RefusedError, match=message):
        method(model, case.layers).attribute(case.inputs)
    before = torch.get_rng_state(), random.getstate()
    fixed = method(lambda **inputs: seeded(model, **inputs), case.layers)
    found = fixed.attribute(case.inputs)
    torch.rand(1)
    again = fixed.attribute(case.inputs)
    assert_same(found, again, tolerance=0)
    torch.set_rng_state(before[0])
    with torch.no_grad():
        torch.manual_seed(3)
        states = model.embeddings(case.inputs["input_ids"], case.inputs.get("token_type_ids"))
    kept = model.embeddings.register_forward_hook(lambda *_: states)
    model.eval()
    assert_same(found, method(model, case.layers).attribute(case.inputs), tolerance=0)
    kept.remove()


class Noisy(nn.Module):
    """Two blocks, the second of which gets what `draw` makes of the output of the first."""

    def __init__(self, draw: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.draw, self.after = draw, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.second(self.draw(self.first(x))))


def ignored(x: Tensor) -> Tensor:
    torch.rand(2), random.random(), np.random.rand()
    return x


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout without training=": lambda x: dropout(x, 0.1),
    "noise": lambda x: x + 0.01 * torch.randn_like(x),
    "numpy": lambda x: x * torch.from_numpy(np.random.rand(WIDTH)),
    "Python": lambda x: x * torch.tensor([random.random() for _ in range(WIDTH)]),
    "order": lambda x: x[:, torch.randperm(x.shape[1])],
    "number of tokens": lambda x: x[:, : random.randint(2, x.shape[1])],
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_drawn_between_layers(name: str) -> None:
    model, x = Noisy(DRAWS[name]), sequences(2)
    for method in (ValueZeroing, LayerAttention):
        random.seed(1)  # both calls draw another number of tokens
        message = rf"Noisy draws random numbers .*, so {ANOTHER}.*fix the numbers: .* torch\.manual_seed\(0\)"
        with pytest.raises(RefusedError, match=message):
            method(model.eval(), model.second).attribute(x)
        assert method(model, model.first).attribute(x).any()  # what is drawn later does not reach the first block


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_are_fixed(name: str) -> None:
    model, x = Noisy(DRAWS[name]).eval(), sequences(2)

    def fixed(x: Tensor) -> Tensor:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        return model(x)

    def forked(x: Tensor) -> Tensor:
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng():
            output = fixed(x)
        random.setstate(states[0]), np.random.set_state(states[1])
        return output

    with torch.no_grad():
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        given = model.draw(model.first(x))
    expected = ValueZeroing(model.second, model.second).attribute(given)
    for forward in (fixed, forked):
        ignored(x)
        with pytest.warns(
            UserWarning, match=r"order or choose the tokens \(ViTMAE's patches\), rows and columns of maps"
        ):
            found = ValueZeroing(forward, model.second).attribute(x)
        assert_same(found, expected)


class Rarely(nn.Module):
    """Leaves out a layer of its own in few calls, as LayerDrop does, before or after another layer."""

    def __init__(self, draw: Callable[[], Any], rate: float, before: bool) -> None:
        super().__init__()
        self.block, self.layers, self.draw, self.rate = Block(), nn.ModuleList([Block()]), draw, rate
        self.before = before
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before else self.layers[0](x)
        if self.draw() >= self.rate:
            x = self.block(x)
        return self.layers[0](x) if self.before else x


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()), random.random, np.random.rand], ids=["torch", "Python", "numpy"]
)
@pytest.mark.parametrize(
    ("method", "before"), [(ValueZeroing, True), (ValueZeroingEffect, True), (ValueZeroingEffect, False)]
)
def test_numbers_that_seldom_matter(method: Any, before: bool, draw: Any, rate: float) -> None:
    model, x = Rarely(draw, rate, before), sequences(2)
    options = {"target": (1, 2)} if method is ValueZeroingEffect else {}
    for seed in range(8):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        with pytest.raises(RefusedError, match="draw"):
            method(model, model.layers[0]).attribute(x, **options)


def test_numbers_without_a_use() -> None:
    x = sequences(2)
    for model in (Noisy(ignored), Noisy(lambda x: x, after=DRAWS["noise"])):
        expected = ValueZeroing(lambda x, model=model: model.second(model.first(x)), model.second).attribute(x)
        states = random.getstate(), np.random.get_state()[2]
        assert_same(ValueZeroing(model, model.second).attribute(x), expected)
        if model.draw is ignored:  # as after one plain call
            random.setstate(states[0])
            random.random()
            assert np.random.get_state()[2] == (states[1] + 2 if states[1] < 624 else 2)


def test_numbers_of_another_thread() -> None:
    """A thread that draws all the time. Nothing of the model depends on its numbers, so nothing is said."""
    case, over = FAMILIES["bert"].case, threading.Event()
    method = ValueZeroing(case.model, case.layers)
    expected = method.attribute(case.inputs)

    def draw() -> None:
        while not over.wait(1e-4):
            torch.rand(1)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                assert_same(method.attribute(case.inputs), expected)
    finally:
        over.set()
        thread.join()


def test_a_function_that_runs_once() -> None:
    model, rest = Noisy(DRAWS["noise"]), iter([sequences(2)])
    with pytest.raises(RefusedError, match=r"draws random numbers, and fails if it is called again \(StopIteration"):
        ValueZeroing(lambda x: model(next(rest)), model.second).attribute(sequences(2))


def test_patches_drawn_at_random() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = ViTMAEModel(ViTMAEConfig(image_size=16, patch_size=4, **sizes)).double().eval()
    layers, pixels = find_layers(model), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    message = rf"embeddings \(ViTMAEEmbeddings\) draws random numbers also in eval mode, so {ANOTHER}"
    with pytest.raises(RefusedError, match=message):
        ValueZeroing(model, layers).attribute(pixels)
    noise = torch.rand(2, 16)
    inputs = {"pixel_values": pixels, "noise": noise}
    first, second = (ValueZeroing(model, layers).attribute(inputs) for _ in range(2))
    assert_same(first, second, tolerance=0)

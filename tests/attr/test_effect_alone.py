"""ValueZeroingEffect of models whose copies in one batch decide together, against one run of one example at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import SwitchTransformersConfig, SwitchTransformersEncoderModel

from captum_vz import ValueZeroingEffect, find_layers
from captum_vz._engine import keeps_examples_apart
from captum_vz.errors import RefusedError
from captum_vz.testbed import load_model
from tests.engine.blocks import WIDTH, Block, without_value_of
from tests.engine.compare import assert_same
from tests.reference import FAMILIES

TOKENS = 6
PER_EVAL = [None, 1]


class Together(nn.Module):
    """Three blocks and three classes. A subclass says what the examples of a batch share."""

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.threshold = threshold
        self.double().eval()
        with torch.no_grad():
            for block in self.blocks:
                block.attention.output.weight.mul_(3)

    @property
    def zeroed(self) -> list[nn.Module]:
        """The layers in which values are zeroed: those that run for any threshold."""
        return list(self.blocks)

    def confidence(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1)).softmax(-1).amax(-1)

    def decides(self, x: Tensor) -> Tensor:
        """The number that is compared with the threshold, for each example."""
        for block in self.blocks[:1]:
            x = block(x)
        return self.confidence(x)


class Exit(Together):
    """Leaves after the first block if all examples are sure. Values are zeroed in the first block."""

    @property
    def zeroed(self) -> list[nn.Module]:
        return [self.blocks[0]]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if (self.confidence(x) > self.threshold).all():
                break
        return self.head(x.mean(1))


class Switch(Together):
    """Leaves out its second block if the batch is large on average. No code reads a number for this."""

    @property
    def zeroed(self) -> list[nn.Module]:
        return [self.blocks[0]]

    def decides(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)[..., 0].mean(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.head(torch.where(x[..., 0].mean() > self.threshold, x, self.blocks[1](x)).mean(1))


class Statistics(Together):
    """Normalises by the mean and variance of the batch, as BatchNorm does in train mode."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = (x - x.mean((0, 1))) / x.std((0, 1))
        return self.head(x[:, 0])


class OneAtATime(Together):
    """Refuses a batch of several examples."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 1
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@torch.no_grad()
def with_zeroed(model: Together, token: int, run: Callable[[], Tensor], layers: Any = None) -> Tensor:
    """What `run` gives while the value of one token is zero, by plain hooks. `layers` is None: in `model.zeroed`."""
    with without_value_of(token, *(block.attention.value for block in layers or model.zeroed)):
        return run()


@torch.no_grad()
def naive(model: Together, x: Tensor, layers: Any = None) -> Tensor:
    """The effect of each token on class 0, one example and one token at a time."""
    rows = []
    for one in x.split(1):
        lost = [with_zeroed(model, token, lambda one=one: model(one)[:, 0], layers) for token in range(x.shape[1])]
        rows.append(model(one)[:, :1] - torch.stack(lost, 1))
    return torch.cat(rows)


def near_thresholds(model: Together, x: Tensor) -> Iterable[float]:
    """Thresholds between the numbers that the examples decide by, with and without each value."""
    with torch.no_grad():
        numbers = [model.decides(x), *(with_zeroed(model, j, lambda: model.decides(x)) for j in range(x.shape[1]))]
    ordered = torch.cat(numbers).sort().values
    return ((ordered[1:] + ordered[:-1]) / 2).tolist()


def sentences(batch: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(batch, TOKENS, WIDTH, dtype=torch.float64)


DECIDING = [Exit, Switch]


@pytest.mark.parametrize("per_eval", PER_EVAL)
@pytest.mark.parametrize("kind", DECIDING)
def test_one_example_near_thresholds(kind: type[Together], per_eval: int | None) -> None:
    x, model = sentences(1, 0), kind()
    for threshold in near_thresholds(model, x):
        model.threshold = threshold
        found = ValueZeroingEffect(model, model.zeroed).attribute(x, 0, perturbations_per_eval=per_eval)
        assert_same(found, naive(model, x))


@pytest.mark.parametrize("kind", DECIDING)
def test_two_examples_near_thresholds(kind: type[Together]) -> None:
    """Two examples that decide otherwise than alone are refused. Else each has the effects that it has alone."""
    outcomes, x, model = set(), sentences(2, 0), kind()
    method = ValueZeroingEffect(model, model.zeroed)
    for threshold in list(near_thresholds(model, x))[::2]:
        model.threshold = threshold
        with torch.no_grad():
            same = torch.allclose(model(x)[:, 0], torch.cat([model(one)[:, 0] for one in x.split(1)]))
        outcomes.add(same)
        if same:
            assert_same(method.attribute(x, 0), naive(model, x))
        else:
            with pytest.raises(RefusedError, match="one example at a"):
                method.attribute(x, 0)
    assert outcomes == {True, False}


@pytest.mark.parametrize("per_eval", PER_EVAL)
@pytest.mark.parametrize("kind", [Statistics, OneAtATime])
def test_one_example_of_a_shared_scale(kind: type[Together], per_eval: int | None) -> None:
    x, model = sentences(1, 0), kind()
    found = ValueZeroingEffect(model, model.zeroed).attribute(x, 0, perturbations_per_eval=per_eval)
    assert_same(found, naive(model, x))


@pytest.mark.parametrize("per_eval", PER_EVAL)
def test_two_examples_of_a_shared_scale(per_eval: int | None) -> None:
    model = Statistics()
    with pytest.raises(RefusedError, match="one example at a"):
        ValueZeroingEffect(model, model.zeroed).attribute(sentences(2, 0), 0, perturbations_per_eval=per_eval)


class Apart(Together):
    """Keeps its examples apart, and reads a number, as a check for NaN does."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            assert not x.isnan().any()
        return self.head(x.mean(1))


class Placed(Apart):
    """Adds vectors of places, which are as many as the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(TOKENS, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places(torch.arange(x.shape[1])))


@pytest.mark.filterwarnings("error")  # a check for NaN is harmless
def test_as_many_places_as_examples() -> None:
    model, x = Placed(), sentences(TOKENS, 0)
    for layers in (model.zeroed, [model.blocks[1]]):
        assert_same(ValueZeroingEffect(model, layers).attribute(x, 0), naive(model, x, layers))


def test_target_of_each_example() -> None:
    """A list has one target for each example. A function may count the examples of its batch."""
    model, x, classes = Apart(), sentences(2, 0), [2, 0]
    method = ValueZeroingEffect(model, model.zeroed)

    def one_by_one(of: list[int]) -> Tensor:
        return torch.cat([method.attribute(one[None], target) for one, target in zip(x, of, strict=True)])

    others = [(target + 1) % 3 for target in classes]
    assert_same(method.attribute(x, classes), one_by_one(classes))
    assert_same(method.attribute(x, lambda output: output[torch.arange(2), classes]), one_by_one(classes))
    assert_same(method.attribute(x, classes, foil=others), one_by_one(classes) - one_by_one(others))


# Library models.


@pytest.mark.parametrize("texts", [1, 2])
def test_runs_of_a_library_model(texts: int) -> None:
    """The clean pass and one run of all copies. A function takes one more of each example, code from elsewhere of all.

    That is one run for each example and source.
    """
    model, tokenizer = load_model()
    inputs = tokenizer(["the hats [MASK] here.", "the picture [MASK] here."][:texts], padding=True, return_tensors="pt")
    layers, ran = find_layers(model), []

    def count(module: nn.Module, args: Any) -> None:
        if module is layers[0]:
            ran.append(module)

    count.__module__ = "captum_vz.count"  # a hook of the user's is code from elsewhere

    def effect(forward_func: Any) -> tuple[Tensor, int]:
        ran.clear()
        with register_module_forward_pre_hook(count):
            return ValueZeroingEffect(forward_func, layers).attribute(inputs, (3, 5)), len(ran)

    trusted, runs = effect(model)
    checked, more = effect(lambda **given: model(**given))
    assert runs == 2
    columns = inputs["input_ids"].shape[1]
    assert more == 2 + texts
    torch.testing.assert_close(trusted, checked)
    model.bert.embeddings.training = True  # it holds dropout, whose own switch is off
    try:
        alone = texts * (1 + columns)  # with nothing and with each source zeroed
        assert effect(model)[1] == 2 + alone  # twice on the inputs
    finally:
        model.bert.embeddings.training = False


def shares_a_scale(numbers_of: Callable[..., Tensor], **x: Tensor) -> Tensor:
    numbers = numbers_of(**x)
    return numbers / numbers.abs().max()


def takes_one_example(numbers_of: Callable[..., Tensor], **x: Tensor) -> Tensor:
    assert len(x["input_ids"]) == 1
    return numbers_of(**x)


def runs_each_alone(numbers_of: Callable[..., Tensor], **x: Tensor) -> Tensor:
    each = ({name: value[row : row + 1] for name, value in x.items()} for row in range(len(x["input_ids"])))
    return torch.cat([numbers_of(**one) for one in each])


def decides_if_any_is_low(numbers_of: Callable[..., Tensor], **x: Tensor) -> Tensor:
    numbers = numbers_of(**x)
    return numbers if (numbers.abs() < 0.1).any() else 2 * numbers


FUNCTIONS = [shares_a_scale, takes_one_example, runs_each_alone, decides_if_any_is_low]


@pytest.mark.all_cases
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_functions_of_a_library_model(function: Callable[..., Tensor]) -> None:
    """A function that treats a batch in another way than its examples has the effects of one example at a time."""
    case = FAMILIES["bert"].case.example(0)

    def run(**x: Tensor) -> Tensor:
        return function(lambda **x: case.model(**x).last_hidden_state[:, 2, 3], **x)

    lost = []
    for token in range(case.inputs["input_ids"].shape[1]):
        with without_value_of(token, *(layer.attention.self.value for layer in case.layers)):
            lost.append(run(**case.inputs))
    expected = run(**case.inputs)[:, None] - torch.stack(lost, 1)
    assert_same(ValueZeroingEffect(run, case.layers).attribute(case.inputs), expected.detach())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "bart-decoder", "t5-encoder"])
def test_library_models_are_trusted(name: str) -> None:
    model = FAMILIES[name].build().model
    assert keeps_examples_apart(model)
    assert not keeps_examples_apart(lambda **inputs: model(**inputs))
    with model.register_forward_hook(lambda module, args, output: output):
        assert not keeps_examples_apart(model)
    model.pooler = nn.BatchNorm1d(3).eval()
    assert keeps_examples_apart(model)
    model.pooler = nn.BatchNorm1d(3, track_running_stats=False).eval()
    assert not keeps_examples_apart(model)
    model.pooler = None
    assert keeps_examples_apart(model)
    model.train()
    assert not keeps_examples_apart(model)


def test_experts_are_not_trusted() -> None:
    size = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "num_experts": 2}
    size["num_sparse_encoder_layers"] = 1
    assert not keeps_examples_apart(SwitchTransformersEncoderModel(SwitchTransformersConfig(**size)).eval())

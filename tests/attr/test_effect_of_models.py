"""What ValueZeroingEffect costs, the models that people run, and what it refuses and keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.module import register_module_forward_hook

from captum_vz import ValueGates, ValueZeroingEffect
from captum_vz._engine.whole_model import cache as cache_of_outputs
from captum_vz.errors import RefusedError
from tests.attr.test_value_zeroing_effect import effect, of_hidden_states
from tests.benchmarks.measure import operations
from tests.budget import set_budget
from tests.captum.footprint import footprint
from tests.captum.test_threads import together
from tests.engine.blocks import WIDTH as BLOCK_WIDTH
from tests.engine.blocks import Block
from tests.engine.compare import assert_same
from tests.reference import FAMILIES, Attention, Case
from tests.reference.effects import case_of, naive_effect, read, zeroed_everywhere

# What it costs.


@contextmanager
def counted(case: Case) -> Iterator[list[int]]:
    """The examples of each run of a model."""
    examples: list[int] = []

    def count(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is case.model:
            examples.append(len(output.last_hidden_state))

    count.__module__ = "captum_vz.count"  # a hook of the user's is code from elsewhere
    with register_module_forward_hook(count, with_kwargs=True):
        yield examples


@pytest.mark.parametrize("chosen", [-1, slice(None)], ids=str)
@pytest.mark.parametrize("name", ["bert", "gpt_neo", "bart-decoder", "albert"])
def test_sources_run_in_one_batch(name: str, chosen: Any) -> None:
    case = case_of(name)
    of = ValueZeroingEffect(case.model, case.layers[chosen])
    for target in (read, (2, 3)):
        with counted(case) as examples:
            scores = of.attribute(case.inputs, target)
        assert examples == [3, 3 * (scores.shape[1] + 1)]  # and one copy that is left as it is
    with counted(case) as examples:
        of.attribute(case.inputs, read, perturbations_per_eval=2)
    assert max(examples) == 3 * 3


def test_memory_bounds_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("bert")
    expected = effect(case)
    widest = 3 * 7 * 48 * 8  # the feed-forward layer's
    set_budget(monkeypatch, copies_bytes=4 * widest)
    with counted(case) as examples:
        assert_same(effect(case), expected)
    assert examples[:4] == [3, 12, 12, 6]
    set_budget(monkeypatch, copies_bytes=1)
    assert_same(effect(case), expected)


def test_features_of_examples_share_a_run() -> None:
    """Nine features in all, but no example has more than four."""
    case = case_of("bert")
    groups = torch.tensor([[0, 0, 1, 1, 2, 2, 3], [4, 4, 5, 5, 6, 6, 6], [7, 7, 8, 8, 8, 8, 8]])
    with counted(case) as examples:
        found = effect(case, feature_mask=groups)
    assert examples[:2] == [3, 3 * 5]
    assert_same(found, naive_effect(case, groups=groups))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neo"])
def test_unchanged_positions_are_skipped_when_causal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tokens = case_of(name), 24
    inputs = {"input_ids": torch.randint(4, 60, (2, tokens))}
    of = ValueZeroingEffect(case.model, case.layers)
    last = ValueZeroingEffect(case.model, case.layers[-1])
    plain = operations(lambda: case.model(**inputs))
    found, cost = of.attribute(inputs, read), operations(lambda: of.attribute(inputs, read))
    cost_of_last = operations(lambda: last.attribute(inputs, read))
    monkeypatch.setattr(cache_of_outputs, "MOST_CHANGED", -1)  # as if everything had changed
    assert_same(of.attribute(inputs, read), found)
    whole = operations(lambda: of.attribute(inputs, read))
    assert whole > 0.95 * plain * (tokens + 2)  # the clean pass, a copy for each token and one more
    # Attention is computed whole, which weighs much in a model of this size; of all else, half the positions.
    assert cost < 0.7 * whole
    assert cost_of_last < 0.4 * cost


# Models as people run them, and forward functions of their own kind.


def compiled(case: Case) -> Any:
    return torch.compile(case.model, backend="eager")


def offloaded(case: Case) -> Any:
    return cpu_offload(case.model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("prepare", [compiled, offloaded, lambda case: case.model.train()])  # LLaMA has no dropout
def test_models_as_people_run_them(prepare: Callable[[Case], Any]) -> None:
    case = FAMILIES["llama"].build()
    model = prepare(case)
    before = footprint(case.model)
    for chosen in (slice(1, 2), slice(None)):
        found = ValueZeroingEffect(model, case.layers[chosen]).attribute(case.inputs, read)
        assert_same(found, naive_effect(case_of("llama"), chosen))
    assert footprint(case.model) == before


class Careless(nn.Module):
    """Writes into the outputs of its modules, and runs a scripted module before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH, dtype=torch.float64)
        self.scripted = torch.jit.script(nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH, dtype=torch.float64))
        self.lower, self.upper = Block(), Block()
        self.leave = nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x += 1
        x = self.scripted(x).mul_(2)
        x = self.upper(self.lower(x).add_(0.5)).add_(0.25)
        return self.leave(x).mul_(3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("chosen", [("upper",), ("lower", "upper")])
def test_model_that_writes_into_outputs(chosen: tuple[str, ...]) -> None:
    model = Careless()
    x = torch.randn(2, 4, BLOCK_WIDTH, dtype=torch.float64)
    layers = [getattr(model, name) for name in chosen]
    site = Attention("attention.value", "attention.output", value_heads=1, head_width=BLOCK_WIDTH)
    expected = []
    for j in range(4):
        with torch.no_grad(), zeroed_everywhere(layers, site, (torch.arange(4) == j).expand(2, -1)):
            expected.append(model(x)[:, 2, 3])
    expected = model(x)[:, 2, 3][:, None].detach() - torch.stack(expected, 1)
    assert_same(ValueZeroingEffect(model, layers).attribute(x, target=(2, 3)), expected)


# Refusals, and the model left as it was found.


class Chance(nn.Module):
    def __init__(self, own: torch.Generator | None = None) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=self.own)


class Neighbours(nn.Module):
    """Mixes the examples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0)


@pytest.mark.all_cases
@pytest.mark.parametrize("odd", [Chance(), Neighbours()])
@pytest.mark.parametrize("place", ["between", "inside", "behind"])
def test_dependent_or_random_examples_are_refused(odd: nn.Module, place: str) -> None:
    blocks = nn.Sequential(Block(), Block(after=odd if place == "inside" else None))
    model = nn.Sequential(blocks[0], *([odd] if place == "between" else []), blocks[1], *([odd] * (place == "behind")))
    x = torch.randn(3, 5, BLOCK_WIDTH, dtype=torch.float64)
    message = "uses no random numbers" if isinstance(odd, Chance) else "examples of a batch affect each other"
    with pytest.raises(AssertionError, match=message):
        ValueZeroingEffect(model, list(blocks)).attribute(x, target=(2, 3))
    if place == "between" and isinstance(odd, Neighbours):  # what it gave is what the last layer gets
        assert ValueZeroingEffect(model, blocks[1]).attribute(x, target=(2, 3)).any()


def test_chance_behind_the_layers_is_refused() -> None:
    block = Block()
    model, x = nn.Sequential(block, Chance(torch.Generator())), torch.randn(1, 5, BLOCK_WIDTH, dtype=torch.float64)
    with pytest.raises(RefusedError, match="unchanged copy gave"):
        ValueZeroingEffect(model, block).attribute(x, target=(2, 3))
    case = FAMILIES["bert"].build()
    case.model.embeddings.dropout.train()
    with pytest.raises(AssertionError, match="and has dropout"):
        effect(case, 1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"target": None}, r"picks \(3, 7, 32\)"),
    ({"target": 3}, r"picks \(3, 32\)"),
    ({"target": (2, 99)}, "range in axis"),
    ({"target": read, "foil": 3}, "function, so foil"),
    ({"target": lambda out: out.sum()}, r"target gave \(\)"),
    ({"target": lambda out: 1.0}, "target gave float"),
    ({"target": lambda out: out[:, 2, 3] / 0}, "are not finite"),
    ({"target": (2, 3), "attribute_to_layer_input": True}, "Leave attribute_to"),
    ({"target": (2, 3), "perturbations_per_eval": 0}, "per_eval is 0"),
    ({"target": (2, 3), "feature_mask": torch.zeros(1, 3).long()}, r"mask is \(1, 3\)"),
]


def test_wrong_arguments_are_refused() -> None:
    case = case_of("bert")
    before = footprint(case.model)
    for keywords, message in WRONG:
        with pytest.raises(AssertionError, match=message):
            of_hidden_states(case, case.layers).attribute(case.inputs, **keywords)
        assert footprint(case.model) == before


def test_unsupported_layers_are_refused() -> None:
    case = case_of("bert")
    with pytest.raises(AssertionError, match="without logits"):
        ValueZeroingEffect(lambda **inputs: [case.model(**inputs)], case.layers).attribute(case.inputs, (2, 3))
    with pytest.raises(AssertionError, match="did not run layer"):
        ValueZeroingEffect(case.model, FAMILIES["bert"].build().layers[0]).attribute(case.inputs, read)
    with pytest.raises(AssertionError, match="no second attention"):
        effect(case, attention="cross")
    pair = case_of("bart-decoder")
    both = [*pair.model.encoder.layers, *pair.layers]
    with pytest.raises(AssertionError, match="different sources"):
        ValueZeroingEffect(pair.model, both).attribute(pair.inputs, read)


def test_a_foil_is_subtracted() -> None:
    case = case_of("bert")
    method = of_hidden_states(case, case.layers[1])
    right, wrong = ([(2, 3), (0, 1), (1, 4)], [(1, 5), (2, 2), (0, 0)])
    both = method.attribute(case.inputs, target=right, foil=wrong)
    assert_same(both, method.attribute(case.inputs, target=right) - method.attribute(case.inputs, target=wrong))
    assert_same(method.attribute(case.inputs, target=(2, 3)), method.attribute(case.inputs, target=[(2, 3)] * 3))


def gated(case: Case) -> None:
    sources = effect(case, -1).shape[1]
    with torch.enable_grad():
        ValueGates(case.model, case.layers[1:])(torch.rand(3, sources).requires_grad_(), case.inputs)


@pytest.mark.parametrize("action", [lambda case: effect(case, slice(1, 2)), gated], ids=["effect", "gates"])
@pytest.mark.parametrize("name", ["bert", "gpt_neo", "t5-decoder"])
def test_model_is_unchanged(name: str, action: Callable[[Case], Any]) -> None:
    """After success, and after an error in any run of the last layer."""
    case = case_of(name)
    before, clean = footprint(case.model), case.model(**case.inputs).last_hidden_state

    class InterruptionError(Exception):
        pass

    def runs_until(number: int) -> int:
        runs: list[int] = []

        def interrupt(module: nn.Module, args: Any, kwargs: Any) -> None:
            runs.append(1)
            if len(runs) == number:
                raise InterruptionError

        with case.layers[2].register_forward_pre_hook(interrupt, with_kwargs=True):
            action(case)
        return len(runs)

    for number in range(1, min(runs_until(0), 4) + 1):
        with pytest.raises(InterruptionError):
            runs_until(number)
    assert footprint(case.model) == before
    assert not torch_modules._global_forward_hooks
    assert not torch_modules._global_forward_pre_hooks
    assert torch.equal(case.model(**case.inputs).last_hidden_state, clean)


def test_half_precision_warns() -> None:
    case = FAMILIES["bert"].build(torch.bfloat16)
    with pytest.warns(UserWarning, match="Load it in float32"):
        found = effect(case)
    assert found.dtype == torch.float32


def test_threads() -> None:
    case = case_of("bert")
    before = footprint(case.model)
    expected = [effect(case, chosen) for chosen in (0, 1, 2)]
    plain = case.model(**case.inputs).last_hidden_state
    actions = [lambda chosen=chosen: effect(case, chosen) for chosen in (0, 1, 2)]
    for _ in range(3):
        *found, hidden = together(*actions, lambda: case.model(**case.inputs).last_hidden_state)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(hidden, plain)
    assert footprint(case.model) == before


def test_progress_counts_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    effect(case_of("bert"), perturbations_per_eval=3, show_progress=True)
    shown = capsys.readouterr().err
    assert "Value Zeroing Effect attribution" in shown
    assert "3/3" in shown
    effect(case_of("bert"))
    assert capsys.readouterr().err == ""

"""Value gates: any class of Captum explains value zeroing. Each equals the effect, a twin or a closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captum.attr import DeepLift, FeatureAblation
from torch import Tensor, nn

from captum_vz import ValueGates, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional import Intervention
from captum_vz.testbed import load_model
from tests.attr.test_effect_of_models import Chance, Neighbours
from tests.attr.test_interventions import KINDS
from tests.captum.footprint import footprint
from tests.engine.blocks import WIDTH, Block, Halves, sequences
from tests.engine.compare import assert_same
from tests.engine.test_sparse_patterns import LONGFORMER, model_of
from tests.reference import FAMILIES, Case
from tests.reference.effects import INLINE, NAMES, PAIRED, case_of, read, scaled_everywhere
from tests.sweep.models import small_models, working_inputs

# One of each way in which values are gated; the others run in the long tests.
FEW = ("bert", "llama", "gpt_neo", "t5-decoder", "albert")
ALL = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in [*NAMES, *PAIRED, *INLINE]]


def length_of(case: Case, attention: str = "self") -> int:
    gated = ValueGates(case.model, case.layers, attention=attention)
    with pytest.raises(ArgumentError, match="source tokens") as error:
        gated(torch.ones(case.batch, 1000), case.inputs)
    return int(str(error.value).split(" source tokens")[0].split()[-1])


def number(case: Case, layers: Any = None, **options: Any) -> Any:
    """A function of gates and of the model's inputs, one number for each example."""
    gated = ValueGates(case.model, case.layers if layers is None else layers, **options)
    return lambda gates, inputs: read(gated.forward(gates, inputs))


def check_gradient(forward: Callable[[Tensor], Tensor], gates: Tensor, step: float = 1e-4) -> None:
    """Compare the gradient with finite differences. Many models compute norms and softmaxes in float32."""
    assert torch.autograd.gradcheck(forward, gates.requires_grad_(), eps=step, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_ablation_of_gates_is_the_effect(name: str) -> None:
    case = case_of(name)
    before = footprint(case.model)
    for layers in (case.layers[-1], case.layers):
        for attention in ("self", "cross")[: 1 + bool(case.family.cross)]:
            expected = ValueZeroingEffect(case.model, layers, attention=attention).attribute(case.inputs, read)
            forward = number(case, layers, attention=attention)
            found = FeatureAblation(forward).attribute(torch.ones(expected.shape), additional_forward_args=case.inputs)
            assert_same(found.double(), expected, 1e-7)
    assert expected.abs().max() > 1e-3
    assert footprint(case.model) == before


@pytest.mark.parametrize("name", ALL)
def test_scaled_values_equal_the_twin(name: str) -> None:
    case = case_of(name)
    gates = torch.linspace(-0.5, 1.5, case.batch * length_of(case), dtype=torch.float64).view(case.batch, -1)
    real = case.mask(case.family.mask, gates.shape[1])
    with torch.no_grad(), scaled_everywhere(case.layers, case.family.attention, gates.where(real, 1)):
        expected = read(case.model(**case.inputs))
    assert_same(number(case)(gates, case.inputs).detach(), expected)
    assert (expected - read(case.model(**case.inputs))).abs().max() > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_gradients_equal_finite_differences(name: str) -> None:
    case = case_of(name)
    before = footprint(case.model)
    forward = number(case)
    shape = case.batch, length_of(case)
    gates = torch.linspace(0.2, 1, shape[0] * shape[1]).view(shape).double().requires_grad_()
    check_gradient(lambda gates: forward(gates, case.inputs), gates)
    slope = torch.autograd.grad(forward(gates, case.inputs).sum(), gates)[0]
    assert slope.abs().max() > 1e-4
    assert footprint(case.model) == before


@pytest.mark.parametrize("kind", KINDS)
def test_other_interventions(kind: str) -> None:
    case = case_of("bert").example(1)
    expected = ValueZeroingEffect(case.model, case.layers, intervention=KINDS[kind]).attribute(case.inputs, read)
    forward = number(case, intervention=KINDS[kind])
    gates = torch.ones(expected.shape, dtype=torch.float64)
    assert_same(FeatureAblation(forward).attribute(gates, additional_forward_args=case.inputs), expected)
    some = torch.linspace(0.1, 1, gates.numel(), dtype=torch.float64).view_as(gates)
    check_gradient(lambda gates: forward(gates, case.inputs), some)


@pytest.mark.parametrize("heads", [1, pytest.param([0, 3], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["llama", pytest.param("bloom", marks=pytest.mark.slow)])
def test_gates_of_some_heads(name: str, heads: Any) -> None:
    case = case_of(name)
    expected = ValueZeroingEffect(case.model, case.layers, heads=heads).attribute(case.inputs, read)
    forward = number(case, heads=heads)
    gates = torch.ones(3, 7, dtype=torch.float64)
    assert_same(FeatureAblation(forward).attribute(gates, additional_forward_args=case.inputs), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5-decoder", "gpt_neo"])
def test_batches_of_any_kind(name: str) -> None:
    """Captum repeats examples in several orders. Each row has its own gates and its own padding."""
    case = case_of(name)
    forward = number(case)
    gates = torch.rand(6, length_of(case), dtype=torch.float64)
    expected = torch.cat([forward(half, case.inputs) for half in gates.split(3)])
    in_turn = {key: value.repeat(2, *[1] * (value.dim() - 1)) for key, value in case.inputs.items()}
    assert_same(forward(gates, in_turn), expected)
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    by_example = {key: value.repeat_interleave(2, 0) for key, value in case.inputs.items()}
    assert_same(forward(gates[order], by_example), expected[order])
    for row in range(3):
        only = {key: value[row : row + 1] for key, value in case.inputs.items()}
        assert_same(forward(gates[row : row + 1], only), expected[row : row + 1])
        assert_same(forward(gates[[row, row + 3]], only), expected[[row, row + 3]])  # one example, repeated


# What it costs, and what it keeps.


class Counted:
    """A forward function that counts its runs and their examples."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.examples: list[int] = []

    def __call__(self, **inputs: Tensor) -> Any:
        self.examples.append(len(inputs["input_ids"]))
        return self.case.model(**inputs)


def test_clean_pass_runs_once() -> None:
    """Further calls with the same numbers run a function once for each example, in batches of any size."""
    case = case_of("bert")
    forward = Counted(case)
    gated = ValueGates(forward, case.layers)
    gates, one = torch.rand(3, 7), case.example(0)
    gated(gates, case.inputs)
    first, forward.examples = forward.examples, []
    assert 3 <= len(first) <= 8
    for _ in range(3):
        gated(gates, {key: value.clone() for key, value in case.inputs.items()})
    gated(gates.repeat(4, 1), {key: value.repeat(4, 1) for key, value in case.inputs.items()})
    assert forward.examples == [1] * (3 * 3 + 12)
    forward.examples.clear()
    gated(torch.ones(1, one.inputs["input_ids"].shape[1]), one.inputs)
    assert len(forward.examples) > 1
    assert max(forward.examples) == 1


def test_other_masks_are_noticed() -> None:
    """A function that holds a mask, and gets another one: what is known of it is found again."""
    case = case_of("bert")
    masks = [case.inputs["attention_mask"][row : row + 1] for row in (0, 1)]
    held = {"attention_mask": masks[0]}
    ids = case.inputs["input_ids"][:1]
    gates = torch.rand(1, 7, dtype=torch.float64)
    gated = ValueGates(lambda ids: case.model(input_ids=ids, **held), case.layers, intervention="mean")
    for mask in (*masks, masks[0]):
        held["attention_mask"] = mask
        fresh = ValueGates(case.model, case.layers, intervention="mean")(gates, ids, mask)
        assert_same(gated(gates, ids), fresh)


def test_keywords_with_other_arguments() -> None:
    """Two examples with equal ids and other masks, whose masks are passed by keyword."""
    case = case_of("bert")
    ids = case.inputs["input_ids"][:1].repeat(2, 1)
    masks = torch.ones_like(ids).index_put((torch.tensor(1), torch.arange(5, 7)), torch.tensor(0))
    gated, gates = ValueGates(case.model, case.layers), torch.rand(2, 7, dtype=torch.float64)
    expected = gated(gates, {"input_ids": ids, "attention_mask": masks})
    for mask in (torch.ones_like(ids), masks):
        found = gated(gates, ids, attention_mask=mask)
    assert_same(found, expected)
    others = {"input_ids": ids, "token_type_ids": masks}  # the same numbers under another name
    assert_same(gated(gates, others), ValueGates(case.model, case.layers)(gates, others))


def test_changed_weights_are_used() -> None:
    case = FAMILIES["bert"].build()
    gated, gates = ValueGates(case.model, case.layers), torch.rand(3, 7)
    gated(gates, case.inputs)
    with torch.no_grad():
        case.layers[0].attention.self.value.weight.mul_(2)
    assert_same(gated(gates, case.inputs), ValueGates(case.model, case.layers)(gates, case.inputs), 0)
    case.model.train()
    with pytest.raises(RefusedError, match="and has dropout"):
        gated(gates, case.inputs)


def test_reassigned_options_are_used() -> None:
    case, gates = case_of("bert"), torch.rand(3, 7)
    gated = ValueGates(case.model, case.layers)
    for option in ({"heads": 1}, {"intervention": "mean"}, {"layer": case.layers[0]}):
        gated(gates, case.inputs)
        vars(gated).update(option)
        assert_same(
            gated(gates, case.inputs),
            ValueGates(**{"forward_func": case.model, "layer": case.layers} | option)(gates, case.inputs),
            0,
        )
        vars(gated).update(layer=case.layers, heads=None, intervention="zero")


# Models of other kinds.


@pytest.mark.parametrize(
    "kind", ["deberta", *(pytest.param(one, marks=pytest.mark.slow) for one in ("xlnet", "mpnet", "openai-gpt", "mpt"))]
)
def test_inline_families(kind: str) -> None:
    model = next(small_models(kind)).double()
    layers, (inputs, _) = find_layers(model), working_inputs(model)
    assert_ablation_is_the_effect(model, layers, inputs)


def assert_ablation_is_the_effect(model: nn.Module, layers: list[nn.Module], inputs: dict[str, Tensor]) -> None:
    def some(output: Any) -> Tensor:
        return output[0].flatten(1)[:, 3:40].sum(1)

    expected = ValueZeroingEffect(model, layers).attribute(inputs, some)
    gated = ValueGates(model, layers)
    gates = torch.ones(expected.shape, dtype=torch.float64)
    forward = lambda gates: some(gated.forward(gates, inputs))  # noqa: E731
    assert_same(FeatureAblation(forward).attribute(gates), expected.double(), 1e-6)
    assert expected.abs().max() > 1e-3
    check_gradient(forward, gates, step=1e-3)


def test_padding_that_the_model_adds() -> None:
    """Longformer pads seven tokens to eight, which is no source of ours."""
    model = model_of("Longformer", **LONGFORMER)
    assert_ablation_is_the_effect(model, find_layers(model), {"input_ids": torch.randint(4, 30, (1, 7))})


def packed(x: Tensor) -> Tensor:
    """The values in the output of a projection of queries, keys and values."""
    return x.chunk(3, -1)[2]


def test_values_that_the_user_names() -> None:
    """A selection by `chunk` is a view into which autograd refuses to write in place."""
    case = FAMILIES["gpt2"].build()
    named = ValueGates(case.model, case.layers, values=lambda layer: (layer.attn.c_attn, packed))
    gates = torch.rand(3, 7, dtype=torch.float64)
    assert_same(named(gates, case.inputs), ValueGates(case.model, case.layers)(gates, case.inputs))
    forward = lambda gates: read(named.forward(gates, case.inputs))  # noqa: E731
    check_gradient(forward, gates)


def test_one_of_two_inputs() -> None:
    case = case_of("bert").example(2)

    def twice(**inputs: Tensor) -> Tensor:
        rolled = {**inputs, "input_ids": inputs["input_ids"].roll(1, 1)}
        return read(case.model(**inputs)) - 2 * read(case.model(**rolled))

    gates = torch.ones(1, 3, dtype=torch.float64)
    expected = ValueZeroingEffect(twice, case.layers).attribute(case.inputs, run=1)
    gated = ValueGates(twice, case.layers, run=1)
    assert_same(FeatureAblation(gated).attribute(gates, additional_forward_args=case.inputs), expected)
    with pytest.raises(RefusedError, match="are not related"):
        ValueGates(twice, case.layers)(gates, case.inputs)


# Refusals.


def test_wrong_arguments() -> None:
    case = case_of("bert")
    gated, gates = ValueGates(case.model, case.layers), torch.ones(3, 7)
    for wrong in (torch.ones(3, 6), torch.ones(2, 7), torch.ones(3, 8)):
        with pytest.raises(ArgumentError, match="of 7 source"):
            gated(wrong, *case.inputs.values())
    for wrong in (torch.ones(7), [1.0], None, torch.ones(3, 0)):
        with pytest.raises(ArgumentError, match="each source token"):
            gated(wrong, case.inputs)
    with pytest.raises(ArgumentError, match="DeepLift passes it"):
        DeepLift(gated).attribute(gates, target=0, additional_forward_args=case.inputs)
    with pytest.raises(ArgumentError, match="inputs is None"):
        gated(gates)
    with pytest.raises(ArgumentError, match="'zero', 'mean'"):
        ValueGates(case.model, case.layers, intervention="none")
    with pytest.raises(ArgumentError, match="layer is"):
        ValueGates(case.model, "encoder")(gates, case.inputs)
    with pytest.raises(ArgumentError, match="pass a model"):
        ValueGates(lambda ids: case.model(ids))(gates, case.inputs["input_ids"])
    with pytest.raises(UnsupportedLayerError, match="did not run layer"):
        ValueGates(case.model, FAMILIES["bert"].build().layers[0])(gates, case.inputs)
    with pytest.raises(RefusedError, match="no second attention"):
        ValueGates(case.model, case.layers, attention="cross")(gates, case.inputs)
    with pytest.raises(ArgumentError, match="without logits"):
        ValueGates(lambda **inputs: [case.model(**inputs)], case.layers)(gates, case.inputs)
    pair = case_of("bart-decoder")
    with pytest.raises(ArgumentError, match="different sources"):
        ValueGates(pair.model, [*pair.model.encoder.layers, *pair.layers])(gates, pair.inputs)


def test_windows_are_refused() -> None:
    block = Halves(lambda x: x)
    with pytest.raises(UnsupportedLayerError, match="windows, or in"):
        ValueGates(block, block)(torch.ones(2, 6), sequences(2, 6))


def test_intervention_on_weights_alone() -> None:
    class Louder(Intervention):
        def new_context(self, weights: Tensor, values: Tensor, zeroed: Tensor) -> Tensor:
            return (weights * (1 + zeroed[:, :, None].to(weights))) @ values

    case = case_of("bert")
    gates = torch.ones(3, 7, dtype=torch.float64)
    forward = number(case, intervention=Louder())
    expected = ValueZeroingEffect(case.model, case.layers, intervention=Louder()).attribute(case.inputs, read)
    assert_same(FeatureAblation(forward).attribute(gates, additional_forward_args=case.inputs), expected)
    for other in (gates / 2, gates.clone().requires_grad_()):
        with pytest.raises(ArgumentError, match="says by new_context"):
            forward(other, case.inputs)


@pytest.mark.parametrize("odd", [Chance(), Neighbours()])
def test_dependent_or_random_examples_are_refused(odd: nn.Module) -> None:
    first, last = Block(), Block()
    model = nn.Sequential(first, odd, last)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    message = "uses no random numbers" if isinstance(odd, Chance) else "examples of a batch affect each other"
    gated = ValueGates(model, [first, last])
    with pytest.raises(RefusedError, match=message):
        gated(torch.rand(3, 5), x)
    if isinstance(odd, Neighbours):
        assert gated(torch.rand(1, 5), x[:1]).shape == (1, 5, WIDTH)
        several = torch.rand(2, 5)  # gates of one example: each row runs alone
        alone = [gated(gates[None], x[:1]) for gates in several]
        assert_same(gated(several, x[:1].repeat(2, 1, 1)), torch.cat(alone))


def test_random_output_is_refused() -> None:
    block = Block()
    for own in (torch.Generator(), None):
        with pytest.raises(RefusedError, match="With gates of 1"):
            ValueGates(nn.Sequential(block, Chance(own)), block)(torch.ones(1, 5), sequences(1, 5))


def test_caches_are_refused() -> None:
    model = load_model("causal")[0]
    ids = torch.tensor([[5, 6, 7]])
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ArgumentError, match="key-value cache"):
        ValueGates(model).forward(torch.ones(1, 3), input_ids=ids[:, -1:], past_key_values=cache)

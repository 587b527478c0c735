"""Interventions on values and weights: each equals a naive twin, in maps and in effects."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification, MPNetConfig, MPNetModel

from captum_vz import ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from captum_vz._engine import traced_replays
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.functional import Intervention
from tests.engine.blocks import Block, Convolution, Halves, sequences
from tests.engine.compare import assert_same
from tests.reference import FAMILIES
from tests.reference.naive import real_positions, record, site_of, values_of


class Doubled(Intervention):
    """The value is doubled."""

    def new_values(self, values: Tensor, zeroed: Tensor) -> Tensor:
        return torch.where(zeroed[..., None], 2 * values, values)


KINDS: dict[str, Any] = {"zero": "zero", "mean": "mean", "knockout": "knockout", "doubled": Doubled()}


def context_of(kind: str, weights: Tensor, values: Tensor, source: int, real: list[int]) -> Tensor:
    """The context of one head and one target: `weights (in,)`, `values (in, d_head)`."""
    new = {j: values[j] for j in real}
    shares = {j: float(weights[j]) for j in real}
    if kind == "zero":
        new[source] = torch.zeros_like(values[source])
    elif kind == "mean":
        new[source] = sum(values[j] for j in real) / len(real)
    elif kind == "doubled":
        new[source] = 2 * values[source]
    else:
        before = sum(shares.values())  # 1, up to rounding in float32
        shares[source] = 0.0
        after = sum(shares.values())
        shares = {j: share * before / after if after else 0.0 for j, share in shares.items()}
    return sum((shares[j] * new[j] for j in real), torch.zeros_like(values[0]))


def twin(name: str, index: int, kind: str, attention: str) -> Tensor:
    """The map of one layer, in loops: a rerun with contexts by hand for each source, and the l1 distance."""
    case = FAMILIES[name].case
    site = site_of(case, attention)
    runs, output = record(case, output_attentions=True)
    run, weights = runs[index], output[site.weights][index].double()
    targets, sources = (torch.from_numpy(mask).bool() for mask in real_positions(case, run, attention))
    values = values_of(run, site).double()
    columns = []
    for source in range(sources.shape[1]):

        def by_hand(module: nn.Module, args: tuple[Any, ...], source: int = source) -> tuple[Tensor]:
            context = args[0].clone()
            for b in range(len(context)):
                real = sources[b].nonzero().flatten().tolist()
                for head in range(site.heads if source in real else 0):
                    of_head = values[b, :, site.columns(site.value_head(head))]
                    for i in range(context.shape[1]):
                        new = context_of(kind, weights[b, head, i], of_head, source, real)
                        context[b, i, site.context(head)] = new
            return (context,)

        with torch.no_grad(), run.layer.get_submodule(site.output).register_forward_pre_hook(by_hand):
            columns.append((run.again() - run.hidden).abs().sum(-1))
    return torch.stack(columns, dim=-1) * targets[..., None] * sources[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "attention"),
    [("bert", "self"), ("gpt2", "self"), ("llama", "self"), ("bart-decoder", "self"), ("bart-decoder", "cross")],
)
def test_maps_equal_the_twin(name: str, attention: str, kind: str) -> None:
    case = FAMILIES[name].case
    options: dict[str, Any] = {"attention": attention, "distance": "l1", "normalize": False}
    method = ValueZeroing(case.model, case.layers[1], intervention=KINDS[kind], **options)
    expected = twin(name, 1, kind, attention)
    for only in (None, "definition"):
        with traced_replays(only):
            assert_same(method.attribute(case.inputs), expected, tolerance=1e-9)
    assert_same(method.attribute(case.inputs, token=1), expected[:, 1], tolerance=1e-9)
    assert_same(method.attribute(case.inputs, perturbations_per_eval=2), expected, tolerance=1e-9)
    words = torch.arange(expected.shape[2])[None] // 2
    of_head = ValueZeroing(case.model, case.layers[1], heads=1, intervention=KINDS[kind], **options)
    with traced_replays("definition"):
        groups = of_head.attribute(case.inputs, feature_mask=words)
    assert groups.any()
    assert_same(of_head.attribute(case.inputs, feature_mask=words), groups, tolerance=1e-9)


@pytest.mark.parametrize("kind", ["mean", "doubled"])
def test_inline_attention(kind: str) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    model = MPNetModel(MPNetConfig(vocab_size=30, **size)).double().eval()
    ids, mask = torch.randint(3, 30, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    (layer,) = find_layers(model)
    method = ValueZeroing(model, layer, distance="l1", normalize=False, intervention=KINDS[kind])
    found = method.attribute({"input_ids": ids, "attention_mask": mask})
    with torch.no_grad():
        for example, length in enumerate((5, 3)):
            alone = {"input_ids": ids[example : example + 1, :length]}
            clean = model(**alone).last_hidden_state
            for source in range(length):

                def replace(module: nn.Module, args: Any, values: Tensor, source: int = source) -> Tensor:
                    new = values.mean(1, keepdim=True) if kind == "mean" else 2 * values[:, [source]]
                    return values.index_copy(1, torch.tensor([source]), new)

                with layer.attention.attn.v.register_forward_hook(replace):
                    moved = (model(**alone).last_hidden_state - clean).abs().sum(-1)[0]
                torch.testing.assert_close(found[example, :length, source], moved)
    with pytest.raises(RefusedError, match="has no new_values"):
        ValueZeroing(model, layer, intervention="knockout").attribute(ids)


def test_mixing_after_the_attention() -> None:
    """The definition serves, and a mean of zeroed tokens alone is the value itself."""
    block, x = Block(after=Convolution()), sequences(2, 1)
    assert not ValueZeroing(block, block, intervention="mean", normalize=False).attribute(x).any()
    x = sequences(2, 5)
    zero, knockout = (ValueZeroing(block, block, intervention=kind).attribute(x) for kind in ("zero", "knockout"))
    assert (zero - knockout).abs().max() > 1e-3


def classifier() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    size = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=3, **size)).double().eval()
    return model, torch.randint(3, 30, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_knockout_effect_is_that_of_a_mask() -> None:
    model, ids, mask = classifier()
    inputs = {"input_ids": ids, "attention_mask": mask}
    found = ValueZeroingEffect(model, find_layers(model), intervention="knockout").attribute(inputs, target=1)
    with torch.no_grad():
        clean = model(**inputs).logits[:, 1]
        for source in range(5):
            hidden = mask.clone()
            hidden[:, source] = 0
            expected = clean - model(input_ids=ids, attention_mask=hidden).logits[:, 1]
            torch.testing.assert_close(found[:, source], expected * mask[:, source], rtol=1e-6, atol=1e-9)


def test_mean_effect_equals_hooks() -> None:
    model, ids, mask = classifier()
    effect = ValueZeroingEffect(model, find_layers(model), intervention="mean")
    found = effect.attribute({"input_ids": ids, "attention_mask": mask}, target=2)
    for example, length in enumerate((5, 3)):
        alone = ids[example : example + 1, :length]
        for source in range(length):

            def replace(module: nn.Module, args: Any, values: Tensor, source: int = source) -> Tensor:
                return values.index_copy(1, torch.tensor([source]), values.mean(1, keepdim=True))

            with torch.no_grad(), ExitStack() as hooks:
                clean = model(alone).logits[0, 2]
                for layer in find_layers(model):
                    hooks.enter_context(layer.attention.self.value.register_forward_hook(replace))
                moved = model(alone).logits[0, 2]
            torch.testing.assert_close(found[example, source], clean - moved)
    assert not found[1, 3:].any()


class Runs(TorchDispatchMode):
    """Counts the runs of BERT by the tanh of its pooler: hooks would make it a model that the package does not know."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


def test_values_that_read_no_others_share_a_run() -> None:
    class OwnValues(Doubled):
        reads_others = False

    model, ids, mask = classifier()
    found = []
    for intervention in (Doubled(), OwnValues()):
        effect = ValueZeroingEffect(model, find_layers(model), intervention=intervention)
        with Runs() as runs:
            found.append(effect.attribute({"input_ids": ids, "attention_mask": mask}, target=2))
        found.append(runs.count)
    alone, many, shared, few = found
    torch.testing.assert_close(shared, alone)
    assert alone[0].abs().min() > 1e-6  # in float64
    assert few < 0.7 * many


class Short(Intervention):
    def new_context(self, weights: Tensor, values: Tensor, zeroed: Tensor) -> Tensor:
        return (weights @ values)[..., :1]


class Always(Intervention):
    def new_values(self, values: Tensor, zeroed: Tensor) -> Tensor:
        return 2 * values


@pytest.mark.parametrize(
    ("intervention", "message"),
    [(Short(), r"gave \(2, 6, 4, 1\)"), (Always(), "no source is zeroed")],
)
def test_interventions_that_break_their_contract(intervention: Intervention, message: str) -> None:
    block = Block()
    with pytest.raises(ArgumentError, match=message):
        ValueZeroing(block, block, intervention=intervention).attribute(sequences(2, 6))


def test_unknown_interventions() -> None:
    for method in (ValueZeroing, ValueZeroingEffect, ValueZeroingRollout):
        for intervention in ("none", None, Doubled):
            with pytest.raises(ArgumentError, match="intervention is"):
                method(Block(), Block(), intervention=intervention)


def test_windows_can_only_be_zeroed() -> None:
    block = Halves(lambda x: x)
    with pytest.raises(RefusedError, match="can only be zeroed"):
        ValueZeroing(block, block, intervention="mean").attribute(sequences(2, 6))

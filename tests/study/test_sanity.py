"""Sanity checks: copies with random layers, and the correlation with their scores."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz.errors import ArgumentError
from captum_vz.study import Batch, Example, Scorer, randomized_copies, sanity_checks
from tests.study.conftest import Shipped


def test_layers_become_random_from_the_last(shipped: Shipped) -> None:
    model, _ = shipped
    before = copy.deepcopy(model.state_dict())
    layers = find_layers(model)
    for count, changed, own in randomized_copies(model, layers):
        same = [
            all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
            for one, two in zip(own, layers, strict=True)
        ]
        # A vector of equal numbers, such as a bias of zeros, stays as it is: its standard deviation is 0.
        assert same == [True] * (len(layers) - count) + [False] * count
        assert torch.equal(changed.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert count == len(layers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_all_at_once_equals_the_last_copy(shipped: Shipped) -> None:
    model, _ = shipped
    layers = find_layers(model)
    *_, (_, cascaded, _) = randomized_copies(model, layers, seed=2)
    ((count, once, _),) = randomized_copies(model, layers, seed=2, cascading=False)
    assert count == len(layers)
    for name, value in once.state_dict().items():
        assert torch.equal(value, cascaded.state_dict()[name])
    ((_, other, _),) = randomized_copies(model, layers, seed=3, cascading=False)
    assert any(not torch.equal(value, once.state_dict()[name]) for name, value in other.state_dict().items())


def test_moments_are_kept() -> None:
    layer = nn.Linear(300, 300)
    ((_, changed, _),) = randomized_copies(nn.Sequential(layer), [layer])
    (weight,) = [value for name, value in changed.named_parameters() if name.endswith("weight")]
    assert weight.mean().item() == pytest.approx(layer.weight.mean().item(), abs=1e-3)
    assert weight.std().item() == pytest.approx(layer.weight.std().item(), rel=0.02)


def test_correlations_equal_a_loop(shipped: Shipped, examples: list[Example]) -> None:
    model, tokenizer = shipped
    methods = ["value-zeroing", "position"]
    found = sanity_checks(model, tokenizer, examples, methods, resamples=50).set_index(["method", "random"])
    trained = Scorer(model, tokenizer, methods, "cue_dot").scores(examples)
    for count, changed, _ in randomized_copies(model, find_layers(model)):
        other = Scorer(changed, tokenizer, methods, "cue_dot").scores(examples)
        values = [
            stats.spearmanr(one["scores"], two["scores"]).statistic
            for one, two in zip(trained, other, strict=True)
            if one["method"] == "value-zeroing" and one["layer"] == 3
        ]
        assert found.loc[("value-zeroing", count), "mean"] == pytest.approx(np.mean(values), abs=1e-6)
        assert found.loc[("position", count), "mean"] == pytest.approx(1)
        assert found.loc[("value-zeroing", count), "examples"] == len(examples)


def test_foreign_layers_refused() -> None:
    with pytest.raises(ArgumentError, match=r"layers is \['Linear'\]: pass layers of the model"):
        next(randomized_copies(nn.Sequential(nn.Linear(2, 2)), [nn.Linear(2, 2)]))
    with pytest.raises(ArgumentError, match="layers is empty"):
        next(randomized_copies(nn.Sequential(nn.Linear(2, 2)), []))


@pytest.mark.parametrize(("metric", "count"), [("sanity", 4), ("sanity_last", 1)])
def test_metric_of_a_study_equals_a_loop(shipped: Shipped, examples: list[Example], metric: str, count: int) -> None:
    model, tokenizer = shipped
    methods = ["value-zeroing", "attention-rollout", "position"]
    found = Scorer(model, tokenizer, methods, metric, batch_size=3).score(examples)
    changed = next(changed for number, changed, _ in randomized_copies(model, find_layers(model)) if number == count)
    other = Scorer(changed, tokenizer, methods, "cue_dot").scores(examples)
    for one, two in zip(found, other, strict=True):
        expected = stats.spearmanr(one["scores"], two["scores"]).statistic
        assert one[metric] == pytest.approx(expected, abs=1e-6)
    unmoved = [row for row in found if row["method"] == "value-zeroing" and row["layer"] < 4 - count]
    assert all(row[metric] == pytest.approx(1) for row in unmoved)  # layers below the random ones


def test_metric_is_undefined_where_a_copy_has_no_scores(shipped: Shipped, examples: list[Example]) -> None:
    """A method that has NaN for random layers, or refuses them."""
    trained = shipped[0].bert.encoder.layer[0].attention.self.value.weight

    def undefined(batch: Batch) -> Tensor:
        own = batch.layers[0].attention.self.value.weight
        shares = batch.inputs["attention_mask"].double() * torch.arange(1, batch.inputs["input_ids"].shape[1] + 1)
        return shares if torch.equal(own, trained) else torch.full_like(shares, torch.nan)

    def refused(batch: Batch) -> Tensor:
        if not torch.equal(batch.layers[0].attention.self.value.weight, trained):
            raise ValueError("not this one")
        return batch.inputs["attention_mask"]

    rows = Scorer(*shipped, [undefined, refused], "sanity").score(examples[:3])
    assert all(np.isnan(row["sanity"]) for row in rows if row["method"] == "undefined")
    reasons = [row["skipped"] for row in rows if row["skipped"]]
    assert len(reasons) == 3
    assert all("refused fails with a changed copy of the model" in reason for reason in reasons)
    assert all("not this one" in reason for reason in reasons)

"""Metrics of changed models: with random layers, and with embeddings that are moved a little."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from captum.metrics import sensitivity_max
from scipy import stats
from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz.errors import ArgumentError
from captum_vz.study import Batch, Example, Scorer, random_copy, random_layers, sensitivity
from tests.study.conftest import Decoder, Shipped

METHODS = ["value-zeroing", "attention-rollout", "input-x-gradient", "position"]
SAMPLES, RADIUS = 3, 0.2


def test_last_layers_become_random(shipped: Shipped) -> None:
    model, _ = shipped
    before, layers = copy.deepcopy(model.state_dict()), find_layers(model)
    copies = [random_copy(model, layers, count, seed=2) for count in range(1, len(layers) + 1)]
    for count, changed in enumerate(copies, 1):
        for place, (one, two) in enumerate(zip(find_layers(changed), layers, strict=True)):
            # A vector of equal numbers, such as a bias of zeros, stays as it is: its standard deviation is 0.
            same = all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
            assert same == (place < len(layers) - count)
        assert torch.equal(changed.get_input_embeddings().weight, model.get_input_embeddings().weight)
    whole = random_copy(model, layers, seed=2).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in copies[-1].state_dict().items())
    other = random_copy(model, layers, seed=3).state_dict()
    assert any(not torch.equal(value, whole[name]) for name, value in other.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_random_layers_keep_moments() -> None:
    layer = nn.Linear(300, 300)
    weight = random_copy(nn.Sequential(layer), [layer]).get_parameter("0.weight")
    assert weight.mean().item() == pytest.approx(layer.weight.mean().item(), abs=1e-3)
    assert weight.std().item() == pytest.approx(layer.weight.std().item(), rel=0.02)
    for layers in ([nn.Linear(2, 2)], []):
        with pytest.raises(ArgumentError, match="pass layers of the model"):
            random_copy(nn.Sequential(nn.Linear(2, 2)), layers)
    for options in ({"radius": 0}, {"radius": float("nan")}, {"samples": 0}):
        with pytest.raises(ArgumentError, match="pass numbers above 0"):
            sensitivity(**options)


def test_correlations_equal_a_loop(shipped: Shipped, examples: list[Example]) -> None:
    model, tokenizer = shipped
    metrics = {"all": random_layers(), "two": random_layers(2), "one": random_layers(1)}
    found = Scorer(model, tokenizer, METHODS, metrics, batch_size=3).score(examples)
    for metric, count in zip(metrics, (4, 2, 1), strict=True):
        changed = random_copy(model, find_layers(model), count)
        other = Scorer(changed, tokenizer, METHODS, "cue_dot").scores(examples)
        for one, two in zip(found, other, strict=True):
            expected = stats.spearmanr(one["scores"], two["scores"]).statistic
            assert one[metric] == pytest.approx(expected, abs=1e-6)
            unmoved = one["method"] == "position" or (one["method"] == "value-zeroing" and one["layer"] < 4 - count)
            assert not unmoved or one[metric] == pytest.approx(1)


def test_undefined_where_a_copy_has_no_scores(shipped: Shipped, examples: list[Example]) -> None:
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


@pytest.mark.parametrize("method", ["value-zeroing", "attention-rollout"])
def test_sensitivity_equals_captums(shipped: Shipped, examples: list[Example], method: str) -> None:
    model, tokenizer = shipped
    before = copy.deepcopy(model.state_dict())
    clean = model.bert.embeddings.word_embeddings.weight.detach()
    generators = [torch.Generator().manual_seed(SAMPLES + number) for number in range(SAMPLES)]
    noises = [torch.rand(clean.shape, generator=one, dtype=torch.float64) * 2 - 1 for one in generators]
    radius = RADIUS * clean.double().std(correction=0)

    def with_embeddings(weight: Tensor) -> Any:
        """The model with other word embeddings; the decoder keeps its own."""
        changed = copy.deepcopy(model)
        changed.bert.embeddings.word_embeddings = nn.Embedding.from_pretrained(weight)
        return changed.eval()

    def explained(example: Example, weights: Any) -> tuple[Tensor]:
        """The row of the last layer, for each matrix of embeddings."""
        models = map(with_embeddings, weights[0] if isinstance(weights, tuple) else weights)
        rows = [Scorer(one, tokenizer, method, "cue_dot").scores([example])[-1]["scores"] for one in models]
        return (torch.tensor(rows, dtype=torch.float64),)

    def noisy(weights: Any) -> Tensor:
        each = weights[0] if isinstance(weights, tuple) else weights
        return (each.double() + radius * torch.stack(noises)).to(clean.dtype)

    rows = Scorer(model, tokenizer, [method, "position"], {"step": sensitivity(RADIUS, SAMPLES, 1)}).score(examples[:3])
    for example in examples[:3]:
        expected = sensitivity_max(partial(explained, example), clean[None], noisy, n_perturb_samples=SAMPLES).item()
        own = [row["step"] for row in rows if row["example"] == example.id]
        assert own[-2] == pytest.approx(expected, abs=1e-7)  # the last layer
        assert expected > 0.001
        assert own[-1] == 0  # a baseline without a model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_hidden_embeddings_cost_own_rows_only(decoder: Decoder) -> None:
    model, tokenizer = decoder
    hidden = copy.deepcopy(model)
    hidden.transformer.wte = nn.Sequential(hidden.transformer.wte)
    example = Example("one", ("the", "cat", "is"), target=2)
    rows = Scorer(hidden, tokenizer, ["attention", "position"], "sensitivity").score([example])
    reasons = [row["skipped"] for row in rows if row["skipped"]]
    assert len(reasons) == 2
    assert all("word embeddings of GPT2LMHeadModel are Sequential" in reason for reason in reasons)
    assert all(row["sensitivity"] is None for row in rows)

"""Sensitivity equals Captum's own metric, one sentence and one noise at a time."""

import copy
from typing import Any

import pytest
import torch
from captum.metrics import sensitivity_max
from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.study import Example, Scorer, sensitivity
from tests.study.conftest import Shipped

SAMPLES, RADIUS = 3, 0.2


def with_embeddings(model: Any, weight: Tensor) -> Any:
    """The model with other word embeddings; the decoder keeps its own."""
    changed, one = copy.deepcopy(model), nn.Embedding.from_pretrained(weight)
    changed.bert.embeddings.word_embeddings = one
    return changed.eval()


@pytest.mark.parametrize("method", ["value-zeroing", "attention-rollout"])
def test_equals_captums(shipped: Shipped, examples: list[Example], method: str) -> None:
    model, tokenizer = shipped
    some = examples[:3]
    clean = model.bert.embeddings.word_embeddings.weight.detach()
    generators = [torch.Generator().manual_seed(SAMPLES + number) for number in range(SAMPLES)]
    noises = [torch.rand(clean.shape, generator=one, dtype=torch.float64) * 2 - 1 for one in generators]
    radius = RADIUS * clean.double().std(correction=0)

    def explained(weights: Any, example: Example) -> tuple[Tensor]:
        """The row of the last layer, for each matrix of embeddings."""
        each = weights[0] if isinstance(weights, tuple) else weights
        models = [with_embeddings(model, one) for one in each]
        rows = [Scorer(one, tokenizer, method, "cue_dot").scores([example])[-1]["scores"] for one in models]
        return (torch.tensor(rows, dtype=torch.float64),)

    def noisy(weights: Any) -> Tensor:
        each = weights[0] if isinstance(weights, tuple) else weights
        return (each.double() + radius * torch.stack(noises)).to(clean.dtype)

    options: dict[str, Any] = {"n_perturb_samples": SAMPLES}
    expected = [
        sensitivity_max(lambda x, one=one: explained(x, one), clean[None], noisy, **options).item() for one in some
    ]
    found = sensitivity(model, tokenizer, some, method, radius=RADIUS, samples=SAMPLES, seed=1, resamples=20)
    assert found["mean"].item() == pytest.approx(sum(expected) / len(some), abs=1e-7)
    assert min(expected) > 0.001
    assert found["examples"].item() == len(some)


def test_model_is_not_changed_and_more_noise_moves_more(shipped: Shipped, examples: list[Example]) -> None:
    model, tokenizer = shipped
    before = copy.deepcopy(model.state_dict())
    small, large = (
        sensitivity(model, tokenizer, examples[:4], ["attention", "position"], radius=radius, samples=2, resamples=20)
        for radius in (0.01, 1.0)
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert small["mean"][0] < large["mean"][0]
    assert small["mean"][1] == large["mean"][1] == 0  # a baseline without a model


def test_refusals(shipped: Shipped, examples: list[Example]) -> None:
    model, tokenizer = shipped
    for options in ({"radius": 0}, {"radius": float("nan")}, {"samples": 0}):
        with pytest.raises(ArgumentError, match="pass numbers above 0"):
            sensitivity(model, tokenizer, examples[:1], "position", **options)
    broken = copy.deepcopy(model)
    broken.bert.embeddings.word_embeddings = nn.Sequential(broken.bert.embeddings.word_embeddings)
    with pytest.raises(ArgumentError, match="word embeddings of BertForMaskedLM are Sequential"):
        sensitivity(broken, tokenizer, examples[:1], "position")

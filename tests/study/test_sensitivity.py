"""Sensitivity equals Captum's own metric, one sentence and one noise at a time."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.metrics import sensitivity_max
from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.study import Example, Scorer, run_study, sensitivity
from tests.study.conftest import Decoder, Shipped

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


def test_metric_of_a_study_equals_a_loop(shipped: Shipped, examples: list[Example], tmp_path: Path) -> None:
    """All rows of a method with layers, of one that joins them, and of one that explains the output."""
    model, tokenizer = shipped
    methods = ["value-zeroing", "value-zeroing-rollout", "input-x-gradient"]
    run_study({"m": shipped}, examples, tmp_path, methods, "cue_dot", quiet=True)
    found = run_study({"m": shipped}, examples, tmp_path, methods, "sensitivity", quiet=True).rows()  # added later
    clean = model.bert.embeddings.word_embeddings.weight.detach()
    before = Scorer(model, tokenizer, methods, "cue_dot").scores(examples)
    largest = np.zeros(len(before))
    for number in range(10):
        noise = torch.rand(clean.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * 2 - 1
        moved = (clean.double() + 0.1 * clean.double().std(correction=0) * noise).to(clean.dtype)
        after = Scorer(with_embeddings(model, moved), tokenizer, methods, "cue_dot").scores(examples)
        steps = [
            np.linalg.norm(np.subtract(two["scores"], one["scores"])) / np.linalg.norm(one["scores"])
            for one, two in zip(before, after, strict=True)
        ]
        largest = np.maximum(largest, steps)
    keys = ["method", "example", "layer"]
    expected = {tuple(str(row[key]) for key in keys): step for row, step in zip(before, largest, strict=True)}
    assert len(found) == len(before) == len(expected)
    for row in found.to_dict("records"):
        layer = "None" if row["layer"] != row["layer"] or row["layer"] is None else str(int(row["layer"]))
        assert row["sensitivity"] == pytest.approx(expected[row["method"], row["example"], layer], abs=1e-5)


def test_metric_costs_own_rows_only(decoder: Decoder) -> None:
    """The word embeddings of a model that hides them are not known."""
    model, tokenizer = decoder
    hidden = copy.deepcopy(model)
    hidden.transformer.wte = nn.Sequential(hidden.transformer.wte)
    example = Example("one", ("the", "cat", "is"), target=2)
    rows = Scorer(hidden, tokenizer, ["attention", "position"], "sensitivity").score([example])
    reasons = [row["skipped"] for row in rows if row["skipped"]]
    assert len(reasons) == 2
    assert all("word embeddings of GPT2LMHeadModel are Sequential" in reason for reason in reasons)
    assert all(row["sensitivity"] is None for row in rows)

"""Soft comprehensiveness and sufficiency, against word vectors that are edited entry by entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.metrics import MaskedSentences, Prediction, blank_out, soft_comprehensiveness, soft_sufficiency
from tests.metrics.test_orders import sentences
from tests.metrics.toy import BAD, GOOD, PAD, UNK, additive, sigmoid


class Words(nn.Module):
    """The logit of GOOD is the mean of a nonlinear function of the vectors' entries."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 4, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        self.embedding.weight.data = torch.rand(32, 4, generator=generator, dtype=torch.float64)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Any = None, inputs_embeds: Tensor | None = None
    ) -> SimpleNamespace:
        vectors = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        logits = torch.zeros(*vectors.shape[:2], 32, dtype=torch.float64)
        found = (vectors.square().sum(-1) * attention_mask).sum(-1) / attention_mask.sum(-1)
        logits[..., GOOD] = 3 * found[:, None]
        return SimpleNamespace(logits=logits)


def chance(model: Words, vectors: Tensor) -> float:
    return sigmoid(3 * vectors.square().sum().item() / len(vectors))


@pytest.mark.parametrize("measure", [soft_comprehensiveness, soft_sufficiency])
def test_soft_metrics_equal_loop(measure: Any) -> None:
    model, masked = Words().eval(), sentences()
    prediction, scores = Prediction(model, masked, UNK), torch.rand(masked.ids.shape, dtype=torch.float64)
    found = measure(prediction, scores, samples=3, seed=5)
    one = MaskedSentences(masked.ids[3:4, :6], None, 1, masked.content[3:4, :6], [GOOD, BAD])
    alone = measure(Prediction(model, one, UNK), scores[3:4, :6], samples=3, seed=5)
    torch.testing.assert_close(alone, found[3:4])  # the same masks in any batch
    for b, row in enumerate(masked.ids):
        ids = row[row != PAD]
        content = [j for j, token in enumerate(ids.tolist()) if token >= 10]
        vectors = model.embedding.weight.data[ids]
        largest = max(scores[b, j].item() for j in content)
        drawn = torch.rand(len(row), 3, 4, generator=torch.Generator().manual_seed(5))
        falls = []
        for sample in range(3):
            edited = vectors.clone()
            for j in content:
                share = scores[b, j].item() / largest
                chance_to_stay = share if measure is soft_sufficiency else 1 - share
                for i in range(4):
                    if drawn[j, sample, i].item() >= chance_to_stay:
                        edited[j, i] = 0
            falls.append(max(0.0, chance(model, vectors) - chance(model, edited)))
        empty = vectors.clone()
        empty[content] = 0
        ratio = sum(falls) / 3 / (chance(model, vectors) - chance(model, empty))
        expected = ratio if measure is soft_comprehensiveness else 1 - ratio
        assert found[b].item() == pytest.approx(expected, abs=1e-9)


def test_mean_vector_replaces_tokens() -> None:
    """One token after the other has the mean of all word vectors, the same in any batch."""
    model, masked = Words().eval(), sentences()
    effects = blank_out(Prediction(model, masked, "mean"))
    mean = model.embedding.weight.data.mean(0)
    for b, row in enumerate(masked.ids):
        vectors = model.embedding.weight.data[row[row != PAD]]
        for j in masked.content[b].nonzero()[:, 0].tolist():
            edited = vectors.clone()
            edited[j] = mean
            fall = 3 * (vectors.square().sum() - edited.square().sum()).item() / len(vectors)
            assert effects[b, j].item() == pytest.approx(fall, abs=1e-9)
    torch.testing.assert_close(blank_out(Prediction(model, masked, "mean", batch_size=1)), effects)
    with pytest.raises(ArgumentError, match="a function without get_input_embeddings"):
        blank_out(Prediction(additive, masked, "mean"))


def test_rows_that_order_nothing_are_nan() -> None:
    prediction = Prediction(Words().eval(), sentences(), UNK)
    found = soft_comprehensiveness(prediction, torch.ones(10, 9))
    assert found.isnan().tolist() == [False] + [True] * 9
    assert soft_sufficiency(prediction, torch.zeros(10, 9)).isnan().all()


def test_bad_arguments_refused() -> None:
    prediction = Prediction(Words().eval(), sentences(), UNK)
    with pytest.raises(ArgumentError, match="negative or infinite values: pass sizes"):
        soft_comprehensiveness(prediction, -torch.rand(10, 9))
    with pytest.raises(ArgumentError, match=r"scores is \(2,\)"):
        soft_sufficiency(prediction, torch.rand(2))
    with pytest.raises(ArgumentError, match="samples is 0"):
        soft_sufficiency(prediction, torch.rand(10, 9), samples=0)
    with pytest.raises(ArgumentError, match="a function without get_input_embeddings"):
        soft_sufficiency(Prediction(additive, sentences(), UNK), torch.rand(10, 9))

"""Metrics of an order of the tokens, its bounds, and soft metrics: against loops, for models of a few lines."""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise, permutations
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import metrics
from captum_vz.errors import ArgumentError
from tests.metrics.test_faithfulness import BAD, CLS, GOOD, MASK, PAD, REMOVALS, SEP, UNK, additive, sigmoid

# Ten sentences of one to six content tokens, so that all their orders can be tried.
LENGTHS = [1, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def neighbours(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
    """A model in which neighbours matter together: no order of single effects is the best order."""
    content = (input_ids >= 10) & attention_mask.bool()
    values = torch.where(content, torch.sin(input_ids.double() * 7), 0.0)
    logits = torch.zeros(*input_ids.shape, 32, dtype=torch.float64)
    found = values.sum(-1) + 2 * (values[:, 1:] * values[:, :-1]).sum(-1) + 0.1
    logits[..., GOOD] = found[:, None]
    return SimpleNamespace(logits=logits)


def sentences(seed: int = 0) -> metrics.MaskedSentences:
    drawn = torch.randint(10, 30, (len(LENGTHS), 8), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [[CLS, MASK, *words[:count], SEP] for words, count in zip(drawn, LENGTHS, strict=True)]
    ids = torch.tensor([row + [PAD] * (9 - len(row)) for row in rows])
    return metrics.MaskedSentences(ids, (ids != PAD).long(), 1, ids >= 10, [GOOD, BAD])


def each(masked: metrics.MaskedSentences, removal: Any) -> Iterator[tuple[int, list[int], list[int], int]]:
    """Of each sentence its number, its ids, the positions of its content, and the likelier form."""
    for b, row in enumerate(masked.ids):
        ids = [int(one) for one in row if one != PAD]
        content = [j for j, token in enumerate(ids) if token >= 10]
        yield b, ids, content, GOOD if chance(ids, [], removal, GOOD) > 0.5 else BAD


def chance(ids: list[int], gone: Iterable[int], removal: Any, answer: int) -> float:
    return chance_of(tuple(ids), frozenset(gone), removal, answer)


@cache
def chance_of(ids: tuple[int, ...], gone: frozenset[int], removal: Any, answer: int) -> float:
    if removal == "delete":
        edited = [token for j, token in enumerate(ids) if j not in gone]
    else:
        edited = [removal if j in gone else token for j, token in enumerate(ids)]
    row = torch.tensor([edited])
    logit = neighbours(row, torch.ones_like(row)).logits[0, 0, GOOD].item()
    return sigmoid(logit if answer == GOOD else -logit)


def by_hand(what: str, ids: list[int], order: list[int], removal: Any) -> float:
    """One metric of one order, the most important token first."""
    answer = GOOD if chance(ids, [], removal, GOOD) > 0.5 else BAD
    whole, count = chance(ids, [], removal, answer), len(order)
    if what == "area":
        curve = [chance(ids, order[:k], removal, answer) for k in range(count + 1)]
        return sum((one + other) / 2 for one, other in pairwise(curve)) / count
    tops = [order[: ceil(q * count)] for q in metrics.FRACTIONS]
    gone = tops if what == "comprehensiveness" else [[j for j in order if j not in top] for top in tops]
    return sum(whole - chance(ids, one, removal, answer) for one in gone) / len(gone)


METRICS = {
    "comprehensiveness": (
        lambda p, s: metrics.comprehensiveness(p, s).mean(-1),
        metrics.comprehensiveness_bounds,
        max,
        min,
    ),
    "sufficiency": (lambda p, s: metrics.sufficiency(p, s).mean(-1), metrics.sufficiency_bounds, min, max),
    "area": (metrics.deletion_area, metrics.deletion_bounds, min, max),
}


MEASURES = (metrics.deletion_area, metrics.monotonicity, metrics.infidelity, metrics.comprehensiveness)


@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("what", METRICS)
def test_bounds_equal_all_orders(what: str, removal: Any) -> None:
    measure, bounds_of, best, worst = METRICS[what]
    masked = sentences()
    prediction = metrics.Prediction(neighbours, masked, removal)
    bounds, scores = bounds_of(prediction), torch.rand(masked.ids.shape)
    found = measure(prediction, scores)
    share = metrics.normalized(found, bounds)
    assert bounds.exact.all()
    for b, ids, content, _ in each(masked, removal):
        ranked = sorted(content, key=lambda j: -scores[b, j].item())
        assert found[b].item() == pytest.approx(by_hand(what, ids, ranked, removal), abs=1e-12)
        everything = [by_hand(what, ids, list(order), removal) for order in permutations(content)]
        assert bounds.best[b].item() == pytest.approx(best(everything), abs=1e-12)
        assert bounds.worst[b].item() == pytest.approx(worst(everything), abs=1e-12)
        if len(content) > 1:
            assert -1e-12 <= share[b] <= 1 + 1e-12
    assert share[0].isnan()  # one token has one order


def test_greedy_equals_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captum_vz.metrics.faithfulness.EXHAUSTIVE", 0)
    masked = sentences()
    found = metrics.deletion_bounds(metrics.Prediction(neighbours, masked, UNK))
    assert not found.exact.any()
    for b, ids, content, answer in each(masked, UNK):
        for value, better in ((found.best[b], min), (found.worst[b], max)):
            order: list[int] = []
            while len(order) < len(content):
                left = [j for j in content if j not in order]
                order.append(better(left, key=lambda j: chance(ids, [*order, j], UNK, answer)))
            assert value.item() == pytest.approx(by_hand("area", ids, order, UNK), abs=1e-12)


@pytest.mark.parametrize("removal", REMOVALS)
def test_monotonicity_equals_loop(removal: Any) -> None:
    masked = sentences()
    prediction = metrics.Prediction(neighbours, masked, removal)
    effects = torch.rand(20, *masked.ids.shape)
    found = torch.stack([metrics.monotonicity(prediction, one) for one in effects])
    for b, ids, content, answer in each(masked, removal):
        for scores, value in zip(effects[:, b], found[:, b], strict=True):
            rising = sorted(content, key=lambda j: scores[j].item())
            steps = [chance(ids, rising[k:], removal, answer) for k in range(len(rising) + 1)]
            assert value.item() == all(later >= before for before, later in pairwise(steps))
    assert 0 < found.mean() < 1


def test_infidelity_equals_loop() -> None:
    masked = sentences()
    prediction, scores = metrics.Prediction(neighbours, masked, UNK), torch.rand(masked.ids.shape)
    found = metrics.infidelity(prediction, scores, samples=6, seed=3)
    for b, ids, content, answer in each(masked, UNK):
        drawn = torch.rand(6, len(content), generator=torch.Generator().manual_seed(3)) < 0.5
        pairs = []
        for one in drawn.tolist():
            gone = [j for j, is_gone in zip(content, one, strict=True) if is_gone]
            fall = chance(ids, [], UNK, answer) - chance(ids, gone, UNK, answer)
            pairs.append((sum(scores[b, j].double().item() for j in gone), fall))
        square = sum(dot * dot for dot, _ in pairs)
        beta = sum(dot * fall for dot, fall in pairs) / square if square else 0.0
        expected = sum((beta * dot - fall) ** 2 for dot, fall in pairs) / len(pairs)
        assert found[b].item() == pytest.approx(expected, abs=1e-9)


def test_each_set_runs_once_for_all_metrics() -> None:
    ran = []

    def watch(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        ran.append(len(input_ids))
        return neighbours(input_ids, attention_mask)

    masked = sentences()
    prediction = metrics.Prediction(watch, masked, UNK, batch_size=10_000)
    scores = torch.rand(masked.ids.shape)
    metrics.deletion_bounds(prediction)
    before = sum(ran)
    prediction.best()
    added = sum(ran) - before
    ran.clear()
    for measure in (*MEASURES, metrics.sufficiency):
        measure(prediction, scores)
        measure(prediction.among("vocabulary"), scores)
    assert set(ran) <= {added}  # only the answers are found again, not the sets


def test_rows_that_order_nothing_are_nan() -> None:
    masked = sentences()
    prediction = metrics.Prediction(neighbours, masked, UNK)
    flat = torch.ones(masked.ids.shape)
    for measure in (metrics.deletion_area, metrics.monotonicity, metrics.infidelity):
        found = measure(prediction, flat)
        assert found[1:].isnan().all()
        assert not found[0].isnan()
    holed = torch.rand(masked.ids.shape)
    holed[2, 2] = torch.nan
    assert metrics.deletion_area(prediction, holed).isnan().nonzero().tolist() == [[2]]
    prediction = metrics.Prediction(Words().eval(), sentences(), UNK)
    found = metrics.soft_comprehensiveness(prediction, torch.ones(10, 9))
    assert found.isnan().tolist() == [False] + [True] * 9
    assert metrics.soft_sufficiency(prediction, torch.zeros(10, 9)).isnan().all()


def test_bad_sizes_refused() -> None:
    prediction = metrics.Prediction(neighbours, sentences(), UNK)
    for measure in MEASURES:
        with pytest.raises(ArgumentError, match="but the ids are"):
            measure(prediction, torch.rand(2, 2))
        with pytest.raises(ArgumentError, match="holds infinities"):
            measure(prediction, torch.full((10, 9), torch.inf))
    with pytest.raises(ArgumentError, match="one value for each"):
        metrics.normalized(torch.rand(3), metrics.deletion_bounds(prediction))
    prediction = metrics.Prediction(Words().eval(), sentences(), UNK)
    with pytest.raises(ArgumentError, match="or infinite values"):
        metrics.soft_comprehensiveness(prediction, -torch.rand(10, 9))
    with pytest.raises(ArgumentError, match=r"scores is \(2,\)"):
        metrics.soft_sufficiency(prediction, torch.rand(2))
    with pytest.raises(ArgumentError, match="samples is 0"):
        metrics.soft_sufficiency(prediction, torch.rand(10, 9), samples=0)
    with pytest.raises(ArgumentError, match="function without"):
        metrics.soft_sufficiency(metrics.Prediction(additive, sentences(), UNK), torch.rand(10, 9))


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


def chance_of_words(model: Words, vectors: Tensor) -> float:
    return sigmoid(3 * vectors.square().sum().item() / len(vectors))


@pytest.mark.parametrize("measure", [metrics.soft_comprehensiveness, metrics.soft_sufficiency])
def test_soft_metrics_equal_loop(measure: Any) -> None:
    model, masked = Words().eval(), sentences()
    prediction, scores = metrics.Prediction(model, masked, UNK), torch.rand(masked.ids.shape, dtype=torch.float64)
    found = measure(prediction, scores, samples=3, seed=5)
    one = metrics.MaskedSentences(masked.ids[3:4, :6], None, 1, masked.content[3:4, :6], [GOOD, BAD])
    alone = measure(metrics.Prediction(model, one, UNK), scores[3:4, :6], samples=3, seed=5)
    torch.testing.assert_close(alone, found[3:4])  # the same masks in any batch
    for b, ids, content, _ in each(masked, UNK):
        vectors = model.embedding.weight.data[ids]
        largest = max(scores[b, j].item() for j in content)
        drawn = torch.rand(masked.ids.shape[1], 3, 4, generator=torch.Generator().manual_seed(5))
        falls = []
        for sample in range(3):
            edited = vectors.clone()
            for j in content:
                share = scores[b, j].item() / largest
                chance_to_stay = share if measure is metrics.soft_sufficiency else 1 - share
                for i in range(4):
                    if drawn[j, sample, i].item() >= chance_to_stay:
                        edited[j, i] = 0
            falls.append(max(0.0, chance_of_words(model, vectors) - chance_of_words(model, edited)))
        empty = vectors.clone()
        empty[content] = 0
        ratio = sum(falls) / 3 / (chance_of_words(model, vectors) - chance_of_words(model, empty))
        expected = ratio if measure is metrics.soft_comprehensiveness else 1 - ratio
        assert found[b].item() == pytest.approx(expected, abs=1e-9)


def test_mean_vector_replaces_tokens() -> None:
    """One token after the other has the mean of all word vectors, the same in any batch."""
    model, masked = Words().eval(), sentences()
    effects = metrics.blank_out(metrics.Prediction(model, masked, "mean"))
    mean = model.embedding.weight.data.mean(0)
    for b, ids, content, _ in each(masked, UNK):
        vectors = model.embedding.weight.data[ids]
        for j in content:
            edited = vectors.clone()
            edited[j] = mean
            fall = 3 * (vectors.square().sum() - edited.square().sum()).item() / len(vectors)
            assert effects[b, j].item() == pytest.approx(fall, abs=1e-9)
    torch.testing.assert_close(metrics.blank_out(metrics.Prediction(model, masked, "mean", batch_size=1)), effects)

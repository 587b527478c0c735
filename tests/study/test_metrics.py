"""The registered metrics, also those of changed models: the numbers equal loops over tokens, in float64."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from captum.metrics import sensitivity_max
from scipy import stats
from torch import Tensor, nn

from captum_vz import find_layers, metrics
from captum_vz.errors import ArgumentError
from captum_vz.metrics import MaskedSentences, Prediction, normalized
from captum_vz.study import Batch, Example, Scorer, encode, metric_named, random_copy, random_layers, sensitivity
from tests.study.conftest import Decoder, Shipped

FUNCTIONS: list[tuple[str, Any, Any]] = [
    ("comprehensiveness:mask", metrics.comprehensiveness, None),
    ("sufficiency:mask", metrics.sufficiency, None),
    ("comprehensiveness_normalized:mask", metrics.comprehensiveness, metrics.comprehensiveness_bounds),
    ("sufficiency_normalized:mask", metrics.sufficiency, metrics.sufficiency_bounds),
    ("deletion_normalized:mask", metrics.deletion_area, metrics.deletion_bounds),
    ("monotonicity:mask", metrics.monotonicity, None),
    ("infidelity:mask", metrics.infidelity, None),
    ("soft_comprehensiveness", metrics.soft_comprehensiveness, None),
    ("soft_sufficiency", metrics.soft_sufficiency, None),
]
VARIANTS = {
    f"blank_out{how}{over}{size}": (how[1:] or "blank", over[1:] or "forms", bool(size))
    for how in ("", ":mask", ":delete")
    for over in ("", ":vocabulary")
    for size in ("", ":size")
}


@pytest.fixture(scope="module")
def rows(precise: Shipped, examples: list[Example]) -> list[dict[str, Any]]:
    names = ["cue_dot", "cue_ap", "cue_dot:content", "cue_ap:content", "cue_mrr", "cue_p1", "cue_p3"]
    names += [*(name for name, *_ in FUNCTIONS), *VARIANTS]
    return Scorer(*precise, ["attention", "random"], names).score(examples[:4])


def test_names_of_metrics_say_how_tokens_are_removed(precise: Shipped) -> None:
    scorer = Scorer(*precise, ["random"], ["blank_out:size:mask", "sufficiency:delete"])
    assert list(scorer.metrics) == ["blank_out:mask:size", "sufficiency:delete"]
    assert metric_named("blank_out:delete:vocabulary").title == "Spearman with blank-out (delete, vocabulary)"
    for wrong, told in (
        ("blank_out:unk", "blank_out takes"),
        ("blank_out:mask:delete", "blank_out takes"),
        ("infidelity:size", "infidelity takes"),
        ("cue_dot:mask", "cue_dot takes"),
        ("sanity:mask", "takes no words"),
        ("blankout:mask", "mean blank_out"),
    ):
        with pytest.raises(ValueError, match=told):
            metric_named(wrong)


def test_ranks_of_cues_equal_loops(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        (cue,) = row["cue"]
        above = sum(score > row["scores"][cue] for score in row["scores"])
        assert row["cue_dot"] == pytest.approx(row["scores"][cue])
        assert row["cue_ap"] == pytest.approx(1 / sum(score >= row["scores"][cue] for score in row["scores"]))
        content = [row["scores"][place] for place in row["content"]]
        assert row["cue_dot:content"] == pytest.approx(row["scores"][cue] / sum(content))
        assert row["cue_ap:content"] == pytest.approx(1 / sum(score >= row["scores"][cue] for score in content))
        assert row["cue_mrr"] == pytest.approx(1 / (1 + above))
        assert row["cue_p1"] == (above == 0)
        assert row["cue_p3"] == pytest.approx((above < 3) / 3)


def test_metrics_of_removal_equal_their_functions(
    rows: list[dict[str, Any]], precise: Shipped, examples: list[Example]
) -> None:
    """Tests of :mod:`captum_vz.metrics` compare the functions with loops. Here, each sentence is alone."""
    model, tokenizer = precise
    removals = {"mask": tokenizer.mask_token_id, "blank": tokenizer.unk_token_id, "delete": "delete"}
    for example in examples[:3]:
        own = [row for row in rows if row["example"] == example.id and row["layer"] in (None, 3)]
        content = own[0]["content"]
        encoded, keep = encode(tokenizer, example), torch.zeros(1, len(own[0]["scores"]), dtype=torch.bool)
        keep[0, content] = True
        ids = torch.tensor([encoded.ids])
        masked = MaskedSentences(ids, None, encoded.target, keep, torch.tensor([encoded.forms]))
        predictions = {name: Prediction(model, masked, removal) for name, removal in removals.items()}
        for row in own:
            scores = torch.tensor([row["scores"]], dtype=torch.float64)
            for name, measure, bounds in FUNCTIONS:
                value = measure(predictions["mask"], scores)
                value = value.mean(-1) if value.ndim > 1 else value
                expected = value if bounds is None else normalized(value, bounds(predictions["mask"]))
                assert row[name] == pytest.approx(expected.item(), abs=1e-6), name
            for name, (removal, over, by_size) in VARIANTS.items():
                effects = metrics.blank_out(predictions[removal].among(over))[0, content]
                effects = effects.abs() if by_size else effects
                expected = stats.spearmanr(scores[0, content], effects).statistic
                assert row[name] == pytest.approx(expected, abs=1e-6), name


# Metrics of changed models


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
        with pytest.raises(ArgumentError, match="pass layers of the"):
            random_copy(nn.Sequential(nn.Linear(2, 2)), layers)
    for options in ({"radius": 0}, {"radius": float("nan")}, {"samples": 0}):
        with pytest.raises(ArgumentError, match="numbers above 0"):
            sensitivity(**options)


def test_correlations_equal_a_loop(shipped: Shipped, examples: list[Example]) -> None:
    model, tokenizer = shipped
    metrics = {"all": random_layers(), "two": random_layers(2), "one": random_layers(1)}
    examples = examples[:4]
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
    assert all("GPT2LMHeadModel has word embeddings of Sequential" in reason for reason in reasons)
    assert all(row["sensitivity"] is None for row in rows)

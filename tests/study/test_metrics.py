"""The registered metrics on four sentences: the numbers equal loops over tokens, in float64."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from captum_vz import metrics
from captum_vz.metrics import MaskedSentences, Prediction, normalized
from captum_vz.study import Example, Scorer, encode, metric_named
from captum_vz.testbed import agreement_sentences
from captum_vz.text import encode_record
from tests.study.conftest import Shipped

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
Lead = Callable[..., float]


@pytest.fixture(scope="module")
def precise(shipped: Shipped) -> Shipped:
    model, tokenizer = shipped
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.double().eval(), tokenizer


@pytest.fixture(scope="module")
def rows(precise: Shipped, four: list[Example]) -> list[dict[str, Any]]:
    names = ["cue_dot", "cue_ap", "cue_mrr", "cue_p1", "cue_p3", *(name for name, *_ in FUNCTIONS), *VARIANTS]
    return Scorer(*precise, ["attention", "random"], names).score(four)


@pytest.fixture(scope="module")
def four() -> list[Example]:
    return [Example.from_record(record) for record in agreement_sentences(4, seed=3)]


@pytest.fixture(scope="module")
def lead(precise: Shipped, four: list[Example]) -> Lead:
    """The right form's log-probability, or its difference to the wrong one's, of a sentence edited by hand."""
    model, tokenizer = precise
    by_id = {example.id: example for example in four}

    @cache
    def found(example: str, gone: frozenset[int], removal: str, over: str = "forms") -> float:
        one = by_id[example]
        encoded = encode_record(tokenizer, one.to_record())
        ids, target = encoded.encoding["input_ids"][0].tolist(), encoded.target
        if removal == "delete":
            target -= sum(j < target for j in gone)
            ids = [token for j, token in enumerate(ids) if j not in gone]
        else:
            number = tokenizer.unk_token_id if removal == "blank" else tokenizer.mask_token_id
            ids = [number if j in gone else token for j, token in enumerate(ids)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, target].numpy()
        good, bad = (logits[tokenizer.convert_tokens_to_ids(form)] for form in (one.good, one.bad))
        return float(good - (bad if over == "forms" else np.log(np.sum(np.exp(logits)))))

    return found


def test_blank_out_in_all_ways_equals_loops(rows: list[dict[str, Any]], lead: Lead) -> None:
    for row in rows:
        content = row["content"]
        for name, (removal, over, by_size) in VARIANTS.items():
            whole = lead(row["example"], frozenset(), removal, over)
            effects = [whole - lead(row["example"], frozenset({j}), removal, over) for j in content]
            effects = [abs(effect) for effect in effects] if by_size else effects
            expected = stats.spearmanr([row["scores"][j] for j in content], effects).statistic
            assert row[name] == pytest.approx(expected, abs=1e-9)


def test_names_of_metrics_say_how_tokens_are_removed(precise: Shipped) -> None:
    scorer = Scorer(*precise, ["random"], ["blank_out:size:mask", "sufficiency:delete"])
    assert list(scorer.metrics) == ["blank_out:mask:size", "sufficiency:delete"]
    assert metric_named("blank_out:delete:vocabulary").title == "Spearman with blank-out (delete, vocabulary)"
    for wrong, told in (
        ("blank_out:unk", "blank_out takes :mask, :delete, :vocabulary, :size, and not both"),
        ("blank_out:mask:delete", "blank_out takes :mask"),
        ("infidelity:size", "infidelity takes :mask, :delete, and not both"),
        ("cue_dot:mask", "cue_dot takes :content."),
        ("sanity:mask", "sanity takes no words"),
        ("blankout:mask", "did you mean blank_out"),
    ):
        with pytest.raises(ValueError, match=told):
            metric_named(wrong)


def test_ranks_of_cues_equal_loops(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        (cue,) = row["cue"]
        above = sum(score > row["scores"][cue] for score in row["scores"])
        assert row["cue_dot"] == pytest.approx(row["scores"][cue])
        assert row["cue_ap"] == pytest.approx(1 / sum(score >= row["scores"][cue] for score in row["scores"]))
        assert row["cue_mrr"] == pytest.approx(1 / (1 + above))
        assert row["cue_p1"] == (above == 0)
        assert row["cue_p3"] == pytest.approx((above < 3) / 3)


def test_metrics_of_removal_equal_their_functions(
    rows: list[dict[str, Any]], precise: Shipped, four: list[Example]
) -> None:
    """Tests of :mod:`captum_vz.metrics` compare the functions with loops. Here, each sentence is alone."""
    model, tokenizer = precise
    for example in four[:3]:
        own = [row for row in rows if row["example"] == example.id and row["layer"] in (None, 3)]
        encoded, keep = encode(tokenizer, example), torch.zeros(1, len(own[0]["scores"]), dtype=torch.bool)
        keep[0, own[0]["content"]] = True
        ids = torch.tensor([encoded.ids])
        masked = MaskedSentences(ids, None, encoded.target, keep, torch.tensor([encoded.forms]))
        prediction = Prediction(model, masked, tokenizer.mask_token_id)
        for row in own:
            scores = torch.tensor([row["scores"]], dtype=torch.float64)
            for name, measure, bounds in FUNCTIONS:
                value = measure(prediction, scores)
                value = value.mean(-1) if value.ndim > 1 else value
                expected = value if bounds is None else normalized(value, bounds(prediction))
                assert row[name] == pytest.approx(expected.item(), abs=1e-6), name

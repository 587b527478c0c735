"""The registered metrics on ten sentences: the numbers equal loops over tokens, in float64."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from captum_vz.study import METRICS, Example, Scorer, metric_named
from captum_vz.testbed import agreement_sentences
from captum_vz.text import encode_record
from tests.study.conftest import Shipped

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)
ORDERED = (
    "comprehensiveness_normalized",
    "sufficiency_normalized",
    "deletion_normalized",
    "monotonicity",
    "infidelity",
)
VARIANTS = {
    f"blank_out{how}{over}{size}": (how[1:] or "unk", over[1:] or "forms", bool(size))
    for how in ("", ":mask", ":delete")
    for over in ("", ":vocabulary")
    for size in ("", ":size")
}
Chance = Callable[..., float]


@pytest.fixture(scope="module")
def precise(shipped: Shipped) -> Shipped:
    model, tokenizer = shipped
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.double().eval(), tokenizer


@pytest.fixture(scope="module")
def rows(precise: Shipped, ten: list[Example]) -> list[dict[str, Any]]:
    masked = [f"{name}:mask" for name in ORDERED]
    others = [name for name in METRICS if name not in ORDERED]
    return Scorer(*precise, ["attention", "random"], [*others, *masked, *VARIANTS]).score(ten)


@pytest.fixture(scope="module")
def ten() -> list[Example]:
    return [Example.from_record(record) for record in agreement_sentences(10, seed=3)]


@pytest.fixture(scope="module")
def chance(precise: Shipped, ten: list[Example]) -> Chance:
    """The probability of the right form, over the forms or the vocabulary, of a sentence edited by hand."""
    model, tokenizer = precise
    by_id = {example.id: example for example in ten}

    @cache
    def found(example: str, gone: frozenset[int], removal: str, over: str = "forms") -> float:
        one = by_id[example]
        encoded = encode_record(tokenizer, one.to_record())
        ids, target = encoded.encoding["input_ids"][0].tolist(), encoded.target
        if removal == "delete":
            target -= sum(j < target for j in gone)
            ids = [token for j, token in enumerate(ids) if j not in gone]
        else:
            number = tokenizer.unk_token_id if removal == "unk" else tokenizer.mask_token_id
            ids = [number if j in gone else token for j, token in enumerate(ids)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, target].numpy()
        good, bad = (logits[tokenizer.convert_tokens_to_ids(form)] for form in (one.good, one.bad))
        among = [good, bad] if over == "forms" else logits
        return float(np.exp(good) / np.sum(np.exp(among)))

    return found


def test_blank_out_in_all_ways_equals_loops(rows: list[dict[str, Any]], chance: Chance) -> None:
    for row in rows:
        content = row["content"]
        for name, (removal, over, by_size) in VARIANTS.items():
            whole = chance(row["example"], frozenset(), removal, over)
            effects = [whole - chance(row["example"], frozenset({j}), removal, over) for j in content]
            effects = [abs(effect) for effect in effects] if by_size else effects
            expected = stats.spearmanr([row["scores"][j] for j in content], effects).statistic
            assert row[name] == pytest.approx(expected, abs=1e-9)


def test_names_of_metrics_say_how_tokens_are_removed(precise: Shipped) -> None:
    scorer = Scorer(*precise, ["random"], ["blank_out:size:mask", "sufficiency:delete"])
    assert list(scorer.metrics) == ["blank_out:mask:size", "sufficiency:delete"]
    assert metric_named("blank_out:delete:vocabulary").title == "Spearman with blank-out (delete, vocabulary)"
    for wrong, told in (
        ("blank_out:unk", "blank_out takes one of :mask and :delete, and :vocabulary, and :size"),
        ("blank_out:mask:delete", "blank_out takes one of"),
        ("infidelity:size", "infidelity takes one of :mask and :delete."),
        ("cue_dot:mask", "cue_dot takes no words"),
        ("blankout:mask", "did you mean blank_out"),
    ):
        with pytest.raises(ValueError, match=told):
            metric_named(wrong)


def test_ranks_of_cues_equal_loops(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        (cue,) = row["cue"]
        above = sum(score > row["scores"][cue] for score in row["scores"])
        assert row["cue_mrr"] == pytest.approx(1 / (1 + above))
        assert row["cue_p1"] == (above == 0)
        assert row["cue_p3"] == pytest.approx((above < 3) / 3)


def test_orders_equal_loops(rows: list[dict[str, Any]], chance: Chance) -> None:
    """Bounds by recursion over the sets of removed tokens, of sentences with up to eight content tokens."""
    long = 0
    for row in rows:
        id, content, scores = row["example"], row["content"], row["scores"]
        if len(content) > 8:
            long += 1
            continue
        sign = chance(id, frozenset(), "mask") > 0.5

        def p(gone: Any, id: str = id, sign: bool = sign) -> float:
            found = chance(id, frozenset(gone), "mask")
            return found if sign else 1 - found

        count = len(content)
        ranked = sorted(content, key=lambda j: -scores[j])
        sizes = [ceil(q * count) for q in FRACTIONS]
        comprehensive = {k: sizes.count(k) / len(sizes) for k in range(count + 1)}
        sufficient = {count - k: share for k, share in comprehensive.items()}
        area = {k: (1 / 2 if k in (0, count) else 1) / count for k in range(count + 1)}
        for name, weights, order, best in (
            ("comprehensiveness_normalized", comprehensive, ranked, min),
            ("sufficiency_normalized", sufficient, ranked[::-1], max),
            ("deletion_normalized", area, ranked, min),
        ):
            value = sum(weights[k] * p(order[:k]) for k in range(count + 1))
            first, last = (extreme(content, weights, p, one) for one in (best, max if best is min else min))
            assert row[f"{name}:mask"] == pytest.approx((value - last) / (first - last), abs=1e-6)
        curve = [p(ranked[:k]) for k in range(count + 1)]
        assert row["monotonicity:mask"] == all(b <= a + 1e-6 for a, b in pairwise(curve))
    assert long < len(rows)


def extreme(content: list[int], weights: dict[int, float], p: Any, best: Any) -> float:
    @cache
    def upto(gone: frozenset[int]) -> float:
        here = weights[len(gone)] * p(gone) if weights[len(gone)] else 0.0
        return here + (best(upto(gone - {j}) for j in gone) if gone else 0.0)

    return upto(frozenset(content))


def test_soft_metrics_and_infidelity_are_registered(
    rows: list[dict[str, Any]], precise: Shipped, ten: list[Example]
) -> None:
    for name in ("soft_comprehensiveness", "soft_sufficiency", "infidelity:mask"):
        assert all(row[name] == row[name] for row in rows)
    # The same numbers for each sentence alone.
    alone = Scorer(*precise, ["attention"], ["soft_comprehensiveness", "soft_sufficiency", "infidelity:mask"])
    for example in ten[:3]:
        found = alone.score([example])
        together = [row for row in rows if row["example"] == example.id and row["method"] == "attention"]
        for one, other in zip(found, together, strict=True):
            for name in alone.metrics:
                assert one[name] == pytest.approx(other[name], abs=1e-7)


@torch.no_grad()
def test_soft_metrics_equal_loops(rows: list[dict[str, Any]], precise: Shipped, ten: list[Example]) -> None:
    """Entries of the word vectors are kept with the score's share of the largest one, one sentence and mask a run."""
    model, tokenizer = precise
    by_id = {example.id: example for example in ten}
    words = model.get_input_embeddings()
    samples, width = 10, words.embedding_dim
    for row in (row for row in rows if row["layer"] in (None, 3)):
        example = by_id[row["example"]]
        vectors = words(encode_record(tokenizer, example.to_record()).encoding["input_ids"])[0]
        forms = tokenizer.convert_tokens_to_ids([example.good, example.bad])
        draws = torch.rand(len(vectors), samples, width, generator=torch.Generator().manual_seed(0))

        def p(vectors: Any, forms: list[int] = forms, target: int = row["target"]) -> Any:
            logits = model(inputs_embeds=vectors[None]).logits[0, target, forms]
            return logits.softmax(-1)

        whole = p(vectors)
        answer = int(whole.argmax())
        empty = vectors.clone()
        empty[row["content"]] = 0
        most = float((whole - p(empty))[answer])
        shares = {j: row["scores"][j] / max(row["scores"][j] for j in row["content"]) for j in row["content"]}
        for name, kept in (("soft_comprehensiveness", False), ("soft_sufficiency", True)):
            falls = []
            for sample in range(samples):
                changed = vectors.clone()
                for j, share in shares.items():
                    changed[j] *= draws[j, sample] < (share if kept else 1 - share)
                falls.append(max(0.0, float((whole - p(changed))[answer])))
            fall = sum(falls) / samples / most
            assert row[name] == pytest.approx(1 - fall if kept else fall, abs=1e-6)


def test_infidelity_equals_least_squares(rows: list[dict[str, Any]], chance: Chance) -> None:
    for row in (row for row in rows if row["layer"] in (None, 3)):
        id, content = row["example"], row["content"]
        whole = chance(id, frozenset(), "mask")
        drawn = torch.rand(32, len(content), generator=torch.Generator().manual_seed(0)) < 0.5
        sums, effects = [], []
        for one in drawn.tolist():
            gone = [j for j, is_gone in zip(content, one, strict=True) if is_gone]
            sums.append(sum(row["scores"][j] for j in gone))
            effects.append((whole - chance(id, frozenset(gone), "mask")) * (1 if whole > 0.5 else -1))
        _, (residual,), *_ = np.linalg.lstsq(np.array(sums)[:, None], np.array(effects), rcond=None)
        assert row["infidelity:mask"] == pytest.approx(residual / len(sums), abs=1e-6)


def test_sets_run_once_for_variants_and_methods(
    precise: Shipped, ten: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    model, tokenizer = precise

    def counted(*args: Any, **named: Any) -> Any:
        asked.append(len(named["input_ids"]))
        return type(model).forward(model, *args, **named)

    monkeypatch.setattr(model, "forward", counted)
    one = Scorer(model, tokenizer, ["random"], ["blank_out"]).score(ten)
    alone = sum(asked)
    asked.clear()
    names = [name for name, (removal, *_) in VARIANTS.items() if removal == "unk"]
    many = Scorer(model, tokenizer, ["random", "position", "attention"], names).score(ten)
    assert sum(asked) <= alone + len(ten)  # the scores of attention, but no further set of tokens
    assert one[0]["blank_out"] == many[0]["blank_out"]

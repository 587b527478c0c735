"""The grader accepts answers that are computed by plain hooks and loops, and names each usual mistake."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartModel

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.functional import cosine_distance, normalize_rows
from captum_vz.metrics import cue_average_precision
from captum_vz.metrics import kendall as package_kendall
from captum_vz.testbed import check, load_agreement_model

MASK = 6


@cache
def by_hand(part: str = "layer") -> Tensor:
    """Cosine distances `(out, in)` of the last layer, or of a part of it, by two hooks and one pass a token."""
    model, tokenizer = load_agreement_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    layer: Any = model.bert.encoder.layer[-1]
    watched = {"layer": layer, "context": layer.attention.self, "projected": layer.attention.output.dense}[part]
    clean = _watched(model, encoding, layer, watched, None)
    moved = [_watched(model, encoding, layer, watched, j) for j in range(len(clean))]
    return torch.stack([cosine_distance(one, clean) for one in moved], dim=1)


def _watched(model: Any, encoding: Any, layer: Any, watched: nn.Module, zeroed: int | None) -> Tensor:
    found: list[Tensor] = []

    def zero(module: nn.Module, inputs: Any, values: Tensor) -> Tensor:
        return values if zeroed is None else values.index_fill(1, torch.tensor([zeroed]), 0)

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])

    with (
        torch.no_grad(),
        layer.attention.self.value.register_forward_hook(zero),
        watched.register_forward_hook(keep),
    ):
        model(**encoding)
    return found[0][0]


def map_by_hand() -> Tensor:
    return by_hand() / by_hand().sum(1, keepdim=True)


def test_row_by_hand_is_right() -> None:
    row = map_by_hand()[MASK]
    for answer in (row, row[None], row.tolist(), row.numpy()):
        assert check.value_zeroing_row(answer)


ROWS = {
    "swapped": (lambda: map_by_hand()[:, MASK], "rows and columns are swapped"),
    "swapped distances": (lambda: by_hand()[:, MASK], "rows and columns are swapped"),
    "swapped, divided": (lambda: by_hand()[:, MASK] / by_hand()[:, MASK].sum(), "rows and columns are swapped"),
    "distances": (lambda: by_hand()[MASK], "Divide each row by its sum"),
    "similarities": (lambda: normalize_rows(1 - by_hand()[MASK]), "these are similarities"),
    "cosines": (lambda: 1 - by_hand()[MASK], "these are similarities"),
    "context": (lambda: normalize_rows(by_hand("context")[MASK]), "residual connection is forgotten"),
    "projection": (lambda: normalize_rows(by_hand("projected")[MASK]), "residual connection is forgotten"),
    "attention": (lambda: scores_of(LayerAttention, -1)[MASK], "these are attention weights"),
    "softmax": (lambda: by_hand()[MASK].softmax(-1), "softmax"),
    "layer": (lambda: scores_of(ValueZeroing, 1)[MASK], "this is layer 1"),
    "token": (lambda: map_by_hand()[2], "this is the row of output token 2"),
    "map": (map_by_hand, "this is the whole map"),
}


def scores_of(method: Any, layer: int, **options: Any) -> Tensor:
    model, tokenizer = load_agreement_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    return method(model, find_layers(model)[layer], **options).attribute(encoding)[0]


@pytest.mark.parametrize("case", ROWS)
def test_mistake_in_row_is_named(case: str) -> None:
    answer, words = ROWS[case]
    verdict = check.value_zeroing_row(answer())
    assert not verdict
    assert words in verdict.message
    assert verdict.mistake == verdict.message


MAPS = {
    "swapped": (lambda: map_by_hand().mT, "rows and columns are swapped"),
    "swapped, divided": (lambda: normalize_rows(by_hand().mT), "rows and columns are swapped"),
    "columns": (lambda: by_hand() / by_hand().sum(0), "each column is divided"),
    "one sum": (lambda: by_hand() / by_hand().sum(), "divided by one sum"),
    "distances": (by_hand, "Divide each row by its sum"),
    "context": (lambda: normalize_rows(by_hand("context")), "residual connection is forgotten"),
    "euclidean": (lambda: scores_of(ValueZeroing, -1, distance="euclidean"), "Euclidean"),
}


def test_map_by_hand_is_right() -> None:
    assert check.value_zeroing_map(map_by_hand())
    assert check.value_zeroing_map(map_by_hand()[None])


@pytest.mark.parametrize("case", MAPS)
def test_mistake_in_map_is_named(case: str) -> None:
    answer, words = MAPS[case]
    assert words in (check.value_zeroing_map(answer()).mistake or "")


@pytest.mark.parametrize("answer", [None, ...])
def test_missing_answer_is_named(answer: Any) -> None:
    verdict = check.value_zeroing_row(answer)
    assert (verdict.passed, verdict.mistake) == (False, "no answer")
    assert str(verdict).startswith("Not yet. value_zeroing_row: there is no answer yet.")


def test_unknown_mistakes_show_the_difference() -> None:
    row = map_by_hand()[MASK].clone()
    row[4] += 0.25
    verdict = check.value_zeroing_row(row)
    assert verdict.mistake is None
    assert "the largest difference is 2.5e-01, at (4,)" in verdict.message
    assert "shape (3,)" in check.value_zeroing_row([0.1, 0.2, 0.7]).message
    assert "NaN" in check.value_zeroing_row([float("nan")] * 11).message
    assert "type str" in check.value_zeroing_row("pictures").message
    assert "compute in float64" in check.value_zeroing_row(map_by_hand()[MASK] + 1e-4).message.lower()


def test_row_of_a_model_needs_its_token() -> None:
    model, tokenizer = load_agreement_model()
    encoding = tokenizer("the cat sees anna.", return_tensors="pt")
    row = ValueZeroing(model, find_layers(model)[0]).attribute(encoding, token=2)
    assert check.value_zeroing_row(row, encoding, model=model, layer=0, token=2)
    with pytest.raises(ArgumentError, match="token is None"):
        check.value_zeroing_row(row, encoding, model=model)
    with pytest.raises(ArgumentError, match="without inputs"):
        check.value_zeroing_row(row, model=model)


def test_cross_map_and_its_mistakes() -> None:
    torch.manual_seed(0)
    size = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(BartConfig(vocab_size=30, **size, **heads)).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[2, 9, 10]])}
    first, last = find_layers(model, "decoder")

    def scores(layer: nn.Module, **options: Any) -> Tensor:
        return ValueZeroing(model, layer, **options).attribute(inputs)[0]

    right = scores(last, attention="cross")
    assert right.shape == (3, 4)
    assert check.cross_map(right, model, inputs)
    wrong = {
        "swapped": right.mT,
        "self-attention": scores(last),
        "encoder": scores(find_layers(model, "encoder")[-1]),
        "Divide each row": scores(last, attention="cross", normalize=False),
        "layer 0": scores(first, attention="cross"),
    }
    for words, answer in wrong.items():
        assert words in (check.cross_map(answer, model, inputs).mistake or ""), words


def test_joint_row_and_its_mistakes() -> None:
    model, tokenizer = load_agreement_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    groups = torch.tensor([0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8])
    method = ValueZeroing(model, find_layers(model)[-1])
    alone = method.attribute(encoding, token=MASK)[0]
    right = method.attribute(encoding, token=MASK, feature_mask=groups[None])[0]
    first = torch.tensor([0, 1, 3, 4, 6, 7, 8, 9, 10])  # the first token of each group
    options: Any = {"model": model, "token": MASK}
    assert check.joint_row(right, encoding, groups, **options)
    assert check.joint_row(right[first], encoding, groups, **options)
    summed = torch.zeros(9).scatter_add(0, groups, alone)
    for answer in (alone, summed, summed[groups]):
        assert "one at a time" in (check.joint_row(answer, encoding, groups, **options).mistake or "")


def test_effect_and_its_mistakes() -> None:
    model, tokenizer = load_agreement_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    are, is_ = tokenizer.convert_tokens_to_ids(["are", "is"])
    layers: Any = model.bert.encoder.layer

    def preference(zeroed: int | None, some: Any) -> float:
        def zero(module: nn.Module, inputs: Any, values: Tensor) -> Tensor:
            return values if zeroed is None else values.index_fill(1, torch.tensor([zeroed]), 0)

        handles = [layer.attention.self.value.register_forward_hook(zero) for layer in some]
        with torch.no_grad():
            logits = model(**encoding).logits[0, MASK]
        for handle in handles:
            handle.remove()
        return (logits[are] - logits[is_]).item()

    def effects(some: Any) -> Tensor:
        return torch.tensor([preference(None, some) - preference(j, some) for j in range(11)])

    def graded(answer: Tensor) -> check.Verdict:
        return check.effect(answer, encoding, model=model, target=(MASK, are), foil=(MASK, is_))

    right = effects(layers)
    assert graded(right), graded(right)
    assert "sign is wrong" in (graded(-right).mistake or "")
    assert "sign is lost" in (graded(right.abs()).mistake or "")
    assert "last layer only" in (graded(effects(layers[-1:])).mistake or "")

    groups = [0, 1, 1, 3, 4, 5, 6, 7, 8, 9, 10]
    options: Any = {"model": model, "target": (MASK, are), "foil": (MASK, is_), "together": [1, 2]}
    joint = ValueZeroingEffect(model, find_layers(model)).attribute(
        encoding, target=(MASK, are), foil=(MASK, is_), feature_mask=torch.tensor([groups])
    )
    assert check.effect(joint, encoding, **options)
    assert "one at a time" in (check.effect(right, encoding, **options).mistake or "")


def test_rollout_and_its_mistakes() -> None:
    maps = list(torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1).double())
    one, two, three = (each[0] for each in maps)
    right = three @ two @ one
    assert check.rollout(right, maps)
    assert check.rollout(right[2], maps, token=2)
    wrong = {
        "wrong order": one @ two @ three,
        "swapped": right.mT,
        "one by one": one * two * three,
        "mean": (one + two + three) / 3,
        "last layer alone": three,
        "last layer is missing": two @ one,
    }
    for words, answer in wrong.items():
        assert words in (check.rollout(answer, maps).mistake or ""), words
    eye = torch.eye(5).double()
    halves = [(each[0] + eye) / 2 for each in maps]
    with_residual = halves[2] @ halves[1] @ halves[0]
    assert check.rollout(with_residual, maps, residual=0.5)
    assert "residual connection is forgotten" in (check.rollout(right, maps, residual=0.5).mistake or "")
    assert "does not ask for" in (check.rollout(with_residual, maps).mistake or "")
    assert "to each map" in (check.rollout((right + eye) / 2, maps, residual=0.5).mistake or "")
    with pytest.raises(ArgumentError, match="one example"):
        check.rollout(right, [torch.rand(2, 5, 5)])


def test_generation_slice_and_its_mistakes() -> None:
    maps = list(torch.rand(3, 1, 7, 7, generator=torch.Generator().manual_seed(0)).tril())
    whole, m = torch.stack([one[0] for one in maps], -1), 4
    assert check.generation_slice(whole[3:, :4], maps, m)
    wrong = {
        "one too late": whole[m:, :m],
        "one too early": whole[m - 2 :, :m],
        "last row": whole[m - 1 : -1, :m],
        "all columns": whole[m - 1 :],
        "column is missing": whole[m - 1 :, : m - 1],
        "layers stand first": whole[m - 1 :, :m].movedim(-1, 0),
        "swapped": whole[:m, m - 1 :],
    }
    for words, answer in wrong.items():
        assert words in (check.generation_slice(answer, maps, m).mistake or ""), words
    with pytest.raises(ArgumentError, match="from 1 to 7"):
        check.generation_slice(whole, maps, 8)


def by_order(scores: Tensor, cues: Tensor) -> float:
    """Average precision as it is often written: ties go to the token that comes first."""
    hits, total = 0, 0.0
    for place, j in enumerate(sorted(range(len(scores)), key=lambda j: -scores[j].item()), start=1):
        if cues[j]:
            hits += 1
            total += hits / place
    return total / hits


def test_average_precision_and_its_mistakes() -> None:
    def right(scores: Tensor, cues: Tensor) -> Tensor:
        return cue_average_precision(scores[None], cues[None])[0]

    assert check.average_precision(right)
    assert (check.average_precision(by_order).mistake or "").startswith("ties")
    assert "descending" in (check.average_precision(lambda s, c: right(-s, c)).mistake or "")
    assert "reciprocal rank" in (
        check.average_precision(
            lambda s, c: 1 / (1 + c[s.argsort(descending=True, stable=True)].int().argmax())
        ).mistake
        or ""
    )


@pytest.mark.parametrize("grade", [check.average_precision, check.kendall, check.attention])
def test_function_that_does_not_run(grade: Any) -> None:
    def not_written(*arguments: Any) -> Any:
        raise NotImplementedError

    assert grade(not_written).mistake == "no answer"
    assert "returned nothing" in grade(lambda *arguments: None).message
    assert "raised ZeroDivisionError" in grade(lambda *arguments: 1 / 0).message
    assert "pass your function" in grade(3).message
    assert not grade(lambda *arguments: 7.0)


def test_kendall_and_its_mistakes() -> None:
    assert check.kendall(lambda a, b: package_kendall(a[None], b[None])[0])

    def pairs(a: Tensor, b: Tensor, count_ties: bool, subtract: bool) -> float:
        upper = torch.ones(len(a), len(a)).triu(1).bool()
        signs = ((a[:, None] - a).sign() * (b[:, None] - b).sign())[upper]
        same = (signs > 0).double().mean() if not subtract else signs.double().mean()
        return same.item()

    assert "ties" in (check.kendall(lambda a, b: pairs(a, b, True, True)).mistake or "")
    assert "not subtracted" in (check.kendall(lambda a, b: pairs(a, b, True, False)).mistake or "")


def test_deletion_and_its_mistakes() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 4.0, 1.0]])
    worth = torch.tensor([[0.4, 0.1, 0.3, 0.05], [0.02, 0.5, 0.2, 0.11]])
    counts = [0, 1, 2, 3]

    def predict(deleted: Tensor) -> Tensor:
        return 1 - (deleted * worth).sum(1)

    def curve(order: Tensor, alone: bool = False, shift: int = 0) -> list[float]:
        found = []
        for k in counts:
            deleted = torch.zeros(2, 4, dtype=torch.bool)
            for example, row in enumerate(order.tolist()):
                deleted[example, row[k - 1 : k] if alone and k else row[: 0 if alone else k + shift]] = True
            found.append(predict(deleted).mean().item())
        return found

    order = scores.argsort(descending=True)
    assert check.deletion(curve(order), predict, scores, counts)
    wrong = {
        "lowest scores": curve(order.flip(1)),
        "one token is deleted at a time": curve(order, alone=True),
        "one token too many": curve(order, shift=1),
        "differences": [1 - one for one in curve(order)],
    }
    for words, answer in wrong.items():
        assert words in (check.deletion(answer, predict, scores, counts).mistake or ""), words


def test_attention_and_its_mistakes() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.5, axis: int = -1) -> Tensor:
        return (q @ k.T * scale).softmax(axis) @ v

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        return (q @ k.T / 2).masked_fill(future, -torch.inf).softmax(-1) @ v

    assert check.attention(attention)
    assert check.attention(causal, causal=True)
    assert "square root of d" in (check.attention(lambda q, k, v: attention(q, k, v, 1)).mistake or "")
    assert "divided by d" in (check.attention(lambda q, k, v: attention(q, k, v, 0.25)).mistake or "")
    assert "wrong axis" in (check.attention(lambda q, k, v: attention(q, k, v, axis=0)).mistake or "")
    assert "causal mask is missing" in (check.attention(attention, causal=True).mistake or "")


def test_verified_model_and_refused_model() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    hidden = torch.randn(1, 5, 16)
    assert check.verified(model, hidden), check.verified(model, hidden)
    assert check.verified(None, hidden).mistake == "no answer"
    refused = check.verified(nn.Sequential(nn.Linear(16, 16)), hidden)
    assert refused.mistake == "refused"
    assert refused.message


def test_value_names_the_mistakes_of_a_lesson() -> None:
    assert check.value(0.75000001, 0.75)
    verdict = check.value(0.25, 0.75, {"this is the share of the others.": 0.25}, name="share")
    assert str(verdict) == "Not yet. share: this is the share of the others."
    assert check.value(torch.tensor(3), 3)
    assert "differs from the right number by 1.0e-01" in check.value(0.65, 0.75).message


def test_blank_out_and_its_mistakes() -> None:
    ids = torch.tensor([[3, 5, 7, 9]])

    def predict(batch: Tensor) -> Tensor:
        return (batch * torch.tensor([1.0, 0.5, 0.25, -1.0])).sum(1)

    clean = predict(ids).item()
    without = [predict(torch.tensor([[0 if i == j else one for i, one in enumerate([3, 5, 7, 9])]])) for j in range(4)]
    right = [clean - one.item() for one in without]
    assert check.blank_out(right, predict, ids, 0)
    assert "sign" in (check.blank_out([-one for one in right], predict, ids, 0).mistake or "")
    assert "these are predictions" in (check.blank_out([one.item() for one in without], predict, ids, 0).mistake or "")
    staying = torch.tensor(right).cumsum(0)
    assert "stay replaced" in (check.blank_out(staying, predict, ids, 0).mistake or "")
    with pytest.raises(ArgumentError, match="one text"):
        check.blank_out(right, predict, ids.repeat(2, 1), 0)


def test_shares_of_maps_and_their_mistakes() -> None:
    maps = list(torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(0)).double())
    words = [1, 2, 3]
    near = [sum(one[0, i, i - 1] + one[0, i, i + 1] for i in words) / 3 for one in maps]
    own = [sum(one[0, i, i] for i in words) / 3 for one in maps]
    assert check.neighbor_share(near, maps, words)
    both = [a + b for a, b in zip(near, own, strict=True)]
    assert "word itself" in (check.neighbor_share(both, maps, words).mistake or "")
    before = [sum(one[0, i, i - 1] for i in words) / 3 for one in maps]
    assert "before the word" in (check.neighbor_share(before, maps, words).mistake or "")
    columns = [sum(one[0, i - 1, i] + one[0, i + 1, i] for i in words) / 3 for one in maps]
    assert "swapped" in (check.neighbor_share(columns, maps, words).mistake or "")
    assert "mean of the two" in (check.neighbor_share([one / 2 for one in near], maps, words).mistake or "")

    pair = [(one[0, 1, 3] + one[0, 3, 1]) / 2 for one in maps]
    assert check.pair_share(pair, maps, 1, 3)
    assert "one direction" in (check.pair_share([one[0, 3, 1] for one in maps], maps, 1, 3).mistake or "")
    assert "sum" in (check.pair_share([2 * one for one in pair], maps, 1, 3).mistake or "")
    with pytest.raises(ArgumentError, match="one example"):
        check.pair_share(pair, [torch.rand(2, 5, 5)], 1, 3)


def test_share_of_a_path_and_its_mistakes() -> None:
    one, two = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)).double()
    path = [1, 2, 4]  # token 2 reads token 1 in the first layer, token 4 reads token 2 in the second
    assert check.path_share(one[2, 1] * two[4, 2], [one, two], path)
    assert "sum" in (check.path_share(one[2, 1] + two[4, 2], [one, two], path).mistake or "")
    assert "swapped" in (check.path_share(one[1, 2] * two[2, 4], [one, two], path).mistake or "")
    assert "first step" in (check.path_share(two[2, 1] * one[4, 2], [one, two], path).mistake or "")
    staying = [1, 1, 4]
    right = (one[1, 1] / 2 + 0.5) * two[4, 1] / 2
    assert check.path_share(right, [one, two], staying, residual=0.5)
    forgotten = check.path_share(one[1, 1] * two[4, 1], [one, two], staying, residual=0.5)
    assert "residual is forgotten" in (forgotten.mistake or "")
    with pytest.raises(ArgumentError, match="one more than"):
        check.path_share(right, [one, two], [1, 2])

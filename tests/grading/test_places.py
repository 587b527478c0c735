"""The grader of places and counts accepts right answers in several forms, and names each usual mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d
from transformers import BartConfig, BartModel

from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from captum_vz_lessons import check


def named(verdict: check.Verdict, words: str) -> bool:
    return not verdict and words in (verdict.mistake or "")


def test_patch_and_its_mistakes() -> None:
    def graded(token: Any) -> check.Verdict:
        return check.patch_token(token, 6, 2, patch=2, side=4)

    patches = torch.arange(16).reshape(4, 4).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert graded(patches[6, 2] + 1)
    assert named(graded(patches[6, 2]), "[CLS] is token 0")
    assert named(graded(patches[2, 6] + 1), "swapped")
    assert named(graded(1 + 6 * 8 + 2), "these are pixels")


def test_centers_of_frames_and_their_mistakes() -> None:
    kernels, strides, frames = (10, 8, 4), (5, 4, 4), 3
    covers = torch.eye(400)[:, None]  # one input sample is 1, the others are 0
    for kernel, stride in zip(kernels, strides, strict=True):
        covers = conv1d(covers, torch.ones(1, 1, kernel), stride=stride)
    seen = covers[:, 0].T > 0  # (frames, samples): which samples reach a frame
    ends = [row.nonzero().flatten()[[0, -1]].double() for row in seen[:frames]]
    centers = torch.stack(ends).mean(1)

    def graded(answer: Any) -> check.Verdict:
        return check.frame_centers(answer, kernels, strides, frames)

    assert graded(centers)
    assert graded(centers.tolist())
    assert named(graded(centers - centers[0]), "does not stand at sample 0")
    assert named(graded([one[1] for one in ends]), "last samples")
    assert named(graded(centers[0] + 4 * torch.arange(frames)), "further apart")
    assert named(graded(centers[0] + 13 * torch.arange(frames)), "added")
    assert named(graded(4.5 + 3.5 + 1.5 + 80 * torch.arange(frames)), "multiply them by the strides")
    assert named(graded(5 + 4 * 5 + 2 * 20 + 80 * torch.arange(frames)), "(k - 1) / 2")


def test_copied_columns_and_their_mistakes() -> None:
    source = torch.randint(3, 20, (40, 6), generator=torch.Generator().manual_seed(0))
    written = source.flip(1)
    assert check.copied_from([5, 4, 3, 2, 1, 0], source, written)
    assert named(check.copied_from(range(6), source, written), "order is that of the source")
    assert named(check.copied_from([6, 5, 4, 3, 2, 1], source, written), "counted from 0")
    assert named(check.copied_from([0, 5, 4, 3, 2, 1], source, written), "written next")
    with pytest.raises(ArgumentError, match="no single position"):
        check.copied_from([0], source, torch.zeros(40, 1))


def test_source_that_is_read_and_its_mistakes() -> None:
    torch.manual_seed(0)
    size: Any = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads: Any = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(BartConfig(vocab_size=30, **size, **heads)).eval()
    inputs = {"input_ids": torch.tensor([[5, 5, 5, 5]]), "decoder_input_ids": torch.tensor([[2, 9, 10]])}
    layer = find_layers(model, "decoder")[-1]
    scores: Any = ValueZeroing(model, layer, attention="cross").attribute(inputs)
    best = int(scores[0, 1].argmax())
    assert check.source_read(best, model, inputs, row=1)
    assert named(check.source_read((best + 1) % 4, model, inputs, row=1), "holds the same token")
    assert not check.source_read(7, model, inputs, row=1)


def test_rates_and_their_mistakes() -> None:
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
    places, chosen = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([True, True, True, False, False])
    assert check.found_rate(2 / 3, scores, places, chosen)
    assert check.found_rate(torch.tensor([3 / 5]), scores, places)
    assert named(check.found_rate(1 / 2, scores, places, chosen), "the other examples")
    assert named(check.found_rate(3 / 5, scores, places, chosen), "all examples")
    assert named(check.found_rate(2 / 5, scores, places, chosen), "divided by the number of all")
    assert named(check.found_rate(2, scores, places, chosen), "number of examples")
    assert named(check.found_rate(1 / 3, scores, places, chosen), "missed")
    assert named(check.found_rate(0.5, scores[:3], places[:3]), "mean score")


def test_shares_at_places_and_their_mistakes() -> None:
    scores = torch.tensor([[4.0, 2.0, 2.0], [1.0, 1.0, 2.0], [0.0, 3.0, 1.0]])
    places = torch.tensor([[0, 1], [1, 2], [2, 1]])
    right = (0.5 + 0.5 + 0.75) / 3, (0.75 + 0.75 + 1) / 3
    assert check.place_shares(right, scores, places)
    assert check.place_shares([torch.tensor(one) for one in right], scores, places)
    assert named(check.place_shares(right[::-1], scores, places), "other order")
    assert named(check.place_shares((right[0], right[1] / 2), scores, places), "Add up the shares")
    assert named(check.place_shares(((4 + 2 + 3) / 3, (6 + 3 + 4) / 3), scores, places), "divide each row")
    means = (0.5 + 0.25 + 0.25) / 3, (0.25 + 0.5 + 0.75) / 3
    assert named(check.place_shares((max(means), right[1]), scores, places), "largest of each example")


def test_hidden_share_and_its_mistakes() -> None:
    scores = torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 6
    hidden = [True, True, False, True, True, False]

    def graded(answer: float | Tensor) -> check.Verdict:
        return check.hidden_share(answer, scores, hidden, step=0, layer=-1)

    row = scores[0, :, 2].tolist()
    assert graded(sum(one for one, off in zip(row, hidden, strict=True) if off))
    assert named(graded(row[2] + row[5]), "that the mask shows")
    assert named(graded(4 / 6), "numbers of tokens")
    assert named(graded(scores[0, hidden, 1].sum()), "this is layer 1")
    assert named(graded(scores[2, hidden, 2].sum()), "generated token 2")
    assert named(graded(scores[0, hidden, 2].mean()), "this is the mean")

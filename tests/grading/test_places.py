"""The grader of places and counts accepts right answers in several forms, and names each usual mistake."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d
from transformers import BartConfig, BartModel

from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from captum_vz_lessons import check
from tests.grading import assert_named


def test_patch_and_its_mistakes() -> None:
    graded = partial(check.patch_token, row=6, column=2, patch=2, side=4)
    patches = torch.arange(16).reshape(4, 4).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert graded(patches[6, 2] + 1)
    wrong = {"[CLS] is token 0": patches[6, 2], "swapped": patches[2, 6] + 1, "these are pixels": 1 + 6 * 8 + 2}
    assert_named(graded, wrong)


def test_centers_of_frames_and_their_mistakes() -> None:
    kernels, strides, frames = (10, 8, 4), (5, 4, 4), 3
    covers = torch.eye(400)[:, None]  # one input sample is 1, the others are 0
    for kernel, stride in zip(kernels, strides, strict=True):
        covers = conv1d(covers, torch.ones(1, 1, kernel), stride=stride)
    seen = covers[:, 0].T > 0  # (frames, samples): which samples reach a frame
    ends = torch.stack([row.nonzero().flatten()[[0, -1]].double() for row in seen[:frames]])
    centers, steps = ends.mean(1), torch.arange(frames)
    graded = partial(check.frame_centers, kernels=kernels, strides=strides, frames=frames)
    assert graded(centers)
    assert graded(centers.tolist())
    wrong = {
        "does not stand at sample 0": centers - centers[0],
        "last samples": ends[:, 1],
        "further apart": centers[0] + 4 * steps,
        "added": centers[0] + 13 * steps,
        "multiply them by the strides": 4.5 + 3.5 + 1.5 + 80 * steps,
        "(k - 1) / 2": 5 + 4 * 5 + 2 * 20 + 80 * steps,
    }
    assert_named(graded, wrong)


def test_copied_columns_and_their_mistakes() -> None:
    source = torch.randint(3, 20, (40, 6), generator=torch.Generator().manual_seed(0))
    graded = partial(check.copied_from, source=source, written=source.flip(1))
    assert graded([5, 4, 3, 2, 1, 0])
    wrong = {"that of the source": range(6), "from 0": [6, 5, 4, 3, 2, 1], "written next": [0, 5, 4, 3, 2, 1]}
    assert_named(graded, wrong)
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
    graded = partial(check.source_read, model=model, inputs=inputs, row=1)
    assert graded(best)
    assert_named(graded, {"holds the same token": (best + 1) % 4})
    assert not graded(7)


def test_rates_and_their_mistakes() -> None:
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
    places, chosen = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([True, True, True, False, False])
    graded = partial(check.found_rate, scores=scores, places=places, chosen=chosen)
    assert graded(2 / 3)
    assert check.found_rate(torch.tensor([3 / 5]), scores, places)
    wrong = {"other examples": 1 / 2, "all examples": 3 / 5, "the number of all": 2 / 5, "number of examples": 2}
    assert_named(graded, wrong | {"missed": 1 / 3})
    assert_named(lambda answer: check.found_rate(answer, scores[:3], places[:3]), {"mean score": 0.5})


def test_shares_at_places_and_their_mistakes() -> None:
    scores = torch.tensor([[4.0, 2.0, 2.0], [1.0, 1.0, 2.0], [0.0, 3.0, 1.0]])
    places = torch.tensor([[0, 1], [1, 2], [2, 1]])
    right = (0.5 + 0.5 + 0.75) / 3, (0.75 + 0.75 + 1) / 3
    graded = partial(check.place_shares, scores=scores, places=places)
    assert graded(right)
    assert graded([torch.tensor(one) for one in right])
    means = (0.5 + 0.25 + 0.25) / 3, (0.25 + 0.5 + 0.75) / 3
    wrong = {"other order": right[::-1], "Add up the shares": (right[0], right[1] / 2)}
    wrong |= {"divide each row": ((4 + 2 + 3) / 3, (6 + 3 + 4) / 3), "largest of each": (max(means), right[1])}
    assert_named(graded, wrong)


def test_hidden_share_and_its_mistakes() -> None:
    scores = torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 6
    hidden = [True, True, False, True, True, False]

    def graded(answer: float | Tensor) -> check.Verdict:
        return check.hidden_share(answer, scores, hidden, step=0, layer=-1)

    row = scores[0, :, 2]
    assert graded(row[hidden].sum())
    wrong = {"that the mask shows": row[2] + row[5], "numbers of tokens": 4 / 6, "this is the mean": row[hidden].mean()}
    wrong |= {"this is layer 1": scores[0, hidden, 1].sum(), "generated token 2": scores[2, hidden, 2].sum()}
    assert_named(graded, wrong)

"""GlobEnc: the rollout of the norms of whole layers, with rows divided by their sums or as they are."""

from __future__ import annotations

import pytest
import torch

from captum_vz import GlobEnc
from tests.engine.compare import assert_batch_is_its_examples, assert_same
from tests.reference import FAMILIES, naive_rollout
from tests.reference.norms import naive_attention_norm

each = pytest.mark.parametrize("name", ["bert", "roberta", "electra", "distilbert", "bart-encoder"])


@each
@pytest.mark.parametrize("residual", [None, 0.5, "renormalize"])
def test_the_rollout_of_every_layer(name: str, residual: float | str | None) -> None:
    case = FAMILIES[name].case
    maps = [naive_attention_norm(case, index, "encoder") for index in range(len(case.layers))]
    rollouts = GlobEnc(case.model, case.layers, residual=residual).attribute(case.inputs, all_layers=True)
    assert_same(rollouts, naive_rollout(maps, residual))


@each
def test_norms_without_normalization(name: str) -> None:
    case = FAMILIES[name].case
    maps = [naive_attention_norm(case, index, "encoder", normalize=False) for index in range(len(case.layers))]
    rollouts = GlobEnc(case.model, case.layers, normalize=False).attribute(case.inputs, all_layers=True)
    for rollout, expected in zip(rollouts, naive_rollout(maps), strict=True):
        assert_same(rollout / rollout.amax((1, 2), keepdim=True), expected / expected.amax((1, 2), keepdim=True))
    assert_same(rollouts[0].amax((1, 2)), torch.ones(case.batch, dtype=torch.float64))


@each
def test_normalization_changes_rankings(name: str) -> None:
    case = FAMILIES[name].case
    divided, as_they_are = (
        GlobEnc(case.model, case.layers, normalize=normalize).attribute(case.inputs) for normalize in (True, False)
    )
    real = case.inputs["attention_mask"].bool()
    assert_same(divided.sum(-1), real.double())
    assert not torch.allclose(as_they_are[0] / as_they_are[0].sum(-1, keepdim=True), divided[0], atol=1e-4)


@pytest.mark.parametrize("normalize", [True, False])
@each
def test_padded_batch_equals_its_examples(name: str, normalize: bool) -> None:
    case = FAMILIES[name].case
    method = GlobEnc(case.model, case.layers, normalize=normalize)
    together = assert_batch_is_its_examples(method, case)
    rows = method.attribute(case.inputs, token=[0, 2, 1])
    assert_same(rows, together[[0, 1, 2], [0, 2, 1]])


def test_pre_norm_layers_are_refused() -> None:
    case = FAMILIES["gpt2"].case
    with pytest.raises(AssertionError, match="GPT2Block norms the attention's input"):
        GlobEnc(case.model, case.layers).attribute(case.inputs)

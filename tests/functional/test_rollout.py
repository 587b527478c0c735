"""Rollout equals loops and closed forms, and receptive fields equal counts of reached tokens."""

import pytest
import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional import Residual, add_residual, normalize_rows, receptive_fields, rollout
from tests.reference.attention import naive_rollout

every_residual = pytest.mark.parametrize("residual", [None, 0.5, "renormalize", "add"])


def random_maps(layers: int = 3, batch: int = 2, tokens: int = 4) -> Tensor:
    """Rows of each map (layers, batch, tokens, tokens) sum to 1."""
    return normalize_rows(torch.rand(layers, batch, tokens, tokens, dtype=torch.float64))


@every_residual
def test_rollout_equals_naive_twin(residual: Residual) -> None:
    maps = torch.rand(3, 2, 4, 4, dtype=torch.float64)  # the residuals differ because rows do not sum to 1
    maps[:, 1, 3:] = 0
    maps[:, 1, :, 3:] = 0
    for ours, naive in zip(rollout(maps, residual), naive_rollout(list(maps), residual), strict=True):
        torch.testing.assert_close(ours, naive)


def test_residuals_agree_on_normalised_rows() -> None:
    maps = random_maps()
    torch.testing.assert_close(rollout(maps, 0.5), rollout(maps, "renormalize"))
    assert (rollout(2 * maps, "renormalize")[-1] - rollout(maps, "renormalize")[-1]).abs().max() > 1e-2


@every_residual
def test_rollout_of_padded_example(residual: Residual) -> None:
    alone = random_maps(batch=1, tokens=3)
    padded = torch.zeros(3, 1, 5, 5, dtype=torch.float64)
    padded[..., :3, :3] = alone
    for with_pads, without in zip(rollout(padded, residual), rollout(alone, residual), strict=True):
        torch.testing.assert_close(with_pads[:, :3, :3], without)
        assert with_pads[:, 3:].count_nonzero() == with_pads[..., 3:].count_nonzero() == 0


def test_rollout_of_generator_and_half_precision() -> None:
    maps = random_maps().bfloat16()
    from_generator = rollout(layer for layer in maps)
    assert {after.dtype for after in from_generator} == {torch.float64}
    torch.testing.assert_close(from_generator, rollout(maps.double()))


def test_receptive_fields_count_reached_tokens() -> None:
    maps = random_maps(layers=4, tokens=6)
    maps[torch.rand(maps.shape) < 0.6] = 0
    for after, counts in zip(rollout(maps, 0.5), receptive_fields(maps, 0.5), strict=True):
        expected = [[sum(row[j] > 0 for row in example) for j in range(6)] for example in after.tolist()]
        assert counts.tolist() == expected


def test_residual_keeps_float32() -> None:
    assert add_residual(torch.eye(2)[None], 0.5).dtype == torch.float32
    assert add_residual(torch.eye(2).half()[None], None).dtype == torch.float32


@pytest.mark.parametrize("wrong", [1.0, 0.3, "half", True])
def test_rollout_of_unknown_residual(wrong: Residual) -> None:
    with pytest.raises(ArgumentError, match=f"is {wrong!r}"):
        rollout(random_maps(), wrong)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 3)], "Expected a map"),
        ([(2, 3, 4)], "Expected a map"),
        ([(1, 2, 3, 3)], "Expected a map"),
        ([(1, 3, 3), (1, 2, 2)], r"1 is \(1, 2, 2\)"),
        ([], "got none"),
    ],
)
def test_rollout_of_wrong_shapes(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rollout([torch.ones(shape) for shape in shapes])

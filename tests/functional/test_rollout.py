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


@every_residual
def test_rollout_row_sums(residual: Residual) -> None:
    for layer, after in enumerate(rollout(random_maps(layers=8), residual)):
        total = 2.0 ** (layer + 1) if residual == "add" else 1.0
        torch.testing.assert_close(after.sum(-1), torch.full((2, 4), total, dtype=torch.float64))


def test_residuals_agree_on_normalised_rows() -> None:
    maps = random_maps()
    torch.testing.assert_close(rollout(maps, 0.5), rollout(maps, "renormalize"))
    assert (rollout(2 * maps, "renormalize")[-1] - rollout(maps, "renormalize")[-1]).abs().max() > 1e-2


def test_rollout_of_one_layer() -> None:
    maps = random_maps(layers=1)
    assert torch.equal(rollout(maps)[0], maps[0])


def test_rollout_of_identity_maps() -> None:
    identity = torch.eye(3).expand(4, 1, 3, 3)
    assert torch.equal(rollout(identity, 0.5)[-1], torch.eye(3, dtype=torch.float64)[None])


def test_rollout_of_uniform_attention() -> None:
    # (I/2 + J/2n)^L = I/2^L + (1 - 1/2^L) J/n, where J is a matrix of ones.
    tokens, layers = 5, 6
    uniform = torch.full((layers, 1, tokens, tokens), 1 / tokens, dtype=torch.float64)
    kept = 0.5**layers
    expected = kept * torch.eye(tokens, dtype=torch.float64) + (1 - kept) / tokens
    torch.testing.assert_close(rollout(uniform, 0.5)[-1][0], expected)


def test_rollout_of_causal_maps() -> None:
    maps = normalize_rows(torch.rand(5, 1, 4, 4, dtype=torch.float64).tril())
    last = rollout(maps)[-1]
    assert torch.equal(last, last.tril())
    assert torch.equal(last[0, 0], torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))


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
    with pytest.raises(ArgumentError, match=rf"residual is {wrong!r}: pass None, 0.5, 'renormalize' or 'add'"):
        rollout(random_maps(), wrong)


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 4), (1, 2, 3, 3)])
def test_rollout_of_wrong_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"Expected a map \(batch, tokens, tokens\), got \("):
        rollout([torch.ones(shape)])


def test_rollout_of_different_shapes() -> None:
    with pytest.raises(ArgumentError, match=r"map 1 is \(1, 2, 2\), the maps before it are \(1, 3, 3\)"):
        rollout([torch.ones(1, 3, 3), torch.ones(1, 2, 2)])


def test_rollout_of_no_map() -> None:
    with pytest.raises(ArgumentError, match="at least one layer, got none"):
        rollout([])

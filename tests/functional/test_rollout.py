"""Rollout against loops, closed forms and what must hold of any product of maps."""

import pytest
import torch
from torch import Tensor

from captum_vz.functional import Residual, add_residual, normalize_rows, rollout
from tests.reference.attention import naive_rollout

every_residual = pytest.mark.parametrize("residual", [None, 0.5, "renormalize"])


def random_maps(layers: int = 3, batch: int = 2, tokens: int = 4) -> Tensor:
    """Rows of each map (layers, batch, tokens, tokens) sum to 1."""
    return normalize_rows(torch.rand(layers, batch, tokens, tokens, dtype=torch.float64))


@every_residual
def test_rollout_equals_its_naive_twin(residual: Residual) -> None:
    maps = torch.rand(3, 2, 4, 4, dtype=torch.float64)  # rows that do not sum to 1, where the residuals differ
    maps[:, 1, 3:] = 0
    maps[:, 1, :, 3:] = 0
    for ours, naive in zip(rollout(maps, residual), naive_rollout(list(maps), residual), strict=True):
        torch.testing.assert_close(ours, naive)


@every_residual
def test_rows_sum_to_one_if_those_of_the_maps_do(residual: Residual) -> None:
    for after in rollout(random_maps(layers=8), residual):
        torch.testing.assert_close(after.sum(-1), torch.ones(2, 4, dtype=torch.float64))


def test_the_two_residuals_agree_only_on_rows_that_sum_to_one() -> None:
    maps = random_maps()
    torch.testing.assert_close(rollout(maps, 0.5), rollout(maps, "renormalize"))
    assert (rollout(2 * maps, "renormalize")[-1] - rollout(maps, "renormalize")[-1]).abs().max() > 1e-2


def test_a_rollout_of_one_layer_is_its_map() -> None:
    maps = random_maps(layers=1)
    assert torch.equal(rollout(maps)[0], maps[0])


def test_without_attention_to_others_only_the_token_itself_remains() -> None:
    identity = torch.eye(3).expand(4, 1, 3, 3)
    assert torch.equal(rollout(identity, 0.5)[-1], torch.eye(3, dtype=torch.float64)[None])


def test_uniform_attention_has_a_closed_form() -> None:
    # (I/2 + J/2n)^L = I/2^L + (1 - 1/2^L) J/n, where J is all ones.
    tokens, layers = 5, 6
    uniform = torch.full((layers, 1, tokens, tokens), 1 / tokens, dtype=torch.float64)
    kept = 0.5**layers
    expected = kept * torch.eye(tokens, dtype=torch.float64) + (1 - kept) / tokens
    torch.testing.assert_close(rollout(uniform, 0.5)[-1][0], expected)


def test_a_causal_stack_stays_causal() -> None:
    maps = normalize_rows(torch.rand(5, 1, 4, 4, dtype=torch.float64).tril())
    last = rollout(maps)[-1]
    assert torch.equal(last, last.tril())
    assert torch.equal(last[0, 0], torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))


@every_residual
def test_a_padded_example_rolls_out_as_it_does_alone(residual: Residual) -> None:
    alone = random_maps(batch=1, tokens=3)
    padded = torch.zeros(3, 1, 5, 5, dtype=torch.float64)
    padded[..., :3, :3] = alone
    for with_pads, without in zip(rollout(padded, residual), rollout(alone, residual), strict=True):
        torch.testing.assert_close(with_pads[:, :3, :3], without)
        assert with_pads[:, 3:].count_nonzero() == with_pads[..., 3:].count_nonzero() == 0


def test_any_iterable_of_maps_in_any_precision_gives_float64() -> None:
    maps = random_maps().bfloat16()
    from_generator = rollout(layer for layer in maps)
    assert {after.dtype for after in from_generator} == {torch.float64}
    torch.testing.assert_close(from_generator, rollout(maps.double()))


def test_the_residual_keeps_float32() -> None:
    assert add_residual(torch.eye(2)[None], 0.5).dtype == torch.float32
    assert add_residual(torch.eye(2).half()[None], None).dtype == torch.float32


@pytest.mark.parametrize("wrong", [1.0, 0.3, "half", True])
def test_another_residual_is_refused(wrong: Residual) -> None:
    with pytest.raises(AssertionError, match=rf"residual is {wrong!r}: pass None, 0.5 or 'renormalize'"):
        rollout(random_maps(), wrong)


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 4), (1, 2, 3, 3)])
def test_what_is_not_a_map_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match=r"Expected a map \(batch, tokens, tokens\), got \("):
        rollout([torch.ones(shape)])


def test_maps_of_different_shapes_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"map 1 is \(1, 2, 2\), those before it are \(1, 3, 3\)"):
        rollout([torch.ones(1, 3, 3), torch.ones(1, 2, 2)])


def test_no_map_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one layer, got none"):
        rollout([])

"""Checks that all pictures of scores share."""

from collections.abc import Sequence

from torch import Tensor

from captum_vz.errors import ArgumentError


def one_example(scores: Tensor, tokens: Sequence[str], dimensions: int) -> Tensor:
    """The scores without a batch dimension, on the CPU. Each of the `dimensions` must be as long as `tokens`."""
    kind = {1: "scores (tokens,) or (1, tokens)", 2: "a map (tokens, tokens) or (1, tokens, tokens)"}[dimensions]
    if not isinstance(scores, Tensor):
        raise ArgumentError(f"Expected {kind}, got {type(scores).__name__}.")
    shape = tuple(scores.shape)
    if scores.dim() == dimensions + 1 and len(scores) != 1:
        raise ArgumentError(f"Expected {kind}, got a batch {shape}: pass one example of it, such as scores[0].")
    example = scores[0] if scores.dim() == dimensions + 1 else scores
    if tuple(example.shape) != (len(tokens),) * dimensions:
        raise ArgumentError(f"Expected {kind} for the {len(tokens)} tokens, got {shape}.")
    if not example.isfinite().all():
        raise ArgumentError("Expected finite scores, got NaN or infinity, which cannot be drawn.")
    return example.detach().cpu()


def position_of(token: int | None, tokens: Sequence[str]) -> int | None:
    """The position of the marked token, counted from the start."""
    if token is None:
        return None
    count = len(tokens)
    if not -count <= token < count:
        raise ArgumentError(
            f"token {token} is out of range: there are {count} tokens, so pass a position from {-count} to {count - 1}."
        )
    return token % count

"""What every picture of scores has to be sure of first."""

from collections.abc import Sequence

from torch import Tensor


def one_example(scores: Tensor, tokens: Sequence[str], dimensions: int) -> Tensor:
    """The scores of the one example in them, on the CPU: as many tokens as `tokens` in each of `dimensions`."""
    kind = {1: "scores (tokens,) or (1, tokens)", 2: "a map (tokens, tokens) or (1, tokens, tokens)"}[dimensions]
    assert isinstance(scores, Tensor), f"Expected {kind}, got {type(scores).__name__}."
    shape = tuple(scores.shape)
    assert scores.dim() != dimensions + 1 or len(scores) == 1, (
        f"Expected {kind}, got a batch {shape}: pass one example of it, such as scores[0]."
    )
    example = scores[0] if scores.dim() == dimensions + 1 else scores
    assert tuple(example.shape) == (len(tokens),) * dimensions, (
        f"Expected {kind} for the {len(tokens)} tokens, got {shape}."
    )
    assert example.isfinite().all(), "Scores that are not finite (NaN or infinity) cannot be drawn."
    return example.detach().cpu()


def place_of(target: int | None, tokens: Sequence[str]) -> int | None:
    """The target's position, counted from the start."""
    if target is None:
        return None
    count = len(tokens)
    assert -count <= target < count, (
        f"target {target} is out of range: there are {count} tokens, positions {-count} to {count - 1}."
    )
    return target % count

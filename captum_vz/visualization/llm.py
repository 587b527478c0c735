"""A map of generated text as Captum's result for language models."""

from __future__ import annotations

from collections.abc import Sequence

from captum.attr import LLMAttributionResult
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import one_example


def as_llm_result(scores: Tensor, tokens: Sequence[str], prompt_length: int) -> LLMAttributionResult:
    """Returns the map of a causal model as what Captum's `LLMAttribution` returns, with its plots.

    The model predicts token i + 1 at position i. So the row of a generated token is that of the position before it. The
    columns of generated tokens are left out, because Captum's result has none.

    Args:
        scores: The map `(tokens, tokens)` or `(1, tokens, tokens)` of a layer or of a rollout, for the prompt and the
            generated tokens.
        tokens: All of these tokens.
        prompt_length: How many of them are the prompt.

    Returns:
        An `LLMAttributionResult`: `token_attr (generated, prompt)`, and `seq_attr (prompt,)`, the sum of its rows.

    Raises:
        ArgumentError: The map does not fit the tokens, or no token is generated.

    >>> import torch
    >>> result = as_llm_result(torch.eye(4).roll(-1, 1), ["the", "hat", "is", "red"], 2)
    >>> result.input_tokens, result.output_tokens, result.token_attr.shape
    (['the', 'hat'], ['is', 'red'], torch.Size([2, 2]))
    """
    given = one_example(scores, tokens, dimensions=2)
    if not 0 < prompt_length < len(tokens):
        raise ArgumentError(
            f"prompt_length is {prompt_length!r} of {len(tokens)} tokens: expected a prompt and generated tokens after "
            f"it, so pass 1 to {len(tokens) - 1}."
        )
    rows = given[prompt_length - 1 : -1, :prompt_length]
    return LLMAttributionResult(
        input_tokens=list(tokens[:prompt_length]),
        output_tokens=list(tokens[prompt_length:]),
        seq_attr=rows.sum(0),
        token_attr=rows,
    )

"""Grades for attention that the learner writes: a function, a model, and any number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from captum_vz import verify
from captum_vz.errors import RefusedError
from captum_vz.testbed.check.verdict import Mistakes, Verdict, judge, judge_function


def attention(yours: Callable[[Tensor, Tensor, Tensor], Any], *, causal: bool = False, hint: bool = False) -> Verdict:
    r"""Grade a function that computes attention, :math:`\operatorname{softmax}(Q K^\top / \sqrt{d}) V`.

    It recognizes scores that are not divided by :math:`\sqrt{d}`, or by d, a softmax over the wrong axis, a forgotten
    softmax, a forgotten causal mask, and a mask that is applied after the softmax.

    Args:
        yours: A function of q, k and v, each `(tokens, d)`, that returns `(tokens, d)`.
        causal: Whether token i may look at tokens up to i only.
        hint: Whether a wrong answer gets a second hint.

    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> from captum_vz.testbed import check
    >>> check.attention(scaled_dot_product_attention).passed
    True
    >>> check.attention(lambda q, k, v: (q @ k.T).softmax(-1) @ v)
    Not yet. attention: the scores are not divided by the square root of d.
    You go on with the package's answer. This exercise counts as open.
    """
    q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    there = torch.ones(5, 5, dtype=torch.bool).tril() if causal else torch.ones(5, 5, dtype=torch.bool)
    products = q @ k.T

    def with_scores(scores: Tensor, axis: int = -1) -> Tensor:
        return scores.where(there, -torch.inf).softmax(axis).nan_to_num() @ v

    scaled = products / 2
    mistakes: list[tuple[str, Tensor]] = [
        ("the scores are not divided by the square root of d.", with_scores(products)),
        ("the scores are divided by d. Divide by its square root.", with_scores(products / 4)),
        ("the softmax runs over the wrong axis. The weights of each output token sum to 1.", with_scores(scaled, 0)),
        ("queries and keys are swapped: rows are output tokens, Q @ K.T.", with_scores(scaled.T)),
        ("the softmax is missing.", scaled.where(there, 0) @ v),
        ("keys and values are swapped.", (q @ v.T / 2).where(there, -torch.inf).softmax(-1) @ k),
        ("the scores are multiplied by the square root of d. Divide.", with_scores(products * 2)),
        ("the exponentials are not divided by their sum.", scaled.exp().where(there, 0) @ v),
        ("the scale is the root of the number of tokens. Take that of d.", with_scores(products / 5**0.5)),
        ("the weights are scaled after the softmax. Scale the scores before it.", with_scores(products) / 2),
        ("these are the weights. Multiply them by the values.", scaled.where(there, -torch.inf).softmax(-1)),
    ]
    if causal:
        mistakes += [
            ("the causal mask is missing. Token i may look at tokens up to i only.", scaled.softmax(-1) @ v),
            ("the mask is applied after the softmax, so rows do not sum to 1.", scaled.softmax(-1).tril() @ v),
        ]

    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return judge_function("attention", yours, right, [(q, k, v)], mistakes, hint=hint)


def verified(
    model: Any, inputs: Any, layer: nn.Module | list[nn.Module] | None = None, *, hint: bool = False
) -> Verdict:
    """Grade a model of the learner: do its maps agree with the definition of Value Zeroing?

    The check is :func:`captum_vz.verify`. A model that the package refuses is not right yet, and the message says why.

    Args:
        model: A model in eval mode, or a function that runs the layers.
        inputs: What the model takes.
        layer: Its Transformer blocks. None: the layers that :func:`captum_vz.find_layers` finds.
        hint: Whether a wrong answer gets a second hint.
    """
    if model is None or model is ...:
        verdict = Verdict(False, "verified", "there is no model yet.", "no answer")
    else:
        try:
            report = verify(model, inputs, layer)
            mistake = None if report.passed else "differs"
            verdict = Verdict(report.passed, "verified", report.verdict, mistake, answer=model)
        except RefusedError as error:
            verdict = Verdict(False, "verified", str(error), "refused")
    return verdict if verdict else verdict.going_on(_torch_model(inputs), hint)


def _torch_model(inputs: Any) -> nn.Module | None:
    """A model of torch's own that takes hidden states such as these. None: the inputs are something else."""
    if not (isinstance(inputs, Tensor) and inputs.dim() == 3 and inputs.is_floating_point()):
        return None
    layer = nn.TransformerEncoderLayer(inputs.shape[-1], 1, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(inputs).eval()


def value(yours: Any, right: Any, mistakes: Mistakes = (), *, name: str = "value", tolerance: float = 1e-5) -> Verdict:
    """Grade any number or tensor against one that the lesson has computed.

    Args:
        yours: The answer.
        right: The right answer.
        mistakes: From what went wrong to the answer that this mistake gives: a dict, or pairs.
        name: What the verdict calls the exercise.
        tolerance: The largest difference, relative to the largest entry of the right answer if that is above 1.

    >>> from captum_vz.testbed import check
    >>> check.value(0.25, 0.75, {"this is the share of the others.": 0.25}, name="share")
    Not yet. share: this is the share of the others.
    You go on with the package's answer. This exercise counts as open.
    """
    return judge(name, yours, right, mistakes, tolerance=tolerance)

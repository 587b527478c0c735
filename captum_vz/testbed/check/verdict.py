"""A verdict on an answer: right, or not yet with the usual mistake that gives the same numbers, and with a hint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

#: The largest difference from the right answer, relative to its largest entry if that is above 1.
TOLERANCE = 1e-5
# An answer with a mistake is computed in its own way, so it is compared less strictly.
LIKENESS = 1e-3

# Mistakes of any exercise, looked for after its own mistakes: the wrong answer as a multiple of the right answer.
FACTORS = (("the sign is wrong.", -1), ("these are percentages. Divide by 100.", 100))

GOES_ON: Final = "You go on with the package's answer. This exercise counts as open."
#: The type under which a notebook keeps a verdict, for `captum-vz lab grade`.
MIME_TYPE: Final = "application/vnd.captum-vz.verdict+json"
GREEN, ORANGE = "#1b7f46", "#b45309"  # white letters on them have a contrast of 5 to 1

#: What went wrong, and the answer that this mistake gives. A function is called only after a wrong answer. In pairs, a
#: mistake may occur several times, with different answers.
Mistakes: TypeAlias = Mapping[str, Any] | Sequence[tuple[str, Any]]


@dataclass(frozen=True, repr=False)
class Verdict:
    """What `captum_vz.testbed.check` says of an answer. It is true if the answer is right.

    A notebook shows it in color. It begins with "Right." or "Not yet.".

    Attributes:
        passed: Whether the answer is right.
        exercise: The name of the exercise.
        message: What was compared, and what to do if it differs.
        mistake: The usual mistake that gives these numbers. None: the answer is right, or the mistake is not known.
        answer: What the lesson goes on with: the learner's answer if it is right, else the package's.
        hint: The second hint, if it was asked for.

    >>> verdict = Verdict(False, "value_zeroing_row", "The row is not divided by its sum.")
    >>> bool(verdict), verdict
    (False, Not yet. value_zeroing_row: The row is not divided by its sum.)
    """

    passed: bool
    exercise: str
    message: str
    mistake: str | None = None
    answer: Any = field(default=None, compare=False)
    hint: str = ""

    def __bool__(self) -> bool:
        """Whether the answer is right."""
        return self.passed

    def __repr__(self) -> str:
        """A line that begins with "Right." or "Not yet.", then the hint, and what the lesson goes on with."""
        first = f"{'Right.' if self.passed else 'Not yet.'} {self.exercise}: {self.message}"
        return "\n".join([first, *self._further()])

    def _further(self) -> list[str]:
        hint = [f"Hint: {self.hint}"] if self.hint else []
        return hint if self.passed or self.answer is None else [*hint, GOES_ON]

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """What a notebook shows and keeps. An object with `_repr_html_` would not keep the verdict for the grader."""
        content = {"exercise": self.exercise, "passed": self.passed, "mistake": self.mistake}
        return {"text/plain": repr(self), "text/html": self._repr_html_(), MIME_TYPE: content}

    def _repr_html_(self) -> str:
        """The verdict in green or orange, with a sign: color is not all that tells them apart."""
        color, sign, word = (GREEN, "✓", "Right.") if self.passed else (ORANGE, "✗", "Not yet.")
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._further())
        return (
            f'<div style="border-left: 6px solid {color}; padding: 4px 12px">'
            f'<b style="background: {color}; color: #fff; padding: 1px 6px">{sign} {word}</b> '
            f"{escape(self.exercise)}: {escape(self.message)}{lines}</div>"
        )

    def going_on(self, answer: Any, hint: bool) -> Verdict:
        """This verdict on a wrong answer, with the package's answer, and with the second hint if it is asked for."""
        return replace(self, answer=answer, hint=HINTS.get(self.exercise, "") if hint else "")


def judge(
    exercise: str,
    yours: Any,
    right: Any,
    mistakes: Mistakes = (),
    *,
    tolerance: float = TOLERANCE,
    hint: bool = False,
) -> Verdict:
    """Compare an answer with the right one, and name the mistake that explains a difference.

    Args:
        exercise: The name of the exercise.
        yours: The answer: a tensor, an array, a list or a number.
        right: The right answer.
        mistakes: Usual mistakes and the answers that they give.
        tolerance: The largest difference, relative to the largest entry of the right answer if that is above 1.
        hint: Whether a wrong answer gets the second hint.
    """
    verdict = _compared(exercise, yours, right, mistakes, tolerance)
    return replace(verdict, answer=yours) if verdict else verdict.going_on(right, hint)


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


def _compared(exercise: str, yours: Any, right: Any, mistakes: Mistakes, tolerance: float) -> Verdict:
    expected = torch.as_tensor(right).detach().double().cpu()
    found = tensor_of(yours)
    if found is None:
        return Verdict(False, exercise, _nothing(yours, expected), "no answer")
    if found.shape != expected.shape and found.numel() == expected.numel() and found.squeeze().shape == expected.shape:
        found = found.squeeze()
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    error = float("inf")
    if found.shape == expected.shape:
        error = (found - expected).abs().max().item() if found.numel() else 0.0
        if error <= tolerance * scale:
            return Verdict(True, exercise, f"largest difference {error:.1e}.")
    best, likely = error, ""  # several mistakes may give nearly the same numbers: the nearest is named
    named = mistakes.items() if isinstance(mistakes, Mapping) else mistakes
    alone = [(mistake, tensor_of(wrong() if callable(wrong) else wrong)) for mistake, wrong in named]
    common = [(mistake, factor * expected) for mistake, factor in FACTORS]
    both = [
        (f"{first} {second[0].upper()}{second[1:]}", factor * other)
        for first, other in alone
        if other is not None
        for second, factor in FACTORS
    ]
    for some in ([*alone, *common], both):  # two mistakes at once are named only if no single one gives these numbers
        for mistake, other in some if not likely else []:
            if other is None or _distance(expected, other) <= tolerance:
                continue
            apart = _distance(found, other)
            if apart <= LIKENESS and apart * _size(other) < best:
                best, likely = apart * _size(other), mistake
    if likely:
        return Verdict(False, exercise, likely, likely)
    return Verdict(False, exercise, _difference(found, expected, scale))


def judge_function(
    exercise: str,
    yours: Any,
    right: Callable[..., Any],
    cases: Sequence[tuple[Any, ...]],
    mistakes: Mistakes = (),
    *,
    hint: bool = False,
) -> Verdict:
    """Compare what a function of the learner returns with what the right function returns, in each case.

    Args:
        exercise: The name of the exercise.
        yours: The function of the learner.
        right: The right function. The lesson goes on with it if the other one is wrong.
        cases: The arguments of each call.
        mistakes: Usual mistakes and the results that they give: of the only case, or a list.
        hint: Whether a wrong answer gets the second hint.
    """
    found: list[Any] = []
    for case in cases:
        if (verdict := _call(exercise, yours, case, found)) is not None:
            return verdict.going_on(right, hint)
    expected = [right(*case) for case in cases]
    one = len(cases) == 1
    verdict = judge(exercise, found[0] if one else found, expected[0] if one else expected, mistakes, hint=hint)
    return replace(verdict, answer=yours if verdict else right)


def _call(exercise: str, function: Any, arguments: tuple[Any, ...], results: list[Any]) -> Verdict | None:
    """Append what a function of the learner returns. A verdict says why it returns nothing."""
    if not callable(function):
        return Verdict(False, exercise, f"pass your function, not {_described(function)}.", "no function")
    try:
        found = function(*arguments)
    except NotImplementedError:
        return Verdict(False, exercise, "the function is not written yet.", "no answer")
    except Exception as error:  # any error of the learner's code is shown to the learner
        return Verdict(False, exercise, f"the function raised {type(error).__name__}: {error}", "error")
    if found is None or found is ...:
        return Verdict(False, exercise, "the function returned nothing: end it with `return`.", "no answer")
    results.append(found)
    return None


def tensor_of(value: Any) -> Tensor | None:
    """The answer as a tensor in float64, or None if it is no array of numbers."""
    if value is None or value is ... or isinstance(value, str):
        return None
    try:
        return torch.as_tensor(value).detach().double().cpu()
    except (TypeError, ValueError, RuntimeError):
        pass
    try:
        parts = [tensor_of(one) for one in value]
        numbers = [one for one in parts if one is not None]
        return torch.stack(numbers) if numbers and len(numbers) == len(parts) else None
    except (TypeError, RuntimeError):
        return None


def _distance(found: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry of `other`. Infinity: the shapes differ, or one is NaN."""
    found, other = found.squeeze(), other.squeeze()
    if found.shape != other.shape or not found.isfinite().all():
        return float("inf")
    return float((found - other).abs().max() / _size(other))


def _size(of: Tensor) -> float:
    return max(of.abs().max().item(), 1e-12)


def _nothing(yours: Any, expected: Tensor) -> str:
    wanted = "a number" if expected.dim() == 0 else f"numbers of shape {tuple(expected.shape)}"
    if yours is None or yours is ...:
        return f"there is no answer yet. Expected {wanted}."
    return f"the answer is {_described(yours)}. Expected {wanted}."


def _described(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def _difference(found: Tensor, expected: Tensor, scale: float) -> str:
    if found.shape != expected.shape:
        return f"the answer has the shape {tuple(found.shape)}. Expected {tuple(expected.shape)}."
    if not found.isfinite().all():
        return "the answer holds NaN or infinity. Is something divided by zero?"
    error = (found - expected).abs()
    if expected.dim() == 0:
        return f"the answer is {found.item():.6g}, which differs from the right number by {error.item():.1e}."
    place = tuple(int(one) for one in torch.unravel_index(error.argmax(), error.shape))
    largest = error.max().item()
    note = (
        " It is nearly right. If you computed in float32, compute in float64, because 1 - cos loses digits. If not, a "
        "small term is missing."
        if largest < LIKENESS * scale
        else ""
    )
    return f"the largest difference is {largest:.1e}, at {place}.{note}"


#: The second hint of each exercise: which step to take, and with which function. No hint holds a number.
HINTS: Final = {
    "attention": "Compute `q @ k.T`, divide by the square root of d, take the softmax over the last axis, multiply "
    "by v.",
    "average_precision": "Go through `scores.unique().flip(0)`. For each threshold, compute the precision and the "
    "recall of all tokens with at least this score. Add up the precision times the growth of the recall.",
    "blank_out": "Make a batch of texts, in which text j has token j replaced: `ids.masked_fill(torch.eye(n).bool(), "
    "replacement)`. Subtract the predictions of these texts from the prediction of `ids`.",
    "copied_from": "Write down one example: what does the decoder write first, and where does this token stand in "
    "the source? Do so for each written token.",
    "cross_map": "For each source token j, compare the decoder layer's outputs with and without the value of j: `1 - "
    "torch.cosine_similarity(without, clean, dim=-1)`. This is column j. Divide each row by its sum.",
    "deletion": "Give each token its place: `values.argsort(dim=1, descending=True).argsort(dim=1)`. For each k, "
    "delete the tokens whose place is below k, and take the mean prediction.",
    "effect": "Compute the number once with all values, and once without the values of token j. The effect of j is "
    "the first minus the second.",
    "found_rate": "Compare `scores.argmax(1)` with the places, keep the examples that count, and take the mean.",
    "frame_centers": "A frame of the first convolution has its center at (kernel - 1) / 2. Each further convolution "
    "adds (kernel - 1) / 2 times the product of the strides before it. Frames are the product of all strides "
    "apart.",
    "generation_slice": "Stack the maps along the last axis. The first generated token is predicted at the last "
    "token of the prompt. Which row is that? Which columns are tokens of the prompt?",
    "hidden_share": "`scores[step, :, layer]` is the row. Add up its entries where the mask hides.",
    "joint_row": "Pass `feature_mask`: tokens with the same number are zeroed together.",
    "kendall": "For each pair of places, take the sign of the difference in both rows. Add up the products of the "
    "signs, and divide by the root of (untied pairs of one row) times (untied pairs of the other).",
    "neighbor_share": "The neighbors of token i stand at `[:, i, i - 1]` and `[:, i, i + 1]`. Add both up for each "
    "word, and take the mean over the words.",
    "pair_share": "The tokens draw on each other at `[:, one, other]` and `[:, other, one]`. Take the mean of both.",
    "patch_token": "Divide row and column by the side of a patch, without remainder. Count the patches row by row. "
    "Which token stands before the first patch?",
    "path_share": "In the map of layer l, take the entry [position after the layer, position before it]. Multiply "
    "the entries of all layers.",
    "place_shares": "Divide each row by its sum. Take the shares at the places: `shares.gather(1, places)`. One mean "
    "is that of the largest, the other that of the sum.",
    "rollout": "Give each map its residual first, if the exercise asks for one: `(map + identity) / 2`. Multiply the "
    "maps with `@`, the map of the last layer on the left.",
    "source_read": "Take the row's largest entry: `map[row].argmax()`.",
    "value_zeroing_map": "For each source j, compare the layer's outputs with and without the value of j: `1 - "
    "torch.cosine_similarity(without, clean, dim=-1)`. This is column j. Divide each row by its sum.",
    "value_zeroing_row": "The distance of two outputs is `1 - torch.cosine_similarity(moved, clean, dim=-1)`, one "
    "number for each source. Divide the distances by their sum.",
    "verified": "Begin with `torch.nn.TransformerEncoder(layer, n).eval()`, with no dropout, and change one thing at "
    "a time.",
}

"""A verdict on an answer: right, or not yet with the usual mistake that gives the same numbers, and with a hint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from html import escape
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from captum_vz_lessons import MIME_TYPE

#: The largest difference from the right answer, relative to its largest entry if that is above 1.
TOLERANCE = 1e-5
# An answer with a mistake is computed in its own way, so it is compared less strictly.
LIKENESS = 1e-3

# Mistakes of any exercise, looked for after its own mistakes: the wrong answer as a multiple of the right answer.
FACTORS = (("the sign is wrong.", -1), ("these are percentages. Divide by 100.", 100))

GOES_ON: Final = "You go on with the package's answer. This exercise counts as open."
GREEN, ORANGE = "#1b7f46", "#b45309"  # white letters on them have a contrast of 5 to 1

#: What went wrong, and the answer that this mistake gives. A function is called only after a wrong answer. In pairs, a
#: mistake may occur several times, with different answers.
Mistakes: TypeAlias = Mapping[str, Any] | Sequence[tuple[str, Any]]


@dataclass(frozen=True, repr=False)
class Verdict:
    """What a grader says of an answer. It is true if the answer is right.

    A notebook shows it in color. It begins with "Right." or "Not yet.".

    Attributes:
        passed: Whether the answer is right.
        message: What was compared, and what to do if it differs.
        mistake: The usual mistake that gives these numbers. None: the answer is right, or the mistake is not known.
        exercise: The name of the exercise.
        answer: What the lesson goes on with: the learner's answer if it is right, else the package's.
        hint: The second hint, if it was asked for.

    >>> verdict = Verdict(False, "the row is not divided by its sum.", exercise="value_zeroing")
    >>> bool(verdict), verdict
    (False, Not yet. value_zeroing: the row is not divided by its sum.)
    """

    passed: bool
    message: str
    mistake: str | None = None
    exercise: str = ""
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


def exercise(second_hint: str) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Make a grader of a function that judges an answer: verdicts get its name, and the option `hint`.

    Args:
        second_hint: Which step to take, and with which function. No hint holds a number.
    """

    def decorate(grade: Callable[..., Verdict]) -> Callable[..., Verdict]:
        @wraps(grade)
        def graded(*arguments: Any, hint: bool = False, **options: Any) -> Verdict:
            verdict = grade(*arguments, **options)
            return replace(verdict, exercise=grade.__name__, hint=second_hint if hint and not verdict else "")

        graded.__doc__ = f"{grade.__doc__}\n    With `hint=True`, a wrong answer gets a second hint.\n"
        return graded

    return decorate


def judge(yours: Any, right: Any, mistakes: Mistakes = ()) -> Verdict:
    """Compare an answer with the right one, and name the mistake that explains a difference.

    Args:
        yours: The answer: a tensor, an array, a list or a number.
        right: The right answer.
        mistakes: Usual mistakes and the answers that they give.

    >>> judge(0.25, 0.75, {"this is the share of the others.": 0.25}).mistake
    'this is the share of the others.'
    """
    verdict = _compared(yours, right, mistakes)
    return replace(verdict, answer=yours if verdict else right)


def _compared(yours: Any, right: Any, mistakes: Mistakes) -> Verdict:
    expected = torch.as_tensor(right).detach().double().cpu()
    found = tensor_of(yours)
    if found is None:
        return Verdict(False, _nothing(yours, expected), "no answer")
    if found.shape != expected.shape and found.numel() == expected.numel() and found.squeeze().shape == expected.shape:
        found = found.squeeze()
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    error = float("inf")
    if found.shape == expected.shape:
        error = (found - expected).abs().max().item() if found.numel() else 0.0
        if error <= TOLERANCE * scale:
            return Verdict(True, f"largest difference {error:.1e}.")
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
            if other is None or _distance(expected, other) <= TOLERANCE:
                continue
            apart = _distance(found, other)
            if apart <= LIKENESS and apart * _size(other) < best:
                best, likely = apart * _size(other), mistake
    if likely:
        return Verdict(False, likely, likely)
    return Verdict(False, _difference(found, expected, scale))


def judge_function(
    yours: Any, right: Callable[..., Any], cases: Sequence[tuple[Any, ...]], mistakes: Mistakes = ()
) -> Verdict:
    """Compare what a function of the learner returns with what the right function returns, in each case.

    Args:
        yours: The function of the learner.
        right: The right function. The lesson goes on with it if the other one is wrong.
        cases: The arguments of each call.
        mistakes: Usual mistakes and the results that they give: of the only case, or a list.
    """
    found: list[Any] = []
    for case in cases:
        if (verdict := _call(yours, case, found)) is not None:
            return replace(verdict, answer=right)
    expected = [right(*case) for case in cases]
    verdict = judge(*((found[0], expected[0]) if len(cases) == 1 else (found, expected)), mistakes)
    return replace(verdict, answer=yours if verdict else right)


def _call(function: Any, arguments: tuple[Any, ...], results: list[Any]) -> Verdict | None:
    """Append what a function of the learner returns. A verdict says why it returns nothing."""
    if not callable(function):
        return Verdict(False, f"pass your function, not {_described(function)}.", "no function")
    try:
        found = function(*arguments)
    except NotImplementedError:
        return Verdict(False, "the function is not written yet.", "no answer")
    except Exception as error:  # any error of the learner's code is shown to the learner
        return Verdict(False, f"the function raised {type(error).__name__}: {error}", "error")
    if found is None or found is ...:
        return Verdict(False, "the function returned nothing: end it with `return`.", "no answer")
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

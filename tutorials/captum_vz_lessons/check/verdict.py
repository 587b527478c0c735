"""A verdict on an answer: right, or not yet with the usual mistake that gives the same numbers, and with a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from html import escape
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from captum_vz_lessons import MIME_TYPE

TOLERANCE = 1e-5  #: the largest difference from the right answer, relative to its largest entry if that is above 1
LIKENESS = 1e-3  # an answer with a mistake is computed in its own way, so it is compared less strictly

# Mistakes of any exercise, looked for after its own mistakes: the wrong answer as a multiple of the right answer.
FACTORS = (("the sign is wrong.", -1), ("these are percentages. Divide by 100.", 100))
GOES_ON: Final = "You go on with the package's answer. This exercise counts as open."

#: What went wrong, and the answer that this mistake gives; a tuple holds several answers. A function that returns them
#: is called only after a wrong answer.
Mistakes: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, repr=False)
class Verdict:
    """What a grader says of an answer. It is true if the answer is right.

    A notebook shows it in color. It begins with "Right." or "Not yet.".

    >>> verdict = Verdict(False, "the row is not divided by its sum.", exercise="value_zeroing")
    >>> bool(verdict), verdict
    (False, Not yet. value_zeroing: the row is not divided by its sum.)
    """

    passed: bool
    message: str  #: what was compared, and what to do if it differs
    mistake: str | None = None  #: the usual mistake that gives these numbers; None if the answer is right, or unknown
    exercise: str = ""  #: the name of the exercise
    answer: Any = field(default=None, compare=False)  #: what the lesson goes on with: the learner's or the package's
    hint: str = ""  #: the second hint, if it was asked for

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
        # White letters on green and orange have a contrast of 5 to 1. The sign tells them apart without color.
        color, sign, word = ("#1b7f46", "✓", "Right.") if self.passed else ("#b45309", "✗", "Not yet.")
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._further())
        html = (
            f'<div style="border-left: 6px solid {color}; padding: 4px 12px">'
            f'<b style="background: {color}; color: #fff; padding: 1px 6px">{sign} {word}</b> '
            f"{escape(self.exercise)}: {escape(self.message)}{lines}</div>"
        )
        content = {"exercise": self.exercise, "passed": self.passed, "mistake": self.mistake}
        return {"text/plain": repr(self), "text/html": html, MIME_TYPE: content}


def exercise(second_hint: str) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Make a grader of a function that judges an answer: verdicts get its name, and the option `hint`."""

    def decorate(grade: Callable[..., Verdict]) -> Callable[..., Verdict]:
        @wraps(grade)
        def graded(*arguments: Any, hint: bool = False, **options: Any) -> Verdict:
            verdict = grade(*arguments, **options)
            return replace(verdict, exercise=grade.__name__, hint=second_hint if hint and not verdict else "")

        graded.__doc__ = f"{grade.__doc__}\n    With `hint=True`, a wrong answer gets a second hint.\n"
        return graded

    return decorate


def judge(yours: Any, right: Any, mistakes: Mistakes) -> Verdict:
    """Compare an answer (a tensor, an array, a list or a number) with the right one, and name a usual mistake."""
    expected, found = torch.as_tensor(right).detach().double().cpu(), tensor_of(yours)
    if found is None:
        wanted = f"numbers of shape {tuple(expected.shape)}" if expected.dim() else "a number"
        kind = f"the answer is an object of type {type(yours).__name__}"
        given = "there is no answer yet" if yours is None or yours is ... else kind
        return Verdict(False, f"{given}. Expected {wanted}.", "no answer", answer=right)
    if found.numel() == expected.numel() and found.squeeze().shape == expected.shape:
        found = found.squeeze()
    error = (found - expected).abs().amax().item() if found.shape == expected.shape else float("inf")
    if error <= TOLERANCE * max(1.0, expected.abs().amax().item()):
        return Verdict(True, f"largest difference {error:.1e}.", answer=yours)
    named = _named(found, expected, error, mistakes)
    return Verdict(False, named or _difference(found, expected), named, answer=right)


def _named(found: Tensor, expected: Tensor, error: float, mistakes: Mistakes) -> str | None:
    """The mistake that gives these numbers, or the nearest of several; two at once only if no single one gives them."""
    named = mistakes() if callable(mistakes) else mistakes
    answers = ((message, tensor_of(one)) for message, wrong in named.items() for one in several(wrong))
    own = [(message, answer) for message, answer in answers if answer is not None]
    common = [(message, factor * expected) for message, factor in FACTORS]
    double = [
        (f"{first} {second[0].upper()}{second[1:]}", factor * answer)
        for first, answer in own
        for second, factor in FACTORS
    ]
    for candidates in ([*own, *common], double):
        near = [
            (apart * _size(answer), message)
            for message, answer in candidates
            if (apart := _distance(found, answer)) <= LIKENESS and _distance(expected, answer) > TOLERANCE
        ]
        gap, likely = min(near, key=lambda one: one[0], default=(error, ""))
        if gap < error:
            return likely
    return None


def judge_function(
    yours: Any, right: Callable[..., Any], cases: Sequence[tuple[Any, ...]], mistakes: Mapping[str, Any]
) -> Verdict:
    """Compare what a function of the learner returns with what the right function returns, in each case.

    Mistakes are functions, or tuples of functions. The lesson goes on with the right function if the other is wrong.
    """

    def results(function: Callable[..., Any]) -> Any:
        found = [function(*case) for case in cases]
        return found[0] if len(cases) == 1 else found

    def refused(message: str, mistake: str) -> Verdict:
        return Verdict(False, message, mistake, answer=right)

    if not callable(yours):
        return refused(f"pass your function, not an object of type {type(yours).__name__}.", "no function")
    try:
        found = results(yours)
    except NotImplementedError:
        return refused("the function is not written yet.", "no answer")
    except Exception as error:  # any error of the learner's code is shown to the learner
        return refused(f"the function raised {type(error).__name__}: {error}", "error")
    if any(one is None or one is ... for one in (found if isinstance(found, list) else [found])):
        return refused("the function returned nothing: end it with `return`.", "no answer")
    verdict = judge(
        found,
        tensor_of(results(right)),
        lambda: {name: tuple(map(results, several(wrong))) for name, wrong in mistakes.items()},
    )
    return replace(verdict, answer=yours if verdict else right)


def several(wrong: Any) -> tuple[Any, ...]:
    """The answers, or functions, of one mistake."""
    return wrong if isinstance(wrong, tuple) else (wrong,)


def tensor_of(value: Any) -> Tensor | None:
    """The answer as a tensor in float64, or None if it is no array of numbers."""
    if value is None or value is ... or isinstance(value, str):
        return None
    try:
        return torch.as_tensor(value).detach().double().cpu()
    except (TypeError, ValueError, RuntimeError):
        parts = [tensor_of(one) for one in value] if isinstance(value, Iterable) else []
    shapes = {None if one is None else one.shape for one in parts}
    return torch.stack([one for one in parts if one is not None]) if len(shapes) == 1 and None not in shapes else None


def _distance(found: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry of `other`. Infinity: the shapes differ, or one is NaN."""
    found, other = found.squeeze(), other.squeeze()
    if found.shape != other.shape or not found.isfinite().all():
        return float("inf")
    return float((found - other).abs().max() / _size(other))


def _size(of: Tensor) -> float:
    return max(of.abs().max().item(), 1e-12)


def _difference(found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"the answer has the shape {tuple(found.shape)}. Expected {tuple(expected.shape)}."
    if not found.isfinite().all():
        return "the answer holds NaN or infinity. Is something divided by zero?"
    error = (found - expected).abs()
    if expected.dim() == 0:
        return f"the answer is {found.item():.6g}, which differs from the right number by {error.item():.1e}."
    place = tuple(int(one) for one in torch.unravel_index(error.argmax(), error.shape))
    note = (
        " It is nearly right. If you computed in float32, compute in float64, because 1 - cos loses digits. If not, a "
        "small term is missing."
    )
    is_near = error.max() < LIKENESS * max(1.0, expected.abs().max().item())
    return f"the largest difference is {error.max().item():.1e}, at {place}.{note if is_near else ''}"

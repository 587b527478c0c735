"""The names of methods, and names that a user chooses. A misspelt name is answered with the closest known one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any, Final

from captum_vz.errors import ArgumentError

#: The methods of a study by default: without those that take gradients, gates or flows, and without second forms.
DEFAULT_METHODS: Final = (
    *("value-zeroing", "value-zeroing-rollout", "attention", "attention-rollout", "attention-norm"),
    *("attention-norm-rollout", "globenc", "globenc-layer", "alti", "alti-layer", "value-zeroing-effect"),
    *("random", "position"),
)
EXTRA_METHODS: Final = (
    *("value-zeroing-effect-layer", "value-zeroing-rollout-paper", "attention-rollout-paper"),
    *("value-zeroing-shapley", "value-zeroing-integrated"),
    *("attention-flow", "attention-gradient", "saliency", "input-x-gradient", "input-x-gradient-l2", "decision"),
    *("integrated-gradients", "integrated-gradients-l2", "hidden-token-attribution", "attn-lrp", "alti-logit"),
)
#: All names of the registry of methods, whose import takes seconds. A test compares them.
METHODS: Final = (*DEFAULT_METHODS, *EXTRA_METHODS)
#: The models that have a name of their own, compared in the same way.
MODELS: Final = ("agreement", "six-layers", "pre-norm", "causal", "minilm", "smollm2")
#: The methods that :func:`~captum_vz.study.compare` shows by default: the columns fit on a page.
COMPARED_METHODS: Final = (
    *("value-zeroing", "value-zeroing-rollout", "value-zeroing-effect", "attention-rollout", "alti"),
)


def chosen_names(
    argument: str, names: Iterable[str] | None, known: Collection[str], default: tuple[str, ...]
) -> tuple[str, ...]:
    """The names without repetitions, in the order given; None: the default. Unknown names, and no name, are refused."""
    if names is None:
        return default
    chosen = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    wrong = [name for name in chosen if name not in known]
    if wrong or not chosen:
        raise ArgumentError(
            f"{argument} is {list(chosen)}{meant(wrong, known)}: pass some of {', '.join(known)}.", argument
        )
    return chosen


def known_name(argument: str, name: str, known: Collection[str]) -> str:
    """The name, if it is among those that are known.

    >>> known_name("method", "atention", ["attention", "alti"])
    Traceback (most recent call last):
    ...
    captum_vz.errors.ArgumentError: method is 'atention' (did you mean attention?): pass one of attention, alti.
    """
    if name not in known:
        raise ArgumentError(f"{argument} is {name!r}{meant([name], known)}: pass one of {', '.join(known)}.", argument)
    return name


def meant(wrong: Iterable[Any], known: Collection[str]) -> str:
    """The known names that are closest to misspelt ones, in any case, as a question in brackets. Empty: none is close.

    >>> meant(["Altii", "xyz"], ["alti", "random"])
    ' (did you mean alti?)'
    """
    folded = {one.casefold(): one for one in known}
    close = [one for name in wrong for one in difflib.get_close_matches(str(name).casefold(), folded, n=1)]
    return f" (did you mean {', '.join(folded[one] for one in close)}?)" if close else ""

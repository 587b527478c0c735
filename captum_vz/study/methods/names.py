"""Names that a user chooses from a registry."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def chosen_names(
    argument: str, names: Iterable[str] | None, known: Collection[str], default: tuple[str, ...]
) -> tuple[str, ...]:
    """The names without repetitions, in the order given; None: the default.

    Args:
        argument: The name of the argument, for the error.
        names: What the user passed: names, or one name.
        known: All names of the registry.
        default: The names of None.

    Raises:
        ValueError: A name is not in the registry, or there is no name.
    """
    if names is None:
        return default
    chosen = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    if not chosen or any(name not in known for name in chosen):
        raise ValueError(f"{argument} is {list(chosen)}: pass some of {', '.join(known)}.")
    return chosen

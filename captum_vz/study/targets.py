"""Which token of a text is explained, and how long a text may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def find_target(wanted: int | str | None, tokens: Sequence[str], masks: Sequence[bool], special: Sequence[bool]) -> int:
    """The position of the token that `wanted` names, by its position or as it is written.

    Args:
        wanted: A position (negative ones count from the end; digits in a string are one as well), or a token, in any
            case. None is the first mask or, where there is none, the last token that is not the tokenizer's own ([SEP],
            </s>).
        tokens: The tokens.
        masks: Which of them are masks.
        special: Which of them are the tokenizer's own.

    Raises:
        ValueError: There is no such token, or there are several. The message begins with "target".

    >>> tokens = ["[CLS]", "it", "is", "[SEP]"]
    >>> find_target(None, tokens, [False] * 4, [True, False, False, True]), find_target("It", tokens, [], [])
    (2, 1)
    """
    count = len(tokens)
    if wanted is None:
        own = all(special) and not any(masks)
        if own:
            raise ValueError("target is not given, and the text has no token of its own to explain: it is empty.")
        return masks.index(True) if any(masks) else max(i for i, its in enumerate(special) if not its)
    if isinstance(wanted, int) or wanted.lstrip("-").isdecimal():
        position = int(wanted)
        if not -count <= position < count:
            raise ValueError(
                f"target {position} is out of range: there are {count} tokens, positions {-count} to {count - 1}."
            )
        return position % count
    places = [i for i, token in enumerate(tokens) if token == wanted]
    places = places or [i for i, token in enumerate(tokens) if token.casefold() == wanted.casefold()]
    if not places:
        raise ValueError(f"target {wanted!r} is none of the tokens: {' '.join(tokens)}")
    if len(places) > 1:
        raise ValueError(f"target {wanted!r} stands at the positions {', '.join(map(str, places))}: pass one of these.")
    return places[0]


def longest_text(model: Any, tokenizer: Any) -> int | None:
    """How many tokens model and tokenizer take at most; None if neither says."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa counts positions from behind that of padding.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limits = (getattr(tokenizer, "model_max_length", None), positions)
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)

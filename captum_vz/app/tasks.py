"""What a model says about one input, and which rows explain it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Final

from captum_vz.app.inputs import Input
from captum_vz.app.wish import EVERY_WORD, Target, Wish
from captum_vz.errors import ArgumentError
from captum_vz.result.explanation import Predictions
from captum_vz.subjects import heads
from captum_vz.visualization import readable_tokens

SHOWN = 5  # predictions that are kept
LONGEST_ANSWER = 30  # tokens


def targets_of(read: Input, wish: Wish) -> tuple[Predictions, list[Target]]:
    """What the model predicts, and the rows that explain it, with their numbers."""
    task = read.subject.task
    if read.given is not None:
        return read.given[0], [replace(read.given[1], token=read.token)]
    if wish.method is None and (kind := heads.unknown_head(read.subject.model)) is not None:
        raise ArgumentError(
            f"captum_vz.explain does not know the head of {kind}: explain a number of its output with "
            "captum_vz.ValueZeroingEffect, or pass method='value-zeroing' for the states of its tokens."
        )
    if task in _TASKS:
        predictions, rows = _TASKS[task](read, wish)
    elif wish.target is None and wish.foil is None:
        name, kind = read.names[read.token], type(read.subject.model).__name__
        if wish.token is None:
            read.told[f"{kind} has no head: no decision is explained, but the row of {name}"] = None
        return [], [Target(name, read.token, "")]
    else:
        raise ArgumentError(
            f"target names a label or a word, but {type(read.subject.model).__name__} has no head that predicts one. "
            "Leave it out, or pass a model with a head.",
            "target",
        )
    output = SimpleNamespace(**{name: one[None] for name, one in read.numbers.items()})
    return predictions, [replace(row, value=row.reader(row.token)(output).item()) for row in rows]


def _rows(
    wish: Wish,
    numbers: tuple[int | None, int | None],
    places: dict[int, str],
    best: Callable[[int], int],
    name: Callable[[int], str],
    of_token: bool = True,
) -> list[Target]:
    """A row for each place, with what its name begins with. It explains the target, or the best entry of the place."""
    target, foil, rows = *numbers, list[Target]()
    for place, before in places.items():
        entry = best(place) if target is None else target
        if entry == foil:
            raise ArgumentError(
                f"foil is {wish.foil!r}, which is what is explained: all scores would be 0. Pass another foil, or "
                "another target=.",
                "foil",
            )
        contrast = "" if foil is None else f" rather than {name(foil)}"
        rows.append(Target(f"{before}{name(entry)}{contrast}", place, entry=entry, foil=foil, of_token=of_token))
    return rows


def _labels(read: Input, wish: Wish) -> tuple[tuple[int | None, int | None], Callable[[int], str]]:
    """The numbers of the target's label and of the foil's, and a function that names a label."""
    names = heads.label_names(read.subject.model.config)
    numbers = wish.numbers(lambda wanted, argument: heads.label_number(wanted, names, argument))
    return numbers, lambda number: names.get(number, str(number))


def _sequence(read: Input, wish: Wish) -> tuple[Predictions, list[Target]]:
    """The predicted label, or the target's."""
    (numbers, label), config = _labels(read, wish), read.subject.model.config
    logits = read.numbers["logits"]
    kind = getattr(config, "problem_type", None)
    if kind == "regression" or (kind is None and len(logits) == 1):  # no probabilities
        shares = logits
    else:
        shares = logits.sigmoid() if kind == "multi_label_classification" else logits.softmax(-1)
    order = shares.argsort(descending=True, stable=True)[:SHOWN].tolist()
    rows = _rows(wish, numbers, {read.token: ""}, lambda place: order[0], label, of_token=False)
    return [(label(number), shares[number].item()) for number in order], rows


def _tokens(read: Input, wish: Wish) -> tuple[Predictions, list[Target]]:
    """One row for each labelled word, the label of its first token. For every word if asked, or if none is labelled."""
    (numbers, label), logits = _labels(read, wish), read.numbers["logits"]
    words, best, shares = read.text.words, logits.argmax(-1).tolist(), logits.softmax(-1)
    firsts = [i for i, word in enumerate(words) if not read.text.special[i] and words.index(word) == i]
    labelled = [] if wish.token == EVERY_WORD else [i for i in firsts if label(best[i]) != "O"]
    chosen = [read.token] if wish.token not in (None, EVERY_WORD) else labelled or firsts
    places = {place: f"{read.text.word_texts[words[place]]}: " for place in chosen}
    predictions = [(f"{name}{label(best[i])}", shares[i, best[i]].item()) for i, name in places.items()]
    return predictions, _rows(wish, numbers, places, best.__getitem__, label)


def _answer(read: Input, wish: Wish) -> tuple[Predictions, list[Target]]:
    """The first and the last token of the answer."""
    start, end = read.numbers["start_logits"], read.numbers["end_logits"]
    allowed = [i for i, of_second in enumerate(read.second) if of_second and not read.text.special[i]]
    if wish.foil is not None:
        raise ArgumentError("foil has no meaning for an answer: leave it out.", "foil")
    if not allowed:
        raise ArgumentError(
            "the second text has no token that an answer could begin with: pass a text that is not empty."
        )
    spans = [(i, j) for i in allowed for j in allowed if i <= j < i + LONGEST_ANSWER]
    if wish.target is None:
        first, last = max(spans, key=lambda span: (start[span[0]] + end[span[1]]).item())
    else:
        found = (span for span in spans if _plain(_text_of(read, *span)) == _plain(str(wish.target)))
        first, last = next(found, (-1, -1))
        if first < 0:
            raise ArgumentError(
                f"target is {str(wish.target)!r}, which is no part of the second text: pass a part of it.", "target"
            )
    probability = start[allowed].softmax(0)[allowed.index(first)] * end[allowed].softmax(0)[allowed.index(last)]
    rows = [
        Target(f"start: {read.names[first]}", first, "start_logits"),
        Target(f"end: {read.names[last]}", last, "end_logits"),
    ]
    if wish.token is not None:  # for methods with maps
        rows = [Target(read.names[read.token], read.token, "start_logits")]
    return [(_text_of(read, first, last), probability.item())], rows


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()


def _text_of(read: Input, first: int, last: int) -> str:
    """The text of some tokens. With the token before them, a part of a word has no mark such as "##"."""
    decode, ids = read.subject.tokenizer.decode, list(read.text.ids)
    before, text = (str(decode(ids[max(first - 1, 0) : stop])) for stop in (first, last + 1))
    if not text.startswith(before):
        text, before = str(decode(ids[first : last + 1])), ""
    return text[len(before) :].strip()


def _words(read: Input, wish: Wish) -> tuple[Predictions, list[Target]]:
    """The word at a mask, or the next word of a causal model."""
    model, tokenizer, logits = read.subject.model, read.subject.tokenizer, read.numbers["logits"][read.token]
    predictions: Predictions = []

    def word(number: int) -> str:
        return readable_tokens(tokenizer, [number])[0]

    if heads.predicts_next(model) or read.text.ids[read.token] == tokenizer.mask_token_id:
        likeliest = logits.softmax(-1).topk(3)
        predictions = list(zip(map(word, likeliest.indices.tolist()), likeliest.values.tolist(), strict=True))
    numbers, told = heads.class_numbers(model, tokenizer, wish.target, wish.foil)
    read.told.update(dict.fromkeys(told))
    given = zip(numbers, (wish.target, wish.foil), strict=True)
    typed = {number: one.strip() for number, one in given if isinstance(one, str)}  # a word of several tokens is whole

    def name(number: int) -> str:
        return typed.get(number) or word(number)

    return predictions, _rows(wish, numbers, {read.token: ""}, lambda place: int(logits.argmax()), name)


def _speech(read: Input, wish: Wish) -> tuple[Predictions, list[Target]]:
    """One row for each letter that a CTC model writes, or for the target: its first frame."""
    logits, tokenizer = read.numbers["logits"], read.subject.tokenizer
    best, shares = logits.argmax(-1).tolist(), logits.softmax(-1)
    blank = getattr(read.subject.model.config, "pad_token_id", 0)
    starts = [i for i, one in enumerate(best) if one != blank and (i == 0 or best[i - 1] != one)]
    chosen: Sequence[int] = [read.token] if wish.token is not None else starts or [0]
    letter = str if tokenizer is None else tokenizer.convert_ids_to_tokens
    names = {number: str(letter(number)) for number in range(logits.shape[-1])}
    numbers = wish.numbers(lambda wanted, argument: heads.label_number(wanted, names, argument))
    rows = _rows(wish, numbers, {i: f"frame {i}: " for i in chosen}, best.__getitem__, names.__getitem__)
    return [(names[best[i]], shares[i, best[i]].item()) for i in starts], rows


_TASKS: Final[dict[str, Callable[[Input, Wish], tuple[Predictions, list[Target]]]]] = {
    **dict.fromkeys((heads.SEQUENCE, heads.IMAGE, heads.AUDIO), _sequence),
    **dict.fromkeys((heads.MASKED, heads.CAUSAL), _words),
    heads.TOKENS: _tokens,
    heads.ANSWER: _answer,
    heads.SPEECH: _speech,
}

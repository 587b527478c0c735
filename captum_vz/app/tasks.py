"""What a model of each task says about an input, and which rows explain it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from captum_vz.app.inputs import EVERY_WORD, Input, Wish, check_texts, read_signal, read_text
from captum_vz.errors import ArgumentError
from captum_vz.result.explanation import Predictions
from captum_vz.subjects import Subject, heads
from captum_vz.subjects.sentences import Embedding, check_own, prompts_of
from captum_vz.subjects.texts import encode
from captum_vz.visualization import readable_tokens

SHOWN = 5  # predictions that are kept
LONGEST_ANSWER = 30  # tokens


@dataclass(frozen=True)
class Target:
    """What a row of an explanation explains."""

    name: str  # a label, a word and its label, the start of an answer
    token: int  # the position of the token whose row methods with maps show
    field: str = "logits"  # the tensor of the output that holds the explained number; empty for a model without a head
    entry: int | None = None  # the class in that tensor; None: it has one number for each token
    foil: int | None = None  # the class whose number is subtracted
    of_token: bool = True  # whether the tensor has an axis of tokens
    read: Callable[[Any], Tensor] | None = None  # reads the number from an output; None: it is in the tensor
    value: float | None = None  # the explained number; None: nobody asked the model

    def asked(self, place: int) -> dict[str, Any]:
        """The target and the foil of a method's question, for the token at `place`."""
        if self.entry is None:
            of_place = (lambda output: getattr(output, self.field)[:, place]) if self.field else None
            return {"target": self.read or of_place, "foil": None}
        before = (place,) if self.of_token else ()
        return {"target": [(*before, self.entry)], "foil": None if self.foil is None else [(*before, self.foil)]}


def read_input_of(subject: Subject, text: Any, pair: Any, wish: Wish) -> Input:
    """The input of any task."""
    kind = type(subject.model).__name__
    if not subject.reads_text:
        return read_signal(subject, text, pair, wish)
    check_texts(text, pair)
    if subject.task == heads.CHOICE:
        return _choice(subject, text, pair, wish)
    if not isinstance(pair, (str, type(None))):
        raise ArgumentError(
            f"text_pair is {len(pair)} texts, but {kind} reads one second text: pass a string.", "text_pair"
        )
    if subject.task == heads.ANSWER and pair is None:
        raise ArgumentError(f"{kind} answers a question from a text: pass the text as text_pair=.")
    if subject.task == heads.ENCODER and pair is not None and heads.unknown_head(subject.model) is None:
        told = f"{kind} has no head: both texts are read as one input. Pass a SentenceTransformer for a similarity."
        warnings.warn(told, stacklevel=4)
    if subject.task == heads.SENTENCE:
        return _sentences(subject, text, pair, wish)
    return read_text(subject, text, pair, wish)


def _choice(subject: Subject, text: str, answers: Any, wish: Wish) -> Input:
    """The chosen answer of several. Each answer has a logit of its own, from the text and this answer alone."""
    if isinstance(answers, str) or not isinstance(answers, Sequence) or len(answers) < 2:
        raise ArgumentError(
            f"{type(subject.model).__name__} chooses among answers: pass two or more as text_pair=, a list."
        )
    if wish.foil is not None or wish.window:
        raise ArgumentError("each answer is read alone, with the whole text: leave foil= and window= out.")

    def forward(**inputs: Tensor) -> Tensor:
        """The logit of one answer, `(batch, 1)`, from inputs `(batch, tokens)`."""
        found: Tensor = subject.model(**{name: one[:, None] for name, one in inputs.items()}).logits
        return found

    logits = torch.stack([_output(forward, subject, text, answer)[0, 0] for answer in answers])
    shares = logits.float().softmax(0)
    order = shares.argsort(descending=True, stable=True).tolist()
    predictions = [(str(answers[place]), shares[place].item()) for place in order]
    chosen = order[0]
    if wish.target is not None:
        chosen = heads.label_number(wish.target, dict(enumerate(answers)), "target")
    name, value = str(answers[chosen]), logits[chosen].item()
    target = Target(name, 0, read=lambda output: output[:, 0], of_token=False, value=value)
    found = read_text(replace(subject, forward=forward), text, answers[chosen], wish)
    return replace(found, given=(predictions, target))


@torch.no_grad()
def _output(forward: Any, subject: Subject, text: Any, pair: str | None = None) -> Tensor:
    """The output for a text that is not read in windows."""
    made = encode(subject.tokenizer, text, pair) if isinstance(text, str) else text
    count, most = made["input_ids"].shape[1], heads.max_tokens(subject.model, subject.tokenizer)
    if most is not None and count > most:
        raise ArgumentError(
            f"the text is {count} tokens long, but the model takes at most {most}: pass a shorter text."
        )
    found: Tensor = forward(**{name: one.to(subject.device) for name, one in made.items() if isinstance(one, Tensor)})
    return found


def _sentences(subject: Subject, text: Any, other: str | None, wish: Wish) -> Input:
    """The cosine similarity of two embeddings, or of an embedding with itself before values are zeroed."""
    if wish.target is not None or wish.foil is not None or wish.window:
        raise ArgumentError(
            "an encoder of sentences has one embedding and no labels: leave target=, foil= and window= out."
        )
    embedding, texts = subject.forward, [text] if other is None else [text, other]
    assert isinstance(embedding, Embedding)  # of this task
    prompts, told = prompts_of(embedding, texts)
    forwards = [embedding.after(prompt) for prompt in prompts]
    outputs = list[Tensor]()
    for one, prompt, forward in zip(texts, prompts, forwards, strict=True):
        outputs.append(_output(forward, subject, prompt + one if prompt else one))
        if isinstance(one, str):
            check_own(embedding, outputs[-1], one, prompt)
    reference = outputs[-1]
    name, value, predictions = "the embedding", None, list[tuple[str, float]]()
    if other is not None:
        name = f"similarity to {other}"
        value = cosine_similarity(outputs[0], reference).item()
        predictions = [("cosine similarity", value)]
    target = Target(name, 0, read=lambda output: cosine_similarity(output, reference), of_token=False, value=value)
    read = read_text(replace(subject, forward=forwards[0]), prompts[0] + text if prompts[0] else text, None, wish)
    found = replace(read, given=(predictions, target))
    found.told.update(dict.fromkeys(told))
    if other is None:
        found.told["no decision is explained, but how far the embedding of the text moves without each token"] = None
    return found


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
        return _TASKS[task](read, wish)
    name, kind = read.names[read.token], type(read.subject.model).__name__
    if wish.target is not None or wish.foil is not None:
        raise ArgumentError(
            f"target names a label or a word, but {kind} has no head: leave it out, or pass a model with one.", "target"
        )
    if wish.token is None:
        read.told[f"{kind} has no head: no decision is explained, but the row of {name}"] = None
    return [], [Target(name, read.token, "")]


def _rows(
    read: Input,
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
                f"foil is {wish.foil!r}, which is what is explained: pass another foil, or another target=.", "foil"
            )
        logits = read.numbers["logits"][place] if of_token else read.numbers["logits"]
        value, title = logits[entry], f"{before}{name(entry)}"
        if foil is not None:
            value, title = value - logits[foil], f"{title} rather than {name(foil)}"
        rows.append(Target(title, place, entry=entry, foil=foil, of_token=of_token, value=value.item()))
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
    rows = _rows(read, wish, numbers, {read.token: ""}, lambda place: order[0], label, of_token=False)
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
    return predictions, _rows(read, wish, numbers, places, best.__getitem__, label)


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
        Target(f"start: {read.names[first]}", first, "start_logits", value=start[first].item()),
        Target(f"end: {read.names[last]}", last, "end_logits", value=end[last].item()),
    ]
    if wish.token is not None:  # for methods with maps
        rows = [Target(read.names[read.token], read.token, "start_logits", value=start[read.token].item())]
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

    return predictions, _rows(read, wish, numbers, {read.token: ""}, lambda place: int(logits.argmax()), name)


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
    rows = _rows(read, wish, numbers, {i: f"frame {i}: " for i in chosen}, best.__getitem__, names.__getitem__)
    return [(names[best[i]], shares[i, best[i]].item()) for i in starts], rows


_TASKS: Final[dict[str, Callable[[Input, Wish], tuple[Predictions, list[Target]]]]] = {
    **dict.fromkeys((heads.SEQUENCE, heads.IMAGE, heads.AUDIO), _sequence),
    **dict.fromkeys((heads.MASKED, heads.CAUSAL), _words),
    heads.TOKENS: _tokens,
    heads.ANSWER: _answer,
    heads.SPEECH: _speech,
}

"""What a model says about a text, an image or a sound, explained in one call."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from captum_vz import find_layers
from captum_vz.app.computing import Chosen, Row, Scores, by_words, computed, position
from captum_vz.app.explanation import Explanation
from captum_vz.app.models import Loaded
from captum_vz.app.reading import Cut, Piece, cut, encode, fixed_tokens, joined, second_text, window_size
from captum_vz.app.subjects import Subject, check_runs, read_input, source_names, subject_of
from captum_vz.app.tasks import (
    ANSWER,
    CAUSAL,
    CHOICE,
    ENCODER,
    MASKED,
    OF_IMAGES,
    OF_SOUND,
    SENTENCE,
    SEQ2SEQ,
    SPEECH,
    TOKENS,
    Asked,
    Predictions,
    Question,
    questions,
)
from captum_vz.app.wish import BY_MAPS, Wish, check_layer, check_texts, depth_of, remarks
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.generation import attribute_generation
from captum_vz.generation.words import TokenText
from captum_vz.study.examples.text import PreparedText, content_specials, label_number, max_tokens, prepare_text

#: What a user passes as `token` for a row of each word.
EVERY_WORD: Final = "*"
#: The tensors of an output that tasks read.
FIELDS: Final = ("logits", "start_logits", "end_logits")


def explain(
    model: Any,
    text: Any,
    text_pair: Any = None,
    *,
    tokenizer: Any = None,
    task: str | None = None,
    method: Any = None,
    target: int | str | None = None,
    foil: int | str | None = None,
    token: int | str | None = None,
    layer: int | None = None,
    words: bool = False,
    window: Any = None,
    stack: str | None = None,
    residual: float | str | None = 0.5,
) -> Explanation:
    """What a model says about a text, an image or a sound, and how much each of its tokens has to do with it.

    ============================ ======================================= ==================================
    a model with a head for      explains                                by default
    ============================ ======================================= ==================================
    classes of a text            the predicted label                     the effect on its logit
    labels of tokens             each labelled word                      the effect on its label's logit
    answers                      the start and the end of the answer     the effects on their logits
    multiple choice              the chosen answer                       the effect on its logit
    a word at a mask, next words the mask, the last token                its row of Value Zeroing
    classes of images, of sound  the predicted class                     the effect on its logit
    the same, with target, foil  the word at the mask, the next word     the effect on its logit
    letters of speech (CTC)      each letter, at its first frame         the effect on its logit
    no head                      the mask, the last token                its row of Value Zeroing
    ============================ ======================================= ==================================

    A SentenceTransformer with two texts explains the cosine similarity of their embeddings by the tokens of the first
    text; with one text, how far the embedding moves without each token. An encoder-decoder explains the encoder's
    states. With `stack="decoder"`, or with a method that explains the output, it explains each word that it generates,
    by cross-attention.

    Args:
        model: The name of a folder, or of an embedded model; a model of transformers; a pair of it and its tokenizer,
            as :func:`~captum_vz.testbed.load_model` returns it; a pipeline of transformers; or a SentenceTransformer.
        text: The text. A question, for a model that answers. For models of images and of sound an image of Pillow, an
            array, or the path of a file (sound: WAV).
        text_pair: A second text: the text of the answer, the other sentence of a pair. A list of answers for multiple
            choice.
        tokenizer: The tokenizer of a model that is passed as an object; the processor of its images or sound.
        task: The task whose head is loaded from a folder. None: the head that the checkpoint has.
        method: A name of :data:`~captum_vz.study.METHODS`, or a class, an object or a function, see
            :func:`~captum_vz.study.as_method`. None: see the table.
        target: What is explained: a label, by its name, else by its number; a word of the vocabulary; a part of
            `text_pair`, or an answer of multiple choice. None: what the model predicts.
        foil: The label or word whose logit is subtracted ("why target rather than foil?").
        token: The token that is explained, by its position, or as it or its word is written. None: see the table; for
            classes, the token that the head reads, `[CLS]` or the last one. "*" for labels of tokens: every word, also
            those whose label is "O".
        layer: The layer of methods with scores for each layer, negative ones from the end. None: the last one. With a
            layer, the default for labels is the effect of this layer's values alone.
        words: Whether the tokens of a word are zeroed together, so that words have scores. Gradients, and the scores of
            a method of your own, are added up.
        window: The number of tokens that are read together, for a text that is longer than the model takes; or a pair,
            this number and the number of tokens that two windows share (a quarter by default); or True: as many as
            the model takes. No row looks outside its window. A label of the whole text is that of the mean logits, and
            its scores are the mean of the windows' effects.
        stack: The stack of layers, if the model has several: "encoder", "decoder", or a name as
            :func:`captum_vz.find_layers` takes it.
        residual: What rollouts and flows add to each map for the residual connection: 0.5, half of each row; None,
            nothing; or "paper", the choice of the method's paper. Maps of ALTI and GlobEnc hold it already. Classes
            and objects that you pass are not changed.

    Returns:
        An :class:`~captum_vz.app.explanation.Explanation`: rows, tokens, predictions; `plot()`, `view()`,
        `to_pandas()`.

    Raises:
        ArgumentError: An argument does not fit the model, or changes no score of the method; the text is empty or too
            long.
        RefusedError: The method refuses the model.

    >>> import captum_vz
    >>> found = captum_vz.explain("agreement", "the pictures of some hat [MASK] scaring marcus.")
    >>> found.tokens[found.scores.argmax()], found.predictions[0][0]
    ('pictures', 'are')
    """
    wish = Wish(method, target, foil, token, layer, words, window, stack=stack, residual=residual)
    return explain_subject(subject_of(model, tokenizer, task, stack=stack), text, text_pair, wish)


def explain_subject(subject: Subject, text: Any, text_pair: Any, wish: Wish) -> Explanation:
    """:func:`explain` for a model that was found. The command line and the demo call this function as well."""
    asked = wish.default_method(subject.task) if wish.method is None else wish.method
    chosen = Chosen.of(asked, wish.layer, wish.residual)
    wish.check(subject.task, chosen.name, chosen.method)
    wish = replace(wish, method=chosen)
    if not (subject.task == SEQ2SEQ and (chosen.method.explains_output or wish.stack == "decoder")):
        subject = subject.encoder
    elif chosen.method.layered:
        subject = replace(subject, layers=find_layers(subject.model, "decoder"))
    if chosen.method.layered:
        check_layer(chosen.layer, depth_of(Loaded(subject.model, subject.tokenizer, subject.layers)))
    if subject.task in (*OF_IMAGES, *OF_SOUND):
        return _signal(subject, text, text_pair, wish)
    check_texts(text, text_pair)
    if subject.task == CHOICE:
        return _choice(subject, text, text_pair, wish)
    if not isinstance(text_pair, (str, type(None))):
        raise ArgumentError(
            f"text_pair is {len(text_pair)} texts, but {type(subject.model).__name__} reads one second text: pass a "
            "string.",
            "text_pair",
        )
    if subject.task == SEQ2SEQ:
        return _generated(subject, text, text_pair, wish)
    if subject.task == ANSWER and text_pair is None:
        raise ArgumentError(
            f"{type(subject.model).__name__} answers a question from a text: pass the text as text_pair=."
        )
    if subject.task == SENTENCE:
        return _sentences(subject, text, text_pair, wish)
    return _text(subject, text, text_pair, wish)


def _text(
    subject: Subject, text: str, pair: str | None, wish: Wish, given: tuple[Predictions, Question] | None = None
) -> Explanation:
    """A text, or two. `given` are the predictions and the question, if they do not follow from the output."""
    encoding = encode(subject.tokenizer, text, pair)
    every_word = subject.task == TOKENS and wish.token == EVERY_WORD
    token = None if every_word else wish.token
    ids = encoding["input_ids"][0].tolist()
    read = TokenText.of(subject.tokenizer, ids)
    prepared = _prepared(subject, encoding, token, read)
    size, overlap = window_size(wish.window, max_tokens(subject.model, subject.tokenizer), len(ids))
    names = [read.word_texts[word] for word in read.words] if wish.words else list(prepared.tokens)
    told = token if subject.task in BY_MAPS else str(prepared.token)
    loaded = Loaded(subject.model, subject.tokenizer, subject.layers)
    for remark in remarks(text, loaded, prepared, None if told is None else str(told)):
        warnings.warn(remark, stacklevel=4)
    content = content_specials(subject.tokenizer).values()
    special = [mark and number not in content for number, mark in zip(ids, read.special, strict=True)]
    second = second_text(subject.tokenizer, encoding, pair)
    pieces = cut(prepared.inputs, fixed_tokens(special, second), size, overlap)
    if given is None:
        asked = Asked(
            subject.model,
            subject.tokenizer,
            _numbers(subject, pieces, len(ids)),
            ids,
            names,
            read.words,
            read.word_texts,
            special,
            second,
            prepared.token,
            token is not None,
            prepared.is_mask,
            wish.target,
            wish.foil,
            every_word,
        )
        predictions, rows = questions(subject.task, asked)
    else:
        predictions, rows = given[0], [replace(given[1], token=prepared.token)]
    words = read.words if wish.words else None
    found = computed(subject, wish.method, pieces, rows, words, wish.distances, wish.residual)
    if (sources := len(found.rows[0].scores)) != len(ids):
        raise UnsupportedLayerError(
            f"{type(subject.model).__name__} reads {sources} tokens, but the text has {len(ids)}: it adds its own, as "
            "prompt tuning does. Use the classes, such as ValueZeroing, whose rows count them."
        )
    if not wish.method.method.explains_output:  # the row is that of a token
        found.rows = [Row(names[row.token or 0], row.token, row.scores, row.window) for row in found.rows]
    if words is not None:
        found = by_words(found, words)
    windows = pieces.windows if len(pieces.pieces) > 1 else []
    raw = [str(one) for one in subject.tokenizer.convert_ids_to_tokens(ids)]
    return Explanation.of(
        subject, wish.method, found, predictions, prepared.tokens, read, special, raw, wish.words, windows
    )


def _prepared(subject: Subject, encoding: Any, token: Any, read: TokenText) -> PreparedText:
    """The text, and the explained token. A word of several tokens is named by its text: its first token is meant."""
    if isinstance(token, str) and token not in read.labels and read.word_texts.count(token) == 1:
        token = read.words.index(read.word_texts.index(token))
    return prepare_text(subject.model, subject.tokenizer, encoding, token, any_length=True)


@torch.no_grad()
def _numbers(subject: Subject, text: Cut, count: int) -> dict[str, Tensor]:
    """The tensors that a task reads from the output, for the whole text."""
    if subject.task == ENCODER:
        return {}
    outputs = [subject.forward(**piece.inputs) for piece in text.pieces]
    numbers = [
        {name: one[0].float() for name in FIELDS if isinstance(one := getattr(output, name, None), Tensor)}
        for output in outputs
    ]
    return joined(numbers, text, count, subject.task in (TOKENS, ANSWER, MASKED, CAUSAL))


def _choice(subject: Subject, text: str, answers: Any, wish: Wish) -> Explanation:
    """The chosen answer of several. Each answer has a logit of its own, from the text and this answer alone."""
    if isinstance(answers, str) or not isinstance(answers, Sequence) or len(answers) < 2:
        raise ArgumentError(
            f"{type(subject.model).__name__} chooses among answers: pass two or more as text_pair=, a list."
        )
    if wish.foil is not None or wish.window:
        raise ArgumentError("each answer is read alone, with the whole text: leave foil= and window= out.")
    alone = replace(subject, forward=_OneChoice(subject.model))
    with torch.no_grad():
        logits = [alone.forward(**_whole(subject, text, answer))[0, 0] for answer in answers]
    shares = torch.stack(logits).float().softmax(0)
    order = shares.argsort(descending=True, stable=True).tolist()
    predictions = [(str(answers[place]), shares[place].item()) for place in order]
    chosen = order[0]
    if wish.target is not None:
        chosen = label_number(wish.target, dict(enumerate(answers)), "target")
    question = Question(str(answers[chosen]), 0, read=_first_column, of_token=False)
    return _text(alone, text, answers[chosen], wish, (predictions, question))


def _whole(subject: Subject, text: str, pair: str | None = None) -> dict[str, Tensor]:
    """The inputs of a text that is not read in windows."""
    made = encode(subject.tokenizer, text, pair)
    count, most = made["input_ids"].shape[1], max_tokens(subject.model, subject.tokenizer)
    if most is not None and count > most:
        raise ArgumentError(
            f"the text is {count} tokens long, but the model takes at most {most}, and cannot read it in windows: pass "
            "a shorter text."
        )
    return {name: one.to(subject.device) for name, one in made.items() if isinstance(one, Tensor)}


class _OneChoice:
    """The logit of one answer, `(batch, 1)`, from inputs `(batch, tokens)`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Tensor) -> Tensor:
        found: Tensor = self.model(**{name: one[:, None] for name, one in inputs.items()}).logits
        return found


def _first_column(output: Tensor) -> Tensor:
    return output[:, 0]


def _sentences(subject: Subject, text: str, other: str | None, wish: Wish) -> Explanation:
    """The cosine similarity of two embeddings, or of an embedding with itself before values are zeroed."""
    if wish.target is not None or wish.foil is not None or wish.window:
        raise ArgumentError(
            "a SentenceTransformer has one embedding and no labels: leave target=, foil= and window= out."
        )

    def embedding(sentence: str) -> Tensor:
        with torch.no_grad():
            found: Tensor = subject.forward(**_whole(subject, sentence))
        return found

    reference = embedding(text if other is None else other)
    predictions: Predictions = []
    if other is not None:
        predictions = [("cosine similarity", cosine_similarity(embedding(text), reference).item())]
    name = "the embedding" if other is None else f"similarity to {other}"
    question = Question(name, 0, read=_similarity(reference), of_token=False)
    if not wish.method.method.explains_output:
        question = replace(question, of_token=True)
    return _text(subject, text, None, wish, (predictions, question))


def _similarity(reference: Tensor) -> Callable[[Tensor], Tensor]:
    def read(output: Tensor) -> Tensor:
        return cosine_similarity(output, reference)

    return read


def _generated(subject: Subject, text: str, pair: str | None, wish: Wish) -> Explanation:
    """The words that an encoder-decoder generates, by cross-attention."""
    chosen: Chosen = wish.method
    if pair is not None or wish.words or wish.window or (wish.target, wish.foil, wish.token) != (None, None, None):
        raise ArgumentError(
            "generated words are explained one by one: leave text_pair=, target=, foil=, token=, words=, window= out, "
            "or use captum_vz.generation.attribute_generation."
        )
    found = attribute_generation(subject.model, subject.tokenizer, text, chosen.asked, residual=wish.residual)
    layer = found.layer_index(chosen.layer) if chosen.method.layered else 0
    ids = encode(subject.tokenizer, text)["input_ids"][0].tolist()
    read = TokenText.of(subject.tokenizer, ids)
    rows = [
        Row(f"{step} {label}", None, found.scores[step, : len(ids), layer])
        for step, label in enumerate(found.generated.labels)
    ]
    raw = [str(one) for one in subject.tokenizer.convert_ids_to_tokens(ids)]
    scores = Scores(rows, len(subject.layers), residual=wish.residual)
    return Explanation.of(subject, chosen, scores, [(found.text, 1.0)], read.labels, read, read.special, raw, False, [])


def _signal(subject: Subject, given: Any, pair: Any, wish: Wish) -> Explanation:
    """An image or a sound."""
    if pair is not None or wish.words or wish.window:
        raise ArgumentError(f"{type(subject.model).__name__} takes one input: leave text_pair=, words=, window= out.")
    piece = Piece(None, read_input(subject, given))
    check_runs(subject, piece.inputs)
    pieces = Cut([piece], [(0, 0)])
    numbers = _numbers(subject, pieces, 0)
    count = len(next(iter(numbers.values()))) if subject.task == SPEECH else 1
    token = wish.token
    if token is not None and not re.fullmatch(r"-?\d+", str(token)):
        raise ArgumentError(f"token is {token!r}: pass the position of a patch or a frame.", "token")
    place = 0 if token is None else int(token)
    if subject.task == SPEECH:
        place = position(place, count, "token")
    names = [str(i) for i in range(count)]
    asked = Asked(
        subject.model,
        subject.tokenizer,
        numbers,
        [],
        names,
        [],
        [],
        [],
        [],
        place,
        token is not None,
        False,
        wish.target,
        wish.foil,
    )
    predictions, rows = questions(subject.task, asked)
    found = computed(subject, wish.method, pieces, rows, None, wish.distances, wish.residual)
    labels = source_names(subject, len(found.rows[0].scores), piece.inputs)
    if not wish.method.method.explains_output:
        found.rows = [replace(row, name=labels[row.token or 0]) for row in found.rows]
    return Explanation.of(
        subject, wish.method, found, predictions, labels, None, [False] * len(labels), labels, False, []
    )

"""What a model says about a text, an image or a sound, explained in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from captum_vz import find_layers
from captum_vz._names import known_name
from captum_vz.app.inputs import Input, read_input_of
from captum_vz.app.wish import EFFECT_OF_LAYER, MAPS, Wish, check_texts
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.generation import attribute_generation
from captum_vz.methods import METHODS, Method, as_method, check_layer, name_of
from captum_vz.result import Explanation, Part, Row, TokenText
from captum_vz.subjects import Subject, check_order, subject_of
from captum_vz.subjects.heads import SEQ2SEQ, TOKENS
from captum_vz.subjects.texts import encode

#: A tagger's scores are small if they are less than this part of the logit.
SMALL = 0.2


def explain(
    model: Any,
    text: Any,
    text_pair: Any = None,
    *,
    tokenizer: Any = None,
    method: Any = None,
    target: int | str | None = None,
    foil: int | str | None = None,
    token: int | str | None = None,
    layer: int | None = None,
    words: bool = False,
    window: Any = None,
    stack: str | None = None,
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
    text, as does the folder of a sentence encoder. With one text, it explains how far the embedding moves without each
    token. An encoder-decoder explains the encoder's states. With
    `stack="decoder"`, or with a method that explains the output, it explains each word that it generates, by
    cross-attention.

    Args:
        model: The name of a folder, or of an embedded model; a model of transformers; a pair of it and its tokenizer,
            as :func:`~captum_vz.testbed.load_model` returns it; a pipeline of transformers; or a SentenceTransformer.
        text: The text, or what the tokenizer returned for one. A question, for a model that answers. For models of
            images and of sound an image of Pillow, an array, or the path of a file (sound: WAV).
        text_pair: A second text: the text of the answer, the other sentence of a pair. A list of answers for multiple
            choice.
        tokenizer: The tokenizer of a model that is passed as an object; the processor of its images or sound.
        method: A name of :data:`~captum_vz.study.METHODS`, or a class, an object or a function, see
            :func:`~captum_vz.study.as_method`. None: see the table.
        target: What is explained: a label, by its name, else by its number; a word of the vocabulary; a part of
            `text_pair`, or an answer of multiple choice. None: what the model predicts.
        foil: The label or word whose logit is subtracted ("why target rather than foil?").
        token: The token that is explained, by its position, or as it or its word is written. None: see the table; for
            classes, the token that the head reads, `[CLS]` or the last one. "*" for labels of tokens: every word, also
            those whose label is "O".
        layer: The layer of methods with scores for each layer; negative counts from the end. None: the last one. With a
            layer, the default for labels is the effect of this layer's values alone.
        words: Whether the tokens of a word are zeroed together, so that words have scores. Gradients, and the scores of
            a method of your own, are added up.
        window: The number of tokens that are read together, for a text that is longer than the model takes; or a pair,
            this number and the number of tokens that two windows share (a quarter by default); or True: as many as
            the model takes. No row looks outside its window. A label of the whole text is that of the mean logits, and
            its scores are the mean of the windows' effects.
        stack: The stack of layers, if the model has several: "encoder", "decoder", or a name as
            :func:`captum_vz.find_layers` takes it.

    Returns:
        An :class:`~captum_vz.result.Explanation`: rows, tokens, predictions; `plot()`, `view()`,
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
    check_order("explain", text)
    wish = Wish(method, target, foil, token, layer, words, window, stack=stack)
    return explain_subject(subject_of(model, tokenizer, stack=stack), text, text_pair, wish)


def explain_subject(subject: Subject, text: Any, text_pair: Any, wish: Wish) -> Explanation:
    """:func:`explain` for a model that was found, and a wish."""
    if isinstance(text_pair, str):
        subject = subject.sentences or subject
    asked = wish.default_method(subject.task) if wish.method is None else wish.method
    if isinstance(asked, str):
        asked = known_name("method", asked, METHODS)
    name, method = name_of(asked), as_method(asked).of(subject)
    if wish.layer is not None and not method.layered:
        raise ArgumentError(
            f"{name} has no scores of single layers: leave layer= out, or choose a method that has, such as "
            f"{EFFECT_OF_LAYER if method.explains_output else MAPS}."
        )
    wish.check(subject.task, name, method)
    if subject.task == SEQ2SEQ and (method.explains_output or wish.stack == "decoder"):
        layers = find_layers(subject.model, "decoder") if method.layered else subject.layers
        return _generated(replace(subject, layers=layers), text, text_pair, wish, name, method)
    return explained_by(subject, text, text_pair, wish, {name: method})


def explained_by(
    subject: Subject,
    text: Any,
    text_pair: Any,
    wish: Wish,
    methods: Mapping[str, Method],
    skip: bool = False,
    advance: Callable[[str], object] | None = None,
) -> Explanation:
    """The explanation of one input by several methods. Each takes of the wish what changes its scores.

    Args:
        subject: The model.
        text: The text, image or sound.
        text_pair: A second text.
        wish: What is asked, for all methods.
        methods: The methods by their names.
        skip: Whether methods that refuse the model are left out.
        advance: Called with the name of each method before it runs.

    Raises:
        RefusedError: A method refuses the model, or each of those that may be left out.
    """
    subject = subject.encoder
    if any(method.layered for method in methods.values()):
        check_layer(-1 if wish.layer is None else wish.layer, subject.depth)
    read = read_input_of(subject, text, text_pair, wish)
    parts, refused, predictions = dict[str, Part](), dict[str, str](), list[tuple[str, float]]()
    for name, method in methods.items():
        if advance is not None:
            advance(name)
        own = wish.of_method(method, subject.task)
        try:
            predictions, rows = read.ask(own)
            parts[name] = read.part(name, method, own, rows)
        except ArgumentError:
            raise
        except RefusedError as error:
            if not skip:
                raise
            refused[name] = str(error)
    if not parts:
        several = "No method can explain this model: " if len(methods) > 1 else ""
        raise RefusedError(f"{several}{next(iter(refused.values()))}")
    found = read.explanation(parts, predictions)
    found.refused = refused
    if subject.task == TOKENS and wish.method is None and len(parts) == 1:
        found.told += _deciding(read, found.first, wish)
    return found


def _generated(subject: Subject, text: Any, pair: Any, wish: Wish, name: str, method: Method) -> Explanation:
    """The words that an encoder-decoder generates, by cross-attention."""
    if pair is not None or wish.words or wish.window or (wish.target, wish.foil, wish.token) != (None, None, None):
        raise ArgumentError(
            "generated words are explained one by one: leave text_pair=, target=, foil=, token=, words=, window= out, "
            "or use captum_vz.generation.attribute_generation."
        )
    check_texts(text, pair)
    found = attribute_generation(subject, text, method)
    layer = found.layer_index(-1 if wish.layer is None else wish.layer) if method.layered else 0
    ids = encode(subject.tokenizer, text)["input_ids"][0].tolist()
    read = TokenText.of(subject.tokenizer, ids)
    scores = found.scores[:, : len(ids)].permute(0, 2, 1)
    rows = [Row(f"{step} {label}", None, scores[step, layer]) for step, label in enumerate(found.generated.labels)]
    raw = [str(one) for one in subject.tokenizer.convert_ids_to_tokens(ids)]
    shown = layer if method.layered else None
    part = Part(name, method, rows, scores, found.layers, shown, len(subject.layers))
    of = subject.task, [(found.text, 1.0)], list(read.words), list(read.special), raw
    return Explanation(list(read.labels), {name: part}, *of)


def _deciding(read: Input, part: Part, wish: Wish) -> list[str]:
    """What decides the labels of words that hardly draw on other words: the words' own vectors."""
    small = [row for row in part.rows if row.explained and row.scores.abs().sum() < SMALL * abs(row.explained)]
    if not small or not part.is_signed:
        return []
    name = "input-x-gradient"
    decides = read.part(name, METHODS[name], wish, read.ask(wish)[1])
    kept = [row for row, of in zip(decides.rows, part.rows, strict=True) if any(of is one for one in small)]
    told = []
    for row in kept:
        best = int(row.scores.abs().argmax())
        told.append(f"{row.name} by {read.tokens[best]} {row.scores[best]:+.2f}")
    return [
        "a word's own vector, which zeroing values does not touch, decides these labels more than the values do: "
        f"{', '.join(told)} ({name}; method={name!r} shows all tokens)"
    ]

"""What a model says about a text, an image or a sound, explained in one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz import ValueZeroing
from captum_vz._start import is_terminal
from captum_vz.app.inputs import EFFECT, EFFECT_OF_LAYER, Input, Wish, check_count, check_texts, owner
from captum_vz.app.tasks import Target, read_input_of, targets_of
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.functional import deciding_layer
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.methods import Method, Question, as_method, check_layer, name_of, shares
from captum_vz.methods.decision import AGAINST_ALL, DecisionMethod
from captum_vz.methods.kinds import LayerMethod
from captum_vz.methods.method import WrongScoresError
from captum_vz.methods.registry import DECIDING, DECISION, DEEP, MAPS, METHODS, rollout_of
from captum_vz.result import Explanation, Explanations, Maps, Part, Row
from captum_vz.subjects import Subject, heads, subject_of
from captum_vz.subjects.signals import source_names
from captum_vz.subjects.texts import find_token

#: Effects on a tagger's logit are small if their sizes sum to less than this part of it. A remark then names the tokens
#: on which the logit rests by another method.
SMALL = 0.5
#: What says so.
OF_VECTORS = "attn-lrp"


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
    layer: int | Literal["deciding"] | None = None,
    words: bool | Literal["words", "clauses", "sentences"] = False,
    window: Any = None,
    stack: str | None = None,
    prompt_name: str | Sequence[str] | None = None,
) -> Explanation:
    """What a model predicts for a text, an image or a sound, and how much each token contributes to the prediction.

    ============================ ======================================= ==================================
    a model with a head for      explains                                by default
    ============================ ======================================= ==================================
    classes of a text            the predicted label                     the effect on its logit
    labels of tokens             each labelled word                      the effect on its label's logit
    answers                      the start and the end of the answer     the effects on their logits
    multiple choice              the chosen answer                       the effect on its logit
    a word at a mask, next words the mask, the last token                its row of Value Zeroing
    next words, 12 layers        the next word                           what it rests on, and where it is read
    classes of images, of sound  the predicted class                     the effect on its logit
    the same, with target, foil  the word at the mask, the next word     the effect on its logit
    letters of speech (CTC)      each letter, at its first frame         the effect on its logit
    a text to write              each token of the translation           its row of cross-attention
    no head                      the mask, else `[CLS]`                  its row of Value Zeroing
    ============================ ======================================= ==================================

    A SentenceTransformer with two texts explains the cosine similarity of their embeddings by the tokens of the first
    text, as does the folder of a sentence encoder. With one text, it explains how far the embedding moves without each
    token. An encoder-decoder explains what it writes, as :func:`~captum_vz.generation.attribute_generation` does, and
    with `stack="encoder"` the states of its encoder.

    Args:
        model: The name of a folder, or of an embedded model; a model of transformers; a pair of it and its tokenizer,
            as :func:`~captum_vz.testbed.load_model` returns it; a pipeline of transformers; or a SentenceTransformer.
        text: The text, or what the tokenizer returned for one. A question, for a model that answers. For models of
            images and of sound an image of Pillow, an array, a tensor, the processor's output, or the path of a file
            (sound: WAV). Or a list of texts or files, each of which is explained.
        text_pair: A second text: the text of the answer, the other sentence of a pair. A list of answers for multiple
            choice. For a list of texts, one for all, or a list with one for each.
        tokenizer: The tokenizer of a model that is passed as an object; the processor of its images or sound.
        method: A name of :data:`~captum_vz.study.METHODS`, or a class, an object or a function, see
            :func:`~captum_vz.study.as_method`. None: see the table.
        target: What is explained: a label, by its name, else by its number; a word of the vocabulary; a part of
            `text_pair`, or an answer of multiple choice. None: what the model predicts.
        foil: The label or word whose logit is subtracted ("why target rather than foil?"). A next word of several
            tokens is asked about by its first token, here and as `target`.
        token: The token that is explained, by its position, or as it or its word is written. None: see the table; for
            classes, the token that the head reads, `[CLS]` or the last one. "*" for labels of tokens: every word, also
            those whose label is "O".
        layer: The layer of methods with scores for each layer; negative counts from the end. None: the last one. With a
            layer, the default for labels is the effect of this layer's values alone. "deciding": the layer in which
            the token reads what the decision rests on, by the method "decision", see
            :func:`~captum_vz.functional.deciding_layer`. The default method is then Value Zeroing. Models of next words
            with 12 layers or more have "decision" and this layer by default, because their last layer mostly shows the
            first token. Pass a `foil` of the same kind as the answer.
        words: Whether the tokens of a word are zeroed together, so that words have scores. Or "clauses" (to the next
            comma, semicolon or colon) or "sentences", whose tokens are zeroed together. Special tokens, the explained
            token of a model of words and the first token of a causal model are apart from them. Gradients, and the
            scores of a method of your own, are added up.
        window: The number of tokens that are read together, for a text that is longer than the model takes; or a pair,
            this number and the number of tokens that two windows share (a quarter by default); or True: as many as
            the model takes. No row looks outside its window. The label of a whole text follows from mean logits, and
            its scores are the mean of the windows' effects.
        stack: The stack of layers, if the model has several: "encoder", "decoder", or a name as
            :func:`captum_vz.find_layers` takes it.
        prompt_name: The name of the prompt that an encoder of sentences puts before a text, or a pair of names for two
            texts; "" is no prompt. None: its default prompt; without one, two texts are a query and a document.

    Returns:
        An :class:`~captum_vz.result.Explanation`: rows, tokens, predictions; `plot()`, `view()`,
        `to_pandas()`. For an encoder-decoder a :class:`~captum_vz.generation.GenerationAttribution`, for a list an
        :class:`~captum_vz.result.Explanations`.

    Raises:
        ArgumentError: An argument does not fit the model, or changes no score of the method; the text is empty or too
            long.
        RefusedError: The method refuses the model.

    >>> import captum_vz
    >>> found = captum_vz.explain("agreement", "the pictures of some hat [MASK] scaring marcus.")
    >>> found.tokens[found.scores.argmax()], found.predictions[0][0]
    ('pictures', 'are')
    """
    wish = Wish(method, target, foil, token, layer, words, window)
    subject = subject_of(model, tokenizer, stack=stack)
    if isinstance(text, (list, tuple)) and all(isinstance(one, str) for one in text):
        again = partial(explain, subject, stack=stack, prompt_name=prompt_name, **vars(wish))
        several: Any = _each_text(again, subject, text, text_pair)  # the type of a list is not known to the signature
        return several
    if isinstance(text_pair, str):
        subject = subject.sentences or subject
    elif wish.asks_embedding(subject, text):
        with suppress(ArgumentError):  # of encoders that are not read from their folder
            subject = subject.sentences or subject
    if prompt_name is not None:
        subject = subject.prompted(prompt_name)
    remarks = list[str]()
    if wish.asks_decision(subject):
        both = {name: METHODS[name] for name in (DECISION, MAPS)}
        try:
            return replace(explained_by(subject, text, text_pair, replace(wish, layer=DECIDING), both), by_rows=True)
        except RefusedError as error:  # a wrong argument is refused again below
            if layer is not None:
                raise
            remarks.append(f"without {DECISION}: {error}")
    asked = wish.default_method(subject.task) if method is None else method
    name, chosen = name_of(asked), as_method(asked).of(subject)
    if layer is not None and not wish.has_layer(chosen):
        raise ArgumentError(
            f"{name} has no scores of single layers: leave layer= out, or choose a method that has, such as "
            f"{EFFECT_OF_LAYER if chosen.explains_output else MAPS}."
        )
    for one in wish.unused(subject.task, chosen):
        explained, instead = ("a number of the output", MAPS) if one == "token" else ("the row of a token", EFFECT)
        raise ArgumentError(
            f"{one} is {getattr(wish, one)!r}, but {name} explains {explained}: leave it out, or choose another "
            f"method, such as {instead}.",
            one,
        )
    if subject.task == heads.SEQ2SEQ and stack != "encoder":
        return written(subject, text, text_pair, wish, asked)
    found = explained_by(subject, text, text_pair, wish, {name: chosen})
    found.told += remarks
    return found


def _each_text(
    explained: Callable[[str, Any], Explanation], subject: Subject, texts: Sequence[str], pair: Any
) -> Explanations:
    """The explanation of each text, with its own second text or the same for all."""
    if not texts:
        raise ArgumentError("the list of texts is empty: pass at least one text.", "text")
    if subject.task == heads.SEQ2SEQ:
        raise ArgumentError("an encoder-decoder explains what it writes for one text: pass one at a time.", "text")
    own = isinstance(pair, (list, tuple)) and subject.task != heads.CHOICE
    if own and len(pair) != len(texts):
        raise ArgumentError(f"there are {len(texts)} texts and {len(pair)} second ones: pass as many.", "text_pair")
    pairs = pair if own else [pair] * len(texts)
    return Explanations([explained(*both) for both in zip(texts, pairs, strict=True)])


def written(subject: Subject, text: Any, pair: Any, wish: Wish, method: Any) -> GenerationAttribution:
    """Each token that an encoder-decoder writes, by the tokens of the text."""
    if pair is not None or wish.words or wish.window or (wish.target, wish.token) != (None, None):
        raise ArgumentError(
            "an encoder-decoder explains each token that it writes: leave text_pair=, target=, token=, words=, window= "
            "out. Or use captum_vz.generation.attribute_generation, or stack='encoder'."
        )
    check_texts(text, pair)
    asked: Any = {"layer": wish.layer, "foil": wish.foil}
    found: GenerationAttribution = attribute_generation((subject.model, subject.tokenizer), text, method, **asked)
    found.task, found.predictions = subject.task, [(found.text, 1.0)]
    found.told.insert(0, f"the model writes: {found.text}")
    return found


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

    With `skip`, methods that refuse the model are left out, unless all do. `advance` is called with the name of each
    method before it runs.
    """
    subject = subject.encoder
    if any(method.layered for method in methods.values()):
        check_layer(wish.layer if isinstance(wish.layer, int) else -1, subject.depth)
    read = read_input_of(subject, text, text_pair, wish)
    run = _Run(read)
    parts, refused, predictions = dict[str, Part](), dict[str, str](), list[tuple[str, float]]()
    for name, method in methods.items():
        if advance is not None:
            advance(name)
        own = wish.of_method(method, subject.task)
        try:
            predictions, targets = targets_of(read, own)
            parts[name] = run.part(name, method, own.layer, targets)
        except RefusedError as error:
            if not skip or isinstance(error, ArgumentError):
                raise
            refused[name] = str(error)
    if not parts:
        several = "No method can explain this model: " if len(methods) > 1 else ""
        raise RefusedError(f"{several}{next(iter(refused.values()))}")
    found = Explanation(parts=parts, task=subject.task, predictions=predictions, refused=refused, **run.about)
    found.told += [*read.told, *run.told]
    if subject.task == heads.TOKENS and wish.method is None and len(parts) == 1:
        found.told += _what_decides(run, found, wish)
    return found


class _Run:
    """Runs methods on one input. Methods that need the same maps share them."""

    def __init__(self, read: Input) -> None:
        self.read, self.subject, self.pieces = read, read.subject, read.pieces
        self.asked = [(Question(piece.inputs, 0), read.features(piece)) for piece in read.pieces]
        self.about = read.about()
        self.is_whole = len(read.pieces) == 1
        self.told = list[str]()
        self._known = dict[tuple[Any, ...], Tensor]()

    def part(self, name: str, method: Method, wanted: int | str | None, targets: Sequence[Target]) -> Part:
        """What one method computes for some targets, at a layer, or in the layer that decides; None: the last layer."""
        layer = wanted if isinstance(wanted, int) else -1
        if wanted == DECIDING and not (self.is_whole and all(target.field or target.read for target in targets)):
            raise ArgumentError(
                f"layer is {DECIDING!r}, which needs a model with a head and an input that is read whole: pass the "
                "number of a layer for an encoder alone, and for a text in windows.",
                "layer",
            )
        if not self.about and method.maps is not None and not method.explains_output:
            sources = [""] * len(method.layer_maps(self.subject, self.asked[0][0])[0][0])
            targets = [replace(one, token=find_token(one.token, sources)) for one in targets]
        alone = layer if method.layered and method.maps is None else None  # others have all layers at once
        rows, raw = list[Row](), list[Tensor]()
        for target in targets:
            of_all = not target.of_token and not self.is_whole
            numbers = range(len(self.pieces)) if of_all else [owner(self.pieces, target.token)]
            try:
                found = [self._scores(method, number, target, alone) for number in numbers]
            except WrongScoresError as error:
                raise ArgumentError(f"method {name!r}: {error}") from error
            token = target.token if target.of_token or not method.explains_output else None
            windows = [None if self.is_whole else self.pieces[number].window for number in numbers]
            if of_all and method.explains_output:
                found, windows = [torch.stack(found).mean(0)], [None]
            for scores, window in zip(found, windows, strict=True):
                shown = scores[layer if method.layered and alone is None else 0]
                rows.append(Row(target.name, token, shown, window, target.value))
                raw.append(scores)
        if wanted == DECIDING:
            layer = self._deciding_layer(name, raw, targets)
            rows = [replace(row, scores=scores[layer]) for row, scores in zip(rows, raw, strict=True)]
        scores = torch.stack(raw)
        if scores.isinf().any():
            raise ArgumentError(f"method {name!r} returned infinite numbers; expected finite ones, or NaN.")
        self._check_sources(scores.shape[-1])
        depth = scores.shape[1] if method.layered and alone is None else self.subject.depth
        names = method.layer_names(scores.shape[1]) if alone is None else (method.scope(layer % depth),)
        scores = scores[..., self.read.firsts] if self.read.member else scores
        rows = [self._shown(method, row) for row in rows]
        if isinstance(method, DecisionMethod):
            self.told.append(f"{name}: by {method.used(self.asked[0][0])}")
            if self.subject.task == heads.CAUSAL and targets[0].foil is None:
                self.told.append(f"{targets[0].name}, {AGAINST_ALL}")
        make, causal = partial(self._maps, method, layer if method.layered else -1), self.subject.task == heads.CAUSAL
        return Part(name, method, rows, scores, names, layer % depth if method.layered else None, make, causal)

    def _deciding_layer(self, name: str, raw: Sequence[Tensor], targets: Sequence[Target]) -> int:
        """The layer whose rows agree best with what the decision rests on. A sentence in `told` names it."""
        firsts, found = self.read.firsts or list(range(raw[0].shape[-1])), list[Tensor]()
        for target, rows in zip(targets, raw, strict=True):
            place = self.read.member[target.token] if self.read.member else target.token
            rests_on = self._scores(METHODS[DECISION], 0, target, None)[0]
            found.append(deciding_layer(shares(rows[:, firsts]), rests_on[firsts], place)[1].double())
        products = torch.stack(found).mean(0)
        first, *rest = products.argsort(descending=True, stable=True).tolist()
        near = ", ".join(f"layer {layer} {products[layer]:.2f}" for layer in rest[:2])
        self.told.append(
            f"{name}: layer {first} reads most of what the decision rests on, "
            f"{products[first]:.2f} of it{f'; then {near}' if near else ''}"
        )
        return int(first)

    def _scores(self, method: Method, number: int, target: Target, layer: int | None) -> Tensor:
        """The scores `(layers, tokens)` from one piece. A label of the whole text is read at the piece's last token."""
        if (key := (method, number, target, layer)) in self._known:
            return self._known[key]
        piece, (question, features) = self.pieces[number], self.asked[number]
        missing = piece.places is not None and target.token not in piece.places
        place = len(piece.places or ()) - 1 if missing else piece.local(target.token)
        asked = replace(question, token=place, **target.asked(place))
        scores = method.scores(self.subject, asked, features, layer=layer)
        self._known[key] = scores if self.is_whole else self.read.spread(piece, scores)
        return self._known[key]

    def _check_sources(self, count: int) -> None:
        """Refuse a model that adds tokens. The number of sources of an image or a sound is known only now."""
        if self.read.names:
            check_count(self.subject.model, count, len(self.read.names))
        elif not self.about:
            names = source_names(self.subject.model.config, count, self.pieces[0].inputs)
            self.about = {"tokens": names, "words": list(range(count)), "special": [False] * count, "raw_tokens": names}

    def _shown(self, method: Method, row: Row) -> Row:
        """A row of groups, if groups are explained. Scores without signs become shares, and the row is named."""
        scores, token, read = row.scores, row.token, self.read
        name = row.name if method.explains_output else (read.names or self.about["tokens"])[token or 0]
        if read.member:
            scores, token = scores[read.firsts], None if token is None else read.member[token]
        return replace(row, name=name, token=token, scores=scores if method.is_signed else shares(scores))

    def _maps(self, method: Method, layer: int) -> Maps:
        """The maps behind the rows of a method."""
        if method.maps is None:
            return Maps()
        if self.subject.depth > DEEP and is_terminal(sys.stderr):
            method = replace(method, options={**method.options, "show_progress": True})
        pooled, first = self.read.pooled, (self.subject, *self.asked[0])
        if not self.is_whole:
            return Maps([pooled(self._joined_map(method, layer))])
        layers = [pooled(one[0]) for one in method.layer_maps(*first)]
        joining = rollout_of(method)
        rollout = None if joining is None or not layers else pooled(joining.whole_maps(*first)[-1][0])
        lengths = LayerMethod("distances", partial(ValueZeroing, normalize=False), options=method.options)
        found = lengths.layer_maps(*first) if method.maps is ValueZeroing else []
        return Maps(layers, rollout, [pooled(one[0]) for one in found])

    def _joined_map(self, method: Method, layer: int) -> Tensor:
        """The map of the whole text, each row from the window in which its token has the most context."""
        maps, count = [method.whole_maps(self.subject, *one)[layer][0] for one in self.asked], len(self.read.names)
        owners = [owner(self.pieces, place) for place in range(count)]
        rows = [maps[number][self.pieces[number].local(place)] for place, number in enumerate(owners)]
        return torch.stack([self.read.spread(self.pieces[k], row) for k, row in zip(owners, rows, strict=True)])


def _what_decides(run: _Run, found: Explanation, wish: Wish) -> list[str]:
    """A remark on labels of words that hardly depend on values: they depend mostly on the word's own vector."""
    rows = found.rows
    small = [place for place, row in enumerate(rows) if row.scores.abs().sum() < SMALL * abs(row.explained or 0)]
    if not small or not found.is_signed:
        return []
    try:
        decides = run.part(OF_VECTORS, METHODS[OF_VECTORS], None, targets_of(run.read, wish)[1]).rows
    except RefusedError:
        return []
    best = {place: int(decides[place].scores.abs().argmax()) for place in small}
    told = [f"{rows[i].name} on {found.tokens[j]} {decides[i].scores[j]:+.2f}" for i, j in best.items()]
    return [
        "zeroing values does not touch a token's own vector, and changes less than half of these logits. By "
        f"{OF_VECTORS} they rest most on: {', '.join(told)} (method={OF_VECTORS!r} shows all tokens)"
    ]

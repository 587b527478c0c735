"""What a user asks about one input: what of it is refused or remarked, and the methods that are compared on it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from captum_vz.app.models import Loaded, load
from captum_vz.app.tasks import (
    ANSWER,
    AUDIO,
    CAUSAL,
    CHOICE,
    ENCODER,
    IMAGE,
    MASKED,
    OF_IMAGES,
    OF_SOUND,
    SENTENCE,
    SEQ2SEQ,
    SEQUENCE,
    task_of,
)
from captum_vz.errors import ArgumentError
from captum_vz.study import Table, compare
from captum_vz.study.examples.text import (
    PreparedText,
    class_labels,
    class_number,
    max_tokens,
    predicts_next,
    prepare_text,
    reads_whole_text,
)
from captum_vz.study.methods import METHODS, Method, check_methods
from captum_vz.testbed.grammar import other_number
from captum_vz.testbed.model import EMBEDDED

if TYPE_CHECKING:
    from captum_vz.study.scoring.truth import Truth

#: The methods that explain a model, unless the user chooses others.
MAPS, EFFECT, EFFECT_OF_LAYER = "value-zeroing", "value-zeroing-effect", "value-zeroing-effect-layer"
#: Tasks whose rows explain the state of a token, unless the user chooses a method, a target or a foil.
BY_MAPS: Final = (MASKED, CAUSAL, SEQ2SEQ, ENCODER)
#: Tasks whose prediction is of the whole input, so that no token chooses what is predicted.
OF_WHOLE: Final = (SEQUENCE, CHOICE, ANSWER, IMAGE, AUDIO, SENTENCE)
CLEAR: Final = 0.9  # the probability of an answer without a rival


@dataclass(frozen=True)
class Wish:
    """What a user asks for, except the model and the text. See :func:`captum_vz.explain` for the meaning of each.

    Raises:
        ArgumentError: An argument is of another type.
    """

    method: Any = None
    target: int | str | None = None
    foil: int | str | None = None
    token: int | str | None = None
    layer: int | None = None
    words: bool = False
    window: Any = None
    distances: bool = False
    stack: str | None = None
    residual: float | str | None = 0.5

    def __post_init__(self) -> None:
        """Check the types."""
        for name in ("target", "foil", "token", "layer"):
            value, number = getattr(self, name), name == "layer"
            fits = isinstance(value, Integral if number else (Integral, str)) and not isinstance(value, bool)
            if value is not None and not fits:
                raise ArgumentError(
                    f"{name} is {value!r}, of type {type(value).__name__}: pass a whole number"
                    f"{'' if number else ', a string'} or None.",
                    name,
                )

    def default_method(self, task: str) -> str:
        """The name of the method that explains a model of this task, unless the user chooses one."""
        if task in BY_MAPS and self.target is None and self.foil is None:
            return MAPS
        return EFFECT if self.layer is None else EFFECT_OF_LAYER

    def of_method(self, name: str, task: str) -> Wish:
        """This wish for one of several registered methods, without what changes no score of this method."""
        method = METHODS[name]
        idle = self.unused(task, method)
        return replace(
            self,
            method=name,
            layer=self.layer if method.layered else None,
            target=None if "target" in idle else self.target,
            foil=None if "foil" in idle else self.foil,
            token=None if "token" in idle else self.token,
        )

    def unused(self, task: str, method: Method) -> list[str]:
        """The names of what is asked for, but changes no score of this method. A user's code may read all of it."""
        if method.own and method.maps is None:
            return []
        idle = [] if method.explains_output else ["target", "foil"]
        idle += ["token"] if task in OF_WHOLE and method.is_signed else []
        return [name for name in idle if getattr(self, name) is not None]

    def check(self, task: str, name: str, method: Method) -> None:
        """Refuse what changes no score of the method with this name."""
        for one in self.unused(task, method):
            number, row = "a number of the output", "the row of a token"
            if one == "token":
                number, row = row, number
            raise ArgumentError(
                f"{one} is {getattr(self, one)!r}, which chooses {number}, but {name} explains {row}: "
                f"leave it out, or choose another method, such as {MAPS if one == 'token' else EFFECT}.",
                one,
            )


def check_texts(text: Any, pair: Any) -> None:
    """Refuse what is no text in the place of one. Several answers are a list of texts."""
    if not isinstance(text, str):
        raise ArgumentError(f"the text is of type {type(text).__name__}: pass a string.")
    answers = pair if isinstance(pair, Sequence) and not isinstance(pair, (str, bytes)) else [pair]
    for one in answers:
        if one is not None and not isinstance(one, str):
            raise ArgumentError(f"text_pair has an object of type {type(one).__name__}: pass a string.", "text_pair")


def depth_of(loaded: Loaded) -> int:
    """How many maps of layers there are. ALBERT's only layer runs as often as the configuration says."""
    if loaded.model.config.is_encoder_decoder:  # the number in the configuration is that of one of its two stacks
        return len(loaded.layers)
    return max(len(loaded.layers), getattr(loaded.model.config, "num_hidden_layers", 0))


def load_for_text(name: str) -> Loaded:
    """:func:`~captum_vz.app.models.load` for a command that takes one text.

    Raises:
        ArgumentError: There is no such model, or it reads something else.
    """
    loaded = load(name)
    if task_of(loaded.model) in (*OF_IMAGES, *OF_SOUND, CHOICE):
        raise ArgumentError(
            f"model is {name!r}, a {type(loaded.model).__name__}, which reads no text by itself: pass it to "
            "captum_vz.explain, or pass another model.",
            "model",
        )
    return loaded


def check_layer(layer: int, depth: int) -> None:
    """Refuse a layer that is not one of `depth` layers."""
    if not -depth <= layer < depth:
        raise ArgumentError(
            f"layer {layer} is out of range: the model has {depth} layers, {-depth} to {depth - 1}.", "layer"
        )


def check_room(text: str, loaded: Loaded, new: int) -> None:
    """Refuse a text that is too long for the model with this number of new tokens."""
    if loaded.model.config.is_encoder_decoder:  # the new tokens are a text of their own
        room = getattr(loaded.model.config, "max_position_embeddings", None) or new
        if new > room:
            raise ArgumentError(f"the model writes at most {room} tokens: ask for at most {room} new tokens.")
        return
    most, count = max_tokens(loaded.model, loaded.tokenizer), len(loaded.tokenizer(text)["input_ids"])
    room = new if most is None else most - count + 1  # the last new token is no input
    if new > room:
        raise ArgumentError(
            f"the text is {count} tokens long, and the model takes at most {most}: ask for at most {room} new tokens."
        )


def remarks(text: str, loaded: Loaded, prepared: PreparedText, token: str | None) -> list[str]:
    """What a user may not have meant: unknown words, a mask that is none, and the token that is explained instead."""
    model, tokenizer, _ = loaded
    mask, names = None if predicts_next(model) else tokenizer.mask_token, prepared.tokens
    ids = prepared.inputs["input_ids"][0].tolist()
    masks = [i for i, number in enumerate(ids) if mask is not None and number == tokenizer.mask_token_id]
    # The unknown token of some decoders also begins or ends each text.
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    unknown = [i for i, number in enumerate(ids) if number == tokenizer.unk_token_id and number not in ends]
    found = []
    if unknown:
        found.append(
            f"the tokenizer does not know what stands at {_listed(unknown)}: the model is given {names[unknown[0]]}."
        )
    for written in dict.fromkeys(re.findall(r"\[mask\]|<mask>", text, re.IGNORECASE)):
        if tokenizer.mask_token is None:
            found.append(f"{written} is read as text: the model has no mask token.")
        elif mask is None:
            found.append(f"{written} is no mask for a model that predicts the next token: end the text before it.")
        elif written not in ("[MASK]", mask):
            found.append(f"{written} is read as text: write [MASK] for the mask.")
    if token is None and len(masks) > 1:
        found.append(f"the text has {len(masks)} masks, at {_listed(masks)}: token={masks[0]} is explained.")
    if token is None and not masks:
        fills = not predicts_next(model) and not class_labels(model)
        why = "the text has no mask: its last token" if fills else "the last token of the text"
        why = f"{names[prepared.token]}, which the head reads," if reads_whole_text(model) else why
        found.append(f"{why} is explained, token={prepared.token}.")
    return found


def _listed(places: list[int]) -> str:
    return ("position " if len(places) == 1 else "positions ") + ", ".join(map(str, places))


def compared(
    text: str,
    loaded: Loaded,
    methods: Sequence[str] | None,
    token: str | None,
    layer: int,
    target: str | None = None,
    foil: str | None = None,
    advance: Callable[[str], object] | None = None,
    residual: float | str | None = 0.5,
) -> Table:
    """:func:`~captum_vz.study.compare` for a model that was loaded by its name.

    Warnings name what the user may not have meant, as in :func:`explain`.

    Raises:
        ArgumentError: A method is unknown; there is no such token, layer or target; or the text is empty or too long.
    """
    model, tokenizer, layers = loaded
    _numbers(model, tokenizer, target, foil)
    names = check_methods(None if methods == "all" else methods)
    if any(METHODS[name].layered for name in names):
        check_layer(layer, depth_of(loaded))
    for remark in remarks(text, loaded, prepare_text(model, tokenizer, text, token), token):
        warnings.warn(remark, stacklevel=2)
    return compare(
        model,
        tokenizer,
        text,
        methods,
        target,
        foil=foil,
        layer=layer,
        layers=layers,
        token=token,
        residual=residual,
        advance=advance,
    )


def _numbers(model: Any, tokenizer: Any, target: Any, foil: Any) -> list[list[int] | None]:
    """The numbers of the target's label or word, and of the foil's, each in a list; None where there is none."""
    found = [
        None if wanted is None else [class_number(model, tokenizer, wanted, name)]
        for name, wanted in (("target", target), ("foil", foil))
    ]
    if found[0] is not None and found[0] == found[1]:
        raise ArgumentError(f"foil is {foil!r}, which is the target: pass another foil.", "foil")
    return found


def blanked_out(
    text: str,
    loaded: Loaded,
    token: str | None,
    target: str | None = None,
    foil: str | None = None,
) -> Truth:
    """:func:`~captum_vz.study.scoring.truth.blank_out_text` for a text and written words.

    Raises:
        ArgumentError: A word is not one token, or there is no such token.
        RefusedError: The model predicts no words.
        ModuleNotFoundError: The extra `study` is not installed.
    """
    from captum_vz.study.scoring.truth import blank_out_text

    model, tokenizer, _ = loaded
    targets, foils = _numbers(model, tokenizer, target, foil)
    prepared = prepare_text(model, tokenizer, text, token)
    return blank_out_text(model, tokenizer, prepared, targets, foils)


def choose_foil(text: str, name: str, loaded: Loaded, token: str | None) -> tuple[str | None, str]:
    """A foil for the embedded model of this name, whose question is known, and a sentence about it.

    For other models the foil is None, and the sentence says which answers compete. It is empty if none do.

    Raises:
        ArgumentError: There is no such token.
    """
    words = _answers(text, loaded, token)
    (first, share), (second, other) = words[:2] if len(words) > 1 else (("", 1.0), ("", 0.0))
    if name in EMBEDDED:
        forms = other_number(first)
        foil = next((word for word, _ in words if word in forms), None)
        if foil is not None:
            question = f"why {first} and not {foil}, its likeliest form of the other number?"
            return foil, f"{question} foil= asks for another word"
    if share >= CLEAR:
        return None, ""
    rivals = f"{first} {share:.2f} competes with {second} {other:.2f}"
    return None, f"{rivals}: foil={second} asks why {first} and not {second}"


def _answers(text: str, loaded: Loaded, token: str | None) -> list[tuple[str, float]]:
    """All words of the vocabulary, or labels, with their probabilities at the explained token, the likeliest first."""
    model, tokenizer, _ = loaded
    prepared = prepare_text(model, tokenizer, text, token)
    with torch.no_grad():
        logits = getattr(model(**prepared.inputs), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        return []
    shares, ids = logits[0, prepared.token].float().softmax(-1).sort(descending=True)
    labels = class_labels(model)
    names = [labels[number] if labels else tokenizer.decode([number]).strip() for number in ids.tolist()]
    return list(zip(names, shares.tolist(), strict=True))

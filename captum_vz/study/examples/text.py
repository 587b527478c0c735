"""A text of a user as a model takes it, and the position of the token to explain."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.visualization import readable_tokens


@dataclass(frozen=True)
class PreparedText:
    """One text, ready for a model.

    Attributes:
        inputs: What the tokenizer returned, `(1, tokens)` each, on the model's device.
        tokens: The tokens as a person reads them, special tokens included.
        token: The position of the token to explain, not negative.
        is_mask: Whether this token is a mask that the model fills.
    """

    inputs: dict[str, Tensor]
    tokens: tuple[str, ...]
    token: int
    is_mask: bool


def prepare_text(
    model: Any,
    tokenizer: Any,
    text: str | Mapping[str, Any],
    token: int | str | None = None,
    any_length: bool = False,
) -> PreparedText:
    """Tokenize a text, check its length, and find the token to explain.

    Args:
        model: The model, which says how many tokens it takes at most.
        tokenizer: Its tokenizer.
        text: A text, in which ``[MASK]`` stands for the tokenizer's own mask token, or what the tokenizer returned for
            one text, with tensors `(1, tokens)`.
        token: The token to explain, see :func:`find_token`. None: of a model with a head for the whole text, the token
            that the head reads.
        any_length: Whether the text may be longer than the model takes.

    Raises:
        ArgumentError: The text is empty or too long. `text` holds another number of texts. There is no such token. The
            tokenizer is another model's, with more tokens.

    >>> from captum_vz.testbed import load_model
    >>> prepared = prepare_text(*load_model(), "some hat [MASK] small.")
    >>> prepared.tokens[prepared.token], prepared.token, prepared.is_mask
    ('[MASK]', 3, True)
    """
    encoding: Any = text
    if isinstance(text, str):
        filled = text.replace("[MASK]", tokenizer.mask_token) if tokenizer.mask_token else text
        encoding = tokenizer(filled, return_tensors="pt", verbose=False)
    ids = encoding.get("input_ids") if isinstance(encoding, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
        shape = f"input_ids {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"of type {type(encoding).__name__}"
        raise ArgumentError(
            f"inputs is {shape}: pass one text that is not empty, or what the tokenizer returns for one with "
            "return_tensors='pt', a mapping with input_ids (1, tokens)."
        )
    numbers = ids[0].long().tolist()
    fills = not predicts_next(model)  # a mask token of a causal model has no prediction
    masks = [fills and number == tokenizer.mask_token_id for number in numbers]
    special = [number in tokenizer.all_special_ids for number in numbers]
    if all(special) and not any(masks):
        if tokenizer.unk_token_id in numbers:
            raise ArgumentError(
                f"the tokenizer knows no token of the text: the model would be given {tokenizer.unk_token} only. Pass "
                "a text in the model's language and script."
            )
        raise ArgumentError("the text is empty: there is no token to explain. Pass a text with at least one word.")
    most = max_tokens(model, tokenizer)
    if not any_length and most is not None and len(numbers) > most:
        raise ArgumentError(f"the text is {len(numbers)} tokens long, but the model takes at most {most}.")
    words = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    known = getattr(words, "num_embeddings", None)
    if known is not None and not 0 <= min(numbers) <= max(numbers) < known:
        raise ArgumentError(
            f"the tokenizer gives ids from {min(numbers)} to {max(numbers)}, but the model knows 0 to {known - 1}: "
            "pass the model's own tokenizer."
        )
    tokens = tuple(readable_tokens(tokenizer, numbers))
    if token is None and reads_whole_text(model):
        token, masks = read_token(model, tokenizer, numbers), []
    place = find_token(token, tokens, masks, special)
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in encoding.items() if isinstance(value, Tensor)}
    return PreparedText(inputs, tokens, place, bool(masks) and masks[place])


def find_token(wanted: int | str | None, tokens: Sequence[str], masks: Sequence[bool], special: Sequence[bool]) -> int:
    """The position of a token that is given by its position or as it is written.

    Args:
        wanted: A position, or a token in any case. Negative positions count from the end. A string of digits is a
            position. None: the first mask or, without a mask, the last token that is no special token.
        tokens: The tokens.
        masks: For each token whether it is a mask token.
        special: For each token whether it is a special token ([SEP], </s>).

    Raises:
        ArgumentError: There is no such token, or there are several.

    >>> tokens = ["[CLS]", "it", "is", "[SEP]"]
    >>> find_token(None, tokens, [False] * 4, [True, False, False, True]), find_token("It", tokens, [], [])
    (2, 1)
    """
    count = len(tokens)
    if wanted is None:
        return masks.index(True) if any(masks) else max(i for i, its in enumerate(special) if not its)
    if isinstance(wanted, int) or wanted.lstrip("-").isdecimal():
        position = int(wanted)
        if not -count <= position < count:
            raise ArgumentError(
                f"token {position} is out of range: there are {count} tokens, positions {-count} to {count - 1}.",
                "token",
            )
        return position % count
    places = [i for i, token in enumerate(tokens) if token == wanted]
    places = places or [i for i, token in enumerate(tokens) if token.casefold() == wanted.casefold()]
    if not places:
        raise ArgumentError(f"token {wanted!r} is none of the tokens: {' '.join(tokens)}", "token")
    if len(places) > 1:
        where = ", ".join(map(str, places))
        raise ArgumentError(f"token {wanted!r} is at the positions {where}: pass one of them.", "token")
    return places[0]


def content_specials(tokenizer: Any) -> dict[str, int]:
    """The ids of the tokenizer's special tokens that stand for words: "unk" and "mask".

    The unknown token of some decoders, such as GPT-2, also begins or ends each text. It is left out.

    >>> from captum_vz.testbed import load_model
    >>> content_specials(load_model()[1])
    {'unk': 1, 'mask': 4}
    """
    ends = [getattr(tokenizer, f"{name}_token_id", None) for name in ("cls", "sep", "bos", "eos", "pad")]
    numbers = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("unk", "mask")}
    return {name: number for name, number in numbers.items() if number is not None and number not in ends}


def models_inside(model: Any) -> Iterator[Any]:
    """A model, and the models inside its wrappers, such as torch.compile, DataParallel, PEFT or a class of your own.

    A wrapper is a module with one child.
    """
    while True:
        yield model
        children = list(model.children()) if isinstance(model, nn.Module) else []
        if len(children) != 1:
            return
        (model,) = children


def class_names(model: Any) -> list[str]:
    """The names of a model's classes, from its own to torch's, and of those of the models inside its wrappers.

    >>> from captum_vz.testbed import load_model
    >>> class_names(load_model()[0])[:2]
    ['BertForMaskedLM', 'BertPreTrainedModel']
    """
    return [kind.__name__ for one in models_inside(model) for kind in type(one).__mro__]


def predicts_next(model: Any) -> bool:
    """Whether a model predicts the next token of a text, from the tokens before it.

    >>> from captum_vz.testbed import load_model
    >>> predicts_next(load_model()[0]), predicts_next(load_model("causal")[0])
    (False, True)
    """
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in class_names(model))


def max_tokens(model: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that both model and tokenizer take; None if neither has a limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa's first position comes after the position of padding.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limits = (getattr(tokenizer, "model_max_length", None), positions)
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def word_id(tokenizer: Any, word: int | str) -> int:
    """The id of a token that is given by its id or as it is written, with or without the space before it.

    Raises:
        ArgumentError: The word is not a single token of the tokenizer.
    """
    if isinstance(word, int):
        return word
    for written in (f" {word}", word):
        ids = tokenizer.encode(written, add_special_tokens=False)
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            number: int = ids[0]
            return number
    raise ArgumentError(f"{word!r} is not a single token of the tokenizer: pass another word, or the id of a token.")


def reads_whole_text(model: Any) -> bool:
    """Whether a model has a head that reads one token for the whole text: for its label, or to choose an answer."""
    return any(name.endswith(("ForSequenceClassification", "ForMultipleChoice")) for name in class_names(model))


def class_labels(model: Any) -> dict[int, str]:
    """The labels of a text or of its tokens, by their numbers; nothing for any other model, such as one of words."""
    if not any(name.endswith(("ForSequenceClassification", "ForTokenClassification")) for name in class_names(model)):
        return {}
    return label_names(next(one for one in models_inside(model) if hasattr(one, "config")).config)


def label_names(config: Any) -> dict[int, str]:
    """The labels of a configuration by their numbers. A name that occurs twice has its number behind it."""
    names = {number: str(name) for number, name in config.id2label.items()}
    counts = Counter(names.values())
    return {number: name if counts[name] == 1 else f"{name} ({number})" for number, name in names.items()}


def class_number(model: Any, tokenizer: Any, wanted: int | str, argument: str) -> int:
    """The number of a label or, for a model of words, the id of a word. `argument` begins the messages.

    Raises:
        ArgumentError: There is no such label or word.
    """
    if labels := class_labels(model):
        return label_number(wanted, labels, argument)
    if any(name.endswith("ForQuestionAnswering") for name in class_names(model)):
        raise ArgumentError(
            f"{argument} names a label or a word, but {type(model).__name__} predicts where an answer begins and ends: "
            "leave it out, or use captum_vz.explain.",
            argument,
        )
    known = getattr(model.config.get_text_config(), "vocab_size", None)
    if isinstance(wanted, int) and known is not None and not 0 <= wanted < known:
        raise ArgumentError(
            f"{argument} is {wanted}, but the model knows the words 0 to {known - 1}: pass one of them.", argument
        )
    try:
        return word_id(tokenizer, wanted)
    except ValueError as error:
        raise ArgumentError(
            f"{argument} is {wanted!r}, which is no single token of the tokenizer: pass another word.", argument
        ) from error


def label_number(wanted: int | str, names: dict[int, str], argument: str) -> int:
    """The number of a label that is given by its name, in any case, or by its number. A string is a name first.

    >>> label_number("positive", {0: "NEGATIVE", 1: "POSITIVE"}, "target")
    1
    >>> [label_number(one, {0: "1 star", 1: "0"}, "target") for one in ("0", 0, "1")]
    [1, 0, 1]
    """
    if isinstance(wanted, str):
        for fold in (str, str.casefold):
            found = [number for number, name in names.items() if fold(name) == fold(wanted)]
            if len(found) == 1:
                return found[0]
            if found:
                raise ArgumentError(
                    f"{argument} is {wanted!r}, the name of {len(found)} labels: pass a number, one of "
                    f"{', '.join(map(str, found))}.",
                    argument,
                )
    if str(wanted).isdecimal() and int(wanted) in names:
        return int(wanted)
    known = list(names.values())
    folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(str(wanted).casefold(), folded, n=1, cutoff=0.5)
    meant = f" (did you mean {folded[close[0]]}?)" if close else ""
    shown = ", ".join(known[:20]) + (f" and {len(known) - 20} others" if len(known) > 20 else "")
    raise ArgumentError(
        f"{argument} is {wanted!r}, which is no label of the model{meant}: pass one of {shown}.", argument
    )


def read_token(model: Any, tokenizer: Any, ids: Sequence[int]) -> int:
    """The token that a head for labels reads: the last one of a causal model, else `[CLS]` or, without it, the first.

    Encoder-decoders read their last token, the end of the text.
    """
    causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
    if causal or getattr(model.config, "is_encoder_decoder", False):
        return len(ids) - 1
    number = getattr(tokenizer, "cls_token_id", None)
    return next((place for place, one in enumerate(ids) if one == number), 0)

"""What a model predicts: its task, its labels and its words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from captum_vz._names import meant
from captum_vz.errors import ArgumentError

SEQUENCE, TOKENS = "sequence-classification", "token-classification"
ANSWER, CHOICE = "question-answering", "multiple-choice"
MASKED, CAUSAL, SEQ2SEQ, ENCODER = "masked-lm", "causal-lm", "seq2seq-lm", "encoder"
IMAGE, AUDIO, SPEECH, SENTENCE = "image-classification", "audio-classification", "ctc", "sentence-embedding"

#: For each task how the names of its classes end, and the class that loads a checkpoint.
TASKS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    SEQUENCE: (("ForSequenceClassification", "ForNextSentencePrediction"), "AutoModelForSequenceClassification"),
    TOKENS: (("ForTokenClassification",), "AutoModelForTokenClassification"),
    ANSWER: (("ForQuestionAnswering", "ForQuestionAnsweringSimple"), "AutoModelForQuestionAnswering"),
    CHOICE: (("ForMultipleChoice",), "AutoModelForMultipleChoice"),
    MASKED: (("ForMaskedLM", "WithLMHeadModel"), "AutoModelForMaskedLM"),
    CAUSAL: (("ForCausalLM", "LMHeadModel", "ModelWithLMHead"), "AutoModelForCausalLM"),
    SEQ2SEQ: (("ForConditionalGeneration", "MTModel", "ForTextToText", "EncoderDecoderModel"), "AutoModelForSeq2SeqLM"),
    IMAGE: (("ForImageClassification", "ForImageClassificationWithTeacher"), "AutoModelForImageClassification"),
    AUDIO: (("ForAudioClassification",), "AutoModelForAudioClassification"),
    SPEECH: (("ForCTC",), "AutoModelForCTC"),
}
#: Classes with the name of a task, but with an output of their own: of a table, or of a search among answers.
OTHERS = ("TapasFor", "XLNetForQuestionAnswering", "XLMForQuestionAnswering", "FlaubertForQuestionAnswering")
#: Tasks whose input is no text.
OF_IMAGES, OF_SOUND = (IMAGE,), (AUDIO, SPEECH)
SAMPLES = ("input_values", "input_features")  # the inputs of models of sound


def encoder_of(model: Any) -> Any:
    """The encoder of a model that has an encoder and a decoder; any other model as it is."""
    # In transformers 4, the config of an encoder alone may be that of the whole model.
    return model.get_encoder() if is_encoder_decoder(model) and hasattr(model, "get_encoder") else model


def device_of(model: Any) -> torch.device:
    """Where inputs go. The weights of an offloaded model are on no device, and its hooks move the inputs."""
    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def is_encoder_decoder(model: Any) -> bool:
    """Whether a model's configuration says that it has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def task_of(model: Any) -> str:
    """The task of a model, by the names of its classes, from its own to torch's, also inside wrappers.

    >>> from captum_vz.testbed import load_model
    >>> task_of(load_model()[0])
    'masked-lm'
    """
    names = (kind.__name__ for one in models_inside(model) for kind in type(one).__mro__)
    task = next(filter(None, map(task_of_class, names)), ENCODER)
    if task == SEQ2SEQ and not any(is_encoder_decoder(one) for one in models_inside(model)):
        return CAUSAL  # language models that also read images have the same ending
    # Models of sound have the same ending.
    return AUDIO if task == SEQUENCE and getattr(model, "main_input_name", "input_ids") in SAMPLES else task


def task_of_class(name: str) -> str | None:
    """The task of a class of transformers, by its name; None for a class without a head, or with another one."""
    if name.startswith(OTHERS) and not name.endswith(("ForSequenceClassification", "Simple", "ForMaskedLM")):
        return None
    return next((task for task, (endings, _) in TASKS.items() if name.endswith(endings)), None)


def unknown_head(model: Any) -> str | None:
    """The name of a class of transformers with a head that has no task here. None: it has a task, or no head."""
    kinds = (type(one) for one in models_inside(model))
    names = [kind.__name__ for kind in kinds if kind.__module__.startswith("transformers.")]
    found = next((name for name in names if re.search("For[A-Z]|Reader$", name)), None)
    return found if task_of(model) == ENCODER else None


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


def predicts_next(model: Any) -> bool:
    """Whether a model predicts the next token of a text, from the tokens before it."""
    return task_of(model) == CAUSAL


def reads_whole_text(model: Any) -> bool:
    """Whether a model has a head that reads one token for the whole text: for its label, or to choose an answer."""
    return task_of(model) in (SEQUENCE, CHOICE)


def class_labels(model: Any) -> dict[int, str]:
    """The labels of a text or of its tokens, by their numbers; nothing for any other model, such as one of words."""
    if task_of(model) not in (SEQUENCE, TOKENS):
        return {}
    return label_names(next(one for one in models_inside(model) if hasattr(one, "config")).config)


def label_names(config: Any) -> dict[int, str]:
    """The labels of a configuration by their numbers. A name that occurs twice has its number behind it."""
    names = {number: str(name) for number, name in config.id2label.items()}
    counts = Counter(names.values())
    return {number: name if counts[name] == 1 else f"{name} ({number})" for number, name in names.items()}


def class_numbers(
    model: Any, tokenizer: Any, target: int | str | None, foil: int | str | None
) -> tuple[tuple[int | None, int | None], list[str]]:
    """The numbers of the target's and the foil's label or, for a model of words, their ids, and remarks about them.

    None where nothing is passed. Two words that begin with the same token are refused, see :func:`word_number`.
    """
    labels = class_labels(model)
    numbers, remarks = list[int | None](), list[str]()
    for argument, wanted in (("target", target), ("foil", foil)):
        if wanted is not None and task_of(model) == ANSWER:
            raise ArgumentError(
                f"{argument} names a label or a word, but {type(model).__name__} predicts where an answer begins and "
                "ends: leave it out, or use captum_vz.explain.",
                argument,
            )
        if wanted is None or labels:
            numbers.append(None if wanted is None else label_number(wanted, labels, argument))
        else:
            number, remark = word_number(model, tokenizer, wanted, argument)
            numbers.append(number)
            remarks += [remark] if remark else []
    if isinstance(target, str) and isinstance(foil, str) and numbers[0] == numbers[1] and not labels:
        both = [_word_ids(model, tokenizer, word) for word in (target, foil)]
        part = next((place for place, (one, other) in enumerate(zip(*both, strict=False)) if one != other), 0)
        if part:
            raise ArgumentError(
                f"foil is {foil!r}, which begins with {tokenizer.decode(both[0][:part])!r}, as the target {target!r} "
                "does. Write this beginning at the end of the text, and pass the tokens that follow it, "
                f"target={both[0][part]} and foil={both[1][part]}.",
                "foil",
            )
    return (numbers[0], numbers[1]), remarks


def word_number(model: Any, tokenizer: Any, word: int | str, argument: str) -> tuple[int, str]:
    """The id by which a word is asked about, and a remark if that is only its first token; else an empty one.

    A word is looked up with a space before it, then as it is written. A next word of several tokens is asked about by
    its first token. A mask holds one token, so a word of several tokens is refused there. An id stays as it is. The
    errors and the remark begin with `argument`.

    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model("causal")
    >>> tokenizer.decode(word_number(model, tokenizer, "are", "foil")[0])
    'are'
    """
    if isinstance(word, int):
        known = getattr(model.config.get_text_config(), "vocab_size", None)
        if known is not None and not 0 <= word < known:
            raise ArgumentError(
                f"{argument} is {word}, but the model knows the words 0 to {known - 1}: pass one of them.", argument
            )
        return word, ""
    ids = _word_ids(model, tokenizer, word)
    if not ids:
        raise ArgumentError(
            f"{argument} is {word!r}, which is no single token of the tokenizer: pass another word.", argument
        )
    first = tokenizer.decode(ids[:1])
    return ids[0], f"{argument} {word.strip()} is asked about by its first token, {first!r}" if len(ids) > 1 else ""


def _word_ids(model: Any, tokenizer: Any, word: str) -> list[int]:
    """The tokens of a word: one, or of a next word several; none if there is no such word."""
    written = [tokenizer.encode(one, add_special_tokens=False) for one in (f" {word}", word)]
    single = [ids for ids in written if len(ids) == 1]
    several = [] if task_of(model) == MASKED else [ids for ids in written if len(ids) > 1]
    # Of " a", some tokenizers make a space and the word.
    fit = (ids for ids in single + several if ids[0] != tokenizer.unk_token_id and tokenizer.decode(ids[:1]).strip())
    return next(fit, [])


def label_number(wanted: int | str, names: dict[int, str], argument: str) -> int:
    """The number of a label that is given by its name, in any case, or by its number. A string is a name first.

    >>> label_number("positive", {0: "NEGATIVE", 1: "POSITIVE"}, "target")
    1
    >>> [label_number(one, {0: "1 star", 1: "0"}, "target") for one in ("0", 0, "1")]
    [1, 0, 1]
    """
    for fold in (str, str.casefold) if isinstance(wanted, str) else ():
        found = [number for number, name in names.items() if fold(name) == fold(str(wanted))]
        if len(found) > 1:
            shown = ", ".join(map(str, found))
            raise ArgumentError(
                f"{argument} is {wanted!r}, the name of {len(found)} labels: pass a number, one of {shown}.", argument
            )
        if found:
            return found[0]
    if str(wanted).isdecimal() and int(wanted) in names:
        return int(wanted)
    known = list(names.values())
    shown = ", ".join(known[:20]) + (f" and {len(known) - 20} others" if len(known) > 20 else "")
    raise ArgumentError(
        f"{argument} is {wanted!r}, which is no label of the model{meant([wanted], known)}: pass one of {shown}.",
        argument,
    )


def max_tokens(model: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that both model and tokenizer take; None if neither has a limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa's first position comes after the position of padding.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limits = (getattr(tokenizer, "model_max_length", None), positions)
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)

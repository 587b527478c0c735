"""What a model predicts: its task, its labels and its words."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from captum_vz.errors import ArgumentError

SEQUENCE, TOKENS, ANSWER, CHOICE = (
    "sequence-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
)
MASKED, CAUSAL, SEQ2SEQ, ENCODER = "masked-lm", "causal-lm", "seq2seq-lm", "encoder"
IMAGE, AUDIO, SPEECH, SENTENCE = "image-classification", "audio-classification", "ctc", "sentence-embedding"

#: For each task how the names of its classes end, and the class that loads a checkpoint.
TASKS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    SEQUENCE: (("ForSequenceClassification",), "AutoModelForSequenceClassification"),
    TOKENS: (("ForTokenClassification",), "AutoModelForTokenClassification"),
    ANSWER: (("ForQuestionAnswering",), "AutoModelForQuestionAnswering"),
    CHOICE: (("ForMultipleChoice",), "AutoModelForMultipleChoice"),
    MASKED: (("ForMaskedLM",), "AutoModelForMaskedLM"),
    CAUSAL: (("ForCausalLM", "LMHeadModel"), "AutoModelForCausalLM"),
    SEQ2SEQ: (("ForConditionalGeneration",), "AutoModelForSeq2SeqLM"),
    IMAGE: (("ForImageClassification",), "AutoModelForImageClassification"),
    AUDIO: (("ForAudioClassification",), "AutoModelForAudioClassification"),
    SPEECH: (("ForCTC",), "AutoModelForCTC"),
}
#: Tasks whose input is no text.
OF_IMAGES, OF_SOUND = (IMAGE,), (AUDIO, SPEECH)
SAMPLES = ("input_values", "input_features")  # the inputs of models of sound


def encoder_of(model: Any) -> Any:
    """The encoder of a model that has an encoder and a decoder; any other model as it is."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if both else model


def task_of(model: Any) -> str:
    """The task of a model, by the names of its classes, also inside wrappers."""
    task = next(filter(None, map(task_of_class, class_names(model))), ENCODER)
    # Models of sound have the same ending.
    return AUDIO if task == SEQUENCE and getattr(model, "main_input_name", "input_ids") in SAMPLES else task


def task_of_class(name: str) -> str | None:
    """The task of a class of transformers, by its name; None for a class without a head."""
    return next((task for task, (endings, _) in TASKS.items() if name.endswith(endings)), None)


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


def max_tokens(model: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that both model and tokenizer take; None if neither has a limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa's first position comes after the position of padding.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limits = (getattr(tokenizer, "model_max_length", None), positions)
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)

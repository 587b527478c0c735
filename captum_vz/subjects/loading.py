"""The model that a user names, loaded without chatter."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import huggingface_hub
import transformers

from captum_vz._names import MODELS
from captum_vz.errors import ArgumentError
from captum_vz.subjects import heads
from captum_vz.testbed.models import load_model, model_source, quiet

AGREEMENT, CAUSAL, MINILM = "agreement", "causal", "minilm"

HUB_SECONDS = 5  # that a request to the hub may take, to see whether there is a network
SHOWN = 4  # names of weights in a message


def load(name: str, hub: bool = True) -> tuple[Any, Any]:
    """A model in eval mode by its name, with its head and its decoder, and its tokenizer or processor.

    The name is one of :func:`~captum_vz.testbed.load_model`, or what Hugging Face finds by a folder or an id. Without
    `hub`, nothing is downloaded. A model that is not complete is refused: weights that it lacks would be random.
    """
    if model_source(name) is not None:
        return load_model(name)
    source, is_local = _find(name, hub)
    safely: dict[str, Any] = {"trust_remote_code": False, "local_files_only": is_local}
    with _loading(f"the model {name!r}"):
        model, report = _load_model(source, safely)
    _check_weights(name, model, report)
    task = heads.task_of(model)
    if task in (*heads.OF_IMAGES, *heads.OF_SOUND):
        of_images = task in heads.OF_IMAGES
        kind: Any = transformers.AutoImageProcessor if of_images else transformers.AutoFeatureExtractor
        with _loading(f"the processor of the model {name!r}"):
            return model, kind.from_pretrained(source, **safely)
    with _loading(f"a tokenizer of the model {name!r}"):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, **safely)
        words = set(tokenizer.get_vocab()) - set(tokenizer.added_tokens_encoder)
    # Without files, transformers makes a tokenizer of special tokens only. Sentencepiece's kind has a space as well.
    if words <= {"\N{LOWER ONE EIGHTH BLOCK}"}:
        raise ArgumentError(
            f"the model {name!r} comes without a tokenizer: its vocabulary holds no word. Save its tokenizer in the "
            "same folder, with tokenizer.save_pretrained."
        )
    return model, tokenizer


def find_models(names: Iterable[str], hub: bool = True) -> None:
    """Refuse names that neither a folder nor the hub has, before anything is computed."""
    for name in names:
        if model_source(name) is None:
            _find(name, hub)


def _find(source: str, hub: bool = True) -> tuple[str, bool]:
    """The folder or the id of a model, and whether all that can be had of it is on this machine."""
    if os.path.exists(source) or source.startswith((".", "/", "~")):
        if not os.path.isfile(os.path.join(source, "config.json")):
            what = f"no config.json can be read in {source}" if os.path.exists(source) else f"there is no {source}"
            raise ArgumentError(f"{what}: expected a folder with a model of transformers.")
        return source, True
    try:
        is_cached = isinstance(huggingface_hub.try_to_load_from_cache(source, "config.json"), str)
    except ValueError as error:
        raise ArgumentError(f"{source!r} is neither a folder nor an id of the Hugging Face hub.") from error
    answer = _answer_of_hub(source) if hub else None
    if not is_cached and answer in (None, 404):
        why = "cannot be reached, or is switched off" if answer is None else "has no such model"
        raise ArgumentError(
            f"cannot load the model {source!r}: there is no such folder, and the Hugging Face hub {why}. Other names "
            f"are {', '.join(MODELS)}."
        )
    return source, answer is None


def _answer_of_hub(source: str) -> int | None:
    """The status of one request to the hub, or None. The hub's own client would try again for half a minute."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    answers: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # of the client, of its proxies, of certificates
            url = f"{huggingface_hub.constants.ENDPOINT}/{source}/resolve/main/config.json"
            answers.append(huggingface_hub.get_session().head(url, timeout=HUB_SECONDS).status_code)

    # In a thread, because the search for the address of a name has no limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_SECONDS + 1)
    return next(iter(answers), None)


def _load_model(source: str, safely: dict[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The model, and what transformers says of its weights. No code of the checkpoint runs: no pickle, no module."""
    config = transformers.AutoConfig.from_pretrained(source, **safely)
    model, report = _auto_class(config).from_pretrained(
        source,
        config=config,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the report lists them, and they are refused
        attn_implementation="eager",  # a config may name a kernel of the hub, which would be fetched and run
        **safely,
    )
    return model.eval(), report


def _auto_class(config: Any) -> Any:
    """The class that loads an architecture with its head. The checkpoint of an encoder alone has no decoder."""
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("EncoderModel"):
        return transformers.AutoModelForTextEncoding
    task = heads.task_of_class(architecture)
    if task == heads.SEQUENCE and type(config) in transformers.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING:
        task = heads.AUDIO  # models of sound have the same ending
    if task == heads.SEQ2SEQ and not config.is_encoder_decoder:  # so have language models that also read images
        if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForCausalLM
        images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        return transformers.AutoModelForImageTextToText if images else transformers.AutoModel
    # So have models of images and of sound that write text.
    if task is None or (
        task == heads.SEQ2SEQ and type(config) not in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    ):
        return transformers.AutoModel
    return getattr(transformers, heads.TASKS[task][1])


def _check_weights(name: str, model: Any, report: Mapping[str, Any]) -> None:
    """Refuse a model with weights that the checkpoint lacks, and warn of weights that the model does not use.

    Transformers reports neither tied weights nor buffers such as `position_ids`. Two kinds of missing weights change no
    score: a decoder's, where the encoder is explained, and a pooler's in a model without a head, which returns no
    logits.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    has_head = heads.task_of(model) != heads.ENCODER
    explained = model if has_head else heads.encoder_of(model)
    used = {id(one) for one in (*explained.parameters(), *explained.buffers())}
    missing = [
        key
        for key in sorted(report["missing_keys"])
        if (key not in tensors or id(tensors[key]) in used) and (has_head or "pooler" not in key.split("."))
    ]
    unexpected = sorted(report["unexpected_keys"])
    mismatched = [
        one if isinstance(one, str) else f"{one[0]} {tuple(one[1])} for {tuple(one[2])}"  # a name before transformers 5
        for one in sorted(report["mismatched_keys"])
    ]
    if mismatched:
        raise ArgumentError(
            f"the weights of {name!r} do not fit: the checkpoint holds {_some(mismatched)} of {type(model).__name__}. "
            f"Pass the config.json with which the weights were saved."
        )
    if missing:
        instead = f" It holds others that the model does not use: {_some(unexpected)}." if unexpected else ""
        raise ArgumentError(
            f"the weights of {name!r} are not complete: {type(model).__name__} needs {_some(missing)}, which the "
            f"checkpoint lacks. They would be random numbers.{instead} Pass a complete checkpoint, with the names of "
            "transformers."
        )
    if unexpected:
        told = f"{type(model).__name__} does not use all weights of {name!r}: {_some(unexpected)} stay out."
        warnings.warn(told, stacklevel=2)


def _some(names: Sequence[str]) -> str:
    others = f" and {len(names) - SHOWN} others" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + others


def _reason(error: Exception) -> str:
    """The first line of an error, without advice that does not hold for this command."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OSError) and "file named" in str(error) and "safetensors" in str(error):
        return (
            "there is no model.safetensors. This command reads no pickles, such as pytorch_model.bin, because they can "
            "run code. If you trust the file, load it in Python and save it with model.save_pretrained."
        )
    if type(error).__name__ in ("SafetensorError", "KeyError"):
        return f"one of its files is damaged or not complete ({lines[0]}). Copy or download it again."
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, which this command does not run. Load it in Python, and use a class."
    return " ".join(lines[: 1 + lines[0].endswith(":")]) if lines else type(error).__name__


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Name what is loaded in errors, and print nothing."""
    try:  # the files of a model and the network can raise any error here: the user gets its first line
        with quiet():
            yield
    except Exception as error:
        reason = str(error) if isinstance(error, ArgumentError) else _reason(error)
        raise ArgumentError(f"cannot load {what}: {reason}") from error

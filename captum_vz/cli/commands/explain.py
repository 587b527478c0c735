"""`captum-vz explain`: score the tokens of a text for one of them."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

from captum_vz.app.explanation import Explanation, draw_explanation, explain, explanation_view
from captum_vz.app.models import load
from captum_vz.cli.options import add_command, add_model, add_outputs, check_files, check_text, one_of
from captum_vz.cli.output import is_terminal, name_files, print_table, save_page, save_picture, share_cell, working
from captum_vz.study import METHODS
from captum_vz.visualization import terminal_text

EXAMPLES: Final = (
    'explain "the pictures of some hat [MASK] scaring marcus."',
    'explain "the pictures of some hat [MASK] scaring marcus." --layer 0 --token pictures --output maps.png',
    'explain "the pictures of some hat" --model causal --method alti --html page.html',
    'explain "a cat [MASK] on the mat" --model minilm --method attention-rollout --json',
)


def add_explain(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "explain",
        run,
        help="score the tokens of a text for one of them",
        description="Prints how much one token draws on each token of a text. A full bar is a share of 1.",
        examples=EXAMPLES,
    )
    sub.add_argument("text", metavar="TEXT", help="a sentence; [MASK] stands for the model's own mask token")
    add_model(sub)
    sub.add_argument(
        "--token",
        help="the token to explain: its position, from 0, negative ones from the end; or the token itself "
        "(default: the mask, else the last token of the text)",
    )
    sub.add_argument(
        "--method",
        type=one_of("method", METHODS),
        default="value-zeroing",
        metavar="METHOD",
        help=f"one of {', '.join(METHODS)} (default: %(default)s)",
    )
    sub.add_argument(
        "--layer",
        type=int,
        default=-1,
        help="the layer whose scores are printed, from 0, negative ones from the end; the last layer of joined maps "
        "(default: the last)",
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
    with working(f"loading {options.model}") as say:
        loaded = load(options.model)
        say(f"{options.method}: maps of {len(loaded.layers)} layers")
        asked = options.text, loaded, options.method, options.token, options.layer
        found = explain(*asked, option="--", distances=options.html is not None)
        if options.output is not None:
            say(f"drawing {options.output}")
            save_picture(draw_explanation(found), options, loaded.model, options.method)
        if options.html is not None:
            save_page(explanation_view(f"{options.text} ({options.model})", [found]).html(), options.html)
    if options.json:
        print(json.dumps(_record(found, options)))
        return
    _print(found)
    name_files(options.output, options.html)


def _print(found: Explanation) -> None:
    scope = found.scope
    if found.layer is not None:
        scope += f" (of 0 to {found.depth - 1})"
    name = ", ".join(filter(None, [found.method, scope]))
    print(f"{name}: how much {found.tokens[found.token]} draws on each token")
    if is_terminal(sys.stdout):
        scores = found.scores.tolist()
        rows = [
            (">" if place == found.token else "", str(place), share_cell(word, score), f"{score:.4f}")
            for place, (word, score) in enumerate(zip(found.tokens, scores, strict=True))
        ]
        print_table(("", "", "token", "share"), rows, keys=3, right=(1, 3), marked=found.token, bars=scores)
    else:
        print(terminal_text(found.tokens, found.scores, found.token, color=False, full=1))
    if found.predictions:
        words = ", ".join(f"{word} {probability:.2f}" for word, probability in found.predictions)
        print(f"the model predicts: {words}")


def _record(found: Explanation, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "text": options.text,
        "model": options.model,
        "method": options.method,
        "tokens": found.tokens,
        "token": {"position": found.token, "text": found.tokens[found.token]},
        "layer": found.layer,
        "scores": found.scores.tolist(),
        "maps": [one.tolist() for one in found.maps],
        "rollout": None if found.rollout is None else found.rollout.tolist(),
        "predictions": [{"token": word, "probability": probability} for word, probability in found.predictions],
    }

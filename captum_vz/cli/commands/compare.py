"""`captum-vz compare`: several methods on one text, in one table."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from captum_vz.app.comparison import blanked_out, compared
from captum_vz.app.explanation import explain
from captum_vz.app.models import load
from captum_vz.app.pages import frame, page, paragraph, table
from captum_vz.app.views import explanation_view
from captum_vz.cli.errors import CommandError
from captum_vz.cli.options import add_command, add_methods, add_model, add_outputs, check_files, check_text
from captum_vz.cli.output.console import counted, is_terminal, print_table, share_cell, working
from captum_vz.cli.output.files import name_files, save_page, save_picture
from captum_vz.errors import ArgumentError
from captum_vz.study import DEFAULT_METHODS, Table
from captum_vz.visualization import View

if TYPE_CHECKING:
    from captum_vz.study.one_text.truth import Truth

EXAMPLES: Final = (
    'compare "the pictures of some hat [MASK] scaring marcus."',
    'compare "the pictures of some hat [MASK] scaring marcus." --methods value-zeroing attention --truth',
    'compare "the pictures of some hat" --model causal --target are --foil is --output methods.png',
    'compare "some hat [MASK] small." --layer 0 --html methods.html --json',
)


def add_compare(commands: Any) -> None:
    """Add the command's parser to those of the others."""
    sub = add_command(
        commands,
        "compare",
        run,
        help="score the tokens of a text by several methods, in one table",
        description="Prints how much one token draws on each token of a text, by several methods: one column of shares "
        "for each method. A star marks the highest share of a method.",
        examples=EXAMPLES,
    )
    sub.add_argument("text", metavar="TEXT", help="a sentence; [MASK] stands for the model's own mask token")
    add_model(sub)
    add_methods(sub)
    sub.add_argument("--token", help="the token to explain (default: the mask, else the last token of the text)")
    sub.add_argument("--layer", type=int, default=-1, help="from 0, negative ones from the end (default: the last)")
    sub.add_argument(
        "--target",
        metavar="WORD",
        help="the word that methods of the model's output explain (default: the model's prediction)",
    )
    sub.add_argument("--foil", metavar="WORD", help="explain the target rather than this word")
    sub.add_argument(
        "--truth",
        action="store_true",
        help="also blank out each token, show how much the target's probability falls, and Kendall's rank correlation "
        "of each method with this; needs the extra study",
    )
    add_outputs(sub, "where to draw the table (default: no picture is drawn)", "tokens and scores")


def run(options: argparse.Namespace) -> None:
    """Compare, print and draw."""
    check_text(options.text)
    check_files(options.output, options.html)
    with working(f"loading {options.model}"):
        loaded = load(options.model)
    names = options.methods or DEFAULT_METHODS
    with counted(len(names), "methods") as bar:

        def advance(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        try:
            found = compared(
                options.text,
                loaded,
                options.methods,
                options.token,
                options.layer,
                options.target,
                options.foil,
                advance,
            )
        except ArgumentError as error:
            message = str(error)
            option = "--" if message.startswith(("token ", "layer ", "methods ")) else ""
            raise ArgumentError(f"{option}{message}") from error
    truth = None
    if options.truth:
        try:
            with working("blanking out each token"):
                truth = blanked_out(options.text, loaded, options.token, options.target, options.foil)
        except ModuleNotFoundError as error:
            raise CommandError(str(error)) from error
        found = replace(found, truth=truth.shares)
    if options.output is not None:
        save_picture(found.plot(), options, loaded.model, ", ".join(found.scores))
    if options.html is not None:
        with working("maps of all methods"):
            maps = [explain(options.text, loaded, name, options.token, options.layer) for name in found.scores]
        save_page(_page(found, truth, explanation_view(options.text, maps), options), options.html)
    if options.json:
        print(json.dumps(_record(found, truth, options)))
        return
    print(f"layer {found.layer}: how much {found.tokens[found.token]} draws on each token")
    _print(found, truth)
    name_files(options.output, options.html)


def _print(found: Table, truth: Truth | None) -> None:
    """The table. In a terminal it is cut into parts that fit its width."""
    if not is_terminal(sys.stdout):
        print(found)
        if truth is not None:
            print(_strongest(found, truth))
        return
    places = range(len(found.tokens))
    columns = {name.replace("-", "\n"): [_cell(found, name, place) for place in places] for name in found.scores}
    first = [[">" if place == found.token else "" for place in places], [*map(str, places)], [*found.tokens]]
    if truth is not None:
        taus = [_tau(tau) for tau in found.agreement.values()]
        columns = {head: [*cells, tau] for (head, cells), tau in zip(columns.items(), taus, strict=True)}
        columns = {"blanking\nout": [*map(_fall, truth.falls.tolist()), ""], **columns}
        first = [[*cells, last] for cells, last in zip(first, ("", "", "Kendall's tau"), strict=True)]
    left = 12 + max(map(len, first[2]))
    for part in _parts(list(columns), shutil.get_terminal_size().columns - left):
        rows = list(zip(*first, *(columns[head] for head in part), strict=True))
        print_table(("", "", "token", *part), rows, right=range(3, 3 + len(part)), marked=found.token)
    for name, reason in found.refused.items():
        print(f"without {name}: {reason}")
    if truth is not None:
        print(_strongest(found, truth))


def _parts(heads: Sequence[str], width: int) -> list[list[str]]:
    """The heads of columns, cut into parts that fit a width."""
    parts: list[list[str]] = [[]]
    room = 0
    for head in heads:
        needed = 3 + max(8, *map(len, head.split("\n")))
        if parts[-1] and room + needed > width:
            parts.append([])
            room = 0
        parts[-1].append(head)
        room += needed
    return parts


def _tau(tau: float) -> str:
    return "undefined" if math.isnan(tau) else f"{tau:+.2f}"


def _fall(fall: float) -> str:
    """A fall of a probability, with its sign; nothing for a token that is not blanked out."""
    return "" if math.isnan(fall) else f"{fall:+.3f}"


def _cell(found: Table, name: str, place: int) -> Any:
    column = found.scores[name].tolist()
    return share_cell(f"{column[place]:.3f}{'*' if column[place] == max(column) else ' '}", column[place])


def _strongest(found: Table, truth: Truth) -> str:
    """The tokens without which the probability changes most."""
    falls = truth.falls.nan_to_num()
    order = falls.abs().argsort(descending=True, stable=True)[:3].tolist()
    named = ", ".join(f"{found.tokens[i]} {falls[i]:+.2f}" for i in order if falls[i])
    return f"blanking out: the probability of {truth.answer} falls without {named or 'no token'}"


def _record(found: Table, truth: Truth | None, options: argparse.Namespace) -> dict[str, Any]:
    record = {"text": options.text, "model": options.model} | json.loads(found.to_json())
    if truth is not None:
        falls = [None if math.isnan(fall) else fall for fall in truth.falls.tolist()]
        record |= {"answer": truth.answer, "falls": falls}
    return record


def _page(found: Table, truth: Truth | None, view: View, options: argparse.Namespace) -> str:
    """The interactive maps of the methods, and the table, as a page."""
    token = found.tokens[found.token]
    heads = ["token", *(", ".join(filter(None, [name, found.scopes.get(name)])) for name in found.scores)]
    rows: list[list[Any]] = [
        [f"{place} {name}", *(column[place].item() for column in found.scores.values())]
        for place, name in enumerate(found.tokens)
    ]
    caption = f"How much {token} draws on each token. Each method's column sums to 1."
    if truth is not None:
        caption += (
            f" Blanking out: how much the probability of {truth.answer} falls without the token. "
            "Kendall's tau: each method's rank correlation with the size of these falls."
        )
        heads.insert(1, "blanking out")
        for row, fall in zip(rows, truth.falls.tolist(), strict=True):
            row.insert(1, _fall(fall))
        rows.append(["Kendall's tau", "", *map(_tau, found.agreement.values())])
    return page(
        f"What {token} draws on",
        paragraph(f"{options.text} ({options.model})"),
        frame(view),
        table(caption, heads, rows, marked=found.token),
        *(paragraph(f"without {name}: {reason}") for name, reason in found.refused.items()),
    )

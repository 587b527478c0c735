"""`captum-vz compare`: several methods on one text, in one table."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from captum_vz._start import tell
from captum_vz.cli.options import (
    CommandError,
    add_command,
    add_model,
    add_outputs,
    check_files,
    check_text,
    one_of,
    slow,
)
from captum_vz.cli.output import (
    columns_of_stdout,
    counted,
    is_terminal,
    joined_cell,
    name_files,
    page_origin,
    print_table,
    save_page,
    save_picture,
    share_cell,
    working,
)
from captum_vz.errors import renamed
from captum_vz.result import Explanation
from captum_vz.result.drawing import family_of
from captum_vz.study import COMPARED_METHODS, DEFAULT_METHODS, METHODS
from captum_vz.study.comparison import blanked_out, choose_foil, compare
from captum_vz.subjects import Subject, text_subject_of
from captum_vz.tables import frame, page, paragraph
from captum_vz.tables import html_table as table
from captum_vz.visualization import View
from captum_vz.visualization.terminal import bar, columns_of
from captum_vz.visualization.tokens import printable

if TYPE_CHECKING:
    from captum_vz.study.scoring.truth import Truth

STRONGEST, AGREES = 3, "agrees"  # tokens in a line
WIDEST = 80  # columns of a line
NUMBER, SHORTEST, LEAST, BAR = 5, 2, 12, 8  # columns of a number, of the shortest bar, of the least cell, of a bar
EXAMPLES: Final = (
    'compare "the pictures of some hat [MASK] scaring marcus."',
    'compare "the pictures of some hat [MASK] scaring marcus." --methods value-zeroing attention --truth',
    'compare "the pictures of some hat" --model causal --target are --foil is --output methods.png',
    'compare "some hat [MASK] small." --layer 0 --html methods.html --json',
    'compare "what a film" --model my-classifier --target POSITIVE --foil NEGATIVE',
)


def add_compare(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "compare",
        run,
        help="score the tokens of a text by several methods, in one table",
        description="Prints on which tokens of a text one token draws most, by several methods: one line for each "
        "method. A full bar is a share of 1.",
        examples=EXAMPLES,
    )
    sub.add_argument("text", metavar="TEXT", help="a sentence; [MASK] stands for the model's own mask token")
    add_model(sub)
    sub.add_argument(
        "--methods",
        nargs="+",
        type=one_of("method", [*METHODS, "all"]),
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}, or all: all except {slow()} (default: {', '.join(COMPARED_METHODS)})",
    )
    sub.add_argument(
        "--token",
        help="the token to explain (default: the mask, else the last token of the text; for labels of a text the token "
        "that the head reads)",
    )
    sub.add_argument("--layer", type=int, default=-1, help="from 0, negative ones from the end (default: the last)")
    sub.add_argument(
        "--target",
        help="the word or label that methods of the model's output explain (default: the model's prediction)",
    )
    sub.add_argument("--foil", help="explain the target rather than this word or label")
    sub.add_argument(
        "--truth",
        action="store_true",
        help="also blank out each token, show how much the target's probability falls, and how far each method agrees "
        "with this, from 0 to 1; needs the extra study",
    )
    sub.add_argument("--full", action="store_true", help="print the shares of all tokens, one column for each method")
    add_outputs(sub, "where to draw the table (default: no picture is drawn)", "tokens and scores")


def run(options: argparse.Namespace) -> None:
    """Compare, print and draw."""
    check_text(options.text)
    check_files(options.output, options.html)
    with working(f"loading {options.model}"):
        loaded = text_subject_of(options.model)
    methods = "all" if options.methods == ["all"] else options.methods
    names = DEFAULT_METHODS if methods == "all" else methods or COMPARED_METHODS
    _check_use(options)
    told = ""
    if options.truth and options.foil is None and options.target is None:
        options.foil, told = choose_foil(options.text, loaded, options.token)
        told = renamed(told, options.names)
    truth = _truth(options, loaded) if options.truth else None  # first, because it may refuse the model
    with counted(len(names), "methods") as bar:

        def advance(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        own = {"token": options.token, "layer": options.layer, "foil": options.foil, "advance": advance}
        found = compare(loaded, options.text, methods, options.target, **own)
    if truth is not None:
        found = replace(found, truth=truth.shares)
    if options.output is not None:
        save_picture(found.plot(), options, loaded.model, ", ".join(found.shares))
    if options.html is not None:
        with working("maps of all methods"):
            view = found.view(title=options.text, about=page_origin(options, loaded.model))
        save_page(_page(found, truth, view), options.html)
    if options.json:
        print(json.dumps(_record(found, truth, options)))
        return
    where = "" if _layer(found) is None else f"layer {found.layer}: "
    if options.full:
        print(f"{where}how much {found.tokens[found.token or 0]} draws on each token")
        _print_full(found, truth)
    else:
        print(f"{where}the tokens on which {found.tokens[found.token or 0]} draws most")
        _print(found)
    for line in _refused(found):
        print(line)
    if truth is not None:
        print(_strongest(found, truth))
    for line in (told, "" if options.full else "all tokens: --full; all layers: --html FILE"):
        if line:
            print(line)
    name_files(options.output, options.html)


def _check_use(options: argparse.Namespace) -> None:
    """Tell that a target or a foil has no effect."""
    named = [f"--{name}" for name in ("target", "foil") if getattr(options, name) is not None]
    chosen = [METHODS[name] for name in options.methods or () if name in METHODS]
    if named and chosen and not options.truth and not any(method.explains_output for method in chosen):
        tell(f"{' and '.join(named)} changes no score: none of the methods explains the model's output.")


def _truth(options: argparse.Namespace, loaded: Subject) -> Truth:
    try:
        with working("blanking out each token"):
            return blanked_out(options.text, loaded, options.token, options.target, options.foil)
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error


def _layer(found: Explanation) -> int | None:
    """The layer that was asked for; None if no method has layers."""
    return found.layer if any(METHODS[name].layered for name in found.shares) else None


def _print(found: Explanation) -> None:
    """A line for each method: how far it agrees with the truth, and its strongest tokens with bars."""
    shell = is_terminal(sys.stdout)
    width = min(columns_of_stdout(), WIDEST) - (4 if shell else 0)
    gap = 3 if shell else 2
    names = _sorted(found)
    agrees = found.agreement
    room = width - max(map(len, names)) - (gap + len(AGREES) if agrees else 0)
    count = max(1, min(STRONGEST, len(found.tokens), room // (gap + LEAST)))
    longest = max(columns_of(printable(token)) for token in found.tokens)
    cell = max(LEAST, room // count - gap)
    words = min(longest, cell - NUMBER - SHORTEST)
    drawn = min(BAR, cell - NUMBER - words)
    rows = []
    for name in names:
        column = found.shares[name]
        best = column.argsort(descending=True, stable=True)[:count].tolist()
        cells = [_strong(found.tokens[place], column[place].item(), words, drawn) for place in best]
        rows.append([name, *([_two(agrees[name])] if agrees else []), *cells])
    heads = ["method", *([AGREES] if agrees else []), *("strongest", "second", "third")[:count]]
    print_table(heads, rows, keys=1, right=(1,) if agrees else ())
    scopes: dict[str, list[str]] = {}
    for name in names:
        scopes.setdefault(found.scopes.get(name, ""), []).append(name)
    for scope, of in scopes.items():
        if scope and scope != f"layer {found.layer}":
            print(f"{scope}: {', '.join(of)}")


def _strong(token: str, share: float, words: int, drawn: int) -> Any:
    """A token, its share and a bar, `words + NUMBER + drawn` columns wide."""
    name = printable(token)
    while columns_of(name) > words:
        name = name[:-2] + "…" if len(name) > 1 else ""
    name += " " * (words - columns_of(name))
    number = f"{share:.2f}".removeprefix("0") if share < 0.995 else "1.0"
    line = bar(min(max(share, 0.0), 1.0), drawn)
    return joined_cell(f"{name} {number} ", line + " " * (drawn - len(line)))


def _sorted(found: Explanation) -> list[str]:
    """The methods by families; with a truth, those that agree most first."""
    agrees = {name: one if one == one else -1.0 for name, one in found.agreement.items()}
    order = list(dict.fromkeys(family_of(name) for name in found.shares))
    return sorted(found.shares, key=lambda name: (order.index(family_of(name)), -agrees.get(name, 0.0)))


def _print_full(found: Explanation, truth: Truth | None) -> None:
    places = range(len(found.tokens))
    columns = {name.replace("-", "\n"): [_cell(found, name, place) for place in places] for name in _sorted(found)}
    first = [[">" if place == found.token else "" for place in places], [*map(str, places)], [*found.tokens]]
    if truth is not None:
        notes = {AGREES: found.agreement, "Kendall's tau": found.kendall}
        notes = {what: one for what, one in notes.items() if any(number == number for number in one.values())}
        for head, name in zip(columns, _sorted(found), strict=True):
            columns[head] += [f"{_two(one[name])} " for one in notes.values()]
        blank = [""] * len(notes)
        columns = {"blanking\nout": [*map(_fall, truth.falls.tolist()), *blank], **columns}
        first = [[*first[0], *blank], [*first[1], *blank], [*first[2], *notes]]
    rows = list(zip(*first, *columns.values(), strict=True))
    heads = ("", "", "token", *columns)
    print_table(heads, rows, keys=3, right=(1, *range(3, len(heads))), marked=found.token)


def _refused(found: Explanation) -> list[str]:
    """A line for each reason for which methods are left out."""
    names: dict[str, list[str]] = {}
    for name, reason in found.refused.items():
        names.setdefault(reason, []).append(name)
    return [f"without {', '.join(those)}: {reason}" for reason, those in names.items()]


def _two(number: float) -> str:
    return f"{number:.2f}" if number == number else ""


def _fall(fall: float) -> str:
    """A fall of a probability, with its sign; nothing for a token that is not blanked out."""
    return "" if math.isnan(fall) else f"{fall:+.3f} "


def _cell(found: Explanation, name: str, place: int) -> Any:
    column = found.shares[name].tolist()
    return share_cell(f"{column[place]:.3f}{'*' if column[place] == max(column) else ' '}", column[place])


def _strongest(found: Explanation, truth: Truth) -> str:
    """The tokens without which the probability changes most."""
    falls = truth.falls.nan_to_num()
    order = falls.abs().argsort(descending=True, stable=True)[:3].tolist()
    named = ", ".join(f"{found.tokens[i]} {falls[i]:+.2f}" for i in order if abs(falls[i]) >= 0.005)
    how = "falls most" if all(falls[i] > -0.005 for i in order) else "changes most (+ it falls, - it rises)"
    changes = f"{how} without: {named}" if named else "changes without no token"
    return f"blanking out: the probability of {truth.answer} {changes}"


def _record(found: Explanation, truth: Truth | None, options: argparse.Namespace) -> dict[str, Any]:
    record = {"text": options.text, "model": options.model} | found.to_dict() | {"layer": _layer(found)}
    if truth is not None:
        falls = [None if math.isnan(fall) else fall for fall in truth.falls.tolist()]
        record |= {"answer": truth.answer, "falls": falls}
    return record


def _page(found: Explanation, truth: Truth | None, view: View) -> str:
    """The interactive maps of the methods, and the table, as a page."""
    token = found.tokens[found.token or 0]
    heads = ["token", *(", ".join(filter(None, [name, found.scopes.get(name)])) for name in found.shares)]
    rows: list[list[Any]] = [
        [f"{place} {name}", *(column[place].item() for column in found.shares.values())]
        for place, name in enumerate(found.tokens)
    ]
    caption = f"How much {token} draws on each token. Each method's column sums to 1."
    if truth is not None:
        caption += (
            f" Blanking out: how much the probability of {truth.answer} falls without the token. "
            "Agrees: how much of a method's shares lies on the same tokens as the sizes of these falls."
        )
        heads.insert(1, "blanking out")
        for row, fall in zip(rows, truth.falls.tolist(), strict=True):
            row.insert(1, _fall(fall).strip())
        rows.append([AGREES, "", *map(_two, found.agreement.values())])
        if any(one == one for one in found.kendall.values()):
            rows.append(["Kendall's tau", "", *map(_two, found.kendall.values())])
    return page(
        f"What {token} draws on",
        frame(view),
        table(caption, heads, rows, marked=found.token),
        *map(paragraph, _refused(found)),
    )

"""`captum-vz compare`: several methods on one text, in one table."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from captum_vz._start import tell
from captum_vz.app.explain import explain_subject
from captum_vz.app.explanation import explanation_view
from captum_vz.app.pages import frame, page, paragraph, table
from captum_vz.app.subjects import subject_of_loaded
from captum_vz.app.wish import Wish, blanked_out, choose_foil, compared, load_for_text
from captum_vz.cli.output import (
    check_files,
    check_text,
    name_files,
    page_origin,
    print_table,
    room,
    save_page,
    save_picture,
    shaded,
    working,
)
from captum_vz.errors import renamed
from captum_vz.study import COMPARED_METHODS, DEFAULT_METHODS, METHODS, Table
from captum_vz.study.comparison import family_of
from captum_vz.visualization import View
from captum_vz.visualization.terminal import bar, columns_of, printable

if TYPE_CHECKING:
    from captum_vz.study.scoring.truth import Truth

STRONGEST, AGREES = 3, "agrees"  # tokens in a line
WIDEST = 80  # columns of a line
NUMBER, SHORTEST, LEAST, BAR = 5, 2, 12, 8  # columns of a number, of the shortest bar, of the least cell, of a bar


def compare(options: argparse.Namespace) -> None:
    """Compare, print and draw."""
    check_text(options.text)
    check_files(options.output, options.html)
    methods = "all" if options.methods == ["all"] else options.methods
    names = DEFAULT_METHODS if methods == "all" else methods or COMPARED_METHODS
    _check_use(options)
    told, truth = "", None
    with working(f"loading {options.model}") as say:
        loaded = load_for_text(options.model)
        if options.truth:  # first, because it may refuse the model
            say("blanking out each token")
            if options.foil is None and options.target is None:
                options.foil, told = choose_foil(options.text, options.model, loaded, options.token)
                told = renamed(told, options.names)
            truth = blanked_out(options.text, loaded, options.token, options.target, options.foil)
        done: list[str] = []

        def advance(name: str) -> None:
            done.append(name)
            say(f"methods: {len(done)}/{len(names)}, {name}")

        say(f"methods: 0/{len(names)}")
        asked = options.text, loaded, methods, options.token, options.layer, options.target, options.foil
        found = compared(*asked, advance)
        if truth is not None:
            found = replace(found, truth=truth.shares)
        if options.output is not None:
            save_picture(found.plot(), options, loaded.model, ", ".join(found.scores))
        if options.html is not None:
            say("maps of all methods")
            subject = subject_of_loaded(loaded)
            wish = Wish(None, options.target, options.foil, options.token, options.layer)
            wishes = [wish.of_method(name, subject.task) for name in found.scores]
            maps = [explain_subject(subject, options.text, None, one) for one in wishes]
            view = explanation_view(options.text, maps, page_origin(options, loaded.model))
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


def _layer(found: Table) -> int | None:
    """The layer that was asked for; None if no method has layers."""
    return found.layer if any(METHODS[name].layered for name in found.scores) else None


def _print(found: Table) -> None:
    """A line for each method: how far it agrees with the truth, and its strongest tokens with bars."""
    names, agrees = _sorted(found), found.agreement
    width = min(room() or WIDEST, WIDEST) - max(map(len, names)) - (2 + len(AGREES) if agrees else 0)
    count = max(1, min(STRONGEST, len(found.tokens), width // (LEAST + 2)))
    cell = max(LEAST, width // count - 2)
    words = min(max(columns_of(printable(token)) for token in found.tokens), cell - NUMBER - SHORTEST)
    rows = []
    for name in names:
        column = found.scores[name]
        best = column.argsort(descending=True, stable=True)[:count].tolist()
        cells = [_strong(found.tokens[place], column[place].item(), words, cell) for place in best]
        rows.append([name, *([_two(agrees[name])] if agrees else []), *cells])
    heads = ["method", *([AGREES] if agrees else []), *("strongest", "second", "third")[:count]]
    print_table(heads, rows, right=(1,) if agrees else ())
    scopes: dict[str, list[str]] = {}
    for name in names:
        scopes.setdefault(found.scopes.get(name, ""), []).append(name)
    for scope, of in scopes.items():
        if scope and scope != f"layer {found.layer}":
            print(f"{scope}: {', '.join(of)}")


def _strong(token: str, share: float, words: int, cell: int) -> str:
    """A token, its share and a bar, at most `cell` columns wide."""
    name = printable(token)
    while columns_of(name) > words:
        name = name[:-2] + "…" if len(name) > 1 else ""
    number = f"{share:.2f}".removeprefix("0") if share < 0.995 else "1.0"
    return f"{name}{' ' * (words - columns_of(name))} {number} {bar(min(share, 1.0), min(BAR, cell - NUMBER - words))}"


def _sorted(found: Table) -> list[str]:
    """The methods by families; with a truth, those that agree most first."""
    agrees = {name: one if one == one else -1.0 for name, one in found.agreement.items()}
    order = list(dict.fromkeys(family_of(name) for name in found.scores))
    return sorted(found.scores, key=lambda name: (order.index(family_of(name)), -agrees.get(name, 0.0)))


def _print_full(found: Table, truth: Truth | None) -> None:
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
    print_table(heads, rows, keys=3, right=(1, *range(3, len(heads))))


def _refused(found: Table) -> list[str]:
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


def _cell(found: Table, name: str, place: int) -> str:
    column = found.scores[name].tolist()
    return shaded(f"{column[place]:.3f}{'*' if column[place] == max(column) else ' '}", column[place])


def _strongest(found: Table, truth: Truth) -> str:
    """The tokens without which the probability changes most."""
    falls = truth.falls.nan_to_num()
    order = falls.abs().argsort(descending=True, stable=True)[:3].tolist()
    named = ", ".join(f"{found.tokens[i]} {falls[i]:+.2f}" for i in order if abs(falls[i]) >= 0.005)
    how = "falls most" if all(falls[i] > -0.005 for i in order) else "changes most (+ it falls, - it rises)"
    changes = f"{how} without: {named}" if named else "changes without no token"
    return f"blanking out: the probability of {truth.answer} {changes}"


def _record(found: Table, truth: Truth | None, options: argparse.Namespace) -> dict[str, Any]:
    record = {"text": options.text, "model": options.model} | json.loads(found.to_json()) | {"layer": _layer(found)}
    if truth is not None:
        falls = [None if math.isnan(fall) else fall for fall in truth.falls.tolist()]
        record |= {"answer": truth.answer, "falls": falls}
    return record


def _page(found: Table, truth: Truth | None, view: View) -> str:
    """The interactive maps of the methods, and the table, as a page."""
    token = found.tokens[found.token or 0]
    heads = ["token", *(", ".join(filter(None, [name, found.scopes.get(name)])) for name in found.scores)]
    rows: list[list[Any]] = [
        [f"{place} {name}", *(column[place].item() for column in found.scores.values())]
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

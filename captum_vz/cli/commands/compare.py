"""`captum-vz compare`: several methods on one text, in one table."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from captum_vz.app.checks import blanked_out, compared
from captum_vz.app.explaining.explain import Wish, explain_subject
from captum_vz.app.explaining.explanation import explanation_view
from captum_vz.app.explaining.subjects import subject_of_loaded
from captum_vz.app.models import Loaded, load
from captum_vz.app.pages import frame, page, paragraph, table
from captum_vz.cli.errors import CommandError, tell
from captum_vz.cli.options import add_command, add_model, add_outputs, check_files, check_text, one_of, slow
from captum_vz.cli.output import counted, name_files, print_table, save_page, save_picture, share_cell, working
from captum_vz.study import COMPARED_METHODS, DEFAULT_METHODS, METHODS, Table
from captum_vz.visualization import View

if TYPE_CHECKING:
    from captum_vz.study.scoring.truth import Truth

EXAMPLES: Final = (
    'compare "the pictures of some hat [MASK] scaring marcus."',
    'compare "the pictures of some hat [MASK] scaring marcus." --methods value-zeroing attention --truth',
    'compare "the pictures of some hat" --model causal --target are --foil is --output methods.png',
    'compare "some hat [MASK] small." --layer 0 --html methods.html --json',
)


def add_compare(commands: Any) -> None:
    """Add the parser of this command."""
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
    sub.add_argument(
        "--methods",
        nargs="+",
        type=one_of("method", [*METHODS, "all"]),
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}, or all: all except {slow()} (default: {', '.join(COMPARED_METHODS)})",
    )
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
    methods = "all" if options.methods == ["all"] else options.methods
    names = DEFAULT_METHODS if methods == "all" else methods or COMPARED_METHODS
    _check_use(options)
    truth = _truth(options, loaded) if options.truth else None  # first, because it may refuse the model
    with counted(len(names), "methods") as bar:

        def advance(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        asked = options.text, loaded, methods, options.token, options.layer, options.target, options.foil
        found = compared(*asked, advance, option="--")
    if truth is not None:
        found = replace(found, truth=truth.shares)
    if options.output is not None:
        save_picture(found.plot(), options, loaded.model, ", ".join(found.scores))
    if options.html is not None:
        with working("maps of all methods"):
            subject, wish = subject_of_loaded(loaded), Wish(token=options.token, layer=options.layer, option="--")
            maps = [explain_subject(subject, options.text, None, replace(wish, method=name)) for name in found.scores]
        save_page(_page(found, truth, explanation_view(options.text, maps), options), options.html)
    if options.json:
        print(json.dumps(_record(found, truth, options)))
        return
    where = "" if _layer(found) is None else f"layer {found.layer}: "
    print(f"{where}how much {found.tokens[found.token or 0]} draws on each token")
    _print(found, truth)
    name_files(options.output, options.html)


def _check_use(options: argparse.Namespace) -> None:
    """Tell that a target or a foil has no effect."""
    named = [f"--{name}" for name in ("target", "foil") if getattr(options, name) is not None]
    chosen = [METHODS[name] for name in options.methods or () if name in METHODS]
    if named and chosen and not options.truth and not any(method.explains_output for method in chosen):
        tell(f"{' and '.join(named)} changes no score: none of the methods explains the model's output.")


def _truth(options: argparse.Namespace, loaded: Loaded) -> Truth:
    try:
        with working("blanking out each token"):
            return blanked_out(options.text, loaded, options.token, options.target, options.foil, option="--")
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error


def _layer(found: Table) -> int | None:
    """The layer that was asked for; None if no method has layers."""
    return found.layer if any(METHODS[name].layered for name in found.scores) else None


def _print(found: Table, truth: Truth | None) -> None:
    places = range(len(found.tokens))
    columns = {name.replace("-", "\n"): [_cell(found, name, place) for place in places] for name in found.scores}
    first = [[">" if place == found.token else "" for place in places], [*map(str, places)], [*found.tokens]]
    if truth is not None:
        taus = [_tau(tau) for tau in found.agreement.values()]
        columns = {head: [*cells, tau] for (head, cells), tau in zip(columns.items(), taus, strict=True)}
        columns = {"blanking\nout": [*map(_fall, truth.falls.tolist()), ""], **columns}
        first = [[*cells, last] for cells, last in zip(first, ("", "", "Kendall's tau"), strict=True)]
    rows = list(zip(*first, *columns.values(), strict=True))
    heads = ("", "", "token", *columns)
    print_table(heads, rows, keys=3, right=(1, *range(3, len(heads))), marked=found.token)
    for line in _refused(found):
        print(line)
    if truth is not None:
        print(_strongest(found, truth))


def _refused(found: Table) -> list[str]:
    """A line for each reason for which methods are left out."""
    names: dict[str, list[str]] = {}
    for name, reason in found.refused.items():
        names.setdefault(reason, []).append(name)
    return [f"without {', '.join(those)}: {reason}" for reason, those in names.items()]


def _tau(tau: float) -> str:
    return "undefined " if math.isnan(tau) else f"{tau:+.2f} "


def _fall(fall: float) -> str:
    """A fall of a probability, with its sign; nothing for a token that is not blanked out."""
    return "" if math.isnan(fall) else f"{fall:+.3f} "


def _cell(found: Table, name: str, place: int) -> Any:
    column = found.scores[name].tolist()
    return share_cell(f"{column[place]:.3f}{'*' if column[place] == max(column) else ' '}", column[place])


def _strongest(found: Table, truth: Truth) -> str:
    """The tokens without which the probability changes most."""
    falls = truth.falls.nan_to_num()
    order = falls.abs().argsort(descending=True, stable=True)[:3].tolist()
    named = ", ".join(f"{found.tokens[i]} {falls[i]:+.2f}" for i in order if abs(falls[i]) >= 0.005)
    changes = f"falls most without: {named}" if named else "changes without no token"
    return f"blanking out: the probability of {truth.answer} {changes}"


def _record(found: Table, truth: Truth | None, options: argparse.Namespace) -> dict[str, Any]:
    record = {"text": options.text, "model": options.model} | json.loads(found.to_json()) | {"layer": _layer(found)}
    if truth is not None:
        falls = [None if math.isnan(fall) else fall for fall in truth.falls.tolist()]
        record |= {"answer": truth.answer, "falls": falls}
    return record


def _page(found: Table, truth: Truth | None, view: View, options: argparse.Namespace) -> str:
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
        *map(paragraph, _refused(found)),
    )

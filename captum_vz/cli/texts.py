"""`captum-vz explain`, `compare`, `generate`, `verify`: one text explained, continued or checked. `demo`: a page."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

import captum_vz
from captum_vz._start import is_terminal, room, tell
from captum_vz.cli.output import check_files, name_files, page_origin, save_page, save_picture, working
from captum_vz.errors import ArgumentError, renamed
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.generation.attribute import default_method
from captum_vz.methods import COMPARED_METHODS, DECIDING, DEEP, DEFAULT_METHODS, METHODS
from captum_vz.result import Explanation
from captum_vz.result.words import KINDS
from captum_vz.study.comparison import Truth, choose_foil, truth_of, with_truth
from captum_vz.study.comparison import compare as compared
from captum_vz.subjects import Subject, subject_of, text_subject_of
from captum_vz.subjects.heads import is_encoder_decoder
from captum_vz.subjects.loading import AGREEMENT
from captum_vz.subjects.texts import check_prompt, prepare_text, warn_of_text
from captum_vz.visualization.forms import bar, columns_of, page, paragraph, text_table
from captum_vz.visualization.tokens import printable

STRONGEST, AGREES = 3, "agrees"  # tokens in a line, the head of a column
WIDEST: Final = 80  # columns of a line of several tokens
NUMBER, SHORTEST, LEAST, BAR = 5, 2, 12, 8  # columns of a number, of the shortest bar, of the least cell, of a bar
#: What is verified without a text.
TEXT: Final = "The keys to the old cabinet are on the table, but nobody has found them yet."
AGREEMENT_TEXT: Final = "the pictures of some hat [MASK] scaring marcus."


def explain(options: argparse.Namespace) -> None:
    """Explain, print and draw."""
    check_files(options.output, options.html)
    window, pair, prompt = options.window, options.pair, options.prompt_name
    if window is not None and len(window) > 2:
        raise ArgumentError(
            f"--window is given {len(window)} numbers: pass a number of tokens, and what windows share."
        )
    asked = {name: getattr(options, name) for name in ("method", "target", "foil", "token", "layer", "words")}
    with working(f"loading {options.model}") as say:
        subject = subject_of(options.model)
        say(f"maps of {len(subject.layers)} layers")
        second, asked["prompt_name"] = (one[0] if one and len(one) == 1 else one for one in (pair, prompt))
        found = captum_vz.explain(subject, options.text, second, window=True if window == [] else window, **asked)
        found.told = [renamed(line, options.names) for line in found.told]
        maps = {"maps": True} if options.maps and not isinstance(found, GenerationAttribution) else {}
        if options.output is not None:
            say(f"drawing {options.output}")
            save_picture(found.plot(**maps), options, subject.model, found.method)
        if options.html is not None:
            about = page_origin(options, subject.model)
            save_page(found.view(title=options.text, about=about, **maps).html(), options.html)
    if options.json:
        numbers = found.to_dict() | (found.first.layers_to_dict(True) if maps else {})
        print(json.dumps({"text": options.text, "model": options.model, **numbers}))
        return
    print(found.printed(is_terminal(sys.stdout), room()))
    count = max(len(part.layers) for part in found.parts.values())
    if count > 1 and options.html is None:
        print(f"all {count} layers: --html FILE{', of all tokens with --maps' if count > DEEP else ''}")
    name_files(options.output, options.html)


def compare(options: argparse.Namespace) -> None:
    """Compare, print and draw."""
    check_files(options.output, options.html)
    methods = "all" if options.methods == ["all"] else options.methods
    names = DEFAULT_METHODS if methods == "all" else methods or COMPARED_METHODS
    _check_use(options)
    lines, truth, done = list[str](), None, list[str]()
    with working(f"loading {options.model}") as say:
        subject = text_subject_of(options.model)
        if options.truth or options.patch:  # first, because it may refuse the model
            say("patching each token" if options.patch else "blanking out each token")
            if options.foil is None and options.target is None and not options.patch:
                options.foil, told = choose_foil(options.text, subject, options.token)
                lines += [renamed(told, options.names)] if told else []
            truth = truth_of(options.text, subject, options.token, options.target, options.foil, options.patch)
            options.foil = truth.foil

        def advance(name: str) -> None:
            done.append(name)
            say(f"methods: {len(done)}/{len(names)}, {name}")

        say(f"methods: 0/{len(names)}")
        asked = {name: getattr(options, name) for name in ("target", "token", "layer", "foil")}
        found = compared(subject, options.text, methods, **asked, advance=advance)
        found.told = [renamed(line, options.names) for line in found.told]
        if truth is not None:
            found = with_truth(found, truth)
            best = sorted(found.agreement.items(), key=lambda one: -one[1] if one[1] == one[1] else 1.0)
            found.parts = {name: found.parts[name] for name, _ in best}
            lines.insert(0, _strongest(found, truth))
        if options.output is not None:
            save_picture(found.plot(), options, subject.model, ", ".join(found.parts))
        if options.html is not None:
            say("maps of all methods")
            save_page(_page(found, options, subject, lines), options.html)
    if options.json:
        record = {"text": options.text, "model": options.model, **found.to_dict()}
        falls = [] if truth is None else [None if math.isnan(fall) else fall for fall in truth.falls.tolist()]
        print(json.dumps(record | ({} if truth is None else {"answer": truth.answer, "falls": falls})))
        return
    where = "" if found.layer is None else f"layer {found.layer}: "
    if options.full:
        print(f"{where}how much {found.tokens[found.token or 0]} draws on each token")
        print(found.printed(is_terminal(sys.stdout), room()))
    else:
        print(f"{where}the tokens on which {found.tokens[found.token or 0]} draws most")
        _print(found)
        lines = [*found.remarks(), *lines, "all tokens: --full; all layers: --html FILE"]
    print(*lines, sep="\n", end="\n" * bool(lines))
    name_files(options.output, options.html)


def _check_use(options: argparse.Namespace) -> None:
    named = [f"--{name}" for name in ("target", "foil") if getattr(options, name) is not None]
    chosen = [METHODS[name] for name in options.methods or () if name in METHODS]
    used = options.truth or options.patch or options.layer == DECIDING
    used = used or any(method.explains_output for method in chosen)
    if named and chosen and not used:
        tell(f"{' and '.join(named)} changes no score: none of the methods explains the model's output.")


def _print(found: Explanation) -> None:
    """A line for each method: its agreement, its strongest tokens with bars, and the layers that it scores."""
    agrees = {name: [f"{one:.2f}" if one == one else ""] for name, one in found.agreement.items()}
    width = min(room() or WIDEST, WIDEST) - max(map(len, found.shares)) - (len(AGREES) + 2) * bool(agrees)
    count = max(1, min(STRONGEST, len(found.tokens), width // (LEAST + 2)))
    cell, paints = max(LEAST, width // count - 2), is_terminal(sys.stdout)
    words = min(max(columns_of(printable(token)) for token in found.tokens), cell - NUMBER - SHORTEST)
    rows: list[list[Any]] = []
    for name, shown in found.shown.items():
        column = shown.nan_to_num(nan=0.0)
        best = column.argsort(descending=True, stable=True)[:count].tolist()
        rows.append([name, *agrees.get(name, [])])
        for place in best:
            share = column[place].item()
            token, number = _strong(found.tokens[place], share, words, cell)
            rows[-1].append([(token, share * found.sign(name, place) if paints else None), (number, None)])
    heads = ["method", *[AGREES] * bool(agrees), *("strongest", "second", "third")[:count]]
    print(text_table(heads, rows, right=[1] * bool(agrees)))
    scopes: dict[str, list[str]] = {}
    for name, scope in found.scopes.items():
        scopes.setdefault(scope, []).append(name)
    for scope, names in scopes.items():
        if scope and scope != f"layer {found.layer}":
            print(f"{scope}: {', '.join(names)}")


def _strong(token: str, share: float, words: int, cell: int) -> tuple[str, str]:
    """A token, then its share and a bar, at most `cell` columns wide together."""
    name = printable(token)
    while columns_of(name) > words:
        name = name[:-2] + "…" if len(name) > 1 else ""
    number = f"{share:.2f}".removeprefix("0") if share < 0.995 else "1.0"
    drawn = bar(min(share, 1.0), min(BAR, cell - NUMBER - words))
    return f"{name}{' ' * (words - columns_of(name))}", f" {number} {drawn}"


def _strongest(found: Explanation, truth: Truth) -> str:
    """The tokens without which the answer's log-probability or lead changes most."""
    falls = truth.falls.nan_to_num()
    order = falls.abs().argsort(descending=True, stable=True)[:3].tolist()
    named = ", ".join(f"{found.tokens[i]} {falls[i]:+.2f}" for i in order if abs(falls[i]) >= 0.005)
    how = "falls most" if all(falls[i] > -0.005 for i in order) else "changes most (+ it falls, - it rises)"
    changes = f"{how} without: {named}" if named else "changes without no token"
    return f"{truth.how}: the {truth.answer} {changes}"


def _page(found: Explanation, options: argparse.Namespace, subject: Subject, lines: list[str]) -> str:
    token = found.tokens[found.token or 0]
    falls = "" if found.falls is None else " Fall: of the answer's log-probability or lead, without the token."
    caption = f"How much {token} draws on each token. The column of each method sums to 1.{falls}"
    view = found.view(title=options.text, about=page_origin(options, subject.model)).frame()
    below = map(paragraph, [*lines, *found.remarks()])
    return page(f"What {token} draws on", view, found.html_table(caption), *below)


def generate(options: argparse.Namespace) -> None:
    """Generate, attribute, print and draw."""
    most, step = options.max_new_tokens, options.step
    if step is not None and not -most <= step < most:
        raise ArgumentError(f"--step {step} is out of range: --max-new-tokens is {most}.")
    check_files(options.output, options.html)
    with working(f"loading {options.model}") as say:
        subject = subject_of(options.model)
        has_encoder = is_encoder_decoder(subject.model)
        name, layer = options.method or default_method(subject, options.layer), options.layer
        if layer not in (None, DECIDING) and not METHODS[name].layered:
            raise ArgumentError(f"--method {name} has no scores of single layers: leave --layer out.")
        check_prompt(options.text, subject, most)
        say(f"{name}: {most} new tokens")
        every = layer != DECIDING and (options.json or options.html is not None)
        found: GenerationAttribution = attribute_generation(
            subject,
            options.text,
            options.method,
            most,
            layer=None if every else layer,
            foil=options.foil,
            do_sample=options.sample is not None,
            seed=options.sample,
        )
    name, method = found.method, found.first.method
    place = found.layer_index(layer if every and layer is not None else -1)
    mask = _mask(found, options.mask, has_encoder)
    steps = len(found.generated.ids)
    if step is not None and not -steps <= step < steps:
        raise ArgumentError(f"--step {step} is out of range: there are {steps} new tokens, {-steps} to {steps - 1}.")
    if options.output is not None:
        save_picture(found.plot(place, mask=mask), options, subject.model, name)
    if options.html is not None:
        view = found.view(place, mask=mask, title=f"{options.text} … {found.text}")
        told = f"{options.model} continues the text ({', '.join(filter(None, [name, method.scope(place)]))})."
        view = replace(view, subtitle=told, about=view.about | page_origin(options, subject.model))
        save_page(view.html(), options.html)
    if options.json:
        about: dict[str, Any] = {"model": options.model, "method": name, "residual": method.residual}
        print(json.dumps({**found.to_dict(mask), **about}))
        return
    join = " → " if has_encoder else "" if found.text.startswith(" ") else " "
    print(f"text: {options.text}{join}{found.text}".rstrip())
    found.told = [renamed(line, options.names) for line in found.told]
    print(found.printed(is_terminal(sys.stdout), room(), layer=place, step=step, mask=mask))
    name_files(options.output, options.html)


def _mask(found: GenerationAttribution, given: list[str], has_encoder: bool) -> Tensor:
    """Which prompt tokens `--mask` leaves out, `(m,)`, and the first token of a decoder, which is no source."""
    kinds = [kind if kind in KINDS else kind.split(",") for kind in given]
    for word in (word for kind in kinds if not isinstance(kind, str) for word in kind):
        if not found.mask([word]).any():
            tell(f"--mask: {word!r} is no word of the prompt.")
    mask = found.mask(*kinds)
    if has_encoder:
        mask[-1] = True
    if mask.all():
        raise ArgumentError("--mask leaves out all prompt tokens: keep at least one.")
    return mask


def verify(options: argparse.Namespace) -> None:
    """Verify the model and print the report. If a check fails, it exits with status 1."""
    text = options.text or (AGREEMENT_TEXT if options.model == AGREEMENT else TEXT)
    with working(f"loading {options.model}") as say:
        subject = text_subject_of(options.model)
        prepared = prepare_text(subject.model, subject.tokenizer, text)
        warn_of_text(text, subject, prepared, str(prepared.token))
        told = f"checks of {len(subject.layers)} layers: "
        report = captum_vz.verify(subject.model, prepared.inputs, subject.layers, advance=lambda what: say(told + what))
    if options.json:
        print(report.to_json())
    else:
        in_full = options.verbose or not report.passed
        print(report if in_full else f"{report.verdict}\na table of all checks: --verbose")
    if not report.passed:
        raise SystemExit(1)


def demo(options: argparse.Namespace) -> None:
    """Serve the page."""
    from captum_vz.demo import serve

    serve(options.model, host=options.host, port=options.port, max_tokens=options.max_tokens)

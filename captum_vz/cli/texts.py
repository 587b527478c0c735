"""`captum-vz explain` and `captum-vz generate`: one text explained, or continued."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz import find_layers
from captum_vz._start import is_terminal, tell
from captum_vz.app.explain import explain_subject
from captum_vz.app.explanation import explanation_view, row_text
from captum_vz.app.models import Loaded, load_with_head
from captum_vz.app.subjects import subject_of
from captum_vz.app.wish import Wish, check_layer, check_room, depth_of, remarks
from captum_vz.cli.output import (
    check_files,
    check_text,
    name_files,
    page_origin,
    print_table,
    save_page,
    save_picture,
    shaded,
    working,
)
from captum_vz.errors import ArgumentError
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.generation.prompts import read_prompts
from captum_vz.generation.words import KINDS, TokenText
from captum_vz.study.examples.text import prepare_text
from captum_vz.study.methods import METHODS, effect_of_layer, encoder_of
from captum_vz.visualization.terminal import score_texts, terminal_text

STRONGEST: Final = 3  # prompt tokens in a line
ROLLOUT, CROSS = "value-zeroing-rollout", "value-zeroing"  # the default methods of generated text


def explain(options: argparse.Namespace) -> None:
    """Explain, print and draw."""
    check_text(options.text)
    check_files(options.output, options.html)
    window, pair = options.window, options.pair
    if window is not None and len(window) > 2:
        raise ArgumentError(
            f"--window is given {len(window)} numbers: pass a number of tokens, and what windows share."
        )
    with working(f"loading {options.model}") as say:
        subject = subject_of(options.model)
        asked = options.method, options.target, options.foil, options.token, options.layer, options.words
        wish = Wish(*asked, True if window == [] else window, distances=options.html is not None)
        say(f"{options.method or wish.default_method(subject.task)}: maps of {len(subject.layers)} layers")
        found = explain_subject(subject, options.text, pair[0] if pair is not None and len(pair) == 1 else pair, wish)
        if options.output is not None:
            say(f"drawing {options.output}")
            save_picture(found.plot(), options, subject.model, found.method)
        if options.html is not None:
            save_page(explanation_view(options.text, [found], page_origin(options, subject.model)).html(), options.html)
    if options.json:
        print(json.dumps({"text": options.text, "model": options.model, **found.to_dict()}))
        return
    scope = found.scope + ("" if found.layer is None else f" (of 0 to {found.depth - 1})")
    for row in found.rows:
        print(f"{', '.join(filter(None, [found.method, scope]))}: {found.heading(row)}")
        if found.is_signed:
            print(row_text(found, row))
        else:
            print(terminal_text(found.tokens, row.scores, row.token, is_terminal(sys.stdout), full=1))
    for line in found.remarks():
        print(line)
    if len(found.maps) > 1 and options.html is None:
        print(f"all {len(found.maps)} layers: --html FILE")
    name_files(options.output, options.html)


def generate(options: argparse.Namespace) -> None:
    """Generate, attribute, print and draw."""
    most, step = options.max_new_tokens, options.step
    if step is not None and not -most <= step < most:
        raise ArgumentError(f"--step {step} is out of range: --max-new-tokens is {most}.")
    check_text(options.text)
    check_files(options.output, options.html)
    with working(f"loading {options.model}") as say:
        model, tokenizer = load_with_head(options.model)
        has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
        name = options.method or (CROSS if has_encoder else ROLLOUT)
        row = METHODS[name].with_residual(0.5)
        method, layered = row.generative, row.layered
        if method is None:
            able = ", ".join(one for one, other in METHODS.items() if other.generative is not None)
            raise ArgumentError(f"--method {name} cannot explain generated text: pass one of {able}.")
        if not getattr(model, "can_generate", bool)():
            raise ArgumentError(
                f"--model {options.model} is a {type(model).__name__}, which continues no text: pass a causal model, "
                "or a model with an encoder and a decoder."
            )
        layers = find_layers(model, "decoder" if has_encoder else None)
        asked = -1 if options.layer is None else options.layer
        if layered:
            check_layer(asked, depth_of(Loaded(model, tokenizer, layers)))
        elif options.layer is not None:
            raise ArgumentError(f"--method {name} has no scores of single layers: leave --layer out.")
        read = encoder_of(model)
        prepared = prepare_text(read, tokenizer, options.text)
        loaded = Loaded(read, tokenizer, find_layers(read))
        for remark in remarks(options.text, loaded, prepared, str(prepared.token)):
            warnings.warn(remark, stacklevel=1)
        check_room(options.text, Loaded(model, tokenizer, layers), most)
        mask = _mask(options, tokenizer)
        say(f"{name}: {most} new tokens, {len(layers)} layers")
        sampling: dict[str, Any] = {"do_sample": options.sample is not None, "seed": options.sample}
        of_layer = method is effect_of_layer
        method = partial(effect_of_layer, layer=asked) if of_layer else method
        more = {"method_options": dict(row.options), **sampling}
        found: GenerationAttribution = attribute_generation(model, tokenizer, options.text, method, most, **more)
    starts = len(found.prompt.ids) - len(mask)  # the first tokens of a decoder are no source
    mask = torch.cat([mask, torch.ones(starts, dtype=torch.bool)])
    layer = found.layer_index(asked) if layered and not of_layer else 0
    steps = len(found.generated.ids)
    if step is not None and not -steps <= step < steps:
        raise ArgumentError(f"--step {step} is out of range: there are {steps} new tokens, {-steps} to {steps - 1}.")
    title = ", ".join(filter(None, [name, row.scope(asked % len(layers) if of_layer else layer)]))
    if options.output is not None:
        save_picture(found.plot(layer, mask=mask if torch.any(mask) else None), options, model, name)
    if options.html is not None:
        view = found.view(layer, mask=mask, title=f"{options.text} … {found.text}")
        told = f"{options.model} continues the text ({title})."
        save_page(replace(view, subtitle=told, about=page_origin(options, model)).html(), options.html)
    if options.json:
        record = json.loads(found.to_json(mask=mask))
        print(json.dumps({**record, "model": options.model, "method": name, "residual": row.residual}))
        return
    join = " → " if has_encoder else "" if found.text.startswith(" ") else " "
    print(f"text: {options.text}{join}{found.text}".rstrip())
    if step is not None:
        print(f"{title}: how much {found.generated.labels[step]} (step {step % steps}) draws on each prompt token")
        _print_step(found, step, layer, mask)
    else:
        print(f"{title}: the prompt tokens that each new token draws on most")
        _print_steps(found, layer, mask)
    name_files(options.output, options.html)


def _mask(options: argparse.Namespace, tokenizer: Any) -> Tensor:
    """Which prompt tokens `--mask` leaves out, `(m,)`."""
    (prompt,), _ = read_prompts(tokenizer, options.text, None, None)
    tokens = TokenText.of(tokenizer, prompt.ids)
    kinds = [kind if kind in KINDS else kind.split(",") for kind in options.mask]
    for word in (word for kind in kinds if not isinstance(kind, str) for word in kind):
        if not tokens.mask([[word]]).any():
            tell(f"--mask: {word!r} is no word of the prompt.")
    mask = tokens.mask(kinds)
    if mask.all():
        raise ArgumentError("--mask leaves out all prompt tokens: keep at least one.")
    return mask


def _print_steps(found: GenerationAttribution, layer: int, mask: Tensor) -> None:
    """One line for each new token: its share of the prompt, and its strongest prompt tokens."""
    scores, shares = found.scores[..., layer], found.prompt_share[:, layer].tolist()
    kept, rows = (~mask).nonzero()[:, 0], []
    for step, label in enumerate(found.generated.labels):
        best = kept[scores[step, kept].abs().argsort(descending=True, stable=True)][:STRONGEST].tolist()
        strongest = [shaded(f"{found.prompt.labels[i]} {scores[step, i]:.2f}", scores[step, i].item()) for i in best]
        rows.append((str(step), label, f"prompt {shares[step]:.2f}:", "  ".join(strongest)))
    print_table([""] * 4, rows, right=(0,))


def _print_step(found: GenerationAttribution, step: int, layer: int, mask: Tensor) -> None:
    """One line for each prompt token that is not masked."""
    labels = [label for label, hidden in zip(found.prompt.labels, mask.tolist(), strict=True) if not hidden]
    scores = found.scores[step, ~mask, layer]
    if not (scores < 0).any() and scores.sum() <= 1.001:
        print(terminal_text(labels, scores, color=is_terminal(sys.stdout), full=1))
        return
    highest = float(found.scores[step, :, layer].abs().max()) or 1.0
    words = [shaded(*pair) for pair in zip(labels, (scores / highest).tolist(), strict=True)]
    print_table([""] * 2, list(zip(words, score_texts(scores.tolist(), signed=True), strict=True)), right=(1,))

"""`captum-vz generate`: let a model continue a text, and show which prompt tokens each new token draws on."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from captum_vz import find_layers
from captum_vz._start import tell
from captum_vz.cli.options import (
    CommandError,
    add_command,
    add_model,
    add_outputs,
    check_files,
    check_text,
    one_of,
    positive,
    read_text,
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
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.generation.prompts import read_prompts
from captum_vz.methods import check_layer
from captum_vz.result.words import KINDS, TokenText
from captum_vz.study import METHODS
from captum_vz.subjects import subject_of
from captum_vz.subjects.loading import CAUSAL
from captum_vz.subjects.texts import check_room
from captum_vz.visualization import terminal_text
from captum_vz.visualization.terminal import score_texts

STRONGEST = 3  # prompt tokens in a line of the table
ROLLOUT, CROSS = "value-zeroing-rollout", "value-zeroing"  # the default methods
EXAMPLES: Final = (
    'generate "the pictures of some hat"',
    'generate "the pictures of some hat" --mask stop special --method alti-logit --step 0',
    'generate "the pictures of some hat" --max-new-tokens 4 --sample 1 --layer 0 --html page.html',
    'generate "the pictures of some hat" --output steps.png --json',
)


def add_generate(commands: Any) -> None:
    """Add the parser of this command."""
    sub = add_command(
        commands,
        "generate",
        run,
        help="continue a text, and score the prompt tokens for each new token",
        description="Lets a model continue a text, or translate or summarise it. Prints the prompt tokens that each "
        "new token draws on most: in a model with an encoder, by the cross-attention of its decoder.",
        examples=EXAMPLES,
    )
    sub.add_argument("text", metavar="TEXT", help="the prompt")
    add_model(sub, CAUSAL)
    sub.add_argument(
        "--max-new-tokens", type=positive, default=8, metavar="N", help="the most new tokens (default: %(default)s)"
    )
    sub.add_argument("--sample", type=int, metavar="SEED", help="sample with this seed (default: the likeliest tokens)")
    sub.add_argument(
        "--method",
        type=one_of("method", METHODS),
        metavar="METHOD",
        help=f"one of {', '.join(METHODS)} (default: {ROLLOUT}; {CROSS} of the cross-attention for a model with an "
        "encoder)",
    )
    sub.add_argument("--layer", type=int, help="from 0, negative ones from the end (default: the last)")
    sub.add_argument("--step", type=int, help="print all prompt tokens for one new token, from 0")
    sub.add_argument(
        "--mask",
        nargs="+",
        default=[],
        metavar="KIND",
        help=f"leave out prompt tokens: {', '.join(KINDS)}, or words, separated by commas",
    )
    add_outputs(
        sub, "where to draw all new tokens by all prompt tokens (default: no picture is drawn)", "tokens and all scores"
    )


def run(options: argparse.Namespace) -> None:
    """Generate, attribute, print and draw."""
    most, step = options.max_new_tokens, options.step
    if step is not None and not -most <= step < most:
        raise CommandError(f"--step {step} is out of range: --max-new-tokens is {most}.")
    check_text(options.text)
    check_files(options.output, options.html)
    with working(f"loading {options.model}") as say:
        subject = subject_of(options.model)
        model, tokenizer = subject.model, subject.tokenizer
        has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
        name = options.method or (CROSS if has_encoder else ROLLOUT)
        row = METHODS[name]
        if not getattr(model, "can_generate", bool)():
            raise CommandError(
                f"--model {options.model} is a {type(model).__name__}, which continues no text: pass a causal model, "
                "or a model with an encoder and a decoder."
            )
        layers = find_layers(model, "decoder" if has_encoder else None)
        asked = -1 if options.layer is None else options.layer
        if row.layered:
            check_layer(asked, replace(subject, layers=layers).depth)
        elif options.layer is not None:
            raise CommandError(f"--method {name} has no scores of single layers: leave --layer out.")
        read_text(options.text, subject.encoder)
        check_room(options.text, subject, most)
        mask = _mask(options, tokenizer)
        say(f"{name}: {most} new tokens, {len(layers)} layers")
        sampling: dict[str, Any] = {"do_sample": options.sample is not None, "seed": options.sample}
        found: GenerationAttribution = attribute_generation(subject, options.text, name, most, **sampling)
    starts = len(found.prompt.ids) - len(mask)  # the first tokens of a decoder are no source
    mask = torch.cat([mask, torch.ones(starts, dtype=torch.bool)])
    layer = found.layer_index(asked) if row.layered else 0
    steps = len(found.generated.ids)
    if step is not None and not -steps <= step < steps:
        raise CommandError(f"--step {step} is out of range: there are {steps} new tokens, {-steps} to {steps - 1}.")
    shown = row.scope(layer)
    title = ", ".join(filter(None, [name, shown]))
    if options.output is not None:
        figure = found.plot(layer, mask=mask if torch.any(mask) else None)
        save_picture(figure, options, model, name)
    if options.html is not None:
        view = found.view(layer, mask=mask, title=f"{options.text} … {found.text}")
        told = f"{options.model} continues the text ({title})."
        view = replace(view, subtitle=told, about=page_origin(options, model))
        save_page(view.html(), options.html)
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
        raise CommandError("--mask leaves out all prompt tokens: keep at least one.")
    return mask


def _print_steps(found: GenerationAttribution, layer: int, mask: Tensor) -> None:
    """One line for each new token: its share of the prompt, and its strongest prompt tokens."""
    scores = found.scores[..., layer]
    prompt, shares = found.prompt.labels, found.prompt_share[:, layer].tolist()
    kept = (~mask).nonzero()[:, 0]
    rows: list[tuple[Any, ...]] = []
    for step, label in enumerate(found.generated.labels):
        best = kept[scores[step, kept].abs().argsort(descending=True, stable=True)][:STRONGEST].tolist()
        strongest = [(f"{prompt[i]} {scores[step, i]:.2f}", scores[step, i].item()) for i in best]
        if is_terminal(sys.stdout):
            cells = [share_cell(word, score) for word, score in strongest] + [""] * (STRONGEST - len(best))
            rows.append((str(step), label, f"{shares[step]:.2f}", *cells))
        else:
            rows.append((str(step), label, f"prompt {shares[step]:.2f}:", "  ".join(word for word, _ in strongest)))
    if is_terminal(sys.stdout):
        of_prompt = "prompt sum" if _is_signed(scores) else "prompt share"
        print_table(("", "new token", of_prompt, "strongest", "second", "third"), rows, keys=2, right=(0, 2))
    else:
        print_table([""] * 4, rows, right=(0,))


def _is_signed(scores: Tensor) -> bool:
    """Whether scores `(n, m)` are no shares, which are not negative and sum to at most 1."""
    return bool((scores < 0).any()) or bool((scores.sum(-1) > 1.001).any())


def _print_step(found: GenerationAttribution, step: int, layer: int, mask: Tensor) -> None:
    """One line for each prompt token that is not masked."""
    labels = [label for label, hidden in zip(found.prompt.labels, mask.tolist(), strict=True) if not hidden]
    scores = found.scores[step, ~mask, layer]
    signed = _is_signed(scores[None])
    if not is_terminal(sys.stdout) and not signed:
        print(terminal_text(labels, scores, color=False, full=1))
        return
    numbers = score_texts(scores.tolist(), signed)
    if signed:
        highest = float(found.scores[step, :, layer].abs().max()) or 1.0
        shares = (scores.abs() / highest).tolist()
        signed_rows = [("", share_cell(*pair), number) for *pair, number in zip(labels, shares, numbers, strict=True)]
        print_table(("", "token", "score") if is_terminal(sys.stdout) else ("", "", ""), signed_rows, right=(2,))
        return
    rows = [
        (str(place), share_cell(label, score), number)
        for place, (label, score, number) in enumerate(zip(labels, scores.tolist(), numbers, strict=True))
    ]
    print_table(("", "token", "share"), rows, keys=2, right=(0, 2), bars=scores.tolist())

"""`captum-vz generate`: let a model continue a text, and show which prompt tokens each new token draws on."""

from __future__ import annotations

import argparse
import io
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from captum.attr import InputXGradient
from torch import Tensor

from captum_vz import ALTILogit, TokenAttribution, ValueZeroingEffect
from captum_vz.cli.errors import CommandError
from captum_vz.cli.models import load
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.generation.words import KINDS
from captum_vz.study import METHODS
from captum_vz.testbed import load_agreement_model
from captum_vz.visualization import terminal_text

CAUSAL: Final = "causal"
PICTURE: Final = Path("captum-vz-generated.png")
#: The methods by their names in studies, and methods that explain the logit of each new token.
GENERATIVE: Final[dict[str, Any]] = {
    **{name: method.joined or method.maps for name, method in METHODS.items() if method.joined or method.maps},
    "alti-logit": ALTILogit,
    "value-zeroing-effect": ValueZeroingEffect,
    "input-x-gradient": partial(TokenAttribution, method=InputXGradient),
}
STRONGEST = 3  # prompt tokens in a line of the table


def add_generate(commands: Any) -> None:
    """Add the command's parser to those of the others."""
    sub = commands.add_parser(
        "generate",
        help="continue a text, and score the prompt tokens for each new token",
        description="Lets a causal model continue a text. Prints the prompt tokens that each new token draws on most, "
        "and draws all new tokens by all prompt tokens.",
    )
    sub.add_argument("text", metavar="TEXT", help="the prompt")
    sub.add_argument(
        "--model",
        default=CAUSAL,
        help=f"{CAUSAL}: the embedded causal model (default); or a causal model: a folder, or a Hugging Face id",
    )
    sub.add_argument(
        "--max-new-tokens", type=int, default=8, metavar="N", help="at most so many (default: %(default)s)"
    )
    sub.add_argument("--sample", type=int, metavar="SEED", help="sample with this seed (default: the likeliest tokens)")
    sub.add_argument(
        "--method",
        choices=GENERATIVE,
        default="value-zeroing-rollout",
        metavar="METHOD",
        help=f"one of {', '.join(GENERATIVE)} (default: %(default)s)",
    )
    sub.add_argument("--layer", type=int, default=-1, help="from 0, negative ones from the end (default: the last)")
    sub.add_argument("--step", type=int, help="print all prompt tokens for one new token, from 0")
    sub.add_argument(
        "--mask",
        nargs="+",
        default=[],
        metavar="KIND",
        help=f"leave out prompt tokens: {', '.join(KINDS)}, or words, separated by commas",
    )
    sub.add_argument(
        "--output", type=Path, metavar="FILE", help=f"the picture (default: {PICTURE}; no picture with --json)"
    )
    sub.add_argument("--json", action="store_true", help="print tokens and all scores as JSON")
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Generate, attribute, print and draw."""
    if options.max_new_tokens < 1:
        raise CommandError(f"--max-new-tokens is {options.max_new_tokens}: pass at least 1.")
    output = options.output or (None if options.json else PICTURE)
    if output is not None and not output.parent.is_dir():
        raise CommandError(f"cannot write {output}: there is no folder {output.parent}.")
    model, tokenizer = load_agreement_model("causal") if options.model == CAUSAL else load(options.model)[:2]
    if not getattr(model, "can_generate", bool)() or model.config.is_encoder_decoder:
        raise CommandError(
            f"--model {options.model} is a {type(model).__name__}, which continues no text: pass a causal model."
        )
    sampling: dict[str, Any] = {"do_sample": options.sample is not None, "seed": options.sample}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found: GenerationAttribution = attribute_generation(
            GENERATIVE[options.method], model, tokenizer, options.text, options.max_new_tokens, **sampling
        )
    for remark in dict.fromkeys(str(entry.message) for entry in caught if entry.category is UserWarning):
        print(f"captum-vz: {remark}", file=sys.stderr)
    layer, step = found.layer_index(options.layer), options.step
    steps = len(found.generated.ids)
    if step is not None and not -steps <= step < steps:
        raise CommandError(f"--step {step} is out of range: there are {steps} new tokens, {-steps} to {steps - 1}.")
    mask = found.mask(*(kind if kind in KINDS else kind.split(",") for kind in options.mask))
    if output is not None:
        _draw(found, layer, mask, output)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode a token's characters
    if options.json:
        record = json.loads(found.to_json(mask=mask))
        print(json.dumps({**record, "model": options.model, "method": options.method}))
        return
    print(f"text: {options.text}{'' if found.text.startswith(' ') else ' '}{found.text}")
    name = f"{options.method}, {found.layers[layer]}"
    if step is not None:
        print(f"{name}: how much {found.generated.labels[step]} (step {step % steps}) draws on each prompt token")
        print(_lines(found, step, layer, mask))
    else:
        print(f"{name}: the prompt tokens that each new token draws on most")
        print(_table(found, layer, mask))
    if output is not None:
        print(f"picture: {output}")


def _table(found: GenerationAttribution, layer: int, mask: Tensor) -> str:
    """One line for each new token: its share of the prompt, and its strongest prompt tokens."""
    scores = found.scores[..., layer]
    labels, prompt = found.generated.labels, found.prompt.labels
    width = max(map(len, labels))
    place = len(str(len(labels) - 1))
    kept = (~mask).nonzero()[:, 0]
    lines = []
    for step, label in enumerate(labels):
        best = kept[scores[step, kept].abs().argsort(descending=True, stable=True)][:STRONGEST].tolist()
        strongest = "  ".join(f"{prompt[i]} {scores[step, i]:.2f}" for i in best)
        share = found.prompt_share[step, layer].item()
        lines.append(f"{step:>{place}}  {label:<{width}}  prompt {share:.2f}:  {strongest}".rstrip())
    return "\n".join(lines)


def _lines(found: GenerationAttribution, step: int, layer: int, mask: Tensor) -> str:
    """One line for each prompt token that is not masked."""
    labels = [label for label, hidden in zip(found.prompt.labels, mask.tolist(), strict=True) if not hidden]
    scores = found.scores[step, ~mask, layer]
    if not (scores < 0).any():
        return terminal_text(labels, scores, color=False)
    width = max(map(len, labels))
    return "\n".join(f"  {label:<{width}}  {score:+.4f}" for label, score in zip(labels, scores.tolist(), strict=True))


def _draw(found: GenerationAttribution, layer: int, mask: Tensor, output: Path) -> None:
    figure = found.plot(layer, mask=mask if torch.any(mask) else None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # characters that the font does not have
            figure.savefig(output, format=output.suffix[1:] or "png")
    except OSError as error:
        raise CommandError(f"cannot write {output}: {error.strerror}.") from error
    except ValueError as error:
        raise CommandError(f"cannot write {output}: {error}.") from error

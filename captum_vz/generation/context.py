"""Which generated tokens rest on a context, and on which of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.special import entr

from captum_vz.errors import ArgumentError
from captum_vz.generation.attribute import MAX_NEW_TOKENS, attribute_generation
from captum_vz.generation.prompts import Prompt, completed, read_prompts
from captum_vz.generation.result import STRONGEST, GenerationAttribution
from captum_vz.generation.texts import finish_texts
from captum_vz.methods import as_method, name_of
from captum_vz.subjects import parts_of
from captum_vz.subjects.heads import device_of
from captum_vz.subjects.signals import signals_of

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class ContextReliance:
    """What a context does to each of n generated tokens, of a prompt whose context has c tokens.

    Attributes:
        tokens: The generated tokens.
        context: The tokens of the context.
        probability: The probability of each generated token, with the context and without it, `(n, 2)`.
        entropy: The entropy of the next token in nats, with the context and without it, `(n, 2)`.
        divergence: How far the context moves the distribution of the next token, `(n,)`: the Kullback-Leibler
            divergence of the distribution with the context from that without it, in nats.
        sensitive: The steps whose divergence is large.
        instead: The token that is most probable without the context, for each step.
        scores: The scores of the context's tokens for each sensitive step, `(len(sensitive), c)`, in the unit of the
            method. They explain the generated token rather than the one in `instead`, if these differ.
        cues: For each sensitive step the places of the context's tokens whose scores are large.
    """

    tokens: tuple[str, ...]
    context: tuple[str, ...]
    probability: Tensor
    entropy: Tensor
    divergence: Tensor
    sensitive: tuple[int, ...]
    instead: tuple[str, ...]
    scores: Tensor
    cues: tuple[tuple[int, ...], ...]

    def to_pandas(self) -> DataFrame:
        """A row for each generated token."""
        from pandas import DataFrame

        both = {
            f"{name} {side}": getattr(self, name)[:, place]
            for name in ("probability", "entropy")
            for place, side in enumerate(("with", "without"))
        }
        of_step = dict(zip(self.sensitive, self.cues, strict=True))
        needs = [", ".join(self.context[place] for place in of_step.get(step, ())) for step in range(len(self.tokens))]
        others = {"divergence": self.divergence, "instead": self.instead, "needs": needs}
        return DataFrame({"token": self.tokens, **both, **others})

    def __repr__(self) -> str:
        """A line for each sensitive token."""
        if not self.sensitive:
            return "no token changes much without the context"
        lines = []
        for row, (step, places) in enumerate(zip(self.sensitive, self.cues, strict=True)):
            best = sorted(places, key=lambda place: -self.scores[row, place].item())[:STRONGEST]
            rests = ", ".join(self.context[place] for place in best) or "no single token"
            before, after = self.probability[step].tolist()
            lines.append(
                f"{step} {self.tokens[step]}: {before:.2f} with the context, {after:.2f} without it "
                f"({self.instead[step]}); needs {rests}"
            )
        return "\n".join(lines)


def context_reliance(
    model: Any,
    context: str,
    text: str,
    method: Any = "attn-lrp",
    max_new_tokens: int = MAX_NEW_TOKENS,
    *,
    tokenizer: Any = None,
    generated: Any = None,
    deviations: float = 1.0,
    **generate_kwargs: Any,
) -> ContextReliance:
    r"""Which generated tokens rest on a context before the text, and on which of its tokens.

    .. math:: D_t = \mathrm{KL}\big(p(\cdot \mid c, x, y_{<t}) \,\|\, p(\cdot \mid x, y_{<t})\big)

    The text x is continued after its context c, and the continuation y is read again without the context. Steps whose
    divergence is larger than the mean of all steps by `deviations` standard deviations are sensitive. For these, the
    method explains the generated token rather than the most probable one without the context; context tokens whose
    scores are larger than the mean by as much are cues. Source: Sarti et al., "Quantifying the Plausibility of Context
    Reliance in Neural Machine Translation" (PECoRe), ICLR 2024.

    Args:
        model: What :func:`attribute_generation` takes.
        context: The text before the prompt, with the space or the line break between both.
        text: The prompt without its context.
        method: A method that explains the output, as :func:`attribute_generation` takes it, such as
            "value-zeroing-effect".
        max_new_tokens: The largest number of new tokens.
        tokenizer: The tokenizer of a model that is passed alone.
        generated: The new tokens, if they are given.
        deviations: Standard deviations above the mean. One, as in the paper.
        generate_kwargs: Further arguments for `model.generate`.

    Returns:
        A :class:`ContextReliance`, with numbers for each generated token.

    Raises:
        ArgumentError: The context adds no tokens. Images or sound are passed. The errors of
            :func:`attribute_generation`.

    >>> found = context_reliance("causal", "the pictures of ", "some hat", max_new_tokens=2)
    >>> found.tokens[0], found.instead[0], found.divergence.argmax().item()
    ('were', 'has', 0)
    """
    if not as_method(method).explains_output:
        raise ArgumentError(
            f"method is {name_of(method)}, which explains no output: pass one that does, such as attn-lrp.", "method"
        )
    for name, one in (("context", context), ("text", text)):
        if not isinstance(one, str):
            raise ArgumentError(f"{name} is of type {type(one).__name__}: pass a text.", name)
    if signals := signals_of(generate_kwargs):
        raise ArgumentError(
            f"context_reliance compares two texts: leave {', '.join(signals)} out, or call attribute_generation."
        )
    model, tokenizer = parts_of(model, tokenizer)
    known = completed(tokenizer)
    # A context without words adds no tokens, and a tokenizer may make none of it.
    (whole,), (before,) = (read_prompts(known, one)[0] for one in (context + text, context.rstrip() or text))
    marks = known.all_special_ids
    start = next((place for place, number in enumerate(whole.ids) if number not in marks), 0)
    pairs = enumerate(zip(whole.ids, before.ids, strict=False))
    stop = next((place for place, (one, other) in pairs if one != other), len(before.ids))
    if not context.strip() or not start < stop < len(whole.ids):
        raise ArgumentError(
            f"the context {context!r} adds no tokens before the text {text!r}: pass a context of one word or more, and "
            "a text after it.",
            "context",
        )
    if generated is None:
        generate_kwargs["max_new_tokens"] = max_new_tokens
    finished = finish_texts(model, known, [whole], generated, False, None, generate_kwargs)[0][0]
    alone = replace(finished, ids=whole.ids[:start] + whole.ids[stop:])
    logs = torch.stack([_log_probabilities(model, one) for one in (finished, alone)], 1)  # (n, 2, vocabulary)
    ids = torch.tensor(finished.generated)[:, None, None].expand(-1, 2, 1)
    divergence = kl_div(logs[:, 1], logs[:, 0], reduction="none", log_target=True).sum(-1)
    sensitive = _large(divergence, deviations)
    best = logs[:, 1].argmax(-1).tolist()
    foils = [one if one != other else None for one, other in zip(best, finished.generated, strict=True)]
    found: GenerationAttribution = attribute_generation(
        (model, tokenizer), list(whole.ids), method, generated=list(finished.generated), foil=foils
    )
    scores = found.all_scores[list(sensitive), start:stop, -1]
    return ContextReliance(
        tuple(found.generated.labels),
        tuple(found.prompt.labels[start:stop]),
        logs.gather(-1, ids)[..., 0].exp(),
        entr(logs.exp()).sum(-1),
        divergence,
        sensitive,
        tuple(known.decode([one]).strip() for one in best),
        scores,
        tuple(_large(row, deviations) for row in scores),
    )


@torch.no_grad()
def _log_probabilities(model: Any, text: Prompt) -> Tensor:
    """The log-probabilities of all tokens at each step, `(n, vocabulary)`."""
    logits: Tensor = model(**text.inputs(device_of(model))).logits[0, text.first :]
    return logits.double().log_softmax(-1).cpu()


def _large(values: Tensor, deviations: float) -> tuple[int, ...]:
    """The places of values that are larger than the mean by so many standard deviations, and above zero."""
    least = values.mean() + deviations * values.std(correction=0)
    return tuple(((values >= least) & (values > 0)).nonzero()[:, 0].tolist())

"""Print how often each method gives the word that decides the largest score, in texts whose deciding word is known.

python -m tests.benchmarks.real_model > smollm2.md
python -m tests.benchmarks.real_model --model FOLDER --blimp FOLDER

The texts are those of `prompts.jsonl`: facts, names, opposites, agreement and lists. Their deciding word is known by
patching: with the word of `patched` in its place, the lead of the answer over the foil falls by more than 65 % on
SmolLM2. With `--blimp` (its folder `data`), sentences of two of BLiMP's agreement paradigms follow, after "As we all
know, ". In the other three, the cue is the last word before the form, or comes after it. Texts are left out in which
the model prefers the answer by less than a logit of 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from captum_vz import ValueGates, find_layers
from captum_vz.errors import RefusedError
from captum_vz.functional import deciding_layer
from captum_vz.methods import METHODS, Method, Question
from captum_vz.methods.decision import log_probability
from captum_vz.metrics import summarize
from captum_vz.study import select_blimp
from captum_vz.study.examples.patching import LEAST_DIFFERENCE, Pair
from captum_vz.subjects import Subject, subject_of
from captum_vz.subjects.texts import encode

PROMPTS = Path(__file__).parent / "prompts.jsonl"
PREFIX = "As we all know, "
SENTENCES = 100  # of each paradigm of BLiMP
TIMED = 2  # texts in which each method is timed alone, in forward passes
MAPS = ("value-zeroing", "attention", "attention-norm", "alti-layer")
ROLLOUTS = ("value-zeroing-rollout", "attention-rollout", "attention-norm-rollout", "alti", "attention-flow")
EFFECT, LRP, CONSTANT = "value-zeroing-effect", "attn-lrp", "CP-LRP"
COLUMNS = ("first of all", "without the first", "and without itself", "above the attractor", "overlap", "passes")


@dataclass(frozen=True)
class Prompt:
    """A text, the answer and the foil, the characters of the word that decides, and the word that fits the foil."""

    text: str
    good: str
    foil: str
    cue: tuple[int, int]
    other: str | None
    kind: str

    def patched(self) -> str:
        """The text with the other word."""
        return self.text[: self.cue[0]] + str(self.other) + self.text[self.cue[1] :]


class Asked(NamedTuple):
    """A prompt as inputs of a model: what it is asked, with and without a foil, and what is known of it."""

    question: Question
    logit: Question
    log_probability: Question
    cue: list[int]
    attractor: list[int]
    truth: Tensor | None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file of JSON lines."""
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return [
        Prompt(one["text"], one["good"], one["foil"], tuple(one["cue_span"]), one["patched"], one["kind"])
        for one in lines
    ]


def read_blimp(folder: Path) -> list[Prompt]:
    """Texts up to the form that a noun decides, which is not the last word: in random order."""
    found = []
    for one in select_blimp(folder, whole=True).examples:
        cue = [one.words[place] for place in one.cue]
        if not cue or max(one.cue) >= one.target - 1 or cue == ["lot"] or one.good is None or one.bad is None:
            continue  # of "a lot of doctors", the rule of the paradigm finds "lot"
        words = list(one.words[: one.target])
        words[0] = (
            words[0].lower()
            if words[0].lower()
            in {"a", "an", "the", "this", "that", "these", "those", "some", "many", "most", "all", "every"}
            else words[0]
        )
        starts = [len(PREFIX) + len(" ".join([*words[:place], ""])) for place in (one.cue[0], one.cue[-1])]
        span = starts[0], starts[1] + len(words[one.cue[-1]])
        other = one.other_cue[0] if one.other_cue else None
        found.append(Prompt(PREFIX + " ".join(words), one.good, one.bad, span, other, one.group))
    random.Random(0).shuffle(found)
    return found


def ask(subject: Subject, prompt: Prompt) -> Asked | None:
    """What a model is asked, by the first token of both forms. None: it does not prefer the answer clearly."""
    tokenizer = subject.tokenizer
    encoding = tokenizer(prompt.text, return_offsets_mapping=True)
    spans = encoding["offset_mapping"]
    inputs = dict(encode(tokenizer, prompt.text))
    forms = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in (prompt.good, prompt.foil)]
    good, foil = (form[0] for form in forms)
    place = len(spans) - 1
    with torch.no_grad():
        logits = subject.forward(**inputs).logits[0, place]
    if logits[good] - logits[foil] < LEAST_DIFFERENCE:
        return None

    def tokens(start: int, stop: int) -> list[int]:
        return [token for token, (first, last) in enumerate(spans) if first < stop and last > start and last > first]

    cue, end = tokens(*prompt.cue), prompt.text.rindex(" ") + 1
    is_distracted = prompt.kind == "agreement" or "distractor" in prompt.kind
    attractor = tokens(end, len(prompt.text)) if is_distracted and end > prompt.cue[1] else []
    truth = None
    if prompt.other is not None:
        other = dict(encode(tokenizer, prompt.patched()))
        if other["input_ids"].shape == inputs["input_ids"].shape:
            pair = Pair(subject.model, find_layers(subject.model), (inputs, other), place, (good, foil))
            truth = pair.values(True, -1).shares[-1]
            truth = None if truth.isnan().any() else truth
    target = [(place, good)]
    question = Question(inputs, place, target, [(place, foil)])
    logit = replace(question, foil=None)
    return Asked(question, logit, replace(question, target=log_probability(target), foil=None), cue, attractor, truth)


@dataclass(frozen=True, eq=False)
class Kept(Method):
    """A method whose scores of a question are computed once."""

    inner: Method

    def rows(self, subject: Subject, question: Question, features: Tensor | None) -> Sequence[Tensor]:
        """The scores of the first call."""
        key = self.inner, question.target, question.foil, str(question.places)
        key = tuple(str(one) if isinstance(one, list) else one for one in key)
        if key not in question.kept:
            question.kept[key] = self.inner.scores(subject, question)
        return [one[None] if one.ndim == 1 else one for one in question.kept[key]]


def zeroed(subject: Subject, question: Question) -> Tensor:
    """The logits of the text, and of the text without the value of each token, `(1 + tokens, vocabulary)`."""
    if "zeroed" not in question.kept:
        count = question.inputs["input_ids"].shape[1]
        gates = torch.cat([torch.ones(1, count), 1 - torch.eye(count)])
        with torch.no_grad():
            output = ValueGates(subject.model, subject.layers).forward(gates, question.inputs)
        question.kept["zeroed"] = output.logits[:, question.places[0]].double()
    return question.kept["zeroed"]


def rows_of(subject: Subject, asked: Asked) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The rows of the table: a name, and the function that computes the scores `(tokens,)` of one prompt."""
    question, logit = asked.question, asked.logit
    kept: dict[str, Any] = {name: Kept("", METHODS[name]) for name in (EFFECT, LRP, *MAPS)}
    decision: Any = METHODS["decision"]
    kept[CONSTANT] = Kept("", decision.relevance)
    kept["decision"] = replace(decision, effect=kept[EFFECT], relevance=kept[CONSTANT], without_foil=kept[LRP])

    def scores(name: str, about: Question = question) -> Tensor:
        return (kept.get(name) or METHODS[name]).scores(subject, about)

    def last(name: str, about: Question = question) -> Tensor:
        return scores(name, about)[-1]

    def deciding(name: str, by: str, about: Question = question) -> Tensor:
        rows = scores(name)
        return rows[deciding_layer(rows, last(by, about), question.places[0])[0]]

    def effect(read: Callable[[Tensor], Tensor]) -> Tensor:
        found = read(zeroed(subject, question))[:, logit.target[0][1]]
        return found[0] - found[1:]

    yield "decision | foil", partial(last, "decision")
    yield "decision | none", partial(last, "decision", logit)
    yield "Value Zeroing's effect | foil", partial(last, EFFECT)
    yield "Value Zeroing's effect, logit | none", partial(effect, lambda logits: logits)
    yield "Value Zeroing's effect, log-probability | none", partial(effect, lambda logits: logits.log_softmax(-1))
    yield "AttnLRP | foil", partial(last, LRP)
    yield "AttnLRP, logit | none", partial(last, LRP, logit)
    yield "AttnLRP, log-probability | none", partial(last, LRP, asked.log_probability)
    yield "CP-LRP | foil", partial(last, CONSTANT)
    yield "ALTI-Logit | foil", partial(last, "alti-logit")
    yield "ALTI-Logit, logit | none", partial(last, "alti-logit", logit)
    yield "input × gradient | foil", partial(last, "input-x-gradient")
    for name in MAPS:
        title = METHODS[name].title
        yield f"{title}, layer that decides | foil", partial(deciding, name, "decision")
        if name == MAPS[0]:
            yield f"{title}, layer that decides by the effect | foil", partial(deciding, name, EFFECT)
            yield f"{title}, layer that decides by AttnLRP | foil", partial(deciding, name, LRP)
            yield f"{title}, layer that decides | none", partial(deciding, name, "decision", logit)
        yield f"{title}, mean of layers | -", partial(lambda name: scores(name).mean(0), name)
        yield f"{title}, last layer | -", partial(last, name)
    for name in (*ROLLOUTS, "random", "position"):
        yield f"{METHODS[name].title} | -", partial(last, name)


def judged(scores: Tensor, asked: Asked) -> list[float]:
    """The values of one prompt for the columns of the table, except the time."""
    scores, own = scores.double(), asked.question.places[0]
    hits = []
    for apart in ([], [0], [0, own]):
        rest = scores.clone()
        rest[apart] = -torch.inf
        hits.append(float(int(rest.argmax()) in asked.cue and not rest.isneginf().all()))
    above = overlap = float("nan")
    if asked.attractor:
        above = float(scores[asked.cue].max() > scores[asked.attractor].max())
    if asked.truth is not None:
        positive = scores.clamp_min(0)
        positive[0] = 0
        overlap = float(torch.minimum(positive / positive.sum().clamp_min(1e-12), asked.truth).sum())
    return [*hits, above, overlap]


def measure(subject: Subject, prompts: list[Prompt], most: int | None = None) -> dict[str, list[list[float]]]:
    """For each row of the table the values of each prompt, the last of them the time in forward passes or NaN."""
    found: dict[str, list[list[float]]] = {}
    kinds: list[str] = []
    for prompt in prompts:
        if most is not None and kinds.count(prompt.kind) >= most:
            continue
        asked = ask(subject, prompt)
        if asked is None:
            continue
        is_timed = len(kinds) < TIMED
        for name, run in rows_of(subject, asked):
            if is_timed:
                asked.question.kept.clear()
            start = time.process_time()
            try:
                scores = run()
            except RefusedError:
                continue
            seconds = time.process_time() - start
            passes = seconds / one_pass(subject, asked) if is_timed else float("nan")
            found.setdefault(name, []).append([*judged(scores, asked), passes])
        kinds.append(prompt.kind)
        print(len(kinds), prompt.text, file=sys.stderr, flush=True)
    print(f"\n{len(kinds)} texts: {', '.join(f'{kind} {kinds.count(kind)}' for kind in dict.fromkeys(kinds))}\n")
    return found


@torch.no_grad()
def one_pass(subject: Subject, asked: Asked) -> float:
    """The CPU seconds of a forward pass."""
    start = time.process_time()
    subject.forward(**asked.question.inputs)
    return time.process_time() - start


def table(found: dict[str, list[list[float]]]) -> Iterator[str]:
    """The lines of a table in Markdown, with an interval of the second column."""
    yield f"| Method | foil | {' | '.join(COLUMNS)} |"
    yield "|" + "---|" * (2 + len(COLUMNS))
    for name, values in found.items():
        columns = [summarize(column) for column in torch.tensor(values, dtype=torch.float64).T]
        shown = ["" if one.examples == 0 else f"{one.mean:.2f}" for one in columns]
        shown[1] += f" [{columns[1].low:.2f}, {columns[1].high:.2f}]"
        yield f"| {name} | {' | '.join(shown)} |"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.real_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="a name or a folder")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="a file of JSON lines")
    parser.add_argument("--blimp", type=Path, help="the folder `data` of BLiMP")
    parser.add_argument("--limit", type=int, help="texts of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    subject = subject_of(options.model)
    subject.model.requires_grad_(False)
    print(*table(measure(subject, read_prompts(options.prompts), options.limit)), sep="\n", flush=True)
    if options.blimp is not None:
        found = measure(subject, read_blimp(options.blimp), options.limit or SENTENCES)
        print(*table(found), sep="\n")


if __name__ == "__main__":
    main()

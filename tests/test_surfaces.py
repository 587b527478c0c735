"""Every method gives the same numbers and the same refusals, wherever it is asked."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import BertForMaskedLM

from captum_vz import explain, find_layers
from captum_vz.cli import main
from captum_vz.demo.answers import Answers
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.generation import attribute_generation
from captum_vz.methods import METHODS, Question, shares
from captum_vz.study import Example, Scorer, compare
from captum_vz.subjects import Subject, subject_of
from captum_vz.subjects.texts import prepare_text
from captum_vz.testbed import load_model
from tests.study.conftest import without_drawing

CLOSE = {"rtol": 0.0, "atol": 1e-5}
MASKED = (("the", "pictures", "of", "some", "hat", "[MASK]", "scaring", "marcus."), 5)
#: For each model the words of a sentence, and the place of the word that is explained. A causal model reads up to it.
WORDS = {
    "agreement": MASKED,
    "pre-norm": MASKED,
    "causal": (("the", "pictures", "of", "some", "hat", "[MASK]"), 5),
    "minilm": (("a", "cat", "[MASK]", "on", "the", "mat"), 2),
}


#: Numbers of samples, which are as well compared with few: each surface takes those of the registry.
FEW = {"n_steps": 3, "n_samples": 2, "probes": 4}


@dataclass(frozen=True)
class Case:
    """A model, a text, and the position of the explained token."""

    name: str
    model: Any
    tokenizer: Any
    text: str
    place: int


@cache
def case_of(name: str) -> Case:
    model, tokenizer = loaded(name)
    words, place = WORDS[name]
    text = " ".join(words[:place] if name == "causal" else words)
    return Case(name, model, tokenizer, text, prepare_text(model, tokenizer, text).token)


def loaded(name: str) -> tuple[Any, Any]:
    if name != "minilm":
        return load_model(name)
    subject = subject_of("minilm")
    encoder, tokenizer = subject.model, subject.tokenizer
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForMaskedLM(encoder.config).eval()
    model.bert.load_state_dict(encoder.state_dict(), strict=False)
    return model, tokenizer


def asked(ask: Callable[[], Tensor]) -> Tensor | str:
    """The shares of a surface, or why there are none."""
    try:
        return ask()
    except RefusedError as error:
        return str(error)


def explained(case: Case, method: str) -> Tensor:
    found = explain(case.model, case.text, tokenizer=case.tokenizer, method=method)
    assert found.is_signed == METHODS[method].is_signed
    if found.is_signed:
        torch.testing.assert_close(found.scores.double(), by_verb(case, method), **CLOSE)
    return shares(found.scores.double())


@cache
def by_verb(case: Case, method: str) -> Tensor | str:
    """The signed scores of `Method.scores`, or why there are none."""
    subject = Subject(case.model, case.model, find_layers(case.model), case.tokenizer)
    inputs = dict(case.tokenizer(case.text.replace("[MASK]", case.tokenizer.mask_token or ""), return_tensors="pt"))
    return asked(lambda: METHODS[method].scores(subject, Question(inputs, case.place), layer=-1)[-1].double())


def compared(case: Case, method: str) -> Tensor:
    return compare((case.model, case.tokenizer), case.text, method).shares[method]


def scored(case: Case, method: str) -> Tensor:
    words, place = WORDS[case.name]
    *_, row = Scorer(case.model, case.tokenizer, method, "cue_dot").scores([Example("one", words, place)])
    if row["skipped"] is not None:
        raise ArgumentError(row["skipped"])
    return torch.tensor(row["scores"], dtype=torch.float64)


def generated(case: Case, method: str) -> Tensor:
    found = attribute_generation((case.model, case.tokenizer), case.text, method, 1, do_sample=False)
    if METHODS[method].is_signed:
        torch.testing.assert_close(found.scores[0, :, -1].double(), by_verb(case, method), **CLOSE)
    return shares(found.scores[0, :, -1].double())


def printed(case: Case, method: str) -> Tensor:
    """What the command prints."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(told := io.StringIO()):
        code = main(["explain", case.text, "--model", case.name, "--method", method, "--json"])
    if code:
        raise ArgumentError(told.getvalue().removeprefix("captum-vz: ").strip())
    return shares(torch.tensor(json.loads(out.getvalue())["scores"], dtype=torch.float64))


@cache
def page_of(name: str) -> Answers:
    return Answers((name,), False, 40)


@pytest.fixture(scope="module", autouse=True)
def few_samples_one_page_and_no_pictures() -> Iterator[None]:
    with ExitStack() as stack:
        for drawing in ("captum_vz.result.Explanation.plot", "captum_vz.demo.answers.draw_comparison"):
            stack.enter_context(patch(drawing, lambda *_, **__: Figure()))
        stack.enter_context(without_drawing())
        for method in METHODS.values():
            for options in (method.options, getattr(getattr(method, "kind", None), "keywords", {})):
                stack.enter_context(patch.dict(options, {name: FEW[name] for name in FEW if name in options}))
        yield
        page_of("agreement").close()


def shown(case: Case, method: str) -> Tensor:
    """What the demo lets a visitor download."""
    *_, (remarks, *_, files) = page_of(case.name).steps(case.text, case.name, [method], None, None)
    named = [name for name in files or [] if name.endswith("maps.json")]
    if not named:
        raise ArgumentError(re.sub(r"<[^>]*>", "", remarks))
    record = json.loads(Path(named[0]).read_text("utf-8"))
    return shares(torch.tensor(record["methods"][method]["scores"], dtype=torch.float64))


EVERYWHERE = {"explain": explained, "compare": compared, "scorer": scored}
#: Surfaces that load the model by its name.
BY_NAME = {"command": printed, "demo": shown}


def each_case() -> Iterator[Any]:
    """Each method on the first model and on one of the others by turns. Each night has all."""
    others = list(WORDS)[1:]
    for model in WORDS:
        for number, method in enumerate(METHODS, 1):
            is_asked = model == "agreement" or model == others[number % len(others)]
            yield pytest.param(model, method, marks=() if is_asked else pytest.mark.exhaustive)


@pytest.mark.parametrize(("model", "method"), [*each_case()])
def test_surfaces_agree(model: str, method: str) -> None:
    case = case_of(model)
    surfaces = EVERYWHERE | ({"generate": generated} if model == "causal" else {})
    surfaces |= BY_NAME if model == "agreement" else {}
    expected = by_verb(case, method)
    for surface, ask in surfaces.items():
        found = asked(partial(ask, case, method))
        if isinstance(expected, str) or isinstance(found, str):
            assert html.unescape(str(found)).casefold() == str(expected).casefold(), surface
        else:
            torch.testing.assert_close(found, shares(expected), **CLOSE, msg=partial("{}: {}".format, surface))

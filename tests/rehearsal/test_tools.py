"""Generation, verification, metrics and studies on another device: the CPU's answers, and no mixed devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from captum.attr import InputXGradient, TextTokenInput
from torch import nn

import captum_vz as vz
from captum_vz import functional, metrics
from captum_vz.generation import LLMTokenMaps, attribute_generation
from captum_vz.metrics import MaskedSentences, Prediction
from captum_vz.study import Example, compare, run_study
from captum_vz.testbed import agreement_sentences, load_model
from tests.engine.compare import assert_same
from tests.engine.parameters import sampled
from tests.generation.models import PROMPT, case_of, tokenizer_of_words
from tests.rehearsal.device import AVAILABLE, ELSEWHERE
from tests.rehearsal.subjects import SUBJECTS, moved, subject

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices made in Python")

CPU = torch.device("cpu")
SENTENCE = "the pictures of some hat [MASK] scaring marcus."
TOKENS = tokenizer_of_words()


def on(model: nn.Module, device: torch.device) -> Any:
    return copy.deepcopy(model).to(device)


@pytest.mark.parametrize("name", sampled(SUBJECTS, "encoder"))
def test_verify(name: str) -> None:
    here = subject(name)
    expected, found = (vz.verify(one.model, one.inputs, one.layers) for one in (here, here.elsewhere()))
    assert found.passed == expected.passed
    assert [check.name for check in found.checks] == [check.name for check in expected.checks]


def generated(name: str, method: Any, device: torch.device) -> Any:
    model = on(case_of(name).model, device)
    found = attribute_generation((model, TOKENS), PROMPT, method(model), max_new_tokens=3)
    return [found.scores, found.prefix, torch.tensor(found.generated.ids)]


def gradients(model: Any) -> Any:
    return vz.TokenAttribution(model, InputXGradient, TOKENS)


def of_captums_class(device: torch.device) -> Any:
    method = LLMTokenMaps(vz.ValueZeroing(on(case_of("gpt2").model, device)), TOKENS)
    return [method.attribute(TextTokenInput("the pictures of some hat", TOKENS), target="has upset anna").token_attr]


def of_a_prediction(device: torch.device) -> Any:
    model, tokenizer = on(load_model()[0], device), load_model()[1]
    inputs = tokenizer([SENTENCE, "some hat [MASK] small."], return_tensors="pt", padding=True)
    ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
    method = vz.LayerAttention(model, vz.find_layers(model)[-1])
    scores = method.attribute(ids, additional_forward_args=(mask,), token=[6, 3])
    content = metrics.content_tokens(ids, tokenizer.all_special_ids)
    sentences = MaskedSentences(ids, mask, [6, 3], content, tokenizer.convert_tokens_to_ids(["are", "is"]))
    prediction = Prediction(model, sentences, tokenizer.unk_token_id)
    effects = metrics.blank_out(prediction)
    return [
        effects,
        metrics.comprehensiveness(prediction, scores),
        metrics.sufficiency(prediction, scores),
        metrics.spearman(scores, effects, content),
        metrics.kendall(scores, effects, content),
        metrics.top_k_overlap(scores, effects, 2, content),
        metrics.cue_dot_product(scores, content, mask),
        metrics.cue_average_precision(scores, content, mask),
    ]


def statistics(device: torch.device) -> Any:
    torch.manual_seed(0)
    x, y = torch.randn(1000, 4).to(device), (torch.arange(1000) % 3).to(device)
    return [torch.tensor(metrics.summarize(x[:, 0], resamples=50)), metrics.description_length(x, y).bits]


def functions(device: torch.device) -> Any:
    torch.manual_seed(0)
    maps = torch.rand(3, 2, 5, 5, dtype=torch.float64).softmax(-1).to(device)
    groups = torch.tensor([[0, 0, 1, 2, 2]], device=device)
    found = [functional.normalize_rows(maps[0]), functional.add_residual(maps[0], "renormalize")]
    found.append(functional.pool_groups(maps[0], groups, shared=False))
    for rolled in (functional.rollout(list(maps)), functional.rollout(list(maps), 0.5)):
        found += rolled
    found += functional.attention_flow(list(maps))
    assert {one.device for one in found} == {device}
    return found


TOOLS: dict[str, Callable[[torch.device], Any]] = {
    "maps": partial(generated, "gpt2", vz.ValueZeroing),
    "rollout": partial(generated, "gpt2", vz.ValueZeroingRollout),
    "logit": partial(generated, "gpt2", vz.ALTILogit),
    "gradients": partial(generated, "gpt2", gradients),
    "t5": partial(generated, "t5", lambda model: vz.ValueZeroing),
    "bart": partial(generated, "bart", lambda model: vz.ValueZeroing),
    "Captum's class": of_captums_class,
    "prediction": of_a_prediction,
    "statistics": statistics,
    "functions": functions,
}


@pytest.mark.all_cases
@pytest.mark.parametrize("name", TOOLS)
def test_tools(name: str) -> None:
    assert_same(moved(TOOLS[name](ELSEWHERE), CPU), TOOLS[name](CPU), 1e-5)


@pytest.mark.slow
def test_compare_and_study(tmp_path: Path) -> None:
    model, tokenizer = load_model()
    examples = [Example.from_record(record) for record in agreement_sentences(3, seed=3)]
    tables = []
    for name, device in (("there", ELSEWHERE), ("here", CPU)):
        one = (on(model, device), tokenizer)
        compared = compare(one, SENTENCE, target="are", foil="is", truth=True).to_pandas()
        study = run_study({"it": lambda one=one: one}, examples, tmp_path / name, resamples=50, quiet=True)
        tables.append((compared, study.rows()))
    for found, expected in zip(*tables, strict=True):
        pd.testing.assert_frame_equal(found, expected, rtol=0, atol=1e-5)

"""Generation, verification, metrics and studies on another device: the CPU's answers, and no mixed devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from captum.attr import InputXGradient, TextTokenInput
from torch import Tensor, nn

import captum_vz as vz
from captum_vz import functional, metrics
from captum_vz.generation import LLMTokenMaps, attribute_generation
from captum_vz.metrics import MaskedSentences, Prediction
from captum_vz.study import Example, compare, run_study
from captum_vz.testbed import agreement_sentences, load_model
from tests.engine.compare import assert_same
from tests.engine.parameters import quick, sampled
from tests.generation.models import PROMPT, case_of, tokenizer_of_words
from tests.rehearsal.device import AVAILABLE, ELSEWHERE
from tests.rehearsal.subjects import SUBJECTS, moved, subject

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices made in Python")

CPU = torch.device("cpu")
SENTENCE = "the pictures of some hat [MASK] scaring marcus."


def there(model: nn.Module) -> Any:
    return copy.deepcopy(model).to(ELSEWHERE)


def assert_same_tensors(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    assert {one.device for one in found} == {ELSEWHERE}
    assert_same(moved(found, CPU), expected, tolerance)


@pytest.mark.parametrize("name", sampled(SUBJECTS, "decoder"))
def test_verify(name: str) -> None:
    here = subject(name)
    expected, found = (vz.verify(one.model, one.inputs, one.layers) for one in (here, here.elsewhere()))
    assert found.passed == expected.passed
    assert [check.name for check in found.checks] == [check.name for check in expected.checks]


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "maps": lambda model, layers: vz.ValueZeroing(model, layers),
    "rollout": lambda model, layers: vz.ValueZeroingRollout(model, layers),
    "logit": lambda model, layers: vz.ALTILogit(model, layers),
    "gradients": lambda model, layers: vz.TokenAttribution(model, InputXGradient, tokenizer_of_words()),
}


@pytest.mark.parametrize("method", quick(WAYS, "maps"))
def test_generated_text(method: str) -> None:
    model, tokenizer = case_of("gpt2").model, tokenizer_of_words()
    found, expected = (
        attribute_generation((one, tokenizer), PROMPT, WAYS[method](one, vz.find_layers(one)), max_new_tokens=3)
        for one in (there(model), model)
    )
    assert found.text == expected.text
    assert_same([found.scores.cpu(), found.prefix.cpu()], [expected.scores.cpu(), expected.prefix.cpu()])


@pytest.mark.parametrize("name", quick(["t5", "bart"], "t5"))
def test_generated_text_of_two_stacks(name: str) -> None:
    model, tokenizer = case_of(name).model, tokenizer_of_words()
    found, expected = (
        attribute_generation((one, tokenizer), PROMPT, vz.ValueZeroing, max_new_tokens=3)
        for one in (there(model), model)
    )
    assert found.text == expected.text
    assert_same([found.scores.cpu(), found.prefix.cpu()], [expected.scores, expected.prefix])


def test_llm_token_maps() -> None:
    model, tokenizer = case_of("gpt2").model, tokenizer_of_words()
    found, expected = (
        LLMTokenMaps(vz.ValueZeroing(one, vz.find_layers(one)), tokenizer)
        .attribute(TextTokenInput("the pictures of some hat", tokenizer), target="has upset anna")
        .token_attr
        for one in (there(model), model)
    )
    assert_same(found.cpu(), expected)


def test_metrics_of_a_prediction() -> None:
    model, tokenizer = load_model()
    inputs = tokenizer([SENTENCE, "some hat [MASK] small."], return_tensors="pt", padding=True)
    forms = tokenizer.convert_tokens_to_ids(["are", "is"])

    def of(model: Any, device: torch.device) -> list[Tensor]:
        ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
        scores = vz.LayerAttention(model, vz.find_layers(model)[-1]).attribute(
            ids, additional_forward_args=(mask,), token=[6, 3]
        )
        content = metrics.content_tokens(ids, tokenizer.all_special_ids)
        sentences = MaskedSentences(ids, mask, [6, 3], content, forms)
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

    assert_same(moved(of(there(model), ELSEWHERE), CPU), of(model, CPU), 1e-5)


def test_statistics() -> None:
    values, labels = torch.randn(1000, 4), torch.arange(1000) % 3

    def of(device: torch.device) -> Any:
        x, y = values.to(device), labels.to(device)
        return [*metrics.summarize(x[:, 0], resamples=50), *metrics.description_length(x, y)]

    torch.testing.assert_close(of(ELSEWHERE), of(CPU))


@pytest.mark.parametrize(
    "function",
    [
        lambda maps: functional.rollout(list(maps)),
        lambda maps: functional.rollout(list(maps), 0.5),
        lambda maps: functional.attention_flow(list(maps)),
        lambda maps: [functional.normalize_rows(maps[0])],
        lambda maps: [functional.add_residual(maps[0], "renormalize")],
        lambda maps: [
            functional.pool_groups(maps[0], torch.tensor([[0, 0, 1, 2, 2]], device=maps.device), shared=False)
        ],
    ],
)
def test_functions(function: Callable[[Tensor], Any]) -> None:
    maps = torch.rand(3, 2, 5, 5, dtype=torch.float64).softmax(-1)
    assert_same_tensors(list(function(maps.to(ELSEWHERE))), list(function(maps)))


@pytest.mark.slow
def test_compare() -> None:
    model, tokenizer = load_model()
    found, expected = (
        compare((one, tokenizer), SENTENCE, target="are", foil="is", truth=True).to_pandas()
        for one in (there(model), model)
    )
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_study(tmp_path: Path) -> None:
    model, tokenizer = load_model()
    examples = [Example.from_record(record) for record in agreement_sentences(3, seed=3)]
    found, expected = (
        run_study(
            {"agreement": lambda one=one: (one, tokenizer)}, examples, tmp_path / name, resamples=50, quiet=True
        ).rows()
        for name, one in (("there", there(model)), ("here", model))
    )
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=1e-5)

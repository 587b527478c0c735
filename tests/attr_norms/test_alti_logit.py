"""ALTILogit against the naive twin in float64, and against the model's own logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from captum_vz import ALTILogit
from captum_vz.functional import logit_contributions
from tests.captum.footprint import assert_same_numbers, footprint, numbers
from tests.engine.compare import assert_batch_is_its_examples, assert_same
from tests.reference import FAMILIES
from tests.reference.alti_logit import LANGUAGE_MODELS, language_model, naive_alti_logit, naive_logit
from tests.reference.alti_plus import stacks

each_model = pytest.mark.parametrize("name", LANGUAGE_MODELS)
each_varied = pytest.mark.parametrize("name", ["gpt2", "llama"])
TOKENS = 7
EVERY = slice(None)


def method_of(name: str, **options: Any) -> ALTILogit:
    case = language_model(name)
    return ALTILogit(case.model, case.layers, **options)


def following(ids: Tensor) -> Tensor:
    """The tokens that follow, as entries."""
    return ids.roll(-1, 1)


@pytest.mark.parametrize("p", [1, 2])
@each_model
def test_every_row_of_every_model(name: str, p: Any) -> None:
    inputs = language_model(name).inputs
    entries = following(inputs["input_ids"])
    found = method_of(name, p=p).attribute(inputs, target=[(list(range(TOKENS)), row) for row in entries])
    assert_same(found, naive_alti_logit(name, entries, f"l{p}"))
    assert not found.triu(1).any()


@each_model
def test_terms_sum_to_the_logit(name: str) -> None:
    inputs, naive, entry = language_model(name).inputs, naive_logit(name), 11
    real = inputs["attention_mask"].double()
    terms = method_of(name).terms(inputs, target=(EVERY, entry))
    assert_same(terms.embedding, torch.from_numpy(naive.embedding[..., entry]))
    for one, expected in zip(terms.attention, naive.sources, strict=True):
        assert_same(one, torch.from_numpy(expected[..., entry]))
    assert_same(terms.projection_bias, torch.from_numpy(naive.bias[..., entry]))
    assert_same(terms.feed_forward, torch.from_numpy(naive.feed_forward[..., entry]))
    assert_same(terms.constant, naive.constant[entry] * real)
    assert_same(terms.total(), torch.from_numpy(naive.logits[..., entry]) * real)


@each_model
def test_rows_sum_to_attention_term(name: str) -> None:
    inputs = language_model(name).inputs
    method = method_of(name)
    scores, terms = (ask(inputs, target=(EVERY, 5), foil=(EVERY, 6)) for ask in (method.attribute, method.terms))
    assert_same(scores.sum(-1), torch.stack(terms.attention).sum((0, -1)))
    logits = torch.from_numpy(naive_logit(name).logits)
    assert_same(terms.total(), (logits[..., 5] - logits[..., 6]) * inputs["attention_mask"])


@each_varied
def test_a_foil_is_subtracted(name: str) -> None:
    inputs, method = language_model(name).inputs, method_of(name)
    right, wrong, both = (
        method.attribute(inputs, target=(2, entry), foil=foil) for entry, foil in ((5, None), (6, None), (5, (2, 6)))
    )
    assert_same(both, right - wrong)
    assert_same(method.attribute(inputs, target=(2, 5), foil=(2, 5)), torch.zeros_like(both))


@each_varied
def test_target_in_every_form(name: str) -> None:
    inputs, method = language_model(name).inputs, method_of(name)
    whole = {entry: method.attribute(inputs, target=(EVERY, entry)) for entry in (4, 9, 30)}
    assert_same(method.attribute(inputs, target=(1, 9)), whole[9][:, 1])
    assert_same(method.attribute(inputs, target=(-6, np.int64(-51))), whole[9][:, 1])
    assert_same(method.attribute(inputs, target=(slice(1, 3), 9)), whole[9][:, 1:3])
    assert_same(method.attribute(inputs, target=[(0, 9), (2, 9), (1, 9)]), whole[9][[0, 1, 2], [0, 2, 1]])
    found = method.attribute(inputs, target=[([0, 1], [4, 9]), ([2, 1], torch.tensor([30, 4])), ([0, 3], [9, 9])])
    rows = [[whole[4][0, 0], whole[9][0, 1]], [whole[30][1, 2], whole[4][1, 1]], [whole[9][2, 0], whole[9][2, 3]]]
    assert_same(found, torch.stack([torch.stack(row) for row in rows]))
    assert_same(method.terms(inputs, target=(2, 30)).total(), method.terms(inputs, target=(EVERY, 30)).total()[:, 2])
    with pytest.warns(UserWarning, match="example is padding"):
        assert not method.attribute(inputs, target=(6, 4))[2].any()


@each_model
def test_padded_batch_equals_its_examples(name: str) -> None:
    assert_batch_is_its_examples(method_of(name), language_model(name), target=(EVERY, 8))


def test_padding_on_the_left() -> None:
    case, method = language_model("llama"), method_of("llama")
    one = case.example(1).inputs
    one["position_ids"] = torch.arange(one["input_ids"].shape[1])[None]
    padded = {key: nn.functional.pad(value, (3, 0)) for key, value in one.items()}
    alone, found = method.attribute(one, target=(EVERY, 8)), method.attribute(padded, target=(EVERY, 8))
    # The model's softmax is in float32, whose rounding may depend on where a row stands in memory.
    assert_same(found[:, 3:, 3:], alone, 1e-6)
    assert not found[:, :3].any()
    assert not found[..., :3].any()


def test_tuple_for_a_tuple() -> None:
    case = language_model("gpt2")
    expected = method_of("gpt2").attribute(case.inputs, target=(2, 8))

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        return case.model(ids, attention_mask=mask).logits

    method = ALTILogit(
        forward, case.layers, final_norm=case.model.transformer.ln_f, unembedding=case.model.get_output_embeddings()
    )
    ids, mask = case.inputs.values()
    assert_same(method.attribute(ids, (2, 8), mask), expected)
    one, rest = method.attribute((ids, mask), target=(2, 8))
    assert_same(one, expected)
    assert not rest.any()
    assert one.is_contiguous()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@each_varied
def test_unchanged_model_and_cache(name: str, implementation: str) -> None:
    case = LANGUAGE_MODELS[name].build(attn_implementation=implementation)
    before, values = footprint(case.model), numbers(case.model)
    method = ALTILogit(case.model, case.layers)
    kept = dict(vars(method))
    cache = DynamicCache(config=case.model.config)
    found = method.attribute({**case.inputs, "past_key_values": cache, "use_cache": True}, target=(EVERY, 8))
    assert cache.get_seq_length() == 0
    # Eager attention may compute its softmax in float32.
    expected = method_of(name).attribute(case.inputs, target=(EVERY, 8))
    assert_same(found, expected, 1e-10 if implementation == "eager" else 1e-6)
    assert vars(method) == kept
    assert footprint(case.model) == before
    assert_same_numbers(case.model, values)


@each_varied
def test_half_precision_is_followed_in_float32(name: str) -> None:
    case = LANGUAGE_MODELS[name].build(torch.bfloat16)
    found = ALTILogit(case.model, case.layers).attribute(case.inputs, target=(EVERY, 8))
    expected = method_of(name).attribute(case.inputs, target=(EVERY, 8))
    assert found.dtype == torch.float32
    assert (found.double() - expected).abs().max() < 0.05 * expected.abs().max()


def test_known_contributions() -> None:
    halves = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    updates = [torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[1.0, -4.0]]]), torch.tensor([[[0.0, 8.0]]])]
    # 0 + (1 - 2) + 8 * 0.75 and 2 - 2 + 8 * 0.25
    assert_same(logit_contributions(updates, [halves] * 3), torch.tensor([[[5.0, 2.0]]]).double())
    with pytest.raises(AssertionError, match="needs the update of"):
        logit_contributions([], [])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"target": (2, 60)}, "entry 60"),
    ({"target": (2, torch.tensor(200, dtype=torch.uint8))}, "entry 200"),
    ({"target": None}, "target is None"),
    ({"target": 5}, "target is 5: pass"),
    ({"target": (2, 1.5)}, "not index an output"),
    ({"target": ([0, 1], [4, 9])}, r"pass \(token"),
    ({"target": [([0, 1], [4])] * 3}, r"pass \(token"),
    ({"target": [(0, 9), (2, 9)]}, "target has 2"),
    ({"target": (7, 5)}, "7 is out of range"),
    ({"target": (2, 5), "foil": (3, 6)}, "the same tokens in"),
    ({"target": (2, 5), "foil": (2, 99)}, "foil names entry 99"),
    ({"target": (2, 5), "feature_mask": torch.zeros(1, 7)}, "takes no feature"),
    ({"target": (2, 5), "attribute_to_layer_input": True}, "Leave attribute_to"),
]


def test_bad_arguments_are_named() -> None:
    for arguments, message in WRONG:
        with pytest.raises(AssertionError, match=message):
            method_of("gpt2").attribute(language_model("gpt2").inputs, **arguments)


def test_unreadable_readouts_are_refused() -> None:
    case = language_model("gpt2")
    norm, head = case.model.transformer.ln_f, case.model.get_output_embeddings()

    def refused(forward_func: Any, layers: Any, match: str, **options: Any) -> None:
        with pytest.raises(AssertionError, match=match):
            ALTILogit(forward_func, layers, **options).attribute(case.inputs, target=(EVERY, 8))

    def capped(**inputs: Tensor) -> Tensor:
        return case.model(**inputs).logits.tanh()

    def call(**inputs: Tensor) -> Any:
        return case.model(**inputs)

    refused(call, case.layers, "function without")
    refused(call, case.layers, "norm outside of the", unembedding=head)
    refused(case.model, case.layers, "is a LayerNorm", unembedding=norm)
    refused(case.model, case.layers, "is a Linear", final_norm=head)
    refused(case.model, case.layers, "model's own logits", final_norm=case.layers[1].ln_1)
    refused(case.model, case.layers[:2], "model's own logits")
    refused(capped, case.layers, "own logits", final_norm=norm, unembedding=head)
    later = "with 1 layers of"
    refused(case.model, case.layers[1:], later)
    refused(call, case.layers[1:], later, final_norm=norm, unembedding=head)
    refused(case.model, [case.layers[0], case.layers[2]], "not the output of")
    last = lambda **inputs: case.model(**inputs).logits[:, -1:]  # noqa: E731 - as a user writes it
    refused(last, case.layers, r"gave \(3, 1, 60\)", final_norm=norm, unembedding=head)


def test_a_norm_that_rounds_is_named() -> None:
    """LLaMA's own norm computes in float32, so that in float64 it is not what it is read as."""
    family = LANGUAGE_MODELS["llama"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**family.config)).eval()
    inputs = language_model("llama").inputs
    terms = ALTILogit(model, model.model.layers).terms(inputs, target=(EVERY, 8))
    real = inputs["attention_mask"]
    assert_same(terms.total(), model(**inputs).logits[..., 8] * real, 1e-6)
    with pytest.raises(AssertionError, match="could not be read"):
        ALTILogit(model.double(), model.model.layers).terms(inputs, target=(EVERY, 8))


def test_unsupported_layers_are_refused() -> None:
    with pytest.raises(AssertionError, match="p is 3: pass 1 or 2"):
        method_of("gpt2", p=3)
    bert, head = FAMILIES["bert"].case, nn.Linear(32, 60).double()
    method = ALTILogit(
        lambda **inputs: head(bert.model(**inputs)[0]),
        bert.layers,
        final_norm=bert.model.embeddings.LayerNorm,
        unembedding=head,
    )
    with pytest.raises(AssertionError, match="norms the sum"):
        method.attribute(bert.inputs, target=(EVERY, 8))
    whisper = stacks("whisper")[1]
    method = ALTILogit(
        lambda **inputs: head(whisper.model(**inputs)[0]),
        whisper.layers,
        final_norm=whisper.model.decoder.layer_norm,
        unembedding=head,
    )
    with pytest.raises(AssertionError, match="has a second"):
        method.attribute(whisper.inputs, target=(EVERY, 8))

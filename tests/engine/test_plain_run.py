"""The recorded pass returns what a plain run returns, whatever attention implementation the model was loaded with."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from captum_vz import ValueZeroing
from tests.engine.compare import assert_same
from tests.engine.parameters import sampled
from tests.reference.families import FAMILIES

IDS = torch.randint(4, 60, (2, 6), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def hides(visible: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A mask that is added to the scores, with -inf at what is hidden, `(batch, 1, out, in)`."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf)[:, None]


def recorded(method: Any, model: nn.Module, layers: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Any]:
    outputs: list[Tensor] = []
    maps = method(lambda **given: outputs.append(model(**given)[0]), layers).attribute(inputs)
    return outputs[0], maps


COLUMNS = LENGTHS.bool()[:, None, :].expand(2, 6, 6)
MASKS = {
    "none": None,
    "left": LENGTHS,
    "infinite columns": hides(COLUMNS),
    "infinite rows": hides(COLUMNS & COLUMNS.mT),
    "infinite causal rows": hides((COLUMNS & COLUMNS.mT).tril()),
}
RUNS = [
    *(("bert", padding) for padding in ("none", "left", "infinite columns", "infinite rows")),
    *(("llama", padding) for padding in ("none", "left", "infinite causal rows")),
]
LOADED = [(implementation, *run) for implementation in ("eager", "sdpa") for run in RUNS]
# A row that sees nothing is NaN in eager attention where -inf hides: given, or made of float64's smallest number in the
# float32 softmax of Llama.
PLAIN_IS_NAN = [("eager", *run) for run in RUNS if run[1].startswith("infinite") and run[1].endswith("rows")]
PLAIN_IS_NAN += [("eager", "llama", "left")]


@pytest.mark.parametrize(("implementation", "kind", "padding"), LOADED)
def test_output_is_that_of_a_plain_run(implementation: str, kind: str, padding: str) -> None:
    case = FAMILIES[kind].build(attn_implementation=implementation)
    model, layers = case.model, case.layers
    mask = MASKS[padding]
    inputs = {"input_ids": IDS} if mask is None else {"input_ids": IDS, "attention_mask": mask}
    plain = model(**inputs)[0]
    if (implementation, kind, padding) in PLAIN_IS_NAN:
        assert not plain.isfinite().all()
        output, _ = recorded(ValueZeroing, model, layers, inputs)
        assert output.isfinite().all()
        return
    output, maps = recorded(ValueZeroing, model, layers, inputs)
    torch.testing.assert_close(output, plain, rtol=0, atol=0 if implementation == "eager" else 1e-13)
    alone = {"input_ids": IDS[1:, 2:] if mask is not None else IDS[1:]}
    if kind == "llama":  # position 0 is that of the first token that is no padding
        alone["position_ids"] = torch.arange(6)[None, -alone["input_ids"].shape[1] :]
    for together, one in zip(maps, ValueZeroing(model, layers).attribute(alone), strict=True):
        if kind == "llama" or mask is None:  # BERT counts padding as places
            count = one.shape[1]
            assert_same(together[1:, -count:, -count:], one)


CAPPED = ("gemma2", "gpt-oss")  # transformers has no sdpa for their scores
FAMILY_RUNS = [
    (implementation, name, attention)
    for name, family in FAMILIES.items()
    for implementation in ("eager", "sdpa")
    for attention in ("self", "cross")
    if not (implementation == "sdpa" and name in CAPPED) and not (attention == "cross" and family.cross is None)
]


@pytest.mark.parametrize(("implementation", "name", "attention"), FAMILY_RUNS)
def test_output_of_each_family_is_that_of_a_plain_run(implementation: str, name: str, attention: str) -> None:
    case = FAMILIES[name].build(attn_implementation=implementation)
    plain = tensors_of(case.model(**case.inputs))
    outputs: list[Any] = []
    forward = lambda **given: outputs.append(case.model(**given))  # noqa: E731
    ValueZeroing(forward, case.layers, attention=attention).attribute(case.inputs)
    (output,) = map(tensors_of, outputs)
    assert output.keys() == plain.keys()
    assert plain["last_hidden_state"].isfinite().all()
    for field, expected in plain.items():
        exact = implementation == "eager"
        torch.testing.assert_close(output[field], expected, rtol=0, atol=0 if exact else 1e-13, msg=field)


def tensors_of(output: Any) -> dict[str, Tensor]:
    return {field: value for field, value in output.items() if isinstance(value, Tensor)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["bert", "llama"], "llama"))
def test_output_is_that_of_flex_attention(kind: str) -> None:
    """On a CPU, flex attention is compiled, and computes no float64."""
    case, inputs = FAMILIES[kind].build(torch.float32, "flex_attention"), {"input_ids": IDS, "attention_mask": LENGTHS}
    plain = case.model(**inputs)[0]
    output, maps = recorded(ValueZeroing, case.model, case.layers, inputs)
    torch.testing.assert_close(output[LENGTHS.bool()], plain[LENGTHS.bool()], rtol=0, atol=1e-5)
    exact_case = FAMILIES[kind].build(attn_implementation="eager")
    exact_case.model.load_state_dict(case.model.state_dict())
    exact = recorded(ValueZeroing, exact_case.model, exact_case.layers, inputs)[1]
    for found, expected in zip(maps, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def test_what_transformers_gives_torchs_function() -> None:
    """The tap computes what this function computes. An argument that is new to it may change the numbers."""
    known = "module query key value attention_mask dropout scaling is_causal position_bias cache kwargs"
    assert {*inspect.signature(sdpa_attention_forward).parameters} <= {*known.split()}

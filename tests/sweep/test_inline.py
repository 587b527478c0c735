"""The table of families that compute attention inline names the values of each head, and nothing else.

Zeroing the value of source j in head h must not change the weights. It must take weight times value from the context
of that head. Both factors are read where the module multiplies them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz._engine.taps.projection import family_of
from captum_vz.verification.definition import Operators, Product
from captum_vz.verification.recorded import half_squared_distance_of_directions
from tests.sweep.models import small_models, working_inputs
from tests.sweep.twin import Run, hidden_states, record

# Model types, and those whose output does not hold the weights of their first attention as they were.
SHOWN = """big_bird bloom bros codegen data2vec-vision deberta deberta-v2 falcon fsmt funnel glpn gpt_neo gptj
gpt_neox_japanese imagegpt layoutlmv3 luke megatron-bert mgp-str mpnet mpt mvp openai-gpt perceiver pvt rembert
roformer sew-d tapas visual_bert xglm"""
OTHERS = "cpmant cvt dab-detr mobilevit pvt_v2 table-transformer timesformer vilt"
FIELDS = dict.fromkeys(SHOWN.split(), "attentions") | dict.fromkeys(("fsmt", "mvp"), "encoder_attentions")
FIELDS["perceiver"] = "cross_attentions"


def with_zeroed_value(run: Run, head: int, source: int) -> tuple[Product, list[slice]]:
    """The product in the attention module, with one head's value zeroed as the table says, and the heads' columns."""
    row = family_of(run.layer)
    assert row is not None
    columns: list[slice] = []

    def zero(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output.clone()
        values = output.transpose(0, 1) if row.sequence_first else output
        where, _ = row.in_run(run.layer, run.layer, [(module, output)])
        columns[:] = where.columns
        values[:, source, columns[head]] = where.zero if isinstance(where.zero, float) else where.zero[head]
        return output

    operators = Operators()
    with run.layer.get_submodule(row.projection).register_forward_hook(zero):
        run.again(operators)
    return operators.found[0], columns


@pytest.mark.parametrize("model_type", [*SHOWN.split(), *OTHERS.split()])
def test_row_names_values_of_head(model_type: str) -> None:
    model = next(small_models(model_type))
    inputs, problem = working_inputs(model)
    assert inputs, problem
    attentions = [module for module in model.modules() if family_of(module)]
    run = record(lambda: model(**inputs), attentions)[0]
    clean = run.clean[1][0]
    row = family_of(run.layer)
    assert row is not None
    batch = run.hidden.shape[1 if row.sequence_first else 0]
    weights, values = (factor.unflatten(0, (batch, -1)) for factor in (clean.weights, clean.values))

    if model_type in FIELDS:
        with torch.no_grad():
            returned = model(**inputs, output_attentions=True)[FIELDS[model_type]][0]
        torch.testing.assert_close(weights, returned, rtol=1e-4, atol=1e-5)

    heads = values.shape[1]
    for head, source in ((0, 1), (heads - 1, 2)):
        zeroed, columns = with_zeroed_value(run, head, source)
        expected = values.clone()
        for other in range(heads):
            if columns[other] == columns[head]:  # heads that share a value
                expected[:, other, source] = 0
        torch.testing.assert_close(zeroed.values.unflatten(0, (batch, -1)), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(zeroed.weights, clean.weights, rtol=0, atol=1e-6)
        lost = weights[:, head, :, source, None] * values[:, head, source, None]
        context, was = zeroed.weights @ zeroed.values, clean.weights @ clean.values
        change = (was - context).unflatten(0, (batch, -1))[:, head]
        torch.testing.assert_close(change, lost, rtol=1e-4, atol=1e-5)


# model type -> the attention that samples its values between positions
DEFORMABLE = {"deformable_detr": "self", "rf_detr": "cross", "rt_detr": "cross", "rt_detr_v2": "cross"}


@pytest.mark.parametrize(("model_type", "attention"), DEFORMABLE.items())
def test_sampled_values_equal_rerun(model_type: str, attention: str) -> None:
    """The twin sees no product of weights there, so the values are zeroed by hand in a rerun of the layer."""
    model, inputs = next((m, inputs) for m in small_models(model_type) if (inputs := working_inputs(m)[0]))
    model.double()
    pixels = inputs["pixel_values"].double()
    inputs = {"pixel_values": pixels}
    if attention == "self":
        inputs["pixel_mask"] = torch.ones_like(pixels[:, 0], dtype=torch.long)
        inputs["pixel_mask"][1, :, 40:] = 0
    layers = [m for m in model.modules() if any(map(samples, m.children()))]
    run = record(lambda: model(**inputs), layers)[0]
    scores = ValueZeroing(model, run.layer, attention=attention, normalize=False).attribute(inputs)
    projection = next(filter(samples, run.layer.children())).get_submodule("value_proj")
    columns = []
    with torch.no_grad():
        clean = hidden_states(run.layer(*run.args, **run.kwargs))
        for source in range(0, scores.shape[2], 9):

            def zero(module: nn.Module, given: Any, made: Tensor, source: int = source) -> Tensor:
                return made.index_fill(1, torch.tensor(source), 0)

            with projection.register_forward_hook(zero):
                columns.append(
                    half_squared_distance_of_directions(hidden_states(run.layer(*run.args, **run.kwargs)), clean)
                )
    expected = torch.stack(columns, dim=-1)
    if attention == "self":
        real = next(x for x in run.args if isinstance(x, Tensor) and x.dtype == torch.bool)
        assert not real.all()
        expected = expected * real[..., None]
    torch.testing.assert_close(scores[:, :, ::9], expected, rtol=0, atol=1e-10)
    assert scores.amax() > 1e-5


def samples(module: nn.Module) -> bool:
    return type(module).__name__.endswith("MultiscaleDeformableAttention")

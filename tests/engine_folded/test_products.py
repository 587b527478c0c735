"""Products through oneDNN equal those of torch for any number of rows, and are used where they are faster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from captum_vz import LayerAttention, ValueZeroing, find_layers
from captum_vz._engine import value_zeroing
from captum_vz._engine.numerics import matmul
from captum_vz._engine.numerics.matmul import FEW, ROWS_THAT_PAY_REORDER, STEP, OneDnnLinears, Product
from tests.engine_folded.replays import long_case
from tests.reference import naive_value_zeroing

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-13}

has_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch comes without oneDNN"
)


@pytest.fixture(autouse=True)
def small_matrices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN as on a machine with AVX-512, and for matrices of any size."""
    monkeypatch.setattr(matmul, "SMALL", 0)
    monkeypatch.setattr(matmul, "LEAST_WORK", 0)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each product that oneDNN computed."""
    rows: list[int] = []
    compute = matmul._by_onednn

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(len(x))
        return compute(x, weight, bias)

    monkeypatch.setattr(matmul, "_by_onednn", noted)
    return rows


@pytest.fixture
def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    case = long_case("bert")
    return deepcopy(case.model).float(), case.inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, STEP, STEP + 1, FEW + 1, 512, 1024, 2051])
@pytest.mark.parametrize("transposed", [True, False], ids=["(out, in)", "(in, out)"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("count", [0, 3 * ROWS_THAT_PAY_REORDER], ids=["as given", "reordered"])
def test_products_equal_torch(dtype: torch.dtype, rows: int, transposed: bool, with_bias: bool, count: int) -> None:
    weight = torch.randn(24, 40, dtype=dtype)
    matrix = weight.T if transposed else weight.T.contiguous()
    bias = torch.randn(24, dtype=dtype) if with_bias else None
    x = torch.randn(rows, 40, dtype=dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias)
    found = Product(matrix, bias, count)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=DTYPES[dtype], atol=20 * DTYPES[dtype])


@pytest.mark.parametrize("bias", [torch.randn(48)[::2], torch.randn(1).expand(24)], ids=["strided", "expanded"])
def test_bias_in_any_layout(bias: Tensor) -> None:
    weight, rows = torch.randn(24, 40), torch.randn(7, 40)
    torch.testing.assert_close(Product(weight.T, bias)(rows), rows @ weight.T + bias)
    with torch.no_grad(), OneDnnLinears():
        torch.testing.assert_close(functional.linear(rows, weight, bias), rows @ weight.T + bias)


def test_rows_are_padded_to_few_sizes() -> None:
    found = {matmul.padded(rows) for rows in range(1, 1025)}
    assert len(found) == FEW // 4 + (1024 - FEW) // STEP
    assert all(0 <= matmul.padded(rows) - rows < STEP for rows in range(1, 1025))


@has_onednn
def test_where_onednn_is_used(by_onednn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def used(matrix: Tensor) -> bool:
        by_onednn.clear()
        Product(matrix)(matrix[:, 0][None])
        return bool(by_onednn)

    weight = torch.randn(24, 40)
    assert used(weight.T)
    assert used(weight.T.contiguous())
    assert used(weight.T.bfloat16()) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert not used(weight.T.double())
    assert not used(weight.T.to("meta"))
    assert not used(torch.randn(40, 48)[:, ::2])
    with torch.backends.mkldnn.flags(enabled=False):
        assert not used(weight.T)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert not used(weight.T)
    monkeypatch.setattr(matmul, "SMALL", weight.numel() + 1)
    assert not used(weight.T)


@has_onednn
def test_where_onednn_is_used_with_avx2(by_onednn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    weight = torch.randn(24, 40)
    in_order = Product(weight.T, count=3 * ROWS_THAT_PAY_REORDER)
    for rows in (torch.randn(FEW, 40), torch.randn(FEW + 1, 40)):
        torch.testing.assert_close(in_order(rows), rows @ weight.T)
        reordered = Product(weight.T.contiguous(), count=3 * ROWS_THAT_PAY_REORDER)
        torch.testing.assert_close(reordered(rows), rows @ weight.T)
        with torch.no_grad(), OneDnnLinears():
            torch.testing.assert_close(functional.linear(rows, weight), rows @ weight.T)
            torch.testing.assert_close(
                torch.addmm(weight[:, 0], rows, weight.T.contiguous()), rows @ weight.T + weight[:, 0]
            )
    assert by_onednn == [FEW, FEW]  # the product's and the module's


@has_onednn
def test_which_weights_are_reordered() -> None:
    matrix = torch.randn(24, 40).T
    assert not Product(matrix, count=ROWS_THAT_PAY_REORDER - 1).weight.is_mkldnn
    assert Product(matrix, count=ROWS_THAT_PAY_REORDER).weight.is_mkldnn
    assert not Product(matrix.contiguous(), count=ROWS_THAT_PAY_REORDER).weight.is_mkldnn
    assert Product(matrix.contiguous(), count=3 * ROWS_THAT_PAY_REORDER).weight.is_mkldnn


def test_torch_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul.torch.ops, "mkldnn", object())
    matrix, rows = torch.randn(24, 40).T, torch.randn(3, 24)
    torch.testing.assert_close(Product(matrix.T, count=3 * ROWS_THAT_PAY_REORDER)(rows), rows @ matrix.T)


LINEAR: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(40, 24),
    "without bias": lambda: nn.Linear(40, 24, bias=False),
    "Conv1D": lambda: Conv1D(24, 40),
}


@has_onednn
@pytest.mark.parametrize("build", LINEAR.values(), ids=LINEAR)
@pytest.mark.parametrize("shape", [(7, 40), (2, 5, 40), (0, 40)], ids=str)
def test_linear_modules(build: Callable[[], nn.Module], shape: tuple[int, ...], by_onednn: list[int]) -> None:
    module, x = build(), torch.randn(shape)
    with torch.no_grad():
        expected = module(x)
        with OneDnnLinears():
            found = module(x)
        assert len(by_onednn) == 1
        module(x)
    assert len(by_onednn) == 1  # outside, torch's
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)


class Doubled(Tensor):
    """A subclass of Tensor, as quantised weights are."""


class Seen(TorchFunctionMode):
    """A function mode of the user, which records calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_products_left_to_torch(by_onednn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(7, 40), torch.randn(24, 40), torch.randn(24)
    with OneDnnLinears():
        linear = nn.Linear(40, 24)
        linear(x).sum().backward()  # autograd
        assert linear.weight.grad is not None
        with torch.no_grad():
            functional.linear(x, weight, bias=bias)  # by keyword: no module does
            torch.addmm(torch.randn(7, 24), x, weight.T)  # no bias
            torch.addmm(bias, x, weight.T, beta=2)
            torch.addmm(2, bias, 1, x, weight.T)
            functional.linear(x[0], weight[0])
            functional.linear(x[0], weight)
            functional.linear(x, weight, torch.randn(1))
            functional.linear(x.double(), weight.double())
            functional.linear(x, weight.to_sparse_csr())
            functional.linear(x.to_mkldnn(), weight.to_mkldnn())
            functional.linear(torch.nested.nested_tensor([x, x[:3]]), weight)
            functional.linear(x, weight.as_subclass(Doubled))
            assert type(functional.linear(x.as_subclass(Doubled), weight)) is Doubled
            with forward_ad.dual_level():
                moving = functional.linear(forward_ad.make_dual(x, x), weight)
                torch.testing.assert_close(forward_ad.unpack_dual(moving).tangent, x @ weight.T)
            tangent = torch.func.jvp(lambda x: functional.linear(x, weight), (x,), (x,))[1]
            torch.testing.assert_close(tangent, x @ weight.T)
            torch.vmap(functional.linear)(x[None], weight[None])
            with torch.autocast("cpu"):
                assert functional.linear(x, weight).dtype == torch.bfloat16
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                functional.linear(x, torch.randn(24, 39))
            monkeypatch.setattr(matmul, "LEAST_WORK", 7 * 40 * 24 + 1)
            functional.linear(x, weight)
    assert not by_onednn


def test_mode_of_user_sees_products(by_onednn: list[int]) -> None:
    x, weight = torch.randn(7, 40), torch.randn(24, 40)
    with torch.no_grad(), Seen() as seen, OneDnnLinears():
        functional.linear(x, weight)
    assert functional.linear in seen.calls
    assert not by_onednn


def test_counted_operations(bert: tuple[nn.Module, dict[str, Tensor]], by_onednn: list[int]) -> None:
    """A counter of operations sees all products. It would not know oneDNN's operators."""
    model, inputs = bert
    explain = ValueZeroing(model, find_layers(model))
    with FlopCounterMode(display=False) as counted:
        explain.attribute(inputs)
    assert not by_onednn
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as by_torch:
        explain.attribute(inputs)
    assert counted.get_total_flops() == by_torch.get_total_flops() > 0


# Models by the number of the replay: folded pairs, packed pairs, whole sequences.
BY_REPLAY = {
    0: ["bert", "gpt2", "llama"],
    1: ["bert", "gpt2", "albert", "bart-decoder"],
    3: ["bert", "gpt2", "bart-decoder"],
}


@has_onednn
@pytest.mark.parametrize(("number", "name"), [(number, x) for number, names in BY_REPLAY.items() for x in names])
def test_maps_against_definition(number: int, name: str, by_onednn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay with oneDNN gives the map of the definition in float64, up to rounding."""
    case = long_case(name)
    expected = naive_value_zeroing(case, -1, normalize=False)
    model = deepcopy(case.model).float()
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in case.inputs.items()}
    monkeypatch.setattr(value_zeroing, "REPLAYS", value_zeroing.REPLAYS[number : number + 1])
    layer = find_layers(model, stack="decoder" if name.endswith("decoder") else None)[-1]
    found = ValueZeroing(model, layer, normalize=False).attribute(inputs)
    assert len(by_onednn) > 2
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * expected.max().item())


class Watched(nn.Module):
    """A model that runs another model, under a mode if one is given, and may then fail."""

    def __init__(self, model: nn.Module, mode: TorchFunctionMode | None = None, fails: bool = False) -> None:
        super().__init__()
        self.model = model
        self.mode = mode
        self.fails = fails

    def forward(self, **inputs: Tensor) -> Any:
        with nullcontext() if self.mode is None else self.mode:
            output = self.model(**inputs)
        if self.fails:
            raise RuntimeError("it fails")
        return output


def states(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """The outputs of a model's layers in one run."""
    seen: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda *given: seen.append(given[-1])) for layer in find_layers(model)]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return seen


@has_onednn
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_clean_pass_of_model(place: int, bert: tuple[nn.Module, dict[str, Tensor]], by_onednn: list[int]) -> None:
    """oneDNN computes the layers that are replayed. torch computes the rest of the model, and all for other methods."""
    model, inputs = bert
    layers, (examples, tokens) = find_layers(model), inputs["input_ids"].shape
    expected = states(model, lambda: model(**inputs))
    found = states(model, lambda: LayerAttention(model, layers[place]).attribute(inputs))
    assert all(map(torch.equal, found, expected))
    assert not by_onednn
    found = states(model, lambda: ValueZeroing(model, layers[place]).attribute(inputs, token=3))
    before = place % len(layers)
    assert all(map(torch.equal, found[:before], expected[:before]))
    torch.testing.assert_close(found, expected)
    assert by_onednn.count(examples * tokens) == 6  # four projections and the feed-forward of one layer
    others = [rows for rows in by_onednn if rows != examples * tokens]
    assert others  # pairs
    assert max(others) <= 3 * (tokens + 2)


@has_onednn
@pytest.mark.parametrize("build", [lambda: None, Seen], ids=["no mode", "the model's mode"])
def test_modes_do_not_stay(
    build: Callable[[], TorchFunctionMode | None], bert: tuple[nn.Module, dict[str, Tensor]]
) -> None:
    """Replays run without our mode and under the model's. Afterwards no mode is left, also after an error."""
    mode, (model, inputs) = build(), bert
    layer, modes = find_layers(model)[-1], list[Any]()

    def distance(zeroed: Tensor, clean: Tensor) -> Tensor:
        modes.append(_get_current_function_mode())
        return (zeroed - clean).norm(dim=-1)

    expected = ValueZeroing(model, layer, distance=distance, normalize=False).attribute(inputs)
    assert modes
    assert set(modes) == {None}
    modes.clear()
    found = ValueZeroing(Watched(model, mode), layer, distance=distance, normalize=False).attribute(inputs)
    assert modes
    assert set(modes) == {mode}
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.max().item())
    with pytest.raises(RuntimeError, match="it fails"):
        ValueZeroing(Watched(model, mode, fails=True), layer).attribute(inputs)

    def wrong(zeroed: Tensor, clean: Tensor) -> Tensor:
        raise RuntimeError("so does this")

    with pytest.raises(RuntimeError, match="so does this"):
        ValueZeroing(Watched(model, mode), layer, distance=wrong).attribute(inputs)
    assert _get_current_function_mode() is None


@has_onednn
def test_where_modes_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(24, 40)
    assert OneDnnLinears.gain([torch.randn(24), weight])
    assert not OneDnnLinears.gain([torch.randn(24), weight.double(), weight.bfloat16(), torch.randn(2, 3, 4)])
    with Seen():
        assert not OneDnnLinears.gain([weight])
    monkeypatch.setattr(matmul, "SMALL", weight.numel() + 1)
    assert not OneDnnLinears.gain([weight])

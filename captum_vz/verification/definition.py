"""Value Zeroing by its definition: run a layer again with one value row zeroed, once for each source token.

Nothing here is shared with the replays. No module and no attention function is known by name. A mode sees torch's
operators, below all modules. If a matrix product multiplies the output of a softmax, its other factor is the values.
The values are zeroed where a matrix product computes them from the layer's input. So a value is zero in every place
where the layer uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from captum_vz._private import COPIES, SOFTMAX, TorchDispatchMode, storage_id

aten = torch.ops.aten
# Operators whose output is still attention weights: copies, casts, scalings and masks of the same size, and padding.
KEEPS_WEIGHTS = {
    *COPIES,
    aten.clone.default,
    aten.native_dropout.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.nan_to_num.default,
    aten.constant_pad_nd.default,
}
PRODUCTS = {aten.bmm.default, aten.mm.default}
# Operators that may end the projection of the values: a matrix product, or the bias that is added to it.
PROJECTIONS = {*PRODUCTS, aten.addmm.default, aten.baddbmm.default, aten.convolution.default}
PROJECTIONS |= {aten.add.Tensor, aten.add_.Tensor}


class NoDefinitionError(Exception):
    """The definition cannot be applied to this layer, for the reason that is given."""


@dataclass
class Product:
    """A product of attention weights and values."""

    number: int  # how many products of this kind came before it in the run
    weights: Tensor  # `(batch * heads, out, in)`
    values: Tensor  # `(batch * heads, in, d_head)`
    operator: int | None = None  # its number, if it projects the values; None: they are zeroed in the product
    places: Tensor | None = None  # of the values in the output of the operator: flat indices, shaped as `values`


class Operators(TorchDispatchMode):
    """Counts the operators of a run, and finds the products of weights and values.

    `changes` are made to the outputs of operators, and values in products are `zeroed`, each by its number. `look` is
    called with the number, the function and the output of each operator.
    """

    def __init__(
        self,
        changes: Mapping[int, Callable[[Tensor], None]] | None = None,
        zeroed: Mapping[int, Tensor] | None = None,
        look: Callable[[int, Any, Tensor], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no types
        self.changes, self.zeroed, self.look = changes or {}, zeroed or {}, look
        self.count = 0
        self.found: list[Product] = []
        self._weights: dict[int, Tensor] = {}  # by storage; kept alive so that torch does not use the storage again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        number, self.count = self.count, self.count + 1
        if func in PRODUCTS and any(map(self._is_weights, args)):
            args = self._multiplied(*args)
        output = func(*args, **(kwargs or {}))
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(first, Tensor):
            return output
        pads = func is aten.constant_pad_nd.default
        kept = func in KEEPS_WEIGHTS and any(self._is_weights(x) and (pads or x.numel() == first.numel()) for x in args)
        if func in SOFTMAX or kept:
            self._weights[storage_id(first)] = first
        if self.look is not None:
            self.look(number, func, first)
        if number in self.changes:
            self.changes[number](first)
        return output

    def _is_weights(self, value: Any) -> bool:
        return isinstance(value, Tensor) and storage_id(value) in self._weights

    def _multiplied(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        weights_first = self._is_weights(left)
        weights, values = (left, right) if weights_first else (right.transpose(-1, -2), left.transpose(-1, -2))
        values = values.clone()
        number = len(self.found)
        self.found.append(Product(number, weights.clone(), values.clone()))
        if number in self.zeroed:
            values[self.zeroed[number]] = 0
        return (left, values) if weights_first else (values.transpose(-1, -2), right)


class Definition:
    """A layer, ready to run with values zeroed where they are projected, or without `at_projection` in the attention.

    `run` runs it on its recorded input, or with the input of one position changed, and returns its hidden states.
    """

    def __init__(self, run: Callable[[int | None], Tensor], at_projection: bool) -> None:
        self.run = run
        operators = Operators()
        self.clean = self._run(operators)  # the hidden states with nothing zeroed
        self.products = operators.found
        if not self.products:
            raise NoDefinitionError("no matrix product multiplies the output of a softmax, so no values were found")
        if at_projection:
            for product in self.products:
                self._find_projection(product)

    def attention(self, out: int, sources: int, which: int | None) -> list[Product]:
        """The products that make up the attention of this size. Empty: there is none, as in layers with windows.

        Of several attentions of this size, with values that are projected one after another, the one with the index
        `which`. None: they are parts of one attention.
        """
        products = [one for one in self.products if one.weights.shape[-2:] == (out, sources)]
        operators = list(dict.fromkeys(one.operator for one in products))
        return products if which is None else [one for one in products if one.operator == operators[which]]

    def rows(self, products: list[Product], source: int) -> list[Tensor]:
        """The values of one source, for each product."""
        place = torch.tensor(source, device=products[0].values.device)
        return [torch.zeros_like(one.values, dtype=torch.bool).index_fill(-2, place, True) for one in products]

    def rows_of_position(self, position: int) -> list[Tensor]:
        """The values of one position of the input, for each product: the rows that change with the position."""
        operators = Operators()
        self._run(operators, position)
        pairs = zip(self.products, operators.found, strict=True)
        return [(a.values != b.values).any(-1, keepdim=True).expand_as(a.values) for a, b in pairs]

    def zeroed(self, products: list[Product], rows: list[Tensor]) -> Tensor:
        """The hidden states with some values zeroed in these products."""
        values: dict[int, Tensor] = {}
        outputs: dict[int, list[Tensor]] = {}
        for product, mask in zip(products, rows, strict=True):
            if product.operator is None or product.places is None:
                values[product.number] = mask
            else:
                outputs.setdefault(product.operator, []).append(product.places[mask])
        changes = {operator: _writer(torch.cat(places)) for operator, places in outputs.items()}
        return self._run(Operators(changes, values))

    def _run(self, operators: Operators, position: int | None = None) -> Tensor:
        with without_fused_attention(), torch.no_grad(), operators:
            return self.run(position)

    def _find_projection(self, product: Product) -> None:
        """Find the operator that computes the values, and the places of the values in its output.

        The output of the operator is replaced by its flat indices. The values of the product then show their places.
        """
        operator, total = self._operator_of(product.values)
        if operator is None:
            return
        tagged = Operators({operator: _writer(None)})
        try:
            self._run(tagged)
        except Exception:  # the layer's own code may not take indices for hidden states
            return
        places = tagged.found[product.number].values.double() - 1
        if (places != places.round()).any() or places.min() < 0 or places.max() >= total or total >= 2**24:
            return
        product.operator, product.places = operator, places.long()
        # A projection that is also used for keys is not zeroed: attention weights keep their values.
        middle = product.values.shape[-2] // 2
        operators = Operators({operator: _writer(product.places[..., middle, :].flatten())})
        self._run(operators)
        if not torch.equal(operators.found[product.number].weights, product.weights):
            product.operator = product.places = None

    def _operator_of(self, values: Tensor) -> tuple[int | None, int]:
        """The first matrix product, or bias that is added, whose output holds all values; and this output's size."""
        wanted = values.flatten()
        found: list[tuple[int, int]] = []

        def look(number: int, func: Any, output: Tensor) -> None:
            if found or func not in PROJECTIONS or output.dtype != wanted.dtype:
                return
            if torch.isin(wanted[:8], output).all() and torch.isin(wanted, output).all():
                found.append((number, output.numel()))

        self._run(Operators(look=look))
        return found[0] if found else (None, 0)


def _writer(places: Tensor | None) -> Callable[[Tensor], None]:
    """Writes 0 at flat places of a tensor; or, without places, the flat index of each entry, from 1."""

    def write(output: Tensor) -> None:
        changed = torch.arange(1, output.numel() + 1, device=output.device).to(output).view(output.shape)
        if places is not None:
            changed = output.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[places] = 0
        output.copy_(changed)

    return write


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """Let torch compute attention by operators that can be seen."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)

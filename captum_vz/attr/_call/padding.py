"""Padding on the left, which moves the tokens of models that count positions from the first token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import AttentionSite, LayerPass, LayerRecord, attention_site, is_out_of_memory, repeated
from captum_vz.attr._call.arguments import begins_with_padding, bind_forward
from captum_vz.attr._call.misuse import has_cache
from captum_vz.attr._call.model_errors import MODEL_ERRORS


def map_tensors(change: Callable[[Tensor, str], Tensor], value: Any, name: str = "") -> Any:
    """Apply `change` to each tensor of the inputs, with its name in a mapping."""
    if isinstance(value, Tensor):
        return change(value, name)
    if isinstance(value, tuple):
        return tuple(map_tensors(change, one) for one in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(change, one, str(key)) for key, one in value.items()}
    return value


def tokens_of_example(inputs: Any, mask: Tensor, index: int, places: Tensor) -> Any:
    """One example of the inputs, with the tokens at `places` in this order. `mask` has the shape `(batch, tokens)`."""

    def change(x: Tensor, _: str) -> Tensor:
        if x.shape[:2] == mask.shape:
            return x[index : index + 1, places.to(x.device)]
        return x[index : index + 1] if x.dim() and len(x) == len(mask) else x

    return map_tensors(change, inputs)


class LeftPadding:
    """Whether padding on the left changes the vectors that the first explained layer is given.

    It is made while this layer runs, see :func:`begins_with_padding`. No model is known by its name: after the pass,
    one example is run without its padding, up to the layer, and its vectors are compared.
    """

    def __init__(self, site: AttentionSite) -> None:
        self._layer = site.layer.layer
        self._mask = site.target_mask.clone()  # which tokens are no padding, (batch, tokens)
        self._states = site.layer.states[0].clone()

    def warnings(self, forward_func: Callable[..., Any], inputs: Any, further: Any) -> list[str]:
        """A warning if the vectors of tokens change with the padding, and if another form of the inputs mends this."""
        if has_cache(inputs, further):
            return []
        layer, mask, states = self._layer, self._mask, self._states
        padding = (mask.cumsum(1) == 0).sum(1) * mask.any(1)
        index = int(padding.argmax())
        kept, order = mask[index].nonzero()[:, 0], (~mask[index]).int().argsort(stable=True)
        padded, given = states[index, kept], (inputs, further)

        def vectors(places: Tensor, **more: Tensor) -> Tensor | None:
            """The vectors of the example's tokens, if its inputs stand at these places."""
            some, others = tokens_of_example(given, mask, index, places)
            some = {**some, **more} if more else some
            found = _given_to(layer, forward_func, some, others)
            fits = found is not None and found.shape[:2] == (1, len(places))
            return found[0, torch.isin(places, kept)] if found is not None and fits else None

        alone = vectors(kept)
        if alone is None or not (change := _change(padded, alone)):
            return []
        remedies = []
        if isinstance(inputs, Mapping):
            positions = (mask[index : index + 1].cumsum(1) - 1).clamp_min(0)
            if _agree(vectors(torch.arange(len(order), device=order.device), position_ids=positions), alone):
                remedies.append("pass position_ids=(attention_mask.cumsum(1) - 1).clamp(0)")
        if _agree(vectors(order), alone):
            remedies.append("pad on the right")
        if not remedies:  # something else than the positions
            return []
        reason = ", because it counts padding as positions" if "position_ids" in remedies[0] else ""
        return [
            f"{int((padding > 0).sum())} example(s) begin with padding, and the model gives {type(layer).__name__} "
            f"other vectors of their tokens than without padding{reason}. They differ by {change:.2g} of the largest "
            f"entry. The maps are those of this call. For the maps of the text alone, {', or '.join(remedies)}"
        ]


def left_padding(forward_func: Callable[..., Any], inputs: Any, further: Any, layer: nn.Module) -> list[str]:
    """The warning of `LeftPadding` for a call and one layer."""
    found: list[LeftPadding] = []

    def note(record: LayerRecord) -> Tensor:
        site = attention_site(record, "self")
        if not found and begins_with_padding(site):
            found.append(LeftPadding(site))
        return torch.empty(0)

    LayerPass([layer], note).run(bind_forward(forward_func, inputs, further))
    return [said for one in found for said in one.warnings(forward_func, inputs, further)]


class _Stop(Exception):  # noqa: N818 - no error: it ends a call of the user's function
    """The layer has been given its vectors."""


def _given_to(layer: nn.Module, forward_func: Callable[..., Any], inputs: Any, further: Any) -> Tensor | None:
    """The vectors that a layer is given in its first run. None: the model does not run on such inputs."""
    found: list[Tensor] = []

    def stop(record: LayerRecord) -> Tensor:
        found.extend(x.clone() for x in record.states[:1])
        raise _Stop

    try:
        repeated(lambda: LayerPass([layer], stop).run(bind_forward(forward_func, inputs, further)))
    except _Stop:
        pass
    except (*MODEL_ERRORS, AssertionError) as error:
        if is_out_of_memory(error):
            raise
    return found[0] if found else None


def _change(found: Tensor, expected: Tensor) -> float:
    """The largest difference of vectors, as a share of their largest entry. 0: it is rounding."""
    largest = expected.abs().amax().clamp_min(torch.finfo(found.dtype).tiny)
    share = float((found - expected).abs().amax() / largest)
    # Models of any precision may rotate queries and keys in float32.
    return share if share > max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5 else 0.0


def _agree(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and not _change(found, expected)

"""The final norm and the unembedding, which turn the last layer's output into logits.

The norm is linear once its scale is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import HALF, in_float32
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.structure.modules import Norm, matrix, read_norm
from captum_vz.errors import ArgumentError


@dataclass(frozen=True)
class Readout:
    """The logit of vocabulary entry w at hidden state x is `norm.scale(x) * direction_w @ x + constant_w`.

    Attributes:
        matrix: The unembedding, `(d, entry)`. Its bias is `(entry,)`.
    """

    norm: Norm
    matrix: Tensor
    bias: Tensor | None

    @classmethod
    def of(
        cls,
        forward_func: Callable[..., Any],
        layers: Sequence[nn.Module],
        final_norm: nn.Module | None,
        unembedding: nn.Module | None,
    ) -> Readout:
        """Read the norm and the unembedding. A module that is None is searched for in `forward_func`.

        ArgumentError: a module was not found, or is no norm or no linear module.
        """
        name = type(forward_func).__name__
        if unembedding is None and hasattr(forward_func, "get_output_embeddings"):
            unembedding = forward_func.get_output_embeddings()
        if not isinstance(unembedding, nn.Module):
            raise ArgumentError(
                f"forward_func is a {name} without get_output_embeddings(): pass the linear module that computes "
                "logits from hidden states as `unembedding`."
            )
        rows = matrix(unembedding)
        weight = getattr(unembedding, "weight", None)
        if rows is None and isinstance(unembedding, nn.Linear) and isinstance(weight, Tensor):
            raise ArgumentError(
                f"unembedding is a Linear whose weight is a {type(weight).__name__}, which holds no plain numbers. "
                "Expected a plain weight, because each logit needs a direction. Pass a dequantised copy of the module."
            )
        if rows is None:
            raise ArgumentError(
                f"unembedding is a {type(unembedding).__name__}. Expected: a linear module, because each logit needs a "
                "direction. Pass the linear module that computes logits from hidden states."
            )
        norm = final_norm if final_norm is not None else _last_norm(forward_func, layers)
        if not isinstance(norm, nn.Module):
            raise ArgumentError(
                f"forward_func is a {name} in which no norm outside of the layers was found: pass the norm after the "
                "last layer as `final_norm`."
            )
        if any(parameter.dtype in HALF for parameter in norm.parameters()):
            norm = in_float32(norm)
        bias = getattr(unembedding, "bias", None)
        probe = rows[:, :4].T.to(next(norm.parameters(), rows))
        try:
            with torch.no_grad():
                return cls(read_norm(norm, probe, norm(probe)), rows.detach(), None if bias is None else bias.detach())
        except (CannotReplayError, RuntimeError) as error:
            raise ArgumentError(
                f"final_norm is a {type(norm).__name__}, which could not be read as a LayerNorm or an RMSNorm of "
                f"{rows.shape[0]} numbers: pass the norm after the last layer. A norm that rounds to float32 in a "
                "float64 model, as transformers' RMSNorms do, can be read if the model is loaded in float32."
            ) from error

    def along(self, entries: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the directions `(..., d)` and constants `(...)` of entries, in the dtype of `like`, on its device."""
        entries = entries.to(self.matrix.device)  # the model may be spread over several devices
        rows, gamma, beta = self.matrix.T[entries].to(like), self.norm.gamma.to(like), self.norm.beta.to(like)
        direction = gamma * rows
        if self.norm.centred:
            direction = direction - direction.mean(-1, keepdim=True)
        constant = rows @ beta
        return direction, constant if self.bias is None else constant + self.bias[entries].to(like)


def _last_norm(forward_func: Any, layers: Sequence[nn.Module]) -> nn.Module | None:
    """Return the last module outside the layers that has an epsilon, as norms do, or None.

    The caller compares logits to verify that this is the final norm.
    """
    if not isinstance(forward_func, nn.Module):
        return None
    inside = {id(module) for layer in layers for module in layer.modules()}
    found = [
        module
        for module in forward_func.modules()
        if id(module) not in inside
        and not any(True for _ in module.children())
        and any("eps" in name and isinstance(value, (float, type(None))) for name, value in vars(module).copy().items())
    ]
    return found[-1] if found else None

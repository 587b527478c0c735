"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.float32 import HALF, in_float32
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.structure.modules import Norm, matrix, read_norm


@dataclass(frozen=True)
class Readout:
    """The logit of entry w at x is `norm.scale(x) * direction_w @ x + constant_w`."""

    norm: Norm
    matrix: Tensor  # (d, entry)
    bias: Tensor | None  # (entry,)

    @classmethod
    def of(
        cls,
        forward_func: Callable[..., Any],
        layers: Sequence[nn.Module],
        final_norm: nn.Module | None,
        unembedding: nn.Module | None,
    ) -> Readout:
        """Read the modules, found in `forward_func` where they are not given.

        Raises:
            AssertionError: There are none, or they are not what they are looked for as.
        """
        name = type(forward_func).__name__
        if unembedding is None and hasattr(forward_func, "get_output_embeddings"):
            unembedding = forward_func.get_output_embeddings()
        assert isinstance(unembedding, nn.Module), (
            f"forward_func is a {name} without get_output_embeddings(): pass the linear module that makes logits of "
            "hidden states as `unembedding`."
        )
        rows = matrix(unembedding)
        assert rows is not None, (
            f"unembedding is a {type(unembedding).__name__}: looked for a linear module, whose rows the logits' "
            "directions are."
        )
        norm = final_norm if final_norm is not None else _last_norm(forward_func, layers)
        assert isinstance(norm, nn.Module), (
            f"forward_func is a {name} in which no norm outside of the layers was found: pass the norm behind the last "
            "layer as `final_norm`."
        )
        if any(parameter.dtype in HALF for parameter in norm.parameters()):
            norm = in_float32(norm)
        bias = getattr(unembedding, "bias", None)
        probe = rows[:, :4].T.to(next(norm.parameters(), rows))
        try:
            with torch.no_grad():
                return cls(read_norm(norm, probe, norm(probe)), rows.detach(), None if bias is None else bias.detach())
        except (CannotReplayError, RuntimeError) as error:
            raise AssertionError(
                f"final_norm is a {type(norm).__name__}, which could not be read as a LayerNorm or an RMSNorm of "
                f"{rows.shape[0]} numbers: pass the norm behind the last layer. (One that rounds to float32 in a "
                "float64 model, as transformers' RMSNorms do, is read when the model is loaded in float32.)"
            ) from error

    def along(self, entries: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The entries' directions `(..., d)` and constants `(...)`, for hidden states like these."""
        entries = entries.to(self.matrix.device)  # of a model that is spread over devices
        rows, gamma, beta = self.matrix.T[entries].to(like), self.norm.gamma.to(like), self.norm.beta.to(like)
        direction = gamma * rows
        if self.norm.centred:
            direction = direction - direction.mean(-1, keepdim=True)
        constant = rows @ beta
        return direction, constant if self.bias is None else constant + self.bias[entries].to(like)


def _last_norm(forward_func: Any, layers: Sequence[nn.Module]) -> nn.Module | None:
    """The last module outside of the layers that looks like a norm; whether it is the one, the logits tell."""
    if not isinstance(forward_func, nn.Module):
        return None
    inside = {id(module) for layer in layers for module in layer.modules()}
    found = [
        module
        for module in forward_func.modules()
        if id(module) not in inside
        and not any(True for _ in module.children())
        and any("eps" in name and isinstance(value, (float, type(None))) for name, value in vars(module).items())
    ]
    return found[-1] if found else None

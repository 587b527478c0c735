"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.tolerance import CannotReplayError, check_reproduced


@dataclass(frozen=True)
class Norm:
    """A norm, read as `scale * direction(x) + beta`: LayerNorm, or without centring RMSNorm."""

    module: nn.Module
    gamma: Tensor
    beta: Tensor
    centred: bool
    eps: float

    def direction(self, x: Tensor) -> Tensor:
        """The part that is linear in `x (..., d)`."""
        return self.gamma * self._centre(x)

    def scale(self, x: Tensor) -> Tensor:
        """One over the size of `x (..., d)`, `(..., 1)`."""
        square = torch.linalg.vector_norm(self._centre(x), dim=-1, keepdim=True).square() / x.shape[-1]
        return (square + self.eps).rsqrt()

    def normed_and_scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the module makes of `x (..., d)`, and the scale of it `(..., 1)`."""
        if not self.centred:
            return self.module(x), self.scale(x)
        normed, _, scale = torch.native_layer_norm(x, x.shape[-1:], self.gamma, self.beta, self.eps)
        return normed, scale

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


def matrix(module: nn.Module) -> Tensor | None:
    """The `(in, out)` matrix of a module that multiplies by it and adds a bias; None for any other module."""
    # Exact kinds: subclasses hold their weights in other forms (quantised, adapted).
    kind, weight = type(module), getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta:  # offloaded: torch would multiply by what it never filled
        return None
    if kind in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return weight.T
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return weight
    return None


def read_norm(module: nn.Module, x: Tensor, normed: Tensor) -> Norm:
    """The reading of a norm that explains what it made of `x (n, d)`, found by probing and not by its name.

    Raises:
        CannotReplayError: There is none.
    """
    eps = [value for name, value in vars(module).items() if "eps" in name and isinstance(value, (float, type(None)))]
    if len(eps) != 1:
        raise CannotReplayError("the first module behind the attention is no norm")
    epsilon = torch.finfo(x.dtype).eps if eps[0] is None else eps[0]
    signs = x.new_ones(x.shape[-1])  # there may be no rows, of padding alone
    signs[1::2] = -1
    beta, probed, shifted = module(torch.stack([torch.zeros_like(signs), signs, signs + 1])).unbind()
    centred = bool((shifted - probed).abs().max() < 1e-3 * (probed - beta).abs().max())
    unit = Norm(module, torch.ones_like(signs), beta, centred, epsilon)
    gamma = (probed - beta) / (unit.direction(signs) * unit.scale(signs))
    norm = Norm(module, gamma, beta, centred, epsilon)
    if len(x):
        check_reproduced(norm.scale(x) * norm.direction(x) + beta, normed)
    return norm

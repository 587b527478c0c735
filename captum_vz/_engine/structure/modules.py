"""Linear modules recognised by class, and norms recognised by probing: what each one computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.tolerance import CannotReplayError, check_reproduced


@dataclass(frozen=True)
class Norm:
    """A norm that computes `scale(x) * direction(x) + beta`: LayerNorm, or RMSNorm if it is not centred."""

    module: nn.Module
    gamma: Tensor
    beta: Tensor
    centred: bool
    eps: float

    def direction(self, x: Tensor) -> Tensor:
        """Return the part of the norm that is linear in `x (..., d)`."""
        return self.gamma * self._centre(x)

    def scale(self, x: Tensor) -> Tensor:
        """Return the inverse of the root mean square of (centred) `x (..., d)`, as `(..., 1)`."""
        square = torch.linalg.vector_norm(self._centre(x), dim=-1, keepdim=True).square() / x.shape[-1]
        return (square + self.eps).rsqrt()

    def normed_and_scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the module's output for `x (..., d)`, and the scale `(..., 1)` that it used."""
        if not self.centred:
            return self.module(x), self.scale(x)
        normed, _, scale = torch.native_layer_norm(x, x.shape[-1:], self.gamma, self.beta, self.eps)
        return normed, scale

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


@dataclass(frozen=True)
class NoNorm(Norm):
    """What stands in the place of a norm where there is none: its `module` takes the residual stream itself."""

    @classmethod
    def before(cls, module: nn.Module, x: Tensor) -> NoNorm:
        """The missing norm before a module that is given vectors like `x (..., d)`."""
        one = x.new_ones(x.shape[-1])
        return cls(module, one, torch.zeros_like(one), False, 0.0)

    def direction(self, x: Tensor) -> Tensor:
        return x

    def scale(self, x: Tensor) -> Tensor:
        return torch.ones_like(x[..., :1])


# Weights of other classes, which torchao quantises, hold no plain numbers.
PLAIN = (Tensor, nn.Parameter)


def _holds_numbers(weight: Any) -> TypeGuard[Tensor]:
    """Return whether a weight is a plain tensor that is not offloaded."""
    return type(weight) in PLAIN and not weight.is_meta


def matrix(module: nn.Module) -> Tensor | None:
    """Return the `(in, out)` matrix of a linear module, with or without bias. None for any other module."""
    # Subclasses do not count, because they may store the weight in another form (quantised, adapted).
    kind, weight = type(module), getattr(module, "weight", None)
    if not _holds_numbers(weight):
        return None
    if kind in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return weight.T
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return weight
    return None


def plain_layer_norm(module: nn.Module) -> Norm | None:
    """Return the norm of a `torch.nn.LayerNorm` over the last axis, without probing. None for any other module."""
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        return None
    if not _holds_numbers(module.weight):
        return None
    beta = module.weight.new_zeros(()) if module.bias is None else module.bias
    return Norm(module, module.weight, beta, True, module.eps)


def read_norm(module: nn.Module, x: Tensor, normed: Tensor) -> Norm:
    """Return a norm's parameters, found by probing and not by its name.

    The result is checked on `x (n, d)` and the module's output `normed (n, d)`. CannotReplayError: the module is no
    LayerNorm or RMSNorm.
    """
    eps = [
        value for name, value in vars(module).copy().items() if "eps" in name and isinstance(value, (float, type(None)))
    ]
    if len(eps) != 1:
        raise CannotReplayError(
            f"{type(module).__name__} cannot be read as a norm: expected one epsilon, found {len(eps)}"
        )
    epsilon = torch.finfo(x.dtype).eps if eps[0] is None else eps[0]
    signs = x.new_ones(x.shape[-1])  # not rows of x, which has none if all tokens are padding
    signs[1::2] = -1
    beta, probed, shifted = module(torch.stack([torch.zeros_like(signs), signs, signs + 1])).unbind()
    centred = bool((shifted - probed).abs().max() < 1e-3 * (probed - beta).abs().max())
    unit = Norm(module, torch.ones_like(signs), beta, centred, epsilon)
    gamma = (probed - beta) / (unit.direction(signs) * unit.scale(signs))
    norm = Norm(module, gamma, beta, centred, epsilon)
    if len(x):
        check_reproduced(norm.scale(x) * norm.direction(x) + beta, normed)
    return norm

"""Linear modules recognised by class, and norms recognised by probing: what each one computes.

The final norm and the unembedding together turn the last layer's output into logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import HALF, in_float32
from captum_vz._engine.numerics.tolerance import CannotReplayError, check_reproduced
from captum_vz.errors import ArgumentError


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

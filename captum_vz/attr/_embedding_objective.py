"""The explained number as a function of word embeddings, for Captum's methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import not_finite
from captum_vz.attr._call.output import Indices, pick, tensor_of
from captum_vz.errors import ArgumentError, RefusedError


class EmbeddingObjective(nn.Module):
    """The explained number as a function of embeddings and of the inputs that have a batch dimension."""

    def __init__(self, model: Any, objective: Any, named: dict[str, Any], batch: int) -> None:
        super().__init__()
        self.model = model
        self.words = nn.Identity()  # takes the place of the word embedding, which does not run on embeddings
        self.objective = objective
        # Captum repeats inputs that have a batch dimension when it runs copies of the batch.
        self.batched = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.ndim and len(v) == batch}
        self.fixed = {k: v for k, v in named.items() if k not in self.batched}

    def forward(self, embedded: Tensor, *further: Any) -> Tensor:
        *batched, foil = further
        named = dict(zip(self.batched, batched, strict=True))
        return self.read(self.model(inputs_embeds=self.words(embedded), **named, **self.fixed), foil)

    def example(self, b: int) -> dict[str, Any]:
        """Arguments for one example of the batch."""
        return {k: v[b : b + 1] for k, v in self.batched.items()} | self.fixed

    def read(self, output: Any, foil: Tensor | None) -> Tensor:
        """The output `(batch, ...)` that `target` indexes, minus the entry at `foil (batch, axis)`."""
        if self.objective is not None:
            return self.objective(output)
        found = tensor_of(output)
        if found is None:
            raise ArgumentError(
                f"forward_func gave an object of type {type(output).__name__}: expected logits (batch, classes) or "
                "(batch, tokens, classes). For other outputs pass an objective."
            )
        if foil is None:
            return found
        subtracted = found[(torch.arange(len(found), device=found.device), *foil.unbind(1))]
        return found - subtracted.reshape(-1, *[1] * (found.ndim - 1))

    @torch.no_grad()
    def check(self, ids: Tensor, embedded: Tensor, target: Indices, foil: Indices) -> None:
        """Refuse indices out of range, and a model whose output differs between embeddings and ids."""
        from_ids = self.read(self.model(input_ids=ids, **self.batched, **self.fixed), None)
        picked = pick(from_ids, target)
        if picked.numel() != len(ids):
            raise ArgumentError(
                f"The output is {tuple(from_ids.shape)}, and target {target!r} picks {tuple(picked.shape)} for "
                f"{len(ids)} examples: one number for each example is explained. For classes (batch, classes) pass a "
                "class as target, for classes of tokens a tuple (token, class)."
            )
        if foil is not None and pick(from_ids, foil, "foil").shape != picked.shape:
            raise ArgumentError(f"foil is {foil!r}: pass one number for each example, as target {target!r} does.")
        # Other tokens may be padding, so only the output at the target is compared.
        from_ids = pick(from_ids, _without_last(target))
        from_embeddings = pick(self(embedded, *self.batched.values(), None), _without_last(target))
        if not from_ids.isfinite().all():
            raise RefusedError(f"forward_func gives {not_finite(from_ids.dtype)}")
        tolerance = torch.finfo(from_ids.dtype).eps ** 0.5 * from_ids.abs().max().clamp_min(1)
        if not ((from_ids - from_embeddings).abs() <= tolerance).all():
            raise RefusedError(
                "forward_func gives another output for inputs_embeds than for input_ids. Some models count positions "
                "from the ids: pass position_ids. Some have dropout left on: call model.eval()."
            )


def _without_last(indices: Indices) -> Indices:
    if isinstance(indices, list):
        return [one[:-1] for one in indices]
    return indices and indices[:-1]

"""The number that Captum's methods explain, as a function of word embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Explained(nn.Module):
    """The number that is explained as a function of embeddings, and of all that has one entry an example."""

    def __init__(self, model: Any, objective: Any, named: dict[str, Any], batch: int) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        # Captum repeats what has a batch dimension where it runs copies of the batch.
        self.batched = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.ndim and len(v) == batch}
        self.fixed = {k: v for k, v in named.items() if k not in self.batched}

    def forward(self, embedded: Tensor, *further: Any) -> Tensor:
        *batched, position, foil = further
        named = dict(zip(self.batched, batched, strict=True))
        return self.read(self.model(inputs_embeds=embedded, **named, **self.fixed), position, foil)

    def example(self, b: int) -> dict[str, Any]:
        """Arguments for one example of the batch."""
        return {k: v[b : b + 1] for k, v in self.batched.items()} | self.fixed

    def read(self, output: Any, position: Tensor | None, foil: Tensor | None) -> Tensor:
        if self.objective is not None:
            return self.objective(output)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        if position is None:
            assert isinstance(logits, Tensor) and logits.ndim == 2, (
                f"forward_func gave {shape}: expected logits (batch, classes). Of logits for each token, position "
                "picks one; an objective reads another output."
            )
        else:
            assert isinstance(logits, Tensor) and logits.ndim == 3, (
                f"forward_func gave {shape}: expected logits (batch, tokens, classes), of which position picks a token."
            )
            tokens = logits.shape[1]
            assert ((position >= -tokens) & (position < tokens)).all(), (
                f"position {position.tolist()} is out of range: there are {tokens} tokens."
            )
            logits = logits[torch.arange(len(logits), device=logits.device), position]
        if foil is None:
            return logits
        classes = logits.shape[1]
        assert ((foil >= 0) & (foil < classes)).all(), (
            f"foil {foil.tolist()} is out of range: there are {classes} classes, 0 to {classes - 1}."
        )
        return logits - logits.gather(1, foil[:, None])

    @torch.no_grad()
    def check(self, ids: Tensor, embedded: Tensor, position: Tensor | None, foil: Tensor | None) -> None:
        """Refuse a model that computes something else from embeddings than from ids."""
        from_ids = self.read(self.model(input_ids=ids, **self.batched, **self.fixed), position, foil)
        from_embeddings = self(embedded, *self.batched.values(), position, foil)
        assert from_ids.isfinite().all(), (
            "forward_func gives values that are not finite (NaN or infinity): check its weights and inputs. float16 "
            "overflows above 65504: load the model in bfloat16 or float32."
        )
        tolerance = torch.finfo(from_ids.dtype).eps ** 0.5 * from_ids.abs().max().clamp_min(1)
        assert ((from_ids - from_embeddings).abs() <= tolerance).all(), (
            "forward_func gives another output for inputs_embeds than for input_ids. Some models count positions from "
            "the ids: pass position_ids. Some have dropout left on: call model.eval()."
        )

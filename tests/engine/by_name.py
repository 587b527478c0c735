"""Home-made blocks that import `scaled_dot_product_attention` by name. No other file of the tests does so."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.engine.blocks import Projections


class ByName(Projections):
    """Attention that calls torch's function by a global name of this file."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        context = scaled_dot_product_attention(*self.heads(x), attn_mask=mask)
        return self.output(context.transpose(1, 2).flatten(2))


class InAMethod(Projections):
    """The same, called by another method. A decorator hides the file of `forward`."""

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(*self.heads(x), attn_mask=mask)

    @torch.no_grad()
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(self.attend(x, mask).transpose(1, 2).flatten(2))

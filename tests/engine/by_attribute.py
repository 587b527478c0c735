"""Home-made attention modules that hold `scaled_dot_product_attention` as an attribute."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tests.engine.blocks import Projections

# Under a name that is no global name of this file.
TORCHS = {"function": F.scaled_dot_product_attention}


class OnModule(Projections):
    """Attention that calls torch's function as an attribute of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = TORCHS["function"]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(self.attend(*self.heads(x), attn_mask=mask).transpose(1, 2).flatten(2))


class OnClass(Projections):
    """Attention that calls torch's function as an attribute of the class."""

    attend = staticmethod(TORCHS["function"])
    forward = OnModule.forward

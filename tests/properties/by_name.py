"""Attention that imports `scaled_dot_product_attention` by name. No other file of these tests does so."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class AttendByName:
    """Calls torch's function by a global name of this file."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

"""The attention that a map is about, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.structure.site import valid_positions
from captum_vz.errors import RefusedError, UnsupportedLayerError


@dataclass(frozen=True)
class AttentionSite:
    """One attention of a layer that has just run.

    Attributes:
        index: The place of the layer in the list of layers.
        layer: The run of the layer.
        attention: The attention that is explained.
    """

    index: int
    layer: LayerRecord
    attention: AttentionRecord

    @property
    def name(self) -> str:
        """The class of the layer."""
        return self.layer.name

    @property
    def target_mask(self) -> Tensor:
        """Which output tokens are not padding, `(batch, out)`."""
        return valid_positions(self.layer, self.attention)[0]

    @property
    def source_mask(self) -> Tensor:
        """Which source tokens are not padding, `(batch, in)`."""
        return valid_positions(self.layer, self.attention)[1]

    @property
    def output(self) -> Tensor | None:
        """The first tensor that the layer returned, as it returned it."""
        return first_tensor(self.layer.output)

    def weights(self) -> Tensor:
        """The attention weights `(batch, head, out, in)`, as they are in the model's graph.

        Raises:
            UnsupportedLayerError: The weights cannot be read.
            RefusedError: The weights are not finite.
        """
        weights = self.attention.weights
        if weights is None:
            raise UnsupportedLayerError(self.attention.why_no_weights)
        if not weights.isfinite().all():
            raise RefusedError(
                f"The attention of {self.name} has weights that are not finite (NaN or infinity) in {weights.dtype}. "
                "float16 overflows above 65504: load the model in bfloat16 or float32."
            )
        return weights

    def is_given(self, hidden: Tensor) -> bool:
        """Whether the layer's input is `hidden`."""
        tensors = [x for x in tree_leaves((self.layer.args, self.layer.kwargs)) if isinstance(x, Tensor)]
        given = next((x for x in tensors if x.is_floating_point() and x.shape == hidden.shape), None)
        return given is not None and torch.allclose(given, hidden.to(given), rtol=0, atol=0, equal_nan=True)

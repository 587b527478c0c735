"""The shell of attributions that ask no model: what any method has to beat."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from captum._utils.typing import TargetType
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor

from captum_vz.attr._target import TokenTarget
from captum_vz.functional import normalize_rows


class WithoutModel(Attribution):
    """Base of the baselines that look at the tokens only: one map `(batch, out, in)`, as methods that ask a model give.

    `target` names an output *token*, never a class. A subclass says in `_scores` what the map of one example is; what
    is described here is shared.

    Args:
        forward_func: Not called; it may be left out. It is there so that these classes are built as all others are.
        causal: Whether tokens see only themselves and those before them, as in a causal model.
    """

    def __init__(self, forward_func: Callable[..., Any] | None = None, *, causal: bool = False) -> None:
        super().__init__(forward_func)
        self.causal = causal

    @log_usage(part_of_slo=True)  # type: ignore[untyped-decorator]  # Captum ships it without types.
    def attribute(
        self,
        inputs: Tensor | Mapping[str, Any],
        target: TargetType = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """A score of each source token for each output *token* (`target`: a token, never a class), without a model.

        Args:
            inputs: Token ids `(batch, tokens)` or embeddings `(batch, tokens, d)`; or a mapping that holds either as
                `input_ids` or `inputs_embeds`, and the attention mask.
            target: The output tokens whose rows are wanted, as in :meth:`LayerMaps.attribute`.
            attention_mask: 1 for tokens, 0 for padding, `(batch, tokens)`. None: there is no padding.

        Returns:
            A map `(batch, out, in)`, or, with `target`, `(batch, in)`, in float32. Rows sum to 1; rows and columns of
            padding are 0.

        Raises:
            AssertionError: Inputs or a mask of another shape, or a target that is no token.
        """
        if isinstance(inputs, Mapping):
            attention_mask = inputs.get("attention_mask", attention_mask)
            inputs = inputs.get("input_ids", inputs.get("inputs_embeds"))
        assert isinstance(inputs, Tensor) and inputs.ndim in (2, 3) and inputs.numel(), (
            f"inputs is {tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__}: pass token ids "
            "(batch, tokens) or embeddings (batch, tokens, d), or a mapping with input_ids or inputs_embeds."
        )
        batch, tokens = inputs.shape[:2]
        mask = inputs.new_ones(batch, tokens) if attention_mask is None else attention_mask
        assert isinstance(mask, Tensor) and mask.shape == (batch, tokens), (
            f"attention_mask is {tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}: pass 1 for "
            f"tokens and 0 for padding, ({batch}, {tokens})."
        )
        wanted = TokenTarget.parse(target)
        maps = torch.zeros(batch, tokens, tokens)
        for example, row, there in zip(maps, inputs.detach().cpu(), mask.detach().cpu().bool(), strict=True):
            scores = self._scores(row[there])
            places = there.nonzero()[:, 0]
            example[places[:, None], places] = normalize_rows(scores.tril() if self.causal else scores)
        return wanted.select(wanted.rows_of(maps.to(inputs.device)))

    @abstractmethod
    def _scores(self, tokens: Tensor) -> Tensor:
        """The scores of one example without its padding, `(out, in)`: positive, and not yet normalised."""

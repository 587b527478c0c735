"""Answers for the attention of a layer, whose contexts are computed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler

if TYPE_CHECKING:
    from captum_vz._engine.capture.records import AttentionRecord


class _Answer:
    """Holds a context for the next run, and checks that the layer asks for it exactly once."""

    context: Tensor | None = None

    def put(self, context: Tensor) -> None:
        """Set the context of the next run."""
        self.context = context

    def take(self) -> Tensor:
        """The context, once."""
        if self.context is None:
            raise CannotReplayError("it asked for its attention more than once in one run")
        context, self.context = self.context, None
        return context

    def check_used(self) -> None:
        """Raise CannotReplayError unless the context was asked for."""
        if self.context is not None:
            raise CannotReplayError("it never asked for its attention's output")


class ModuleAnswer(nn.Module, _Answer):
    """Takes the place of the attention module, and returns its output for given contexts.

    With `projected`, what is given is the output itself.
    """

    def __init__(self, attention: AttentionRecord, projected: bool = False) -> None:
        super().__init__()
        self.attention = attention
        # In a tuple, so that it is not registered as a submodule.
        self.projection: tuple[Callable[[Tensor], Any], ...] = ()
        if attention.projection is not None and not projected:
            self.projection = (attention.projection,)
        returned = attention.output
        self.others = (None,) * (len(returned) - 1) if isinstance(returned, (tuple, list)) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = self.take()
        for projection in self.projection:
            output = first_tensor(projection(output))
        output = self.attention.batch_first(output)
        return output if self.others is None else (output, *self.others)


class AnswerContext(AttentionHandler, _Answer):
    """Answers the first attention call with a given context, and computes later ones."""

    def __init__(self, heads: Sequence[int]) -> None:
        self.heads = heads  # (head, d_head)

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if self.context is None:
            return call.compute(call.values)
        return self.take().unflatten(-1, tuple(self.heads)), None

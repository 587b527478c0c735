"""What Captum asks of its attribution classes, where all of ours say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from captum.attr import PerturbationAttribution
from captum.log import log_usage

_Attribute = TypeVar("_Attribute", bound=Callable[..., Any])


def logged(attribute: _Attribute) -> _Attribute:
    """The decorator that Captum puts on every `attribute`, which has no types of its own."""
    return log_usage(part_of_slo=True)(attribute)


class WhileRunning(PerturbationAttribution):
    """Base of the methods that compute their scores while `forward_func` runs `layer`, one layer or several."""

    def __init__(self, forward_func: Callable[..., Any], layer: Any, device_ids: list[int] | None = None) -> None:
        PerturbationAttribution.__init__(self, forward_func)
        self.layer = layer
        self.device_ids = device_ids

    @property
    def multiplies_by_inputs(self) -> bool:
        """False: the scores are no products with the inputs."""
        return False

    def attribute_future(self, *args: Any, **kwargs: Any) -> None:
        """Not offered: the scores are computed while the model runs."""
        raise NotImplementedError(f"attribute_future is not implemented for {type(self).__name__}")

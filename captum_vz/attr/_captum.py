"""What Captum asks of its attribution classes, where all of ours say the same."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from captum.attr import PerturbationAttribution
from captum.log import log_usage

_Attribute = TypeVar("_Attribute", bound=Callable[..., Any])


def logged(attribute: _Attribute) -> _Attribute:
    """The decorator that Captum puts on every `attribute`, which has no types of its own."""
    return log_usage(part_of_slo=True)(attribute)


def warn(message: str) -> None:
    """Warn at the line that called Captum or this package, however many of their frames lie between."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("captum", "captum_vz"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class ForwardPassAttribution(PerturbationAttribution):
    """Base of the methods that compute their scores while `forward_func` runs `layer`, one layer or several."""

    def __init__(self, forward_func: Callable[..., Any], layer: Any, device_ids: list[int] | None = None) -> None:
        """See the class for the arguments."""
        PerturbationAttribution.__init__(self, forward_func)
        self.layer = layer
        self.device_ids = device_ids

    @classmethod
    def get_name(cls) -> str:
        """The class's name in words, as Captum makes it, but with acronyms in one piece.

        A class of our own that no user knows goes by the name of the public one that it is made of.
        """
        known = next(one for one in cls.__mro__ if "._" not in f"{one.__module__}.{one.__name__}")
        return re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", known.__name__)

    @property
    def multiplies_by_inputs(self) -> bool:
        """False: the scores are no products with the inputs."""
        return False

    def attribute_future(self, *args: Any, **kwargs: Any) -> None:
        """Not offered: the scores are computed while the model runs."""
        raise NotImplementedError(f"attribute_future is not implemented for {type(self).__name__}")

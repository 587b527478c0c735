"""The embedded model, and figures that are not drawn."""

from tests.study.conftest import shipped, undrawn

__all__ = ["shipped", "undrawn"]

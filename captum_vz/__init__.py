"""Value Zeroing and its attention baselines as Captum attributions."""

from captum_vz import functional

__version__ = "0.1.0"

__all__ = ["__version__", "functional"]

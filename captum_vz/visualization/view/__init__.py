"""One interactive page of maps, for notebooks, sites and files."""

from captum_vz.visualization.view.interactive import View, view
from captum_vz.visualization.view.page import three_steps

__all__ = ["View", "three_steps", "view"]

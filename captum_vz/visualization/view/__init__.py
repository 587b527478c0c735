"""One interactive page of maps, for notebooks, sites and files."""

from captum_vz.visualization.view.interactive import View, view

__all__ = ["View", "view"]

"""The figures of a study."""

from captum_vz.study.figures.differences import draw_differences
from captum_vz.study.figures.sanity import draw_sanity
from captum_vz.study.figures.summary import (
    LAST_LAYER,
    draw_summary,
    last_layers,
    method_color,
    metric_title,
    name_layers,
    name_methods,
    write_title,
)

__all__ = [
    "LAST_LAYER",
    "draw_differences",
    "draw_sanity",
    "draw_summary",
    "last_layers",
    "method_color",
    "metric_title",
    "name_layers",
    "name_methods",
    "write_title",
]

"""The figures of a study."""

from captum_vz.study.figures.differences import draw_differences
from captum_vz.study.figures.sanity import draw_sanity
from captum_vz.study.figures.summary import (
    LAST_LAYER,
    draw_summary,
    label_color,
    last_layers,
    method_color,
    metric_title,
    name_layers,
    name_methods,
    write_title,
)
from captum_vz.study.figures.tables import draw_agreement, draw_groups, group_columns, group_title
from captum_vz.study.figures.variants import draw_variants
from captum_vz.visualization.pictures.parts.style import FONT_SIZE

__all__ = [
    "FONT_SIZE",
    "LAST_LAYER",
    "draw_agreement",
    "draw_differences",
    "draw_groups",
    "draw_sanity",
    "draw_summary",
    "draw_variants",
    "group_columns",
    "group_title",
    "label_color",
    "last_layers",
    "method_color",
    "metric_title",
    "name_layers",
    "name_methods",
    "write_title",
]

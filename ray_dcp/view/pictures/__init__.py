"""Pictures for notebooks and pages: from values to SVG and HTML.

They work offline, also in exported notebooks, on light pages and on dark ones, and stay small
however large the checkpoint is. Views, runs, tensors, differences, previews and traces show
themselves with them.
"""

from ray_dcp.view.pictures.drawing import Picture
from ray_dcp.view.pictures.histogram import picture_histogram
from ray_dcp.view.pictures.lines import line_chart, picture_norms
from ray_dcp.view.pictures.rank_boxes import picture_layout, picture_reshard
from ray_dcp.view.pictures.tables import picture_diff, picture_steps
from ray_dcp.view.pictures.timeline import timeline
from ray_dcp.view.pictures.tree import tensor_tree

__all__ = [
    "Picture",
    "line_chart",
    "picture_diff",
    "picture_histogram",
    "picture_layout",
    "picture_norms",
    "picture_reshard",
    "picture_steps",
    "tensor_tree",
    "timeline",
]

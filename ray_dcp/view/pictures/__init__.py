"""Pictures for notebooks and pages: pure functions from values to SVG and HTML.

They work offline, also in exported notebooks, on light pages and on dark ones, and stay small
however large the checkpoint is. The same as matplotlib figures are in `figures`.
"""

from ray_dcp.view.pictures.drawing import Picture
from ray_dcp.view.pictures.layout import Boxes, even_boxes, reshard, shard_layout
from ray_dcp.view.pictures.lines import line_chart
from ray_dcp.view.pictures.of_runs import (
    picture_diff,
    picture_norms,
    picture_preview,
    picture_steps,
)
from ray_dcp.view.pictures.of_views import (
    picture_layout,
    picture_reshard,
    picture_timeline,
    picture_tree,
)
from ray_dcp.view.pictures.tables import Changed, Step, diff_chart, step_table
from ray_dcp.view.pictures.timeline import timeline
from ray_dcp.view.pictures.tree import Leaf, tensor_tree

__all__ = [
    "Boxes",
    "Changed",
    "Leaf",
    "Picture",
    "Step",
    "diff_chart",
    "even_boxes",
    "line_chart",
    "picture_diff",
    "picture_layout",
    "picture_norms",
    "picture_preview",
    "picture_reshard",
    "picture_steps",
    "picture_timeline",
    "picture_tree",
    "reshard",
    "shard_layout",
    "step_table",
    "tensor_tree",
    "timeline",
]

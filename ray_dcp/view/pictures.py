"""Pictures of checkpoints and runs as SVG and HTML, for notebooks and web pages.

Pictures need no network, can be read on light and on dark pages, and stay small for any size of
checkpoint. Views, runs, tensors, differences, previews and traces show themselves as pictures.
"""

from ray_dcp.view.charts import line_chart, picture_histogram, picture_norms, timeline
from ray_dcp.view.drawing import Picture
from ray_dcp.view.resharding import picture_layout, picture_reshard
from ray_dcp.view.tables import picture_diff, picture_steps, tensor_tree

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

"""For type checkers: importing it gives another module; see `ray_dcp/__init__.py`."""

from torch.distributed.checkpoint.planner_helpers import *  # noqa: F403

"""For type checkers: importing it gives another module; see `ray_dcp/__init__.py`."""

from torch.distributed.checkpoint.utils import *  # noqa: F403

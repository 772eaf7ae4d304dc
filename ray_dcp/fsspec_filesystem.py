"""For type checkers: importing it gives another module; see `ray_dcp/__init__.py`."""

from torch.distributed.checkpoint._fsspec_filesystem import *  # noqa: F403
from torch.distributed.checkpoint.fsspec_filesystem import *  # noqa: F403

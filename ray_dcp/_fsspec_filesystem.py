"""For type checkers: importing it gives another module; see `ray_dcp/__init__.py`."""

from ray_dcp.fsspec_filesystem import *  # noqa: F403

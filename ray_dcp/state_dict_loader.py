"""For type checkers: importing it gives another module; see `ray_dcp/__init__.py`."""

from ray_dcp.loading import load as load
from ray_dcp.loading import load_state_dict as load_state_dict

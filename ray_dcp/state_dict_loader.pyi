# For type checkers: `ray_dcp/__init__.py` imports another module in its place.
from ray_dcp.loading import load as load
from ray_dcp.loading import load_state_dict as load_state_dict

# For type checkers: `ray_dcp/__init__.py` imports another module in its place.
from ray_dcp.dcp._protocol import CheckpointableTensor as CheckpointableTensor

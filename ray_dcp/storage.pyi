# For type checkers: `ray_dcp/__init__.py` imports another module in its place.
from torch.distributed.checkpoint.storage import *

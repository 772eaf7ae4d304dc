# For type checkers: `ray_dcp/__init__.py` imports another module in its place.
from torch.distributed.checkpoint._fsspec_filesystem import *
from torch.distributed.checkpoint.fsspec_filesystem import *

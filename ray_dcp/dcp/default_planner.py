"""Mirror of `torch.distributed.checkpoint.default_planner`.

The default planners and what they are made of; torch's own.
"""

from torch.distributed.checkpoint import default_planner as _stock
from torch.distributed.checkpoint.default_planner import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

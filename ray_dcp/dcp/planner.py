"""Mirror of `torch.distributed.checkpoint.planner`.

Plans, their items and planners; torch's own.
"""

from torch.distributed.checkpoint import planner as _stock
from torch.distributed.checkpoint.planner import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint.planner_helpers`.

How read items are planned; torch's own.
"""

from torch.distributed.checkpoint import planner_helpers as _stock
from torch.distributed.checkpoint.planner_helpers import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

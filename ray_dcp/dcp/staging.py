"""Mirror of `torch.distributed.checkpoint.staging`.

Stagers; torch's own.
"""

from torch.distributed.checkpoint import staging as _stock
from torch.distributed.checkpoint.staging import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

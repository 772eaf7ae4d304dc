"""Mirror of `torch.distributed.checkpoint.api`.

The exception; torch's own.
"""

from torch.distributed.checkpoint import api as _stock
from torch.distributed.checkpoint.api import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint.optimizer`.

Sharded optimizer states of FSDP1; torch's own.
"""

from torch.distributed.checkpoint import optimizer as _stock
from torch.distributed.checkpoint.optimizer import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint.filesystem`.

The file system writer and reader; torch's own.
"""

from torch.distributed.checkpoint import filesystem as _stock
from torch.distributed.checkpoint.filesystem import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

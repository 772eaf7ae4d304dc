"""Mirror of `torch.distributed.checkpoint.metadata`.

What `.metadata` is made of; torch's own.
"""

from torch.distributed.checkpoint import metadata as _stock
from torch.distributed.checkpoint.metadata import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

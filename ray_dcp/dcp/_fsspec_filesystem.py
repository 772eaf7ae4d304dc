"""Mirror of `torch.distributed.checkpoint._fsspec_filesystem`.

The fsspec writer and reader; torch's own.
"""

from torch.distributed.checkpoint import _fsspec_filesystem as _stock
from torch.distributed.checkpoint._fsspec_filesystem import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

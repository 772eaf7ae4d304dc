"""Mirror of `torch.distributed.checkpoint.format_utils`.

Conversions to and from files of torch.save; torch's own.
"""

from torch.distributed.checkpoint import format_utils as _stock
from torch.distributed.checkpoint.format_utils import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint.format_utils`.

What is public.
"""

from torch.distributed.checkpoint import format_utils as _stock
from torch.distributed.checkpoint.format_utils import *  # noqa: F403

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

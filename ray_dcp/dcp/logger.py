"""Mirror of `torch.distributed.checkpoint.logger`.

The decorator that logs; torch's own.
"""

from torch.distributed.checkpoint import logger as _stock

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

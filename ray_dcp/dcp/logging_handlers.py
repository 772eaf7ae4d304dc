"""Mirror of `torch.distributed.checkpoint.logging_handlers`.

The name of the logger; torch's own.
"""

from torch.distributed.checkpoint import logging_handlers as _stock

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

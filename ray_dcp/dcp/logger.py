"""`torch.distributed.checkpoint.logger` by ray_dcp's name: the decorator that logs; torch's own."""

from torch.distributed.checkpoint import logger as _stock

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

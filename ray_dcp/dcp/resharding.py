"""Mirror of `torch.distributed.checkpoint.resharding`.

Nothing public; torch's own.
"""

from torch.distributed.checkpoint import resharding as _stock

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

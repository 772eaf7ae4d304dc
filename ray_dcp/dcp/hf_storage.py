"""Mirror of `torch.distributed.checkpoint.hf_storage`.

The Hugging Face writer and reader; torch's own.
"""

from torch.distributed.checkpoint import hf_storage as _stock
from torch.distributed.checkpoint.hf_storage import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint.quantized_hf_storage`.

The reader that dequantises; torch's own.
"""

from torch.distributed.checkpoint import quantized_hf_storage as _stock
from torch.distributed.checkpoint.quantized_hf_storage import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

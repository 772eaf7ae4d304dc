"""Mirror of `torch.distributed.checkpoint._consolidate_hf_safetensors`.

Sharded safetensors files into whole ones; torch's own.
"""

from torch.distributed.checkpoint import _consolidate_hf_safetensors as _stock
from torch.distributed.checkpoint._consolidate_hf_safetensors import *

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

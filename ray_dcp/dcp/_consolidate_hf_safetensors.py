"""Mirror of `torch.distributed.checkpoint._consolidate_hf_safetensors`.

The work is ray_dcp's own.
"""

from torch.distributed.checkpoint import _consolidate_hf_safetensors as _stock

from ray_dcp.dcp._rest import names_of, rest_of

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint._consolidate_hf_safetensors`.

The work is ray_dcp's own.
"""

from torch.distributed.checkpoint import _consolidate_hf_safetensors as _stock

from ray_dcp.dcp._rest import names_of, rest_of
from ray_dcp.seam.hugging_face_whole import (
    consolidate_safetensors_files as consolidate_safetensors_files,
)
from ray_dcp.seam.hugging_face_whole import (
    consolidate_safetensors_files_on_every_rank as consolidate_safetensors_files_on_every_rank,
)

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint.hf_storage`.

The work is ray_dcp's own.
"""

from torch.distributed.checkpoint import hf_storage as _stock

from ray_dcp.dcp._rest import names_of, rest_of
from ray_dcp.seam.hugging_face import HuggingFaceStorageReader as HuggingFaceStorageReader
from ray_dcp.seam.hugging_face import HuggingFaceStorageWriter as HuggingFaceStorageWriter

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint._fsspec_filesystem`.

The writer and reader are ray_dcp's own, the rest is torch's.
"""

from torch.distributed.checkpoint import _fsspec_filesystem as _stock
from torch.distributed.checkpoint._fsspec_filesystem import *

from ray_dcp.dcp._rest import names_of, rest_of
from ray_dcp.seam.file_system import (
    FsspecReader,
    FsspecWriter,
)

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

"""Mirror of `torch.distributed.checkpoint.format_utils`.

The conversions and the reader are ray_dcp's own. `python -m ray_dcp.dcp.format_utils` is DCP's
command.
"""

from torch.distributed.checkpoint import format_utils as _stock
from torch.distributed.checkpoint.format_utils import *

from ray_dcp.conversion import dcp_to_torch_save, torch_save_to_dcp
from ray_dcp.dcp._rest import names_of, rest_of
from ray_dcp.seam.torch_save_reader import BroadcastingTorchSaveReader

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

if __name__ == "__main__":
    import importlib

    # Why so: the command line is a layer above this one.
    importlib.import_module("ray_dcp.cli.format_utils").main(
        prog_name="python -m ray_dcp.dcp.format_utils"
    )

"""Mirror of `torch.distributed.checkpoint.state_dict_loader`.

`load` and its older form are ray_dcp's own.
"""

from torch.distributed.checkpoint import state_dict_loader as _stock

from ray_dcp.dcp._rest import names_of, rest_of
from ray_dcp.entrypoints import load as load
from ray_dcp.entrypoints import load_state_dict as load_state_dict

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

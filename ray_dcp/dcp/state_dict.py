"""Mirror of `torch.distributed.checkpoint.state_dict`.

The six functions are guarded.
"""

from torch.distributed.checkpoint import state_dict as _stock
from torch.distributed.checkpoint.state_dict import *

from ray_dcp.dcp._rest import names_of, rest_of
from ray_dcp.seam.state_dicts import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

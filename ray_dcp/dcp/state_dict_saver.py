"""Mirror of `torch.distributed.checkpoint.state_dict_saver`.

`save`, `async_save` and the older form are ray_dcp's own.
"""

from torch.distributed.checkpoint import state_dict_saver as _stock
from torch.distributed.checkpoint.state_dict_saver import *

from ray_dcp.dcp._rest import names_of, rest_of
from ray_dcp.entrypoints import (
    async_save,
    save,
    save_state_dict,
)

__all__ = names_of(_stock)
__getattr__ = rest_of(_stock, __name__)

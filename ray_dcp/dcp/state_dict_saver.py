"""Mirror of `torch.distributed.checkpoint.state_dict_saver`.

`save`, `async_save` and the older form are ray_dcp's own.
"""

from typing import Any

from torch.distributed.checkpoint import state_dict_saver as _stock
from torch.distributed.checkpoint.state_dict_saver import *

from ray_dcp.asynchronous import async_save
from ray_dcp.saving import save, save_state_dict

__all__ = list(_stock.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)

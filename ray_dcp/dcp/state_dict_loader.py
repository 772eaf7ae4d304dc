"""Mirror of `torch.distributed.checkpoint.state_dict_loader`.

`load` and its older form are ray_dcp's own.
"""

from typing import Any

from torch.distributed.checkpoint import state_dict_loader as _stock

from ray_dcp.loading import load as load
from ray_dcp.loading import load_state_dict as load_state_dict

__all__ = list(_stock.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)

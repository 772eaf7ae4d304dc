"""For type checkers: importing it gives another module; see `ray_dcp/__init__.py`."""

from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType as AsyncCheckpointerType,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse as AsyncSaveResponse

from ray_dcp.asynchronous import async_save as async_save
from ray_dcp.saving import save as save
from ray_dcp.saving import save_state_dict as save_state_dict

"""Mirror of `torch.distributed.checkpoint`: torch's own objects, but for the entry points.

For every module X of it there is `ray_dcp.X`, also as `ray_dcp.dcp.X`: torch's very module, or the
one here where it has entry points. Nothing is implemented here; `_protocol` stands for a module
that older versions of torch lack.
"""

import importlib
from typing import Any

from torch.distributed import checkpoint as _stock

from ray_dcp.asynchronous import async_save as async_save
from ray_dcp.loading import load as load
from ray_dcp.loading import load_state_dict as load_state_dict
from ray_dcp.saving import save as save
from ray_dcp.saving import save_state_dict as save_state_dict

_OF_LATER_TORCH = {
    "CheckpointableTensor": "protocol",
    "FsspecReader": "fsspec_filesystem",
    "FsspecWriter": "fsspec_filesystem",
}
"""Names that only later versions of torch have in the package itself, and their modules."""

__all__ = sorted({*_OF_LATER_TORCH, *(name for name in vars(_stock) if name[0] != "_")})


def __getattr__(name: str) -> Any:
    try:
        # Why first: torch's package has its own submodules as attributes.
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"{__name__}.{name}":
            raise
    home = _stock
    if name in _OF_LATER_TORCH and not hasattr(_stock, name):
        home = importlib.import_module(f"{__name__}.{_OF_LATER_TORCH[name]}")
    return getattr(home, name)

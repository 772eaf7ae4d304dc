"""Ray-native distributed checkpointing for PyTorch, compatible with torch.distributed.checkpoint.

`import ray_dcp as dcp` is meant to stand in for `import torch.distributed.checkpoint as dcp`.
Names are loaded on first use: importing this package loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ray_dcp import errors
from ray_dcp.version import __version__ as __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
    from torch.distributed.checkpoint.default_planner import (
        DefaultLoadPlanner as DefaultLoadPlanner,
    )
    from torch.distributed.checkpoint.default_planner import (
        DefaultSavePlanner as DefaultSavePlanner,
    )
    from torch.distributed.checkpoint.filesystem import FileSystemReader as FileSystemReader
    from torch.distributed.checkpoint.filesystem import FileSystemWriter as FileSystemWriter
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata as BytesStorageMetadata
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as ChunkStorageMetadata
    from torch.distributed.checkpoint.metadata import Metadata as Metadata
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan as LoadPlan
    from torch.distributed.checkpoint.planner import LoadPlanner as LoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem as ReadItem
    from torch.distributed.checkpoint.planner import SavePlan as SavePlan
    from torch.distributed.checkpoint.planner import SavePlanner as SavePlanner
    from torch.distributed.checkpoint.planner import WriteItem as WriteItem
    from torch.distributed.checkpoint.stateful import Stateful as Stateful
    from torch.distributed.checkpoint.storage import StorageReader as StorageReader
    from torch.distributed.checkpoint.storage import StorageWriter as StorageWriter

    from ray_dcp.entrypoints import async_save as async_save
    from ray_dcp.entrypoints import load as load
    from ray_dcp.entrypoints import load_newest as load_newest
    from ray_dcp.entrypoints import load_state_dict as load_state_dict
    from ray_dcp.entrypoints import save as save
    from ray_dcp.entrypoints import save_state_dict as save_state_dict
    from ray_dcp.errors import CheckpointError as CheckpointError
    from ray_dcp.handle import SaveHandle as SaveHandle
    from ray_dcp.handle import SaveProgress as SaveProgress
    from ray_dcp.handle import SaveReport as SaveReport
    from ray_dcp.options import LoadOptions as LoadOptions
    from ray_dcp.options import SaveOptions as SaveOptions
    from ray_dcp.runtime.collecting import collect as collect
    from ray_dcp.runtime.deleting import delete as delete
    from ray_dcp.runtime.leftovers import CollectReport as CollectReport
    from ray_dcp.runtime.metadata_later import write_metadata as write_metadata
    from ray_dcp.runtime.outcome import outcome as outcome
    from ray_dcp.runtime.session import Session as Session
    from ray_dcp.runtime.session import connect as connect
    from ray_dcp.runtime.workers import WorkerGroup as WorkerGroup
    from ray_dcp.seam.report import LoadReport as LoadReport
    from ray_dcp.view.checkpoint_view import CheckpointView as CheckpointView
    from ray_dcp.view.checkpoint_view import open as open  # noqa: A004 - the contract's name
    from ray_dcp.view.verify import verify as verify
    from ray_dcp.warming import warm_up as warm_up

_TORCH = "torch.distributed.checkpoint"

# Public name -> module that defines it. `__all__` and `__getattr__` both read this table.
_HOMES: dict[str, str] = {
    "save": "ray_dcp.entrypoints",
    "async_save": "ray_dcp.entrypoints",
    "SaveHandle": "ray_dcp.handle",
    "SaveProgress": "ray_dcp.handle",
    "SaveReport": "ray_dcp.handle",
    "load": "ray_dcp.entrypoints",
    "save_state_dict": "ray_dcp.entrypoints",
    "load_newest": "ray_dcp.entrypoints",
    "load_state_dict": "ray_dcp.entrypoints",
    "warm_up": "ray_dcp.warming",
    "connect": "ray_dcp.runtime.session",
    "Session": "ray_dcp.runtime.session",
    "WorkerGroup": "ray_dcp.runtime.workers",
    "LoadReport": "ray_dcp.seam.report",
    "SaveOptions": "ray_dcp.options",
    "LoadOptions": "ray_dcp.options",
    "open": "ray_dcp.view.checkpoint_view",
    "verify": "ray_dcp.view.verify",
    "outcome": "ray_dcp.runtime.outcome",
    "collect": "ray_dcp.runtime.collecting",
    "delete": "ray_dcp.runtime.deleting",
    "write_metadata": "ray_dcp.runtime.metadata_later",
    "CollectReport": "ray_dcp.runtime.leftovers",
    "CheckpointView": "ray_dcp.view.checkpoint_view",
    # torch's own types, by identity: plug-ins subclass them and `isinstance` must agree.
    "BytesStorageMetadata": _TORCH,
    "CheckpointException": _TORCH,
    "ChunkStorageMetadata": _TORCH,
    "DefaultLoadPlanner": _TORCH,
    "DefaultSavePlanner": _TORCH,
    "FileSystemReader": _TORCH,
    "FileSystemWriter": _TORCH,
    "LoadPlan": _TORCH,
    "LoadPlanner": _TORCH,
    "Metadata": _TORCH,
    "ReadItem": _TORCH,
    "SavePlan": _TORCH,
    "SavePlanner": _TORCH,
    "Stateful": f"{_TORCH}.stateful",
    "StorageReader": _TORCH,
    "StorageWriter": _TORCH,
    "TensorStorageMetadata": _TORCH,
    "WriteItem": _TORCH,
}
_HOMES.update(dict.fromkeys(errors.__all__, "ray_dcp.errors"))

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ray_dcp' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""Mirror of `torch.distributed.checkpoint`: for every module X of it there is `ray_dcp.dcp.X`.

`from torch.distributed.checkpoint.X import Y` becomes `from ray_dcp.dcp.X import Y`. Types whose
identity matters to plug-ins (plans, items, metadata, protocols) are torch's own; what does the
work is ray_dcp's. Nothing is implemented here.
"""

from typing import Any

from torch.distributed import checkpoint as _stock

from ray_dcp.dcp import _extension
from ray_dcp.dcp._rest import rest_of
from ray_dcp.dcp.api import CheckpointException
from ray_dcp.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from ray_dcp.dcp.filesystem import FileSystemReader, FileSystemWriter
from ray_dcp.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from ray_dcp.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from ray_dcp.dcp.optimizer import load_sharded_optimizer_state_dict
from ray_dcp.dcp.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from ray_dcp.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from ray_dcp.dcp.state_dict_loader import load, load_state_dict
from ray_dcp.dcp.state_dict_saver import async_save, save, save_state_dict
from ray_dcp.dcp.storage import StorageReader, StorageWriter

__all__ = [
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "_extension",
    "async_save",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
]

_rest = rest_of(_stock, __name__)


def __getattr__(name: str) -> Any:
    import importlib

    try:
        # Why first: torch's package has its own submodules as attributes.
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"{__name__}.{name}":
            raise
    return _rest(name)

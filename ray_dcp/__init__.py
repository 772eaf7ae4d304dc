"""Ray-native distributed checkpointing for PyTorch, compatible with torch.distributed.checkpoint.

`import ray_dcp as dcp` replaces `import torch.distributed.checkpoint as dcp`. Public names are
imported on first use: importing this package imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ray_dcp import errors
from ray_dcp.core import __version__ as __version__

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
    from torch.distributed.checkpoint.hf_storage import (
        HuggingFaceStorageReader as HuggingFaceStorageReader,
    )
    from torch.distributed.checkpoint.hf_storage import (
        HuggingFaceStorageWriter as HuggingFaceStorageWriter,
    )
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata as BytesStorageMetadata
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as ChunkStorageMetadata
    from torch.distributed.checkpoint.metadata import Metadata as Metadata
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorStorageMetadata
    from torch.distributed.checkpoint.optimizer import (
        load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.planner import LoadPlan as LoadPlan
    from torch.distributed.checkpoint.planner import LoadPlanner as LoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem as ReadItem
    from torch.distributed.checkpoint.planner import SavePlan as SavePlan
    from torch.distributed.checkpoint.planner import SavePlanner as SavePlanner
    from torch.distributed.checkpoint.planner import WriteItem as WriteItem
    from torch.distributed.checkpoint.quantized_hf_storage import (
        QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader,
    )
    from torch.distributed.checkpoint.staging import AsyncStager as AsyncStager
    from torch.distributed.checkpoint.staging import BlockingAsyncStager as BlockingAsyncStager
    from torch.distributed.checkpoint.stateful import Stateful as Stateful
    from torch.distributed.checkpoint.storage import StorageReader as StorageReader
    from torch.distributed.checkpoint.storage import StorageWriter as StorageWriter

    from ray_dcp.asynchronous import SaveHandle as SaveHandle
    from ray_dcp.asynchronous import SaveProgress as SaveProgress
    from ray_dcp.asynchronous import SaveReport as SaveReport
    from ray_dcp.asynchronous import async_save as async_save
    from ray_dcp.averaging import AverageReport as AverageReport
    from ray_dcp.averaging import average as average
    from ray_dcp.conversion import dcp_to_safetensors as dcp_to_safetensors
    from ray_dcp.conversion import dcp_to_torch_save as dcp_to_torch_save
    from ray_dcp.conversion import read_state_dict as read_state_dict
    from ray_dcp.conversion import torch_save_to_dcp as torch_save_to_dcp
    from ray_dcp.errors import *  # noqa: F403 - its `__all__` says which
    from ray_dcp.exporting import copy as copy
    from ray_dcp.exporting import export as export
    from ray_dcp.exporting import import_checkpoint as import_checkpoint
    from ray_dcp.fsspec_filesystem import FsspecReader as FsspecReader
    from ray_dcp.fsspec_filesystem import FsspecWriter as FsspecWriter
    from ray_dcp.loading import load as load
    from ray_dcp.loading import load_newest as load_newest
    from ray_dcp.loading import load_state_dict as load_state_dict
    from ray_dcp.manager.following import FollowedStep as FollowedStep
    from ray_dcp.manager.following import follow as follow
    from ray_dcp.manager.following import record_metrics as record_metrics
    from ray_dcp.manager.manager import CheckpointManager as CheckpointManager
    from ray_dcp.options import LoadOptions as LoadOptions
    from ray_dcp.options import SaveOptions as SaveOptions
    from ray_dcp.protocol import CheckpointableTensor as CheckpointableTensor
    from ray_dcp.runtime.discovery import connect as connect
    from ray_dcp.runtime.garbage_collection import collect as collect
    from ray_dcp.runtime.garbage_collection import delete as delete
    from ray_dcp.runtime.session import Session as Session
    from ray_dcp.runtime.standing import CollectReport as CollectReport
    from ray_dcp.runtime.standing import write_metadata as write_metadata
    from ray_dcp.runtime.tasks import outcome as outcome
    from ray_dcp.runtime.worker_group import WorkerGroup as WorkerGroup
    from ray_dcp.saving import save as save
    from ray_dcp.saving import save_state_dict as save_state_dict
    from ray_dcp.saving import warm_up as warm_up
    from ray_dcp.stage.orders import StagerOptions as StagerOptions
    from ray_dcp.store.location import Location as Location
    from ray_dcp.torch_adapter.results import LoadReport as LoadReport
    from ray_dcp.torch_adapter.state import PerRank as PerRank
    from ray_dcp.view.checkpoint_view import CheckpointView as CheckpointView
    from ray_dcp.view.progress import Progress as Progress
    from ray_dcp.view.run_view import RunView as RunView
    from ray_dcp.view.run_view import open as open  # noqa: A004 - the contract's name
    from ray_dcp.view.run_view import open_checkpoint as open_checkpoint
    from ray_dcp.view.run_view import open_run as open_run
    from ray_dcp.view.verify import verify as verify

_TORCH = "torch.distributed.checkpoint"

# Public names by the module that defines them. `__all__` and `__getattr__` both read this table.
_HOMES = {
    name: home
    for home, names in {
        "ray_dcp.asynchronous": ("SaveHandle", "SaveProgress", "SaveReport", "async_save"),
        "ray_dcp.averaging": ("AverageReport", "average"),
        "ray_dcp.conversion": (
            "dcp_to_safetensors",
            "dcp_to_torch_save",
            "read_state_dict",
            "torch_save_to_dcp",
        ),
        "ray_dcp.errors": errors.__all__,
        "ray_dcp.exporting": ("copy", "export", "import_checkpoint"),
        "ray_dcp.loading": ("load", "load_newest", "load_state_dict"),
        "ray_dcp.manager.following": ("FollowedStep", "follow", "record_metrics"),
        "ray_dcp.manager.manager": ("CheckpointManager",),
        "ray_dcp.options": ("LoadOptions", "SaveOptions"),
        "ray_dcp.runtime.discovery": ("connect",),
        "ray_dcp.runtime.garbage_collection": ("collect", "delete"),
        "ray_dcp.runtime.standing": ("CollectReport", "write_metadata"),
        "ray_dcp.runtime.session": ("Session",),
        "ray_dcp.runtime.tasks": ("outcome",),
        "ray_dcp.runtime.worker_group": ("WorkerGroup",),
        "ray_dcp.saving": ("save", "save_state_dict", "warm_up"),
        "ray_dcp.stage.orders": ("StagerOptions",),
        "ray_dcp.store.location": ("Location",),
        "ray_dcp.torch_adapter.results": ("LoadReport",),
        "ray_dcp.torch_adapter.state": ("PerRank",),
        "ray_dcp.view.checkpoint_view": ("CheckpointView",),
        "ray_dcp.view.progress": ("Progress",),
        "ray_dcp.view.run_view": ("RunView", "open", "open_checkpoint", "open_run"),
        "ray_dcp.view.verify": ("verify",),
        # Torch's own classes, not copies: plug-ins subclass them, and `isinstance` must agree.
        _TORCH: (
            "BytesStorageMetadata", "CheckpointException", "ChunkStorageMetadata",
            "DefaultLoadPlanner", "DefaultSavePlanner", "FileSystemReader", "FileSystemWriter",
            "HuggingFaceStorageReader", "HuggingFaceStorageWriter", "LoadPlan", "LoadPlanner",
            "Metadata", "QuantizedHuggingFaceStorageReader", "ReadItem", "SavePlan",
            "SavePlanner", "StorageReader", "StorageWriter", "TensorStorageMetadata",
            "WriteItem", "load_sharded_optimizer_state_dict",
        ),
        f"{_TORCH}.staging": ("AsyncStager", "BlockingAsyncStager"),
        f"{_TORCH}.stateful": ("Stateful",),
        "ray_dcp.fsspec_filesystem": ("FsspecReader", "FsspecWriter"),
        "ray_dcp.protocol": ("CheckpointableTensor",),
    }.items()
    for name in names
}  # fmt: skip

__all__ = sorted(_HOMES)


# DCP's submodules, importable as `ray_dcp.X` too, so that only the first line of a script changes.
# Type checkers and editors, which don't run the finder below, read `X.py`.
_MODULES = frozenset(
    (
        "_consolidate_hf_safetensors", "_extension", "_fsspec_filesystem", "api",
        "default_planner", "filesystem", "format_utils", "fsspec_filesystem", "hf_storage",
        "logger", "logging_handlers", "metadata", "optimizer", "planner", "planner_helpers",
        "protocol", "quantized_hf_storage", "resharding", "staging", "state_dict",
        "state_dict_loader", "state_dict_saver", "stateful", "storage", "utils",
    )
)  # fmt: skip


# The submodules that have entry points: ray_dcp defines these itself.
_OWN_SUBMODULES = frozenset(("state_dict_loader", "state_dict_saver"))

# Replacements for submodules that some versions of torch lack.
_STAND_INS = {
    "_fsspec_filesystem": f"{_TORCH}.fsspec_filesystem",  # deprecated since torch 2.15
    "fsspec_filesystem": f"{_TORCH}._fsspec_filesystem",  # before torch 2.15
    "protocol": f"{__name__}.dcp._protocol",  # before torch 2.14
}


def _home(name: str) -> str:
    """Returns the full name of the module that is imported as `ray_dcp.NAME`."""
    if name in _OWN_SUBMODULES:
        return f"{__name__}.dcp.{name}"
    home = f"{_TORCH}.{name}"
    return home if name not in _STAND_INS or find_spec(home) else _STAND_INS[name]


class _Alias(MetaPathFinder, Loader):
    """Imports `ray_dcp.X` and `ray_dcp.dcp.X` as one module: torch's, or that of `ray_dcp.dcp`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        names = {__name__: _MODULES, f"{__name__}.dcp": _MODULES - _OWN_SUBMODULES}
        is_alias = name in names.get(package, ())
        return ModuleSpec(fullname, self, origin=fullname) if is_alias else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_home(spec.name.rpartition(".")[2]))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Why: the import system has just set `__spec__` of torch's module to that of the alias.
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> Any:
        """Returns torch's code, for `python -m ray_dcp.format_utils`."""
        home = _home(fullname.rpartition(".")[2])
        loader: Any = importlib.import_module(home).__loader__
        return loader.get_code(home)


if not any(type(finder).__qualname__ == "_Alias" for finder in sys.meta_path):
    # Why first: the files `X.py` are for type checkers.
    sys.meta_path.insert(0, _Alias())


# Public submodules of ray_dcp, imported on first use.
_OWN_MODULES = frozenset(("train", "xla"))


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _OWN_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ray_dcp' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(
        {*globals(), *_HOMES, *_OWN_MODULES, *(name for name in _MODULES if name[0] != "_")}
    )

"""`RayDcpCheckpointIO`: checkpoints of PyTorch Lightning. Requires `ray-dcp[lightning]`.

Lightning passes one nested checkpoint on rank 0. Its tensors are saved as tensors, and the
structure around them as one object: any structure is restored unchanged, and loads with
`weights_only` rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO

from ray_dcp.asynchronous import SaveHandle, async_save
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError
from ray_dcp.loading import load
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.root_writer import remove_folder
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.standing import target_of
from ray_dcp.saving import save
from ray_dcp.torch_adapter.tensors import dtype_of
from ray_dcp.view.checkpoint_view import read_view
from ray_dcp.view.wording import few

STRUCTURE = "structure"
_TENSOR = "__ray_dcp_tensor__"


class RayDcpCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Lightning `Trainer`: `Trainer(plugins=[this])`.

    Each checkpoint is a directory. It appears atomically, its bytes are verified by a load, and a
    save to the same path keeps it until the new checkpoint is committed. It supports strategies
    that pass the whole checkpoint to rank 0 (single device, DDP). Files that Lightning itself saved
    are loaded and removed too.

    Args:
        in_background: Return from a save once the bytes are copied. Errors are raised by the next
            call and at the end of the run.
        save_options: Options of saves.
        load_options: Options of loads.
    """

    def __init__(
        self,
        *,
        in_background: bool = False,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        self._in_background = in_background
        # Why stage in the call: Lightning has no handle to wait for.
        self._save_options = replace(save_options or SaveOptions(), staging="call")
        self._load_options = load_options or LoadOptions()
        self._under_way: list[SaveHandle] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint.

        Args:
            checkpoint: The checkpoint that Lightning has made.
            path: Path of the directory.
            storage_options: Not supported; must be None.

        Raises:
            InvalidRequestError: `storage_options` was given.
            CheckpointError: As for `ray_dcp.save`; or an earlier background save failed.
        """
        if storage_options is not None:
            raise InvalidRequestError(
                "RayDcpCheckpointIO takes no storage_options; mount the storage as a directory",
                key="storage_options",
            )
        tensors: dict[str, Any] = {}
        # Why a tuple: DCP flattens dicts and lists, and keeps a tuple as one object.
        state = {STRUCTURE: (_without_tensors(checkpoint, tensors),), "tensors": tensors}
        if not self._in_background:
            save(state, checkpoint_id=path, no_dist=True, options=self._save_options)
            return
        self._raise_failures(wait=False)
        self._under_way.append(
            async_save(state, checkpoint_id=path, no_dist=True, options=self._save_options)
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: str | torch.device | Callable[[Any], Any] | dict[str, str] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns a checkpoint as it was saved.

        Args:
            path: Path of the directory, or of a file that Lightning saved, which `torch.load`
                reads.
            map_location: Device of the tensors, or a function of tensor and location as for
                `torch.load`; the CPU if None.
            weights_only: False allows the checkpoint to execute code. If None, the load options
                decide.

        Raises:
            InvalidRequestError: This plug-in did not save the checkpoint.
            CheckpointError: As for `ray_dcp.load`.
        """
        self._raise_failures(wait=True)
        options = self._load_options
        if weights_only is not None:
            options = replace(options, weights_only=weights_only)
        if os.path.isfile(path):
            location: Any = "cpu" if map_location is None else map_location
            # Why not Lightning's own plug-in: up to 2.5 it takes no weights_only.
            loaded: dict[str, Any] = torch.load(path, location, weights_only=options.weights_only)
            return loaded
        view = read_view(path)
        if STRUCTURE not in view.names:
            raise InvalidRequestError(
                f"expected a checkpoint that RayDcpCheckpointIO saved, found one of "
                f"{few(list(view.names))}; ray_dcp.load loads it",
                checkpoint_id=view.url,
            )
        prefix = "tensors."
        tensors = {
            name[len(prefix) :]: torch.empty(info.shape, dtype=dtype_of(info.dtype))
            for name, info in view.tensors.items()
        }
        state: dict[str, Any] = {STRUCTURE: None, "tensors": tensors}
        load(state, checkpoint_id=path, no_dist=True, options=options)
        found: dict[str, Any] = _with_tensors(state[STRUCTURE][0], state["tensors"], map_location)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint, and its directory unless it contains other files.

        Args:
            path: Path of the directory, or of a file that Lightning saved.

        Raises:
            CheckpointError: The checkpoint could not be removed.
        """
        self._raise_failures(wait=True)
        if os.path.isfile(path):
            os.remove(path)
            return
        parent, _, name = target_of(path, None).url.rstrip("/").rpartition("/")
        # Why: of "memory://name" and "/name", that leaves less than the place above them.
        parent += "/" if not parent or parent.endswith("/") else ""
        remove_folder(Root(Target(parent)), name)

    def teardown(self) -> None:
        """Waits for background saves.

        Raises:
            CheckpointError: A save failed.
        """
        self._raise_failures(wait=True)

    def _raise_failures(self, *, wait: bool) -> None:
        ended = [handle for handle in self._under_way if wait or handle.done()]
        self._under_way = [handle for handle in self._under_way if handle not in ended]
        for error in [handle.exception() for handle in ended]:
            if error is not None:
                raise error


def _without_tensors(value: Any, tensors: dict[str, Any]) -> Any:
    """Returns a structure with placeholders for its tensors, which are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, dict):
        # Why a plain dict: Lightning's dict classes could not be loaded without executing code.
        return {key: _without_tensors(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(one, tensors) for one in value)
    return value


def _with_tensors(value: Any, tensors: dict[str, Any], map_location: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return _map_location(tensors[value[_TENSOR]], map_location)
        return {key: _with_tensors(one, tensors, map_location) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(one, tensors, map_location) for one in value)
    return value


def _map_location(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    if map_location is None:
        return tensor
    if isinstance(map_location, dict):
        return tensor.to(map_location.get("cpu", "cpu"))
    if callable(map_location):
        placed = map_location(tensor, "cpu")
        return tensor if placed is None else placed
    return tensor.to(map_location)

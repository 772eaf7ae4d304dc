"""`RayDcpCheckpointIO`: checkpoints of PyTorch Lightning. Requires `ray-dcp[lightning]`.

Lightning passes one nested checkpoint on rank 0. It is saved as the state dict that it is, so that
its values have the names that Lightning gives them:

    state_dict.layers.0.weight, optimizer_states.0.state.0.exp_avg, loops.fit_loop.…, epoch

What has no such names is saved as one object, in a tuple, because DCP keeps tuples whole: mappings
of another kind or with keys that are neither texts nor numbers, mappings whose names would clash,
and values of other classes. One more object, `structure`, has their places. Everything is restored
unchanged, and loads with `weights_only` rules.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO

from ray_dcp.asynchronous import SaveHandle, async_save
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.names import is_unicode
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.deletions import remove_folder
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.saving import save
from ray_dcp.store.opening import target_of
from ray_dcp.torch_adapter.flatten import LARGEST_KEY
from ray_dcp.torch_adapter.state import has_states
from ray_dcp.transform.conversion import read_state_dict
from ray_dcp.view.checkpoint_view import read_view
from ray_dcp.view.wording import few

STRUCTURE = "structure"
"""Name of the object that tells a checkpoint of this plug-in from others."""
_NAMED = "named"
"""First part of that object. Those of the first form have the structure itself instead."""
_WHOLE = "checkpoint"
"""Name of a checkpoint that is saved as one object."""
_TENSOR = "__ray_dcp_tensor__"
"""Key of a placeholder in the first form: tensors were named by numbers."""
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.Size)


class RayDcpCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Lightning `Trainer`: `Trainer(plugins=[this])`.

    Each checkpoint is a directory, whose values have the names that Lightning gives them, such as
    `state_dict.layers.0.weight`. It appears atomically, its bytes are verified by a load, and a
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
        state = _state_of(checkpoint)
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
        state = read_state_dict(path, options=options)
        structure = state.pop(STRUCTURE)
        if len(structure) == 1:
            checkpoint = _with_tensors(structure[0], state.get("tensors", {}))
        else:
            checkpoint = _restored(state, structure[1])
        found: dict[str, Any] = _placed(checkpoint, map_location)
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


_Path = tuple[str | int, ...]


def _state_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint as a state dict whose names are those of the checkpoint."""
    wholes: list[_Path] = []
    state = _nameable((), checkpoint, wholes)
    if isinstance(state, tuple) or STRUCTURE in state:
        wholes, state = [()], {_WHOLE: _as_object(checkpoint)}
    return {**state, STRUCTURE: (_NAMED, wholes)}


def _nameable(path: _Path, value: Any, wholes: list[_Path]) -> Any:
    """Returns a value of a state dict; adds the paths of values that are saved as one object."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    before = len(wholes)
    # Why a plain dict: Lightning's dict classes could not be loaded without executing code.
    if isinstance(value, dict) and all(map(_is_nameable, value)):
        found = {key: _nameable((*path, key), one, wholes) for key, one in value.items()}
        names = Counter(_names(found))
        if not names or max(names.values()) == 1:
            return found
    elif type(value) is list:
        return [_nameable((*path, n), one, wholes) for n, one in enumerate(value)]
    elif isinstance(value, _PLAIN):
        return value
    elif type(value) is tuple and not has_states(value):
        return _on_cpu(value)
    del wholes[before:]
    wholes.append(path)
    return _as_object(value)


def _as_object(value: Any) -> Any:
    """Returns what `save` stores as one object; `_value_of` returns the value.

    Why not always a tuple: in one, modules, optimizers and schedulers are replaced by their states.
    """
    held = (_on_cpu(value),)
    return SimpleNamespace(value=held[0]) if has_states(held) else held


def _value_of(held: Any) -> Any:
    return held.value if isinstance(held, SimpleNamespace) else held[0]


def _is_nameable(key: object) -> bool:
    """Returns whether a key of a mapping comes back from a checkpoint as it is."""
    if isinstance(key, str):
        return type(key) is str and is_unicode(key)
    return type(key) is int and abs(key) < LARGEST_KEY


def _names(value: Any) -> Iterator[str]:
    """Yields the names that DCP gives to the values of a mapping, and some more."""
    items = enumerate(value) if isinstance(value, list) else value.items()
    for key, one in items:
        yield str(key)
        if isinstance(one, (dict, list)):
            yield from (f"{key}.{name}" for name in _names(one))


def _on_cpu(value: Any) -> Any:
    """Returns what is pickled as one object: its tensors must not depend on a device."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_on_cpu, value))
    return value


def _restored(state: dict[Any, Any], wholes: list[_Path]) -> Any:
    """Returns the checkpoint of a state dict that `_state_of` returned."""
    if () in wholes:
        return _value_of(state[_WHOLE])
    for *way, last in wholes:
        here: Any = state
        try:
            for key in way:
                here = here[key]
            here[last] = _value_of(here[last])
        except LookupError:
            continue  # Another program, as `ray-dcp average`, left it out.
    return state


def _with_tensors(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Returns the checkpoint of the first form: its structure, and tensors by number."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(one, tensors) for one in value)
    return value


def _placed(value: Any, map_location: Any) -> Any:
    """Returns a checkpoint whose tensors are on the chosen devices."""
    if isinstance(value, torch.Tensor):
        return _map_location(value, map_location)
    if isinstance(value, dict):
        return {key: _placed(one, map_location) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placed(one, map_location) for one in value)
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

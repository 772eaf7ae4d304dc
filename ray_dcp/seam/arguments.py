"""Whether what a caller passed as writer, reader, planner or id is one, told before it is used.

Like DCP, a plug-in need not inherit from DCP's classes: its methods decide.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ray_dcp.errors import InvalidRequestError
from ray_dcp.store.location import is_place

__all__ = ["check_id", "check_planner", "check_storage"]

_METHODS: dict[type, tuple[str, ...]] = {
    StorageWriter: (
        "reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan",
        "write_data", "finish",
    ),
    StorageReader: (
        "reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan",
        "prepare_global_plan", "read_data",
    ),
    SavePlanner: (
        "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan",
        "resolve_data",
    ),
    LoadPlanner: (
        "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan",
        "load_bytes", "resolve_tensor", "commit_tensor",
    ),
}  # fmt: skip


def check_storage(storage: Any, argument: str, wanted: type, other: type) -> None:
    """Checks a writer or reader.

    Raises:
        InvalidRequestError: It is neither a `wanted` nor has the methods of one.
    """
    if storage is None or isinstance(storage, wanted):
        return
    way_out = f"; is it a {other.__name__}?" if isinstance(storage, other) else ""
    _check_methods(storage, argument, wanted, way_out)


def check_planner(planner: Any, wanted: type) -> None:
    """Checks a planner.

    Raises:
        InvalidRequestError: It is neither a `wanted` nor has the methods of one.
    """
    if planner is None or isinstance(planner, wanted):
        return
    other = LoadPlanner if wanted is SavePlanner else SavePlanner
    way_out = f"; this is a {other.__name__}" if isinstance(planner, other) else ""
    _check_methods(planner, "planner", wanted, way_out)


def _check_methods(value: Any, argument: str, wanted: type, way_out: str) -> None:
    """Lets through what only behaves like the wanted class, as DCP does."""
    missing = [name for name in _METHODS[wanted] if not callable(getattr(value, name, None))]
    if missing or isinstance(value, type):
        found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        lacks = f", which has no {', '.join(missing)}" if missing else ", not an instance"
        raise InvalidRequestError(
            f"{argument} must be a {wanted.__name__}, but is {found}{lacks}{way_out}",
            key=argument,
        )


def check_id(checkpoint_id: Any) -> None:
    """Checks a checkpoint id.

    Raises:
        InvalidRequestError: It names no place.
    """
    if checkpoint_id is not None and not is_place(checkpoint_id):
        raise InvalidRequestError(
            f"checkpoint_id must be a string, a path, a Location or a filesystem, but is "
            f"{type(checkpoint_id).__name__}",
            key="checkpoint_id",
        )

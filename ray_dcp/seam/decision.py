"""Which path a save or load takes, as a value; `paths` decides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from ray_dcp.errors import InvalidRequestError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.messages import Target

__all__ = [
    "FOREIGN",
    "HOOKS",
    "NATIVE",
    "Decision",
    "MissingTargetError",
    "PathName",
    "PlannerFlags",
]

PathName = Literal["native", "planner hooks", "foreign storage"]

NATIVE: PathName = "native"
HOOKS: PathName = "planner hooks"
FOREIGN: PathName = "foreign storage"

Options = TypeVar("Options", SaveOptions, LoadOptions)


class MissingTargetError(InvalidRequestError, RuntimeError):
    """Neither a checkpoint id nor a storage was given; DCP raises a `RuntimeError` then."""


@dataclass(frozen=True, kw_only=True)
class PlannerFlags:
    """Arguments of `DefaultSavePlanner` and `DefaultLoadPlanner` that are no options of ours."""

    flatten_state_dict: bool = True
    flatten_sharded_tensors: bool = True


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How one save or load goes."""

    path: PathName
    reason: str
    """Why, as half a sentence for the report."""
    target: Target | None
    """Where the checkpoint lies; None on foreign storage, which knows itself."""
    storage: Any
    """The writer or reader that was given, or the stock one to use for a URL that only fsspec
    serves; None when a path says it all."""
    planner: Any
    """The planner to call: None on the native path, where `flags` say it all."""
    flags: PlannerFlags = field(default_factory=PlannerFlags)
    """What the default planner was set to; the defaults on the other paths."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Fields of `SaveOptions` or `LoadOptions` that the writer's, reader's and planner's
    arguments set."""

    def committed(self, attempt: str) -> None:
        """Has the writer that was given name its save by the attempt that was committed.

        As in DCP `writer.save_id` is then the `storage_meta.save_id` of the checkpoint.
        """
        if hasattr(self.storage, "save_id"):
            self.storage.save_id = attempt

    def apply(self, options: Options) -> Options:
        """Returns the options with those of the writer and planner.

        What the caller set in `options` to anything but the default stands.

        Args:
            options: What the caller passed, or the defaults.
        """
        default = type(options)()
        unset = {
            name: value
            for name, value in self.options.items()
            if getattr(options, name) == getattr(default, name)
        }
        return replace(options, **unset)  # type: ignore[arg-type]

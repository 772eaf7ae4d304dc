"""Which path a save or load takes, and whether its arguments are right, before anything is done.

`decide_save` and `decide_load` return a `Route`, with one of three paths and why. *Native* takes
torch's own file system writer or reader and default planner at their word and does their work
itself; *planner hooks* does so with a planner of the user's; *foreign storage* leaves the work to a
plug-in, or to what stands in for one of torch's.

Like DCP, a plug-in need not inherit from DCP's classes: its methods decide.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from torch.distributed.checkpoint import filesystem, format_utils, hf_storage
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ModuleNotFoundError:  # torch before 2.15; later ones warn of this module
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.reporting import contained
from ray_dcp.errors import InvalidRequestError
from ray_dcp.options import INSTEAD_OF_SAFETENSORS, LoadOptions, SaveOptions
from ray_dcp.store.location import AnyPlace, Location, is_place, split_url
from ray_dcp.store.opening import absolute_target, as_target, place_by_fsspec
from ray_dcp.torch_adapter.torch_save_reader import TorchSaveReader


def check_plug_in(value: Any, argument: str, wanted: type, other: type) -> None:
    """Checks a planner, writer or reader that a user gave.

    Args:
        value: What was given; None is fine.
        argument: Its name.
        wanted: Its class, one of torch's. What has the methods of one is taken too, as in DCP.
        other: The class that it is easily confused with.

    Raises:
        InvalidRequestError: It is neither.
    """
    if value is None or isinstance(value, wanted):
        return
    missing = [
        name
        for name, method in vars(wanted).items()
        if getattr(method, "__isabstractmethod__", False)
        # Why not this one: nobody calls it.
        and name != "validate_checkpoint_id"
        and not callable(getattr(value, name, None))
    ]
    if missing or isinstance(value, type):
        found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        lacks = f", which has no {', '.join(missing)}" if missing else ", not an instance"
        way_out = f"; this is a {other.__name__}" if isinstance(value, other) else ""
        raise InvalidRequestError(
            f"{argument} must be a {wanted.__name__}, but is {found}{lacks}{way_out}",
            key=argument,
        )


def _check_id(checkpoint_id: Any) -> None:
    if checkpoint_id is not None and not is_place(checkpoint_id):
        raise InvalidRequestError(
            f"checkpoint_id must be a string, a path, a Location or a filesystem, but is "
            f"{type(checkpoint_id).__name__}",
            key="checkpoint_id",
        )


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
class Route:
    """How one save or load goes."""

    path: PathName
    reason: str
    """Why, as half a sentence for the report."""
    target: Target | None = None
    """Where the checkpoint lies; None on foreign storage, which knows itself."""
    storage: Any = None
    """The writer or reader that was given, or the stock one to use for a URL that only fsspec
    serves; None when a path says it all."""
    planner: Any = None
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
        with contained("The writer's save_id"):
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


def decide_save(
    planner: SavePlanner | None = None,
    storage_writer: StorageWriter | None = None,
    checkpoint_id: AnyPlace | None = None,
) -> Route:
    """Returns the path that a save takes.

    Args:
        planner: As given to `save`.
        storage_writer: As given to `save`.
        checkpoint_id: As given to `save`. With a writer it takes the place of the writer's path,
            as in DCP; nobody calls the writer's `reset` here.

    Raises:
        MissingTargetError: Neither `checkpoint_id` nor `storage_writer` was given.
        InvalidRequestError: One of them has the wrong type, or nothing can write to this id.

    Examples:
        >>> decide_save(checkpoint_id="/checkpoints/step-1").path
        'native'
    """
    check_plug_in(storage_writer, "storage_writer", StorageWriter, StorageReader)
    _check_id(checkpoint_id)
    check_plug_in(planner, "planner", SavePlanner, LoadPlanner)
    place = _place(storage_writer, checkpoint_id, "storage_writer")
    return _with_planner(place, planner, DefaultSavePlanner)


def decide_load(
    planner: LoadPlanner | None = None,
    storage_reader: StorageReader | None = None,
    checkpoint_id: AnyPlace | None = None,
) -> Route:
    """Returns the path that a load takes.

    Args:
        planner: As given to `load`.
        storage_reader: As given to `load`.
        checkpoint_id: As given to `load`; see `decide_save`.

    Raises:
        MissingTargetError: Neither `checkpoint_id` nor `storage_reader` was given.
        InvalidRequestError: One of them has the wrong type, or nothing can read this id.

    Examples:
        >>> decide_load(checkpoint_id="file:///checkpoints/step-1").path
        'native'
    """
    check_plug_in(storage_reader, "storage_reader", StorageReader, StorageWriter)
    _check_id(checkpoint_id)
    check_plug_in(planner, "planner", LoadPlanner, SavePlanner)
    place = _place(storage_reader, checkpoint_id, "storage_reader")
    return _with_planner(place, planner, DefaultLoadPlanner)


_FSSPEC = (FsspecWriter, FsspecReader)
_LOCAL = (filesystem.FileSystemWriter, filesystem.FileSystemReader)
_NATIVE = (*_LOCAL, *_FSSPEC, hf_storage.HuggingFaceStorageReader)
"""Exactly these classes are taken at their word."""


# --- storage ------------------------------------------------------------------------------------


def _place(storage: Any, checkpoint_id: Any, argument: str) -> Route:
    """Returns the route as far as the storage goes: native or foreign, no planner yet."""
    if storage is None:
        return _place_of_id(checkpoint_id, argument)
    kind = type(storage).__name__
    reason = _why_foreign(storage, argument)
    if reason is not None:
        stand_in = _stand_in(storage, checkpoint_id)
        if stand_in is not None:
            return Route(path=FOREIGN, reason=f"{kind} works on the ranks", storage=stand_in)
        if type(storage) is hf_storage.HuggingFaceStorageWriter:
            _local_path(storage, checkpoint_id or storage.path, INSTEAD_OF_SAFETENSORS)
        if checkpoint_id is not None and not isinstance(checkpoint_id, (str, os.PathLike)):
            raise InvalidRequestError(
                f"{kind} does its own work and takes a path or URL, not a "
                f"{type(checkpoint_id).__name__}: set it up with options or filesystem itself",
                key="checkpoint_id",
            )
        return Route(path=FOREIGN, reason=reason, storage=storage)
    target = _target_of(storage, checkpoint_id)
    how = "a local path" if target.filesystem is None else f"{split_url(target.url)[0]}://"
    is_writer = isinstance(storage, filesystem.FileSystemWriter)
    options = _writer_options(storage) if is_writer else {}
    reason = f"{kind} on {how}"
    return Route(path=NATIVE, reason=reason, target=target, storage=storage, options=options)


def _place_of_id(checkpoint_id: Any, argument: str) -> Route:
    if not checkpoint_id:
        raise MissingTargetError(
            f"expected checkpoint_id or {argument}, found neither; pass "
            f"checkpoint_id='/path/of/the/checkpoint'",
            key="checkpoint_id",
        )
    target = absolute_target(checkpoint_id)
    protocol = split_url(target.url)[0]
    how = f"a {protocol}:// URL" if protocol else "a local path"
    return Route(path=NATIVE, reason=f"checkpoint_id is {how}", target=target)


def _target_of(storage: Any, checkpoint_id: Any) -> Target:
    """Returns where torch's own writer or reader works, with the filesystem that it was given.

    Why not by calling its `reset`, as DCP does: that forgets the options of the filesystem.
    """
    if type(storage) not in _FSSPEC:
        return absolute_target(checkpoint_id or _local_path(storage, storage.path))
    own = as_target(Location(str(storage.path), filesystem=storage.fs.fs))
    if not checkpoint_id:
        return absolute_target(own)
    place = as_target(checkpoint_id)
    is_bare = place.filesystem is None and not place.storage_options
    if is_bare and split_url(place.url)[0] == split_url(own.url)[0]:
        return absolute_target(replace(place, filesystem=own.filesystem))
    moved = absolute_target(place)
    # Why not by our own client: what else the user does with this URL goes through fsspec.
    is_text = isinstance(checkpoint_id, (str, os.PathLike))
    return place_by_fsspec(moved.url) if is_text and moved.filesystem is None else moved


def _local_path(
    storage: Any,
    path: Any,
    way_out: str = "pass that as checkpoint_id, which takes the place of the path",
) -> str:
    """Returns the path that a storage of torch's was given.

    Raises:
        InvalidRequestError: It was a URL, of which torch has made a relative path.
    """
    text = str(path)
    scheme, _, rest = text.partition(":/")
    if rest and scheme.isalnum():
        raise InvalidRequestError(
            f"{type(storage).__name__} takes a local path, but was given the URL {scheme}://"
            f"{rest.lstrip('/')}; {way_out}",
            key="checkpoint_id",
        )
    return text


def _stand_in(storage: Any, checkpoint_id: Any) -> Any:
    """Returns what works on the ranks as one of torch's storages is set to; None for all others."""
    if type(storage) is format_utils.BroadcastingTorchSaveReader and not _shadowed(storage):
        path = checkpoint_id or storage.checkpoint_id
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidRequestError(
                f"expected checkpoint_id to be a file of torch.save, found {path!r}",
                key="checkpoint_id",
            )
        return TorchSaveReader(path, storage.coordinator_rank)
    return None


def _why_foreign(storage: Any, argument: str) -> str | None:
    """Returns why a plug-in does its own work, or None when it can be taken at its word."""
    kind = type(storage).__name__
    if type(storage) not in _NATIVE:
        for local in _LOCAL:
            if isinstance(storage, local):
                return f"{kind} is a subclass of {local.__name__}"
        return f"{kind} is a third-party {argument}"
    if shadowed := _shadowed(storage):
        return f"this {kind} has its own {', '.join(shadowed)}"
    if type(storage) not in _FSSPEC and type(storage.fs) is not filesystem.FileSystem:
        return f"this {kind} works on {type(storage.fs).__name__}"
    if _has_extensions(storage):
        return f"this {kind} has stream extensions"
    return None


def _shadowed(storage: Any) -> list[str]:
    """Returns methods that this instance has and its class has otherwise (monkey patches)."""
    cls = type(storage)
    return sorted(name for name in vars(storage) if callable(getattr(cls, name, None)))


def _has_extensions(storage: Any) -> bool:
    transforms = storage.transforms
    if hasattr(transforms, "extensions"):
        return bool(transforms.extensions)
    # A registry only matters to a checkpoint that has transformed items. The default one says
    # nothing about the user's wishes; one with more, or of another class, does.
    registry = getattr(transforms, "extension_registry", None)
    return registry is not None and (
        type(registry) is not ExtensionRegistry
        or registry.extensions != ExtensionRegistry().extensions
    )


def _writer_options(writer: Any) -> dict[str, object]:
    """Returns `SaveOptions` for those arguments that differ from torch's defaults."""
    options: dict[str, object] = {}
    if writer.serialization_format is filesystem.SerializationFormat.SAFETENSORS:
        raise InvalidRequestError(
            f"{type(writer).__name__} must have serialization_format=TORCH_SAVE, but has "
            f"SAFETENSORS, of which DCP reads nothing back: {INSTEAD_OF_SAFETENSORS}",
            key="serialization_format",
        )
    if not writer.sync_files:
        options["sync_files"] = False
    if not writer.overwrite:
        options["overwrite"] = False
    if writer.thread_count != 1:
        options["num_threads"] = _threads(writer.thread_count)
    return options


def _threads(thread_count: object) -> int:
    if isinstance(thread_count, bool) or not isinstance(thread_count, int) or thread_count < 1:
        raise InvalidRequestError(
            f"thread_count must be a whole number above 0, but is {thread_count!r}",
            key="thread_count",
        )
    return thread_count


# --- planners -----------------------------------------------------------------------------------


def _with_planner(place: Route, planner: Any, default: Any) -> Route:
    if place.path == FOREIGN:
        return replace(place, planner=planner)
    if planner is None:
        return place
    kind = type(planner).__name__
    if type(planner) is default:
        shadowed = _shadowed(planner)
        if not shadowed:
            options: dict[str, object] = dict(place.options)
            if getattr(planner, "allow_partial_load", False):
                options["strict"] = False
            if getattr(planner, "dedup_save_to_lowest_rank", False):
                options["dedup_save_to_lowest_rank"] = True
            flags = PlannerFlags(
                flatten_state_dict=planner.flatten_state_dict,
                flatten_sharded_tensors=planner.flatten_sharded_tensors,
            )
            return replace(place, flags=flags, options=options)
        why = f"this {kind} has its own {', '.join(shadowed)}"
    else:
        why = f"{kind} is not torch's {default.__name__} itself"
    return replace(place, path=HOOKS, reason=f"{why}; {place.reason}", planner=planner)

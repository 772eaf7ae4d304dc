"""Chooses the path of a save or load, after its arguments are checked.

`decide_save` and `decide_load` return a `Route` with one of three paths and the reason for it:

| path | storage | planner |
|---|---|---|
| native | ray_dcp's, in place of torch's own file system writer or reader | ray_dcp's |
| planner hooks | the same | the user's: its hooks are called |
| foreign storage | a plug-in, or the stand-in for one of torch's | the user's or DCP's |

As in DCP, a plug-in need not inherit from DCP's classes: its methods decide.
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
except ModuleNotFoundError:  # torch before 2.15; later ones deprecate it
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError
from ray_dcp.events import contained
from ray_dcp.options import LoadOptions, SaveOptions, check_whole
from ray_dcp.store.location import AnyPlace, Location, is_place, split_url
from ray_dcp.store.opening import absolute_target, as_target, place_by_fsspec
from ray_dcp.torch_adapter.foreign import TorchSaveReader


def check_plug_in(value: Any, argument: str, wanted: type, other: type) -> None:
    """Checks a planner, writer or reader that a user passed.

    Args:
        value: The argument; None is valid.
        argument: Name of the argument.
        wanted: Its class, one of torch's. As in DCP, an object with the methods of the class is
            accepted too.
        other: The class that it is easily confused with.

    Raises:
        InvalidRequestError: The value is neither of this class nor has its methods.
    """
    if value is None or isinstance(value, wanted):
        return
    missing = [
        name
        for name, method in vars(wanted).items()
        if getattr(method, "__isabstractmethod__", False)
        # Why not this one: nothing calls it.
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
    """Neither a checkpoint id nor a storage was passed. DCP raises a `RuntimeError` for it."""


@dataclass(frozen=True, kw_only=True)
class PlannerFlags:
    """Arguments of `DefaultSavePlanner` and `DefaultLoadPlanner` that are no ray_dcp options."""

    flatten_state_dict: bool = True
    flatten_sharded_tensors: bool = True


@dataclass(frozen=True, kw_only=True)
class Route:
    """The path of one save or load, and its arguments."""

    path: PathName
    reason: str
    """The reason for the path, as half a sentence for the report."""
    target: Target | None = None
    """Location of the checkpoint; None on foreign storage, where only the plug-in knows it."""
    storage: Any = None
    """The writer or reader that was passed, or the stock one for a URL that only fsspec supports;
    None if a path is enough."""
    planner: Any = None
    """The planner to call; None on the native path, where `flags` describe it completely."""
    flags: PlannerFlags = field(default_factory=PlannerFlags)
    """Arguments of the default planner; the defaults on the other paths."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Fields of `SaveOptions` or `LoadOptions` that the arguments of writer, reader and planner
    set."""

    def committed(self, attempt: str) -> None:
        """Sets the save id of the writer that was passed to the committed attempt.

        As in DCP, `writer.save_id` equals the `storage_meta.save_id` of the checkpoint then.
        """
        with contained("The writer's save_id"):
            if hasattr(self.storage, "save_id"):
                self.storage.save_id = attempt

    def apply(self, options: Options) -> Options:
        """Returns the options merged with those of the writer and planner.

        Fields that the caller set to anything but the default have priority.

        Args:
            options: What the caller passed, or the defaults.
        """
        if not self.options:
            return options
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
        planner: Argument of `save`.
        storage_writer: Argument of `save`.
        checkpoint_id: Argument of `save`. As in DCP it replaces the path of a writer; the writer's
            `reset` is not called here.

    Raises:
        MissingTargetError: Neither `checkpoint_id` nor `storage_writer` was passed.
        InvalidRequestError: An argument has the wrong type, or no storage can write to this id.

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
        planner: Argument of `load`.
        storage_reader: Argument of `load`.
        checkpoint_id: Argument of `load`; see `decide_save`.

    Raises:
        MissingTargetError: Neither `checkpoint_id` nor `storage_reader` was passed.
        InvalidRequestError: An argument has the wrong type, or no storage can read this id.

    Examples:
        >>> decide_load(checkpoint_id="file:///checkpoints/step-1").path
        'native'
    """
    check_plug_in(storage_reader, "storage_reader", StorageReader, StorageWriter)
    _check_id(checkpoint_id)
    check_plug_in(planner, "planner", LoadPlanner, SavePlanner)
    place = _place(storage_reader, checkpoint_id, "storage_reader")
    return _with_planner(place, planner, DefaultLoadPlanner)


_INSTEAD_OF_SAFETENSORS = (
    "save as it is by default, and make safetensors files of the checkpoint with "
    "ray_dcp.export(path, target, 'hf') or `ray-dcp export --format hf`"
)
_FSSPEC = (FsspecWriter, FsspecReader)
_LOCAL = (filesystem.FileSystemWriter, filesystem.FileSystemReader)
_NATIVE = (*_LOCAL, *_FSSPEC, hf_storage.HuggingFaceStorageReader)
"""Storage classes that ray_dcp replaces; subclasses are not replaced."""


# --- storage ------------------------------------------------------------------------------------


def _place(storage: Any, checkpoint_id: Any, argument: str) -> Route:
    """Returns the route as far as the storage decides it: native or foreign, without planner."""
    if storage is None:
        return _place_of_id(checkpoint_id, argument)
    kind = type(storage).__name__
    reason = _why_foreign(storage, argument)
    if reason is not None:
        stand_in = _stand_in(storage, checkpoint_id)
        if stand_in is not None:
            return Route(path=FOREIGN, reason=f"{kind} works on the ranks", storage=stand_in)
        if type(storage) is hf_storage.HuggingFaceStorageWriter:
            _local_path(storage, checkpoint_id or storage.path, _INSTEAD_OF_SAFETENSORS)
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
    """Returns the location of torch's own writer or reader, with the filesystem that it was given.

    Why not by `reset`, which DCP calls: it discards the options of the filesystem.
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
    # Why not ray_dcp's own client: other code of the user opens this URL through fsspec.
    is_text = isinstance(checkpoint_id, (str, os.PathLike))
    return place_by_fsspec(moved.url) if is_text and moved.filesystem is None else moved


def _local_path(
    storage: Any,
    path: Any,
    way_out: str = "pass that as checkpoint_id, which takes the place of the path",
) -> str:
    """Returns the path that was passed to a storage of torch's.

    Raises:
        InvalidRequestError: It was a URL, which torch has turned into a relative path.
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
    """Returns the stand-in for one of torch's storages, with its settings; None for all others."""
    if type(storage) is format_utils.BroadcastingTorchSaveReader and not _patched_methods(storage):
        path = checkpoint_id or storage.checkpoint_id
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidRequestError(
                f"expected checkpoint_id to be a file of torch.save, found {path!r}",
                key="checkpoint_id",
            )
        return TorchSaveReader(path, storage.coordinator_rank)
    return None


def _why_foreign(storage: Any, argument: str) -> str | None:
    """Returns why a storage is used as a plug-in, or None if ray_dcp can replace it."""
    kind = type(storage).__name__
    if type(storage) not in _NATIVE:
        for local in _LOCAL:
            if isinstance(storage, local):
                return f"{kind} is a subclass of {local.__name__}"
        return f"{kind} is a third-party {argument}"
    if shadowed := _patched_methods(storage):
        return f"this {kind} has its own {', '.join(shadowed)}"
    if type(storage) not in _FSSPEC and type(storage.fs) is not filesystem.FileSystem:
        return f"this {kind} works on {type(storage.fs).__name__}"
    if _has_extensions(storage):
        return f"this {kind} has stream extensions"
    return None


def _patched_methods(storage: Any) -> list[str]:
    """Returns the methods in which an instance differs from its class (monkey patches)."""
    cls = type(storage)
    return sorted(name for name in vars(storage) if callable(getattr(cls, name, None)))


def _has_extensions(storage: Any) -> bool:
    transforms = storage.transforms
    if hasattr(transforms, "extensions"):
        return bool(transforms.extensions)
    # A registry only matters for a checkpoint with transformed items. The default registry says
    # nothing about the user's intent; one with more entries, or of another class, does.
    registry = getattr(transforms, "extension_registry", None)
    return registry is not None and (
        type(registry) is not ExtensionRegistry
        or registry.extensions != ExtensionRegistry().extensions
    )


def _writer_options(writer: Any) -> dict[str, object]:
    """Returns `SaveOptions` for the arguments that differ from torch's defaults."""
    options: dict[str, object] = {}
    if writer.serialization_format is filesystem.SerializationFormat.SAFETENSORS:
        raise InvalidRequestError(
            f"{type(writer).__name__} must have serialization_format=TORCH_SAVE, but has "
            f"SAFETENSORS, of which DCP reads nothing back: {_INSTEAD_OF_SAFETENSORS}",
            key="serialization_format",
        )
    if not writer.sync_files:
        options["sync_files"] = False
    if not writer.overwrite:
        options["overwrite"] = False
    if writer.thread_count != 1:
        options["num_threads"] = check_whole(writer.thread_count, "thread_count", 1)
    return options


# --- planners -----------------------------------------------------------------------------------


def _with_planner(place: Route, planner: Any, default: Any) -> Route:
    if place.path == FOREIGN:
        return replace(place, planner=planner)
    if planner is None:
        return place
    kind = type(planner).__name__
    if type(planner) is default:
        shadowed = _patched_methods(planner)
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

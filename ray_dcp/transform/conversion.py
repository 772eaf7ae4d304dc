"""Converts checkpoints to and from `torch.save` files, safetensors files and plain dicts.

Conversions stream: tensors are read into the mapped pages of the new file, or written from those
of the old one, so that memory never holds all of either.

`stored_in` describes the contents of a checkpoint by name, for loads without targets. A conversion
makes several loads; afterwards `check_stands` checks that all of them read the same checkpoint.
`CastingSavePlanner` casts floating-point tensors one at a time while they are saved.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import os
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.serialization import set_default_mmap_options, skip_data

from ray_dcp.core.json_text import to_json
from ray_dcp.core.processes import run_tasks
from ray_dcp.core.values import Kind, NamePath
from ray_dcp.errors import InvalidRequestError, StateDictError, UnsupportedValueError
from ray_dcp.format.manifest import repeated, tied_in
from ray_dcp.format.safetensors import ALL_CODES, header, packed
from ray_dcp.io.checkpoint import CheckpointReplacedError, find_checkpoint, read_checkpoint
from ray_dcp.io.plain_files import INDEX_NAME, plain_files
from ray_dcp.io.reader import locate_item, read_item
from ray_dcp.loading import load
from ray_dcp.options import KeyMap, LoadOptions, SaveOptions, check_patterns, matches
from ray_dcp.saving import CheckpointId, check_options, run_save, text_of
from ray_dcp.session.inline_transport import session_alone
from ray_dcp.store.local import publish
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import threads_for
from ray_dcp.torch_adapter.dispatch import FOREIGN, decide_load, decide_save
from ray_dcp.torch_adapter.flatten import Rename, flatten, renamer, set_by_path
from ray_dcp.torch_adapter.objects import load_object, load_torch_file
from ray_dcp.torch_adapter.operation_log import OperationLog
from ray_dcp.torch_adapter.optimizer_state import Stored
from ray_dcp.torch_adapter.sink import AsStored
from ray_dcp.torch_adapter.targets import first_chunks
from ray_dcp.torch_adapter.tensors import dtype_name, is_plain
from ray_dcp.view.progress import Meter, ShowProgress, reporting


@dataclass(frozen=True)
class Selected:
    """One tensor or object of a checkpoint, and its place and dtype in the new state dict."""

    name: str
    """Name in the checkpoint."""
    path: NamePath
    """Path in the new state dict."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """Dtype of the new tensor; None for objects."""
    is_any_class: bool = False
    """Whether the value may have been saved as a tensor subclass, which ray_dcp can read."""
    tied: str = ""
    """First name in the checkpoint of the tensors that were of one memory, if this one was."""

    @property
    def fqn(self) -> str:
        """Dotted name in the new state dict."""
        return ".".join(map(str, self.path))


def of_classes(checkpoint_id: CheckpointId, stored: Iterable[Selected]) -> list[Selected]:
    """Returns the tensors of a checkpoint that are tensor subclasses.

    Complexity: For stock DCP, reads the head of one item of each tensor; for ray_dcp, nothing.
    """
    todo = [each for each in stored if each.is_any_class]
    if not todo:
        return []
    storage = open_storage(checkpoint_id)
    checkpoint = read_checkpoint(storage, checks_later=True)
    table, transforms = checkpoint.table, checkpoint.transforms
    numbers = {name: number for number, name in enumerate(table.names)}
    first = first_chunks(table)
    found: list[Selected] = []

    def look(each: Selected) -> None:
        chunk = int(first[numbers[each.name]])
        if chunk < 0:
            return
        if transforms is not None and transforms[chunk]:
            data = read_item(storage, table, chunk, transforms=transforms)
            is_own = not is_plain(load_object(data, fqn=each.name))
        elif checkpoint.kind == "stock" and table.kind[numbers[each.name]] == Kind.TENSOR:
            is_own = locate_item(storage, table, chunk) is None
        else:
            is_own = True
        if is_own:
            found.append(each)

    run_tasks(todo, look, threads_for(storage, len(todo)))
    return found


def chosen(
    stored: Sequence[Selected],
    include: Sequence[str] = (),
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
) -> list[Selected]:
    """Selects, renames and casts the contents of a checkpoint.

    Args:
        stored: The contents of the checkpoint.
        include: Shell patterns of names; everything if empty.
        key_map: See `LoadOptions.key_map`. For the place of a new name see `_renamed`.
        dtype: New dtype of floating-point tensors; unchanged if None.

    Raises:
        InvalidRequestError: No name is selected, two values get the same name, or `include` is no
            list of texts.
    """
    check_patterns(include, "include")
    rename = renamer(key_map) if key_map is not None else None
    flat = set[NamePath]() if rename is None else _flat_mappings(each.path for each in stored)
    kept: dict[str, Selected] = {}
    for each in stored:
        if not matches(each.name, include):
            continue
        new = each
        if rename is not None:
            name = rename(each.name)
            if name is None:
                continue
            if name != each.name:
                new = replace(each, path=_renamed(each.path, name, flat))
        if dtype is not None and new.dtype is not None and new.dtype.is_floating_point:
            new = replace(new, dtype=dtype)
        if new.fqn in kept:
            raise InvalidRequestError(
                f"{kept[new.fqn].name!r} and {each.name!r} would both be {new.fqn!r}; give each a "
                f"name of its own",
                key=each.name,
            )
        kept[new.fqn] = new
    if stored and not kept:
        raise InvalidRequestError(
            f"no name of the checkpoint is chosen: expected some of {len(stored)} names such as "
            f"{stored[0].name!r} to match {list(include)}",
            key="include",
        )
    return list(kept.values()) if rename is None else _in_dicts(list(kept.values()))


def _in_dicts(kept: list[Selected]) -> list[Selected]:
    """Returns values with indices as texts where they were renamed to places beside texts."""
    dicts = {
        each.path[:at]
        for each in kept
        for at, part in enumerate(each.path)
        if type(part) is not int
    }
    return [
        replace(
            each,
            path=tuple(
                str(part) if type(part) is int and each.path[:at] in dicts else part
                for at, part in enumerate(each.path)
            ),
        )
        for each in kept
    ]


def _flat_mappings(paths: Iterable[NamePath]) -> set[NamePath]:
    """Returns the paths of mappings that have keys with dots, as the `state_dict()` of a module.

    Examples:
        >>> _flat_mappings([("model", "scale"), ("model", "0.weight"), ("step",)])
        {('model',)}
    """
    return {path[:at] for path in paths for at, part in enumerate(path) if "." in str(part)}


def _renamed(path: NamePath, name: str, flat: Collection[NamePath]) -> NamePath:
    """Returns the path of a value that gets another name.

    Keys and list indices that the new name has at its end or begin stay as they are. The name
    between them is split at its dots, but is one key with dots in a mapping that has such keys.

    Args:
        path: The path of the value.
        name: Its new name.
        flat: See `_flat_mappings`.

    Examples:
        >>> _renamed(("model", "0.weight"), "0.weight", {("model",)})
        ('0.weight',)
        >>> _renamed(("model", "0.weight"), "net.1.weight", {("model",)})
        ('net', '1.weight')
        >>> _renamed(("model", "scale"), "model.net.scale", {("model",)})
        ('model', 'net.scale')
        >>> _renamed(("model", "0.weight"), "ema.net.0.weight", {("model",)})
        ('ema', 'net.0.weight')
        >>> _renamed(("a", "l", 0), "b.c.l.0", ()), _renamed(("a", "w"), "b.c.d", ())
        (('b', 'c', 'l', 0), ('b', 'c', 'd'))
    """
    low, high = 0, len(path)
    while high and f".{name}".endswith(f".{path[high - 1]}"):
        high -= 1
        if name == str(path[high]):
            # Why text: the root is a mapping.
            return (str(path[high]) if type(path[high]) is int else path[high], *path[high + 1 :])
        name = name[: -len(str(path[high])) - 1]
    while low < high and name.startswith(f"{path[low]}."):
        name = name[len(str(path[low])) + 1 :]
        low += 1
    new, old = name.split("."), [str(part) for part in path[low:high]]
    if high < len(path) and path[:high] in flat:
        # A mapping with such keys stays as deep as it was.
        num_parents = len(".".join(old).split(".")) if old else 0
        parents, added = new[:num_parents], new[num_parents:]
        key = ".".join([*added, str(path[high])]) if added else path[high]
        return (*path[:low], *parents, key, *path[high + 1 :])
    if dotted := [at for at in range(len(old)) if path[: low + at] in flat]:
        # Parts that the new name lacks are taken for keys before the one with dots.
        lacking = len(".".join(old).split(".")) - len(new)
        start = max(0, dotted[0] - max(0, lacking))
        new[start:] = [".".join(new[start:])]
    return (*path[:low], *new, *path[high:])


_PARAMS = re.compile(r"(?P<optimizer>.+)\.param_groups\.\d+\.params", re.DOTALL)


def _rename_parameters(
    values: dict[str, Any],
    kept: Iterable[Selected],
    found: Iterable[Selected],
    key_map: KeyMap | None,
) -> None:
    """Gives the parameters that groups of optimizers list the names that their state gets.

    Args:
        values: Values by stored name; lists of names are replaced.
        kept: What `chosen` returned.
        found: The contents of the checkpoint.
        key_map: As for `chosen`.
    """
    lists = [
        (each, old, new)
        for each in kept
        if isinstance(values.get(each.name), list)
        and (old := _PARAMS.fullmatch(each.name))
        and (new := _PARAMS.fullmatch(each.fqn))
    ]
    if key_map is None or not lists:
        return
    rename, names = renamer(key_map), [each.name for each in found]
    keys: dict[str, dict[str, str]] = {}
    for before in {f"{old['optimizer']}.state." for _, old, _ in lists}:
        state = (name.removeprefix(before) for name in names if name.startswith(before))
        keys[before] = {owner: f".{key}" for owner, _, key in (n.rpartition(".") for n in state)}
    for each, old, new in lists:
        before, after = f"{old['optimizer']}.state.", f"{new['optimizer']}.state."
        values[each.name] = [
            _parameter(entry, before, after, keys[before].get(entry, ""), rename)
            if isinstance(entry, str)
            else entry
            for entry in values[each.name]
        ]


def _parameter(name: str, before: str, after: str, key: str, rename: Rename) -> str:
    """Returns the new name of a parameter, by the one that a value of its state gets.

    Args:
        name: The old name.
        before: What precedes it in the names of its state.
        after: What precedes it in the new names.
        key: What follows it; empty if it has no state.
        rename: The key map.
    """
    # Why: a function need not know the name of a parameter that has no state.
    with suppress(Exception):
        found = rename(f"{before}{name}{key}")
        if found is not None and found.startswith(after) and found.endswith(key):
            return found[len(after) : len(found) - len(key)]
    return name


def nested(values: Mapping[NamePath, Any]) -> dict[Any, Any]:
    """Returns the nested state dict that has the values at their paths.

    An empty mapping or list has the values that are at paths within it: ranks may differ.

    Raises:
        StateDictError: There are another value at a path and values within it.
        DamagedCheckpointError: Two paths contradict each other, or describe an impossible list.
    """
    root: dict[Any, Any] = {}
    containers = {path[:stop] for path in values for stop in range(1, len(path))}
    for path, value in values.items():
        if path not in containers:
            set_by_path(root, path, value)
        elif not isinstance(value, dict | list) or value:
            name = ".".join(map(str, path))
            raise StateDictError(
                f"the checkpoint has both {name!r}, a {type(value).__name__}, and values within "
                f"it, as its ranks gave different ones: take those alone, as by "
                f"include=['{name}.*'], or {name!r} alone",
                key=name,
            )
    return root


def get_by_path(root: Any, path: NamePath) -> Any:
    """Returns the value that `nested` put at a path."""
    for part in path:
        root = root[getattr(part, "key", part)]
    return root


def stored_in(
    checkpoint_id: CheckpointId | None, reader: StorageReader | None
) -> tuple[list[Selected], bytes]:
    """Returns the contents and the record of a checkpoint; an empty record for a third party's.

    Args:
        checkpoint_id: As for `load`.
        reader: `storage_reader`, as for `load`.

    Raises:
        CheckpointError: As `load` does.
    """
    decision = decide_load(None, reader, checkpoint_id)
    record, is_ours = b"", decision.path != FOREIGN and decision.target is not None
    tied: dict[str, str] = {}
    if is_ours:
        checkpoint = read_checkpoint(open_storage(decision.target), checks_later=True)
        table, record, tied = checkpoint.table, checkpoint.record, tied_in(checkpoint.manifest)
        content = Stored.of_table(table, {name: at for at, name in enumerate(table.names)})
    else:
        if checkpoint_id is not None:
            decision.storage.reset(checkpoint_id)
        content = Stored.of(decision.storage.read_metadata())
    found = []
    for name in content.names:
        value = content.value(name)
        is_any_class = is_ours and value.dtype is not None and value.is_raw is not True
        path = tuple(value.path or (name,))
        group = tied.get(name, "")
        found.append(Selected(name, path, value.shape, value.dtype, is_any_class, group))
    return found, record


def check_stands(checkpoint_id: CheckpointId, record: bytes) -> None:
    """Checks that all loads of a conversion, each of which opens it, read the same checkpoint.

    Args:
        checkpoint_id: The checkpoint that was read.
        record: The record that `stored_in` returned.

    Raises:
        StorageError: The checkpoint was replaced in the meantime.
    """
    if record and find_checkpoint(open_storage(checkpoint_id)).record != record:
        raise CheckpointReplacedError(
            f"expected the checkpoint that was in {checkpoint_id} at first, found another one: it "
            f"was replaced meanwhile, and nothing was written; run it again"
        )


def read_into(
    flat: dict[str, Any],
    checkpoint_id: CheckpointId | None,
    reader: StorageReader | None,
    options: LoadOptions | None,
    progress: ShowProgress = False,
    *,
    casts: bool,
) -> None:
    """Loads into a flat dict: fills its tensors in place and replaces its objects.

    Args:
        flat: The targets by FQN.
        checkpoint_id: As for `load`.
        reader: `storage_reader`, as for `load`.
        options: As for `load`.
        progress: As for `load`.
        casts: Whether the caller asked for another dtype than the saved one.

    Raises:
        CheckpointError: As `load` does.
    """
    options = options or LoadOptions()
    if casts and options.dtype != "keep":
        options = replace(options, dtype="cast")
    load(
        flat,
        checkpoint_id=checkpoint_id,
        storage_reader=reader,
        no_dist=True,
        options=options,
        progress=progress,
    )


def read_values(checkpoint_id: CheckpointId, names: Iterable[str]) -> dict[str, Any]:
    """Returns objects of a checkpoint by name, loaded under the rules of `weights_only`.

    Raises:
        CheckpointError: As `load` does.
    """
    found: dict[str, Any] = dict.fromkeys(names)
    read_into(found, checkpoint_id, None, None, casts=False)
    return found


def bytes_of(stored: Selected) -> int:
    """Returns the size of a tensor, in bytes."""
    return prod(stored.shape) * (stored.dtype or torch.uint8).itemsize


def _count_expected(meter: Meter, found: Iterable[Selected], stored: Iterable[Selected]) -> None:
    """Adds the stored bytes of some values to what a meter expects."""
    names = {each.name for each in stored}
    meter.expect(sum(bytes_of(each) for each in found if each.name in names))


class CastingSavePlanner(DefaultSavePlanner):
    """A save planner that casts floating-point tensors to another dtype.

    Args:
        dtype: The dtype to cast to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def create_local_plan(self) -> SavePlan:
        """Returns the local plan with the dtypes and sizes of the cast tensors."""
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[self._cast(item) for item in plan.items])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's
        """Casts a tensor at the time when its bytes are needed."""
        made = super().transform_object(write_item, object)
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            return made.to(self._dtype)
        return made

    def _cast(self, item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None or not data.properties.dtype.is_floating_point:
            return item
        properties = dataclasses.replace(data.properties, dtype=self._dtype)
        return dataclasses.replace(
            item, tensor_data=dataclasses.replace(data, properties=properties)
        )


def read_state_dict(
    checkpoint_id: CheckpointId | None = None,
    *,
    include: Sequence[str] = (),
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    storage_reader: StorageReader | None = None,
    options: LoadOptions | None = None,
) -> dict[Any, Any]:
    """Reads a checkpoint into a new state dict of whole tensors, in this process.

    The state dict has the structure that ray_dcp saved: numbers as mapping keys, tuples and empty
    mappings are restored. Mappings of other classes become dicts.

    Args:
        checkpoint_id: Path or URL of any checkpoint that `load` reads.
        include: Shell patterns of FQNs; everything if empty.
        key_map: See `LoadOptions.key_map`. Mappings with dots in their keys, as a module's
            `state_dict()`, stay flat. The names in the parameter groups of optimizers follow.
        dtype: The dtype to cast floating-point tensors to; unchanged if None.
        storage_reader: As for `load`.
        options: As for `load`.

    Raises:
        InvalidRequestError: Nothing matches, or two values get the same name.
        CheckpointError: As `load` does.

    Examples:
        >>> import tempfile, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = ray_dcp.save({"s": {0: torch.ones(1), "e": {}}}, checkpoint_id=f"{root}/a")
        ...     read_state_dict(f"{root}/a")
        {'s': {0: tensor([1.]), 'e': {}}}
    """
    found, _ = stored_in(checkpoint_id, storage_reader)
    stored = chosen(found, include, key_map, dtype)
    flat: dict[str, Any] = {
        each.name: None
        if each.dtype is None
        else AsStored.of(each.shape, each.dtype)
        if each.is_any_class
        else torch.empty(each.shape, dtype=each.dtype)
        for each in stored
    }
    read_into(flat, checkpoint_id, storage_reader, options, casts=dtype is not None)
    _rename_parameters(flat, stored, found, key_map)
    return nested({each.path: flat[each.name] for each in stored})


def dcp_to_torch_save(
    dcp_checkpoint_dir: CheckpointId,
    torch_save_path: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    options: LoadOptions | None = None,
    progress: ShowProgress = False,
) -> None:
    """Converts a checkpoint to a `torch.save` file.

    The file is laid out first, then tensors are read into its mapped pages. It appears under its
    name when it is complete and durable. The CRC32 fields of its zip archive are 0; `torch.load`
    ignores them.

    Args:
        dcp_checkpoint_dir: Path or URL of any checkpoint that `load` reads.
        torch_save_path: Path of the new file, on a filesystem of this machine.
        include: As for `read_state_dict`.
        key_map: As for `read_state_dict`.
        dtype: As for `read_state_dict`.
        options: As for `load`.
        progress: Whether to draw a bar; or a function that receives a `Progress` about ten times a
            second.

    Raises:
        DamagedCheckpointError: The checkpoint is damaged, or was replaced in the meantime.
        CheckpointError: As `read_state_dict` does. No file is created then.

    Complexity:
        O(bytes) time. Anonymous memory for the objects and, where dtypes are cast, for one tensor
        per reading thread.
    """
    # Source: `torch/distributed/checkpoint/format_utils.py`, `dcp_to_torch_save`.
    found, stands = stored_in(dcp_checkpoint_dir, None)
    stored = chosen(found, include, key_map, dtype)
    casts = dtype is not None
    objects: dict[str, Any] = {each.name: None for each in stored if each.dtype is None}
    for each in of_classes(dcp_checkpoint_dir, stored):
        objects[each.name] = AsStored.of(each.shape, each.dtype or torch.uint8)
    if objects:
        read_into(objects, dcp_checkpoint_dir, None, options, casts=casts)
        _rename_parameters(objects, stored, found, key_map)
    repeats = _repeats(stored)
    shown = reporting(progress, "exporting", os.fspath(torch_save_path))
    with shown as meter, _publish_file(torch_save_path) as temporary:
        with FakeTensorMode():
            values = {
                each.path: objects[each.name]
                if each.name in objects
                else torch.empty(each.shape, dtype=each.dtype, device="cpu")
                for each in stored
            }
            path_of = {each.name: each.path for each in stored}
            for name, before in repeats.items():
                values[path_of[name]] = values[path_of[before]].detach()
        state = nested(values)
        with skip_data(materialize_fake_tensors=True):
            torch.save(state, temporary)
            records = _storage_records(state)
        # Why first: unpickling an object may read its tensors, as it does for random generators.
        _fill_records(temporary, records)
        with set_default_mmap_options(mmap.MAP_SHARED):
            # Why not weights_only: this process has just written the file, from trusted values.
            mapped = torch.load(temporary, mmap=True, weights_only=False)
        targets = {
            each.name: get_by_path(mapped, each.path)
            for each in stored
            if each.name not in objects and each.name not in repeats
        }
        if targets:
            tensors = [each for each in stored if each.name in targets]
            _count_expected(meter, found, tensors)
            read_into(targets, dcp_checkpoint_dir, None, options, meter, casts=casts)
        check_stands(dcp_checkpoint_dir, stands)


def _repeats(stored: Sequence[Selected]) -> dict[str, str]:
    """Returns `repeated` of tensors that were chosen."""
    tied = {each.name: each.tied for each in stored if each.tied}
    return repeated([each.name for each in stored], tied)


def _storage_records(saved: Any) -> list[tuple[str, torch.UntypedStorage]]:
    """Returns the storages of all tensors that have memory, each with its record in the file.

    Args:
        saved: The object that `torch.save` wrote.
    """
    # Source: `torch/serialization.py`, `_save`, which numbers storages in the order it meets them.
    finder = _StorageFinder(io.BytesIO(), protocol=2)
    finder.dump(saved)
    found = enumerate(finder.found.values())
    return [(f"data/{number}", each) for number, each in found if each.device.type != "meta"]


def _fill_records(path: str | os.PathLike[str], records: Iterable[tuple[str, Any]]) -> None:
    """Writes the memory of tensors into a file of `torch.save` that was written without it.

    Args:
        path: Path of the file.
        records: The result of `_storage_records`.
    """
    reader: Any = torch._C.PyTorchFileReader(os.fspath(path))
    with Path(path).open("r+b") as file:
        for name, storage in records:
            file.seek(reader.get_record_offset(name))
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu())
            file.write(memory.numpy().data)


class _StorageFinder(pickle.Pickler):
    """Walks an object as `torch.save` does, and collects the storages that it would write."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.TypedStorage):
            obj = obj._untyped_storage
        if not isinstance(obj, torch.UntypedStorage):
            return None
        self.found.setdefault(obj._cdata, obj)
        return len(self.found)


_FILE_NAME = re.compile(r"(shard-\d{5,}-)?model-\d{5,}-of-\d{5,}\.safetensors")
"""File names of the Hugging Face hub and of torch's `HuggingFaceStorageWriter`."""


def dcp_to_safetensors(
    dcp_checkpoint_dir: CheckpointId,
    output_dir: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 << 30,
    options: LoadOptions | None = None,
    progress: ShowProgress = False,
) -> None:
    """Converts the tensors of a checkpoint to safetensors files and an index, as on the hub.

    Args:
        dcp_checkpoint_dir: Path or URL of any checkpoint that `load` reads.
        output_dir: Directory for the files; created if missing.
        include: As for `read_state_dict`.
        key_map: As for `read_state_dict`.
        dtype: As for `read_state_dict`.
        file_bytes: Target size of a file; a file with a larger tensor is larger.
        options: As for `load`.
        progress: As for `dcp_to_torch_save`.

    Raises:
        UnsupportedValueError: A value is not a tensor, has a dtype that safetensors lacks, or is a
            tensor subclass that a plain tensor can't represent; exclude it with `include` or
            `key_map`. No file is written.
        CheckpointError: As `dcp_to_torch_save` does.
    """
    if file_bytes < 1:
        raise InvalidRequestError(f"file_bytes must be above 0, but is {file_bytes}")
    files = HubFiles.of(
        dcp_checkpoint_dir, output_dir, include, key_map, dtype, file_bytes=file_bytes
    )
    files.write_all(options, progress)


@dataclass(frozen=True)
class HubFiles:
    """The safetensors files and the index that a checkpoint becomes, as on the hub.

    Several processes can share the work: each makes the same value with `of` and calls `write` for
    some of the files; after that, one of them calls `finish`.
    """

    checkpoint_id: CheckpointId
    record: bytes
    """The record of the checkpoint when the files were planned."""
    found: Sequence[Selected]
    """All that the checkpoint has."""
    folder: Path
    entries: Sequence[Sequence[Selected]]
    """The tensors of each file."""
    casts: bool
    """Whether floating-point tensors are cast."""
    one_file: str = ""
    """Name of the only file, which then has no index; "" for the names of the hub."""

    @classmethod
    def of(
        cls,
        checkpoint_id: CheckpointId,
        folder: str | os.PathLike[str],
        include: Sequence[str] = (),
        key_map: KeyMap | None = None,
        dtype: torch.dtype | None = None,
        *,
        file_bytes: int = 5 << 30,
        numbers: Mapping[str, int] | None = None,
        tied_once: bool = False,
        one_file: str = "",
    ) -> HubFiles:
        """Returns the files of a checkpoint.

        Args:
            checkpoint_id: As for `dcp_to_safetensors`, like the next arguments.
            folder: `output_dir`.
            include: See there.
            key_map: See there.
            dtype: See there.
            file_bytes: See there.
            numbers: The number of each tensor's file, from 1; tensors that it lacks come into
                the last file. If None, `file_bytes` decides.
            tied_once: Whether, of tensors that were of one memory when they were saved, as tied
                weights, the files have the first alone, as those of `save_pretrained` do.
            one_file: Name of the only file, if there is to be no index.

        Raises:
            UnsupportedValueError: As for `dcp_to_safetensors`.
            CheckpointError: The checkpoint can't be read.
        """
        found, record = stored_in(checkpoint_id, None)
        stored = chosen(found, include, key_map, dtype)
        wrong = [e.name for e in stored if e.dtype is None or dtype_name(e.dtype) not in ALL_CODES]
        if not wrong and dtype is not None:
            # Why: the load compares a subclass's plain values with those saved, and a cast
            # prevents it.
            wrong = [each.name for each in of_classes(checkpoint_id, stored)]
        if wrong:
            raise UnsupportedValueError(
                f"safetensors files hold plain tensors of {', '.join(ALL_CODES)} alone; leave out "
                f"{', '.join(map(repr, wrong[:8]))} by include= or key_map=",
                key=wrong[0],
            )
        repeats = _repeats(stored) if tied_once else {}
        stored = [each for each in stored if each.name not in repeats]
        entries = _split_into_files(stored, file_bytes)
        if numbers:
            last = max(numbers.values())
            by_number: dict[int, list[Selected]] = {}
            for each in stored:
                by_number.setdefault(numbers.get(each.fqn, last), []).append(each)
            entries = [by_number[number] for number in sorted(by_number)]
        casts = dtype is not None
        return cls(checkpoint_id, record, found, Path(folder), entries, casts, one_file)

    def name(self, number: int) -> str:
        """Returns the name of a file, which is numbered from 0."""
        if self.one_file:
            return self.one_file
        return f"model-{number + 1:05d}-of-{len(self.entries):05d}.safetensors"

    def write(
        self,
        number: int,
        options: LoadOptions | None = None,
        progress: ShowProgress = False,
    ) -> None:
        """Writes one file.

        Args:
            number: Number of the file, from 0.
            options: As for `load`.
            progress: As for `load`.

        Raises:
            CheckpointError: As `load` does. There is no such file then.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = self.entries[number]
        entries = packed((e.fqn, dtype_name(e.dtype or torch.uint8), e.shape) for e in stored)
        head = header(entries, {"format": "pt"})
        with (
            _publish_file(self.folder / self.name(number)) as temporary,
            Path(temporary).open("w+b") as stream,
        ):
            stream.write(head)
            stream.truncate(len(head) + sum(map(bytes_of, stored)))
            stream.flush()
            mapped = mmap.mmap(stream.fileno(), 0)
            targets: dict[str, Any] = {}
            for each, (_, _, shape, begin, stop) in zip(stored, entries, strict=True):
                how: dict[str, Any] = {"dtype": each.dtype or torch.uint8}
                if stop == begin:
                    targets[each.name] = torch.empty(shape, **how)
                    continue
                how |= {"count": prod(shape), "offset": len(head) + begin}
                targets[each.name] = torch.frombuffer(mapped, **how).view(shape)
            if targets:
                read_into(targets, self.checkpoint_id, None, options, progress, casts=self.casts)
            mapped.flush()

    def write_all(self, options: LoadOptions | None = None, progress: ShowProgress = False) -> None:
        """Writes all files and the index, in one process.

        Args:
            options: As for `load`.
            progress: As for `dcp_to_torch_save`.

        Raises:
            CheckpointError: As `load` does, or the checkpoint was replaced in the meantime.
        """
        with reporting(progress, "exporting", os.fspath(self.folder)) as meter:
            _count_expected(meter, self.found, [one for some in self.entries for one in some])
            for number in range(len(self.entries)):
                self.write(number, options, meter)
        self.finish()

    def finish(self) -> None:
        """Writes the index, after all files, and deletes files of an earlier conversion.

        Raises:
            StorageError: The checkpoint was replaced in the meantime.
        """
        check_stands(self.checkpoint_id, self.record)
        if self.one_file:
            return
        stored = [each for entries in self.entries for each in entries]
        file_of = {
            each.fqn: self.name(number)
            for number, entries in enumerate(self.entries)
            for each in entries
        }
        index = {"metadata": {"total_size": sum(map(bytes_of, stored))}, "weight_map": file_of}
        storage = open_storage(self.folder)
        storage.write(INDEX_NAME, to_json(index, indent=2).encode())
        # Why: a reader of the folder would also read files of an earlier conversion.
        before = [entry.key for entry in plain_files(storage) if _FILE_NAME.fullmatch(entry.key)]
        storage.delete(key for key in before if key not in file_of.values())


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str],
    dcp_checkpoint_dir: CheckpointId,
    *,
    include: Sequence[str] = (),
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    weights_only: bool = True,
    options: SaveOptions | None = None,
    progress: ShowProgress = False,
) -> None:
    """Converts a `torch.save` file to a checkpoint; maps its tensors instead of reading them whole.

    Args:
        torch_save_path: Path of the file.
        dcp_checkpoint_dir: Path or URL of the new checkpoint.
        include: As for `read_state_dict`.
        key_map: As for `read_state_dict`.
        dtype: As for `read_state_dict`. A cast goes through a planner, which turns numbers as
            mapping keys into strings.
        weights_only: Refuse objects that are not on the allow-list, and files from before torch
            1.6. False, which is DCP's behaviour, runs code from the file.
        options: As for `save`.
        progress: As for `save`.

    Raises:
        UnsafeCheckpointError: The file would run code.
        DamagedCheckpointError: The file was not written by `torch.save`.
        StateDictError: The file does not hold a state dict.
        CheckpointError: As `save` does.
    """
    # Source: `torch/distributed/checkpoint/format_utils.py`, `torch_save_to_dcp`.
    save_torch_file(
        torch_save_path, dcp_checkpoint_dir,
        include=include, key_map=key_map, dtype=dtype, weights_only=weights_only, options=options,
        progress=progress,
    )  # fmt: skip


def save_torch_file(
    torch_save_path: str | os.PathLike[str],
    dcp_checkpoint_dir: CheckpointId,
    *,
    include: Sequence[str] = (),
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    weights_only: bool = True,
    options: SaveOptions | None = None,
    progress: ShowProgress = False,
    attempt: str = "",
) -> None:
    """Converts like `torch_save_to_dcp`, under an attempt id that the caller may give."""
    check_patterns(include, "include")
    state = load_torch_file(torch_save_path, weights_only=weights_only)
    if not isinstance(state, Mapping):
        raise StateDictError(
            f"expected a state dict in {os.fspath(torch_save_path)}, found "
            f"{type(state).__name__}; save a dict: {{'model': model.state_dict()}}"
        )
    if include or key_map is not None:
        state = _subset(state, include, key_map)
    planner = None if dtype is None else CastingSavePlanner(dtype)
    with reporting(progress, "importing", text_of(dcp_checkpoint_dir) or "") as meter:
        check_options(options, SaveOptions)
        how: dict[str, Any] = {"checkpoint_id": dcp_checkpoint_dir, "planner": planner}
        with OperationLog("save", **how) as log:
            route = decide_save(planner, None, dcp_checkpoint_dir)
            run_save(
                route, session_alone(), dict(state), options, dcp_checkpoint_dir,
                log=log, progress=meter, attempt=attempt,
            )  # fmt: skip


def _subset(state: Mapping[Any, Any], include: Sequence[str], key_map: KeyMap | None) -> Any:
    flat = flatten(state)
    everything = [
        Selected(name, path, (), None) for name, path in zip(flat.names, flat.paths, strict=True)
    ]
    values = dict(zip(flat.names, flat.values, strict=True))
    kept = chosen(everything, include, key_map)
    _rename_parameters(values, kept, everything, key_map)
    return nested({each.path: values[each.name] for each in kept})


@contextmanager
def _publish_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields a temporary name next to a path; afterwards makes that file durable and renames it."""
    final = Path(path)
    if final.is_dir() or not final.parent.is_dir():
        raise InvalidRequestError(
            f"expected the name of a new file in a directory that exists, found {final}",
            key="torch_save_path",
        )
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        yield os.fspath(temporary)
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        publish(os.fspath(temporary), os.fspath(final), create=False, sync=True)
    finally:
        temporary.unlink(missing_ok=True)


def _split_into_files(stored: Sequence[Selected], file_bytes: int) -> list[list[Selected]]:
    files: list[list[Selected]] = [[]]
    room = file_bytes
    for each in stored:
        if files[-1] and bytes_of(each) > room:
            files.append([])
            room = file_bytes
        files[-1].append(each)
        room -= bytes_of(each)
    return files

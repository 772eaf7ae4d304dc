"""`export`, `import_checkpoint` and `copy`: convert checkpoints, and copy them to other places.

All of them stream: memory holds neither side whole. They check that the target has enough disk
space before they write, and leave nothing behind when interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DamagedCheckpointError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.manifest import repeated, slot_of, tied_in
from ray_dcp.io.checkpoint import what_became_of
from ray_dcp.options import KeyMap, SaveOptions, check_patterns
from ray_dcp.place.delete import delete
from ray_dcp.place.done_marks import marks_removed_last
from ray_dcp.place.scratch import dead_scratch, remove_dead_scratch, scratch
from ray_dcp.place.stock_metadata import write_metadata
from ray_dcp.place.target_lease import TargetLease, leases_at, writing_to
from ray_dcp.store.local import LocalStorage, publish
from ray_dcp.store.location import AnyPlace, checked_url, split_url
from ray_dcp.store.opening import as_target, open_storage, place_below, target_of
from ray_dcp.store.storage import KeyMissingError, is_temporary
from ray_dcp.transform.copying import check_free, copy_checkpoint, is_copied, plan_copy
from ray_dcp.view.checkpoint_view import SUFFIX, CheckpointView, is_safetensors, read_view
from ray_dcp.view.progress import Meter, ShowProgress, reporting
from ray_dcp.view.run_view import check_no_step
from ray_dcp.view.verify import items_of
from ray_dcp.view.wording import size_text

ExportFormat = Literal["safetensors", "hf", "torch", "dcp"]

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
            "float": "float32", "fp64": "float64"}  # fmt: skip
_FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_FRAME_BYTES = 4096
"""Upper bound of the overhead that a tensor has in a file, in bytes."""
_ONE_FILE_BYTES = 1 << 62
_HUB_FILE_BYTES = 5 << 30
"""Size of the files of an export to `hf`: that of transformers' `save_pretrained`."""


@dataclass(frozen=True)
class ExportPlan:
    """The contents and sizes of an export."""

    source: str
    target: str
    format: str
    num_tensors: int
    num_objects: int
    num_bytes: int
    """Approximate size of the result, in bytes."""
    disk_bytes: int
    """Approximate disk space that the export needs, with temporary files, in bytes."""
    left_out: tuple[str, ...] = ()
    """Names of objects, if the format can't hold objects."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that were of one memory with an earlier name, as tied weights, each with that name. The
    result has the tensor once; in `hf` under the earlier name alone, as `save_pretrained` does it.
    Empty for `safetensors` and `dcp`, which have both."""


def plan_export(
    source: AnyPlace | CheckpointView,
    target: str | os.PathLike[str],
    format: ExportFormat = "safetensors",  # noqa: A002 - what users call it
    *,
    include: Sequence[str] = (),
    dtype: str | None = None,
    strip_prefix: str = "",
) -> ExportPlan:
    """Checks that an export is possible and returns its plan; see `export`."""
    if format not in get_args(ExportFormat):
        raise InvalidRequestError(
            f"format must be one of {', '.join(get_args(ExportFormat))}, but is {format!r}",
            key="format",
        )
    check_patterns(include, "include")
    cast = float_dtype(dtype)
    view = source if isinstance(source, CheckpointView) else read_view(source)
    rewritten = not (format == "dcp" and _is_copy(view, include, cast, strip_prefix))
    if rewritten:
        _check_one_state(view)
    names = [n for n in view.names if not include or any(fnmatchcase(n, p) for p in include)]
    objects = tuple(name for name in names if name not in view.tensors)
    left_out = objects if format in ("safetensors", "hf") else ()
    if len(names) == len(left_out):
        patterns = f"that match {', '.join(map(repr, include))}" if include else "to write"
        what = "tensors" if left_out else "names"
        raise InvalidRequestError(
            f"expected {what} {patterns} in {view.url}, found none of {len(view)}", key="include"
        )
    is_once = format in ("torch", "hf")
    tied = repeated(names, tied_in(view.checkpoint.manifest)) if is_once else {}
    num_bytes = 0
    for name in names:
        info = view.tensors.get(name)
        if info is not None and name not in tied:
            is_cast = cast is not None and "float" in info.dtype
            width = ITEMSIZE.get((cast or "") if is_cast else info.dtype, 0)
            num_bytes += prod(info.shape) * width + _FRAME_BYTES * (format in ("torch", "dcp"))
    num_tensors, num_objects = len(names) - len(objects), len(objects) - len(left_out)
    if format != "torch":
        num_tensors -= len(tied)
    for folder in () if rewritten else items_of(view.storage, view.checkpoint):
        item = read_view(place_below(view.place or view.url, folder))
        num_tensors += len(item.tensors)
        num_objects += len(item.objects)
        num_bytes += item.num_bytes
    plan = ExportPlan(
        view.url,
        os.fspath(target),
        format,
        num_tensors,
        num_objects,
        num_bytes,
        num_bytes * (2 if rewritten and format == "dcp" else 1),
        left_out,
        tied,
    )
    work = _work_of(view, format, include, dtype, strip_prefix)
    if not _published(Path(os.path.realpath(target)), work):
        _check_target(plan)
    return plan


def _work_of(view: CheckpointView, *choice: object) -> str:
    """Returns what is written from a checkpoint, as text that is equal for equal work."""
    text = json.dumps([digest_bytes(view.checkpoint.record).hex(), *choice], default=str)
    return f"export {digest_bytes(text.encode()).hex()}"


def export(
    source: AnyPlace | CheckpointView,
    target: str | os.PathLike[str],
    format: ExportFormat = "safetensors",  # noqa: A002 - what users call it
    *,
    include: Sequence[str] = (),
    dtype: str | None = None,
    strip_prefix: str = "",
    progress: ShowProgress = False,
) -> ExportPlan:
    """Writes a checkpoint in another format.

    Args:
        source: Path, URL or view of any checkpoint.
        target: Path of a new file for `safetensors` and `torch`, of a new or empty directory for
            `hf` and `dcp`.
        format: `safetensors`; `torch` (a `torch.save` file); `hf` (safetensors files and an index,
            as on the hub); or `dcp` (a checkpoint that stock DCP reads).
        include: Shell patterns of FQNs; everything if empty. `safetensors` and `hf` can't hold
            objects, which are left out.
        dtype: The dtype to cast floating-point tensors to, for example `bfloat16` or `bf16`;
            unchanged if None.
        strip_prefix: Prefix that is removed from names, for example `model.`.
        progress: Whether to draw a bar; or a function that receives a `Progress` about ten times a
            second.

    Returns:
        The plan that was carried out, with the names that were left out or are tied to others.

    Raises:
        InvalidRequestError: Nothing matches, an argument is invalid, the target exists or names a
            step as `RUN@STEP`, or the source is a step of several items: only `dcp` copies it
            whole.
        UnsupportedValueError: The format lacks a dtype.
        StorageError: There is not enough space (checked before anything is written), the storage
            failed, or the checkpoint was replaced after the view was opened.
        CheckpointError: The checkpoint can't be read.

    Examples:
        >>> import tempfile, ray_dcp, torch
        >>> root = tempfile.mkdtemp()
        >>> _ = ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=f"{root}/a")
        >>> ray_dcp.export(f"{root}/a", f"{root}/w.safetensors").num_tensors
        1
        >>> ray_dcp.export(f"{root}/a", f"{root}/w.pt", "torch", dtype="bf16").format
        'torch'
        >>> torch.load(f"{root}/w.pt")["w"].dtype
        torch.bfloat16
    """
    from ray_dcp.transform.conversion import HubFiles, dcp_to_torch_save

    view = source if isinstance(source, CheckpointView) else read_view(source)
    plan = plan_export(
        view, target, format, include=include, dtype=dtype, strip_prefix=strip_prefix
    )
    work = _work_of(view, format, include, dtype, strip_prefix)
    place: Any = plan.source if isinstance(source, CheckpointView) else source
    # Why resolved: a folder can't be renamed to a symbolic link.
    path, names = Path(os.path.realpath(target)), _key_map(strip_prefix, plan.left_out)
    choice: dict[str, Any] = {"include": list(include), "dtype": _torch_dtype(dtype)}
    choice["key_map"] = names
    with (
        marks_removed_last(),
        reporting(progress, "exporting", plan.target) as meter,
        still_there(view),
    ):
        # Why: it may have been replaced long before.
        _check_stands(view)
        if format == "dcp" and _is_copy(view, include, dtype, strip_prefix):
            _copied(view, path, meter, partial(_for_stock, path))
        elif format == "dcp":
            with writing_to(target_of(path, None), work) as lease:
                _rewrite(view, place, path, choice, meter=meter, lease=lease)
        elif not take_over(path, work):
            with _temporary_directory(path, work) as temporary:
                made = temporary
                if format == "torch":
                    made = temporary / path.name
                    dcp_to_torch_save(place, made, **choice, progress=meter)
                else:
                    file_bytes = _ONE_FILE_BYTES if format == "safetensors" else _HUB_FILE_BYTES
                    choice |= {"file_bytes": file_bytes, "tied_once": format == "hf"}
                    HubFiles.of(place, temporary, **choice).write_all(progress=meter)
                if format == "safetensors":
                    (made,) = temporary.glob("*.safetensors")
                _check_stands(view)
                path.parent.mkdir(parents=True, exist_ok=True)
                publish(os.fspath(made), os.fspath(path), create=False, sync=True)
    return plan


def import_checkpoint(
    source: str | os.PathLike[str],
    target: AnyPlace,
    *,
    include: Sequence[str] = (),
    dtype: str | None = None,
    weights_only: bool = True,
    options: SaveOptions | None = None,
    progress: ShowProgress = False,
) -> CheckpointView:
    """Converts a file or folder of another program to a checkpoint of ray_dcp.

    Args:
        source: A `torch.save` file, a safetensors file or folder, or a checkpoint of stock DCP.
        target: Path or URL of the new checkpoint, where no checkpoint may exist.
        include: Shell patterns of FQNs; everything if empty.
        dtype: The dtype to cast floating-point tensors to; unchanged if None.
        weights_only: Refuse objects of a `torch.save` file that are not on the allow-list.
        options: As for `save`.
        progress: As for `export`.

    Returns:
        A view of the new checkpoint.

    Raises:
        CheckpointNotFoundError: The source does not exist.
        CheckpointExistsError: The target has files of a checkpoint.
        InvalidRequestError: Nothing matches, an argument is invalid, the target names a step as
            `RUN@STEP`, or the source is a step of several items.
        UnsafeCheckpointError: The file would run code.
        StorageError: There is not enough space, or a storage failed.
        CheckpointError: The source can't be read.
    """
    check_patterns(include, "include")
    check_source(source)
    check_no_step(target, "target")
    check_writable(target)
    source = _plain_path(source)
    path = Path(source)
    is_file = path.is_file()
    seen = [path.stat().st_size, path.stat().st_mtime_ns] if is_file else []
    text = json.dumps([os.fspath(source), *seen, include, dtype, weights_only], default=str)
    work = f"import {digest_bytes(text.encode()).hex()}"
    choice: dict[str, Any] = {"include": list(include), "dtype": _torch_dtype(dtype)}
    with (
        marks_removed_last(),
        reporting(progress, "importing", as_target(target).url) as meter,
        writing_to(target_of(target, None), work) as lease,
    ):
        if is_file and not is_safetensors(path):
            check_space(target, path.stat().st_size)
            choice |= {"weights_only": weights_only, "options": options}
            _save_file(path, target, choice, lease, meter)
        elif is_file:
            with scratch(Path(tempfile.gettempdir())) as folder:
                Path(folder, f"{path.stem}{SUFFIX}").symlink_to(path.absolute())
                try:
                    view = read_view(folder)
                    _rewrite(view, folder, target, choice, options, meter=meter, lease=lease)
                except CheckpointError as error:
                    if error.checkpoint_id == os.fspath(folder):
                        error.checkpoint_id = os.fspath(source)
                    raise
        else:
            view = read_view(source)
            _check_one_state(view)
            _rewrite(view, source, target, choice, options, meter=meter, lease=lease)
        return read_view(target)


def copy(
    source: AnyPlace | CheckpointView, target: AnyPlace, *, progress: ShowProgress = False
) -> CheckpointView:
    """Copies a checkpoint, or a step with its items, to another place; returns a view of the copy.

    The copy appears when all of it is durable; an interrupted copy is removed. Of one whose process
    was killed, the next call takes the files that are whole. A place has one writer at a time:
    while another process that lives copies there, the call is refused.

    Args:
        source: Path, URL or view of any checkpoint.
        target: Path or URL, where no files of a checkpoint may exist. A place from which `delete`
            removed a checkpoint is fine.
        progress: As for `export`.

    Raises:
        CheckpointExistsError: The target has files of a checkpoint, or another process wrote one
            there in the meantime.
        InvalidRequestError: The target names a step as `RUN@STEP`.
        CommitUnknownError: The storage did not report whether the copy was committed.
        DamagedCheckpointError: A file is missing or has another length.
        StorageError: There is not enough space, or a storage failed.

    Examples:
        >>> import ray_dcp, torch
        >>> _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id="memory://doc-copy/a")
        >>> view = ray_dcp.copy("memory://doc-copy/a", "memory://doc-copy/b")
        >>> view["w"][...].tolist(), view.verify().ok
        ([1.0, 1.0], True)
    """
    return _copied(source, target, progress)


def _copied(
    source: AnyPlace | CheckpointView,
    target: AnyPlace,
    progress: ShowProgress,
    then: Callable[[], object] = lambda: None,
) -> CheckpointView:
    """Copies a checkpoint with its items, and calls `then` before the lease of the copy ends."""
    view = source if isinstance(source, CheckpointView) else read_view(source)
    with still_there(view):
        plan = plan_copy(view.storage, view.checkpoint)
        check_space(target, plan.num_bytes)
        check_no_step(target, "target")
        place = target_of(target, None)
        with reporting(progress, "copying", place.url) as meter:
            meter.expect(sum(num_bytes for _, num_bytes in plan.files))
            items = partial(_items_copied, view, place, meter)
            with marks_removed_last():
                copy_checkpoint(view.storage, plan, place, meter=meter, beside=items, then=then)
                return read_view(target)


def _for_stock(path: Path) -> None:
    if not (path / ".metadata").exists():
        write_metadata(path)


def _check_stands(view: CheckpointView) -> None:
    """Checks that a view's checkpoint is still that of its place.

    Conversions open the place again, and make sure that all their loads read one checkpoint. If
    that of the view stands after a conversion, the conversion has read it.

    Raises:
        CheckpointError: It was replaced or deleted.
    """
    if (reason := what_became_of(view.storage, view.checkpoint)) is not None:
        raise reason


@contextmanager
def still_there(view: CheckpointView) -> Iterator[None]:
    """Turns an error of damage into a better one if the checkpoint was deleted or replaced.

    Raises:
        CheckpointNotFoundError: The checkpoint was deleted while it was read.
        StorageError: The checkpoint was replaced while it was read.
        DamagedCheckpointError: The checkpoint is damaged.
    """
    try:
        yield
    except (DamagedCheckpointError, KeyMissingError) as error:
        became = what_became_of(view.storage, view.checkpoint)
        if became is None:
            raise
        raise became from error


def copied_bytes(view: CheckpointView, target: AnyPlace) -> int | None:
    """Returns the size in bytes of a checkpoint and its items if the target has a copy, else None.

    Raises:
        StorageError: A storage failed.
        CheckpointError: As for `copy`.
    """
    with still_there(view):
        if not is_copied(view.storage, view.checkpoint, open_storage(target)):
            return None
        num_bytes = plan_copy(view.storage, view.checkpoint).num_bytes
        for folder in items_of(view.storage, view.checkpoint):
            item = read_view(place_below(view.place or view.url, folder))
            found = copied_bytes(item, place_below(target, folder))
            if found is None:
                return None
            num_bytes += found
        return num_bytes


@contextmanager
def _items_copied(
    view: CheckpointView, target: Target, meter: Meter, may_stand: Callable[[], bool]
) -> Iterator[None]:
    """Copies the items of a step before its own record; deletes the copies if that fails.

    Args:
        view: The step.
        target: Where it is copied.
        meter: Counts bytes.
        may_stand: Returns whether the copy of the step may be committed; its items then stay.
    """
    items = items_of(view.storage, view.checkpoint)
    if items and view.place is None:
        raise InvalidRequestError(
            f"{view.url} is a step of {len(items)} items, and this view does not know where they "
            "lie; give copy the path of the step"
        )
    copied: list[CheckpointView] = []
    try:
        for folder in items:
            below = place_below(target, folder)
            item = read_view(place_below(view.place or "", folder))
            # Why: an earlier copy, killed before it committed the step, may have left this item.
            there = open_storage(below)
            if leases_at(there) or not is_copied(item.storage, item.checkpoint, there):
                copied.append(copy(item, below, progress=meter))
        yield
    except CommitUnknownError:
        raise  # the step may be there by now, or appear
    except BaseException:
        # Why: an interrupt may come after the commit, and the step would lack its items.
        for one in () if may_stand() else copied:
            # Why suppressed: the caller needs the first error.
            with suppress(CheckpointError):
                delete(one.place or one.url, expected=one.attempt)
        raise


def check_space(target: AnyPlace, num_bytes: int) -> None:
    """Checks that a local target has `num_bytes` of free space; skips remote ones.

    Raises:
        StorageError: It does not.
    """
    storage = open_storage(target)
    if isinstance(storage, LocalStorage):
        _check_free_bytes(Path(storage.url), num_bytes)


def _check_free_bytes(path: Path, num_bytes: int) -> None:
    there = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        raise StorageError(f"the free space in {there} can't be read: {error}") from error
    if num_bytes > free:
        raise StorageError(
            f"expected {size_text(num_bytes)} of space in {there}, but {size_text(free)} are free; "
            f"nothing was written. Free some, choose another disk, or less by include or dtype",
            key=str(path),
        )


def _is_free(path: Path, form: str) -> bool:
    """Returns whether nothing is in a directory, or what a command left that was killed there."""
    names = os.listdir(path)
    if form != "dcp" or not names:
        return not names
    # Why records: an export that was interrupted ended its attempt by one; that none of them is a
    # checkpoint is checked later. Why leases: who lives and writes there is named later, too.
    is_left = all(is_temporary(name) or slot_of(name) is not None for name in names)
    return is_left or bool(leases_at(open_storage(path)))


def _check_target(plan: ExportPlan) -> None:
    if "://" in checked_url(plan.target):
        raise InvalidRequestError(
            f"expected a path on this machine, but found {plan.target!r}: export there, and copy "
            f"the result; or copy the checkpoint as it is",
            key="target",
        )
    check_no_step(plan.target, "target")
    path = Path(plan.target)
    if plan.format in ("safetensors", "torch"):
        if path.is_dir() or path.is_symlink() or path.exists():
            raise InvalidRequestError(
                f"expected the name of a new {plan.format} file, but {path} is "
                f"{'a directory' if path.is_dir() else 'there already: delete it first'}",
                key="target",
            )
        if not path.parent.is_dir():
            raise InvalidRequestError(
                f"expected a file in a directory that exists, but {path.parent} is none",
                key="target",
            )
    elif path.exists() and not (path.is_dir() and _is_free(path, plan.format)):
        raise InvalidRequestError(
            f"expected a new or empty directory for {plan.format}, but {path} is neither",
            key="target",
        )
    elif plan.format == "hf" and path.exists() and path.samefile(Path.cwd()):
        # Why: the export takes its place as a whole.
        raise InvalidRequestError(
            f"expected a folder other than the current one for hf, found {plan.target!r}; name a "
            f"new one in it",
            key="target",
        )
    _check_free_bytes(path, plan.disk_bytes)


def _key_map(prefix: str, left_out: Sequence[str]) -> KeyMap | None:
    """Returns a key map that removes a prefix from names and drops those that are left out."""
    if not prefix and not left_out:
        return None
    objects = frozenset(left_out)
    return lambda name: None if name in objects else name.removeprefix(prefix) or name


def _check_one_state(view: CheckpointView) -> None:
    """Raises for a step of several items, whose own checkpoint has only their names."""
    if items := items_of(view.storage, view.checkpoint):
        raise InvalidRequestError(
            f"expected a checkpoint of one state as source, but {view.url} has the items "
            f"{', '.join(items)}, each a folder in it: take these one by one",
            key="source",
        )


def _is_copy(
    view: CheckpointView, include: Sequence[str], dtype: str | None, strip_prefix: str
) -> bool:
    """Returns whether stock DCP can read the files unchanged, so that an export only copies."""
    return view.kind in ("native", "stock") and not (include or dtype or strip_prefix)


def _rewrite(
    view: CheckpointView,
    source: AnyPlace,
    target: AnyPlace,
    choice: Mapping[str, Any],
    options: SaveOptions | None = None,
    *,
    meter: Meter,
    lease: TargetLease,
) -> None:
    """Saves the source anew, by way of a mapped temporary file: only its pages are in memory."""
    from ray_dcp.transform.conversion import dcp_to_torch_save

    storage = open_storage(target)
    local = isinstance(storage, LocalStorage)
    total = sum(info.num_bytes for info in view.tensors.values())
    check_space(target, 2 * total if local else 0)
    parent = Path(storage.url).parent if local else Path(tempfile.gettempdir())
    parent = next(folder for folder in (parent, *parent.parents) if folder.is_dir())
    if lease.is_done:
        remove_dead_scratch(parent)
        return
    with scratch(parent) as folder:
        _check_free_bytes(folder, total)
        made = Path(folder, "state.pt")
        # What is written: the load expects what is read.
        patterns = choice["include"]
        meter.expect(
            sum(
                info.num_bytes
                for name, info in view.tensors.items()
                if not patterns or any(fnmatchcase(name, one) for one in patterns)
            )
        )
        dcp_to_torch_save(source, made, **choice, progress=meter)
        _check_stands(view)
        _save_file(made, target, {"weights_only": True, "options": options}, lease, meter)


def check_writable(target: AnyPlace) -> None:
    """Checks that no checkpoint is at a place, unless a lease of a command is there.

    Raises:
        CheckpointExistsError: There is.
    """
    storage = open_storage(target)
    if not leases_at(storage):
        check_free(storage)


def _save_file(
    file: Path, target: AnyPlace, choice: Mapping[str, Any], lease: TargetLease, meter: Meter
) -> None:
    """Saves a `torch.save` file under the lease of the target, unless that was done before."""
    from ray_dcp.transform.conversion import save_torch_file

    if not lease.is_done:
        check_free(open_storage(target), lease.dead)
        save_torch_file(file, target, **choice, progress=meter, attempt=lease.attempt)


_MADE = "made"


def _work_at(path: Path, work: str) -> str:
    """Returns what is made at a path, as 16 hex digits."""
    return digest_bytes(json.dumps([os.fspath(path), work]).encode()).hex()[:16]


def _is_moved(around: Path, path: Path) -> bool:
    """Returns whether what was made in a temporary directory has been moved to a path."""
    made = around / _MADE
    if not os.path.lexists(path):
        return False
    if not made.exists():
        return True
    return path.is_file() and all(one.name.endswith(".index.json") for one in made.iterdir())


@contextmanager
def _temporary_directory(path: Path, work: str) -> Iterator[Path]:
    """Yields a new directory next to a path, and deletes it afterwards unless it was moved.

    The directory around it is deleted last, and its name says what is made: see `_published`.
    """
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())

    def is_kept(around: Path) -> bool:
        # Why: interrupted in between, and the repeated command would find another's file.
        return _is_moved(around, path)

    with scratch(parent, _work_at(path, work), is_kept=is_kept) as around:
        made = around / _MADE
        made.mkdir(mode=0o755)
        yield made


def _published(path: Path, work: str) -> list[Path]:
    """Returns the temporary directories of dead processes that published the same work at a path.

    Why: such a process was killed before it could end, and its command is repeated.
    """
    parent = next((one for one in path.absolute().parents if one.is_dir()), None)
    if parent is None:
        return []
    return [one for one in dead_scratch(parent, _work_at(path, work)) if _is_moved(one, path)]


def take_over(path: Path, work: str) -> bool:
    """Ends the export of a process that was killed after it had published it; returns whether."""
    found = _published(path, work)
    for one in found:
        shutil.rmtree(one, ignore_errors=True)
    return bool(found)


def float_dtype(dtype: str | None) -> str | None:
    """Returns the full name of a floating-point dtype.

    Raises:
        InvalidRequestError: It is none.
    """
    if dtype is None:
        return None
    name = _ALIASES.get(dtype, dtype) if isinstance(dtype, str) else ""
    if name not in _FLOATS:
        raise InvalidRequestError(
            f"dtype must be one of {', '.join((*_FLOATS, *_ALIASES))}, but is {dtype!r}",
            key="dtype",
        )
    return name


def _torch_dtype(dtype: str | None) -> Any:
    name = float_dtype(dtype)
    if name is None:
        return None
    from ray_dcp.torch_adapter.tensors import dtype_of

    return dtype_of(name)


def _plain_path(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns the path of a `file://` URL; anything else as it is."""
    scheme, rest = split_url(os.fspath(source))
    return rest if scheme in ("file", "local") else source


def check_source(source: str | os.PathLike[str]) -> None:
    """Checks that the source of an import exists and is of a known kind.

    Raises:
        CheckpointNotFoundError: The source does not exist.
        InvalidRequestError: The source is a file of another kind.
    """
    path = Path(_plain_path(checked_url(source)))
    if not path.exists() and "://" not in os.fspath(_plain_path(source)):
        raise CheckpointNotFoundError(f"expected a file or folder to import, but {source} is none")
    if path.is_file() and not is_safetensors(path):
        with path.open("rb") as file:
            begin = file.read(2)
        # A zip archive, or the pickle that torch wrote before version 1.6.
        if begin not in (b"PK", b"\x80\x02"):
            raise InvalidRequestError(
                f"expected a file of torch.save or safetensors, or a folder of one, but {source} "
                f"is another kind of file",
                key="source",
            )

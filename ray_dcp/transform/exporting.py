"""`export`, `copy`: a checkpoint as files of other programs, or at another place.

All of them stream: memory holds neither side whole. They check that the target has enough disk
space before they write, and leave nothing behind when interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    InvalidRequestError,
)
from ray_dcp.format.manifest import repeated, slot_of, tied_in
from ray_dcp.options import KeyMap, check_patterns, matches
from ray_dcp.place.delete import delete
from ray_dcp.place.done_marks import marks_removed_last
from ray_dcp.place.stock_metadata import write_metadata
from ray_dcp.place.target_lease import leases_at
from ray_dcp.store.local import publish
from ray_dcp.store.location import AnyPlace, checked_url
from ray_dcp.store.opening import open_storage, place_below, target_of
from ray_dcp.store.storage import is_temporary
from ray_dcp.transform.copying import copy_checkpoint, is_copied, plan_copy
from ray_dcp.transform.finished_work import publishing, take_over, temporary_directory
from ray_dcp.transform.float_dtypes import float_dtype, torch_dtype
from ray_dcp.transform.free_space import check_free_bytes
from ray_dcp.transform.hf_assets import (
    as_exported,
    assets_in,
    check_files,
    files_of,
    write_files,
)
from ray_dcp.transform.new_checkpoint import new_checkpoint
from ray_dcp.transform.peft_adapter import CONFIG_FILE, WEIGHTS_FILE, find_adapter
from ray_dcp.transform.rewriting import rewrite
from ray_dcp.transform.source import check_one_state, check_still_stands, still_there
from ray_dcp.view.checkpoint_view import SUFFIX, CheckpointView, read_view
from ray_dcp.view.progress import Meter, ShowProgress, reporting
from ray_dcp.view.run_view import check_no_step
from ray_dcp.view.verify import items_of

ExportFormat = Literal["safetensors", "hf", "torch", "dcp"]
Rename = Callable[[str], str | None]
_BY_SUFFIX: Mapping[str, ExportFormat] = {
    SUFFIX: "safetensors",
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "torch"),
}
"""Formats of files by the ends of their names."""
_A_FILE = {"torch": "a file of torch.save", "safetensors": "a safetensors file"}
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
    """Names of objects, if the format can't hold objects; with an adapter, also of the tensors of
    its base model."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that were of one memory with an earlier name, as tied weights, each with that name. The
    result has the tensor once; in `hf` under the earlier name alone, as `save_pretrained` does it.
    Empty for `safetensors` and `dcp`, which have both."""
    assets: tuple[str, ...] = ()
    """Files of config and tokenizer that `hf` has beside the weights."""
    adapter: str | None = None
    """Name of the PEFT adapter that `hf` has, as `PeftModel.from_pretrained` reads it; "" if the
    names did not tell it. None if it is no adapter."""


@dataclass(frozen=True)
class _Contents:
    """What of a checkpoint an export writes."""

    names: tuple[str, ...]
    """Names in the checkpoint, without those that are left out."""
    left_out: tuple[str, ...]
    rename: KeyMap | None
    """From names in the checkpoint to those of the result; None leaves one out."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files beside the weights."""
    adapter: str | None = None


def plan_export(
    source: AnyPlace | CheckpointView,
    target: str | os.PathLike[str],
    format: ExportFormat | None = None,  # noqa: A002 - what users call it
    *,
    include: Sequence[str] = (),
    dtype: str | None = None,
    strip_prefix: str = "",
    key_map: KeyMap | None = None,
    assets: str | os.PathLike[str] | None = None,
) -> ExportPlan:
    """Checks that an export is possible and returns its plan; see `export`."""
    view = source if isinstance(source, CheckpointView) else read_view(source)
    choice = _Choice(format_of(target, format), include, dtype, strip_prefix, key_map, assets)
    return _plan(view, target, choice, _contents(view, choice))


@dataclass(frozen=True)
class _Choice:
    """The arguments of an export, checked.

    Raises:
        InvalidRequestError: One is invalid.
    """

    format: ExportFormat
    include: Sequence[str]
    dtype: str | None
    strip_prefix: str
    key_map: KeyMap | None
    assets: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        check_patterns(self.include, "include")
        float_dtype(self.dtype)
        if self.assets is not None and self.format != "hf":
            raise InvalidRequestError(
                f"expected the format hf with assets, which are files beside its weights, but "
                f"format is {self.format!r}",
                key="assets",
            )

    @property
    def is_all(self) -> bool:
        """Whether nothing is chosen, cast or renamed."""
        return not (self.include or self.dtype or self.strip_prefix or self.key_map)

    def is_copy(self, view: CheckpointView) -> bool:
        """Returns whether the result is a copy: stock DCP can read the files unchanged."""
        return self.format == "dcp" and view.kind in ("native", "stock") and self.is_all

    def work(self, view: CheckpointView, contents: _Contents) -> str:
        """Returns what is written from a checkpoint, as text that is equal for equal work."""
        # Why random: what a function does is not known.
        is_known = not callable(self.key_map)
        key_map = self.key_map if is_known else os.urandom(16).hex()
        pairs = list(key_map.items()) if isinstance(key_map, Mapping) else key_map
        files = {name: digest_bytes(data).hex() for name, data in contents.files.items()}
        record = digest_bytes(view.checkpoint.record).hex()
        parts = [record, self.format, list(self.include), self.dtype, self.strip_prefix, pairs]
        text = json.dumps([*parts, files], default=str)
        return f"export {digest_bytes(text.encode()).hex()}"


def format_of(
    target: str | os.PathLike[str],
    format: ExportFormat | None,  # noqa: A002 - what users call it
) -> ExportFormat:
    """Returns the format of an export; where none is given, that of the target's name.

    Raises:
        InvalidRequestError: It is no format, or the target's name is that of a file of another.

    Examples:
        >>> format_of("w.pt", None), format_of("w.safetensors", None), format_of("out", "hf")
        ('torch', 'safetensors', 'hf')
    """
    if format is not None and format not in get_args(ExportFormat):
        raise InvalidRequestError(
            f"format must be one of {', '.join(get_args(ExportFormat))}, but is {format!r}",
            key="format",
        )
    suffix = Path(target).suffix
    named = _BY_SUFFIX.get(suffix)
    if format is not None and named not in (None, format):
        raise InvalidRequestError(
            f"expected another name for {format}, as {suffix} is that of {_A_FILE[named]}, "
            f"but the target is {os.fspath(target)}: rename it, or choose the format {named}",
            key="target",
        )
    return format or named or "safetensors"


def _contents(view: CheckpointView, choice: _Choice) -> _Contents:
    """Returns what of a checkpoint an export writes.

    Raises:
        InvalidRequestError: Nothing is chosen, or what is chosen can't be written.
    """
    if choice.is_copy(view):
        return _Contents(view.names, (), None)
    check_one_state(view)
    include, rename = choice.include, _renaming(choice.strip_prefix, choice.key_map)
    names = [name for name in view.names if matches(name, include)]
    new = {name: name if rename is None else rename(name) for name in names}
    names = [name for name in names if new[name] is not None]
    files, own, adapter = {}, dict[str, str](), None
    if choice.format == "hf":
        own = assets_in(view.objects)
        files = _files_in(view, own)
        files |= {} if choice.assets is None else files_of(choice.assets)
        config = [content for name, content in files.items() if Path(name).name == CONFIG_FILE]
        tensors = {name: str(new[name]) for name in names if name in view.tensors}
        adapter = find_adapter(tensors.values(), json.loads(config[0]) if config else None)
        if adapter is not None:
            new |= {name: adapter.names.get(to) for name, to in tensors.items()}
        files = as_exported(
            files, None if adapter is None else adapter.name, float_dtype(choice.dtype)
        )
    holds_objects = choice.format not in ("safetensors", "hf")
    kept = tuple(
        name for name in names if new[name] is not None and (holds_objects or name in view.tensors)
    )
    if not kept:
        patterns = f"that match {', '.join(map(repr, include))}" if include else "to write"
        what = "names" if holds_objects else "tensors"
        raise InvalidRequestError(
            f"expected {what} {patterns} in {view.url}, found none of {len(view)}", key="include"
        )
    left_out = tuple(name for name in names if name not in set(kept) and name not in own)
    if left_out or own or adapter is not None:
        to = {name: new[name] for name in kept}
        rename = to.get
    return _Contents(kept, left_out, rename, files, None if adapter is None else adapter.name)


def _files_in(view: CheckpointView, names: Mapping[str, str]) -> dict[str, bytes]:
    """Returns the files that a checkpoint has as values, by the names of these."""
    from ray_dcp.transform.conversion import read_values

    if not names:
        return {}
    found = read_values(view.place or view.url, names)
    files = {names[name]: content for name, content in found.items()}
    check_files(files)
    return files


def _plan(
    view: CheckpointView, target: str | os.PathLike[str], choice: _Choice, contents: _Contents
) -> ExportPlan:
    """Returns the plan of an export, after checking that its target is free and has room."""
    form, cast = choice.format, float_dtype(choice.dtype)
    is_once = form in ("torch", "hf")
    tied = repeated(contents.names, tied_in(view.checkpoint.manifest)) if is_once else {}
    num_bytes = sum(map(len, contents.files.values()))
    num_tensors = num_objects = 0
    for name in contents.names:
        info = view.tensors.get(name)
        if info is None:
            num_objects += 1
            continue
        num_tensors += form == "torch" or name not in tied
        if name not in tied:
            is_cast = cast is not None and "float" in info.dtype
            width = ITEMSIZE.get((cast or "") if is_cast else info.dtype, 0)
            num_bytes += prod(info.shape) * width + _FRAME_BYTES * (form in ("torch", "dcp"))
    is_copy = choice.is_copy(view)
    for folder in items_of(view.storage, view.checkpoint) if is_copy else ():
        item = read_view(place_below(view.place or view.url, folder))
        num_tensors += len(item.tensors)
        num_objects += len(item.objects)
        num_bytes += item.num_bytes
    plan = ExportPlan(
        source=view.url,
        target=os.fspath(target),
        format=form,
        num_tensors=num_tensors,
        num_objects=num_objects,
        num_bytes=num_bytes,
        disk_bytes=num_bytes * (2 if form == "dcp" and not is_copy else 1),
        left_out=contents.left_out,
        tied=tied,
        assets=tuple(sorted(contents.files)),
        adapter=contents.adapter,
    )
    if not publishing(Path(os.path.realpath(target)), choice.work(view, contents)):
        _check_target(plan)
    return plan


def export(
    source: AnyPlace | CheckpointView,
    target: str | os.PathLike[str],
    format: ExportFormat | None = None,  # noqa: A002 - what users call it
    *,
    include: Sequence[str] = (),
    dtype: str | None = None,
    strip_prefix: str = "",
    key_map: KeyMap | None = None,
    assets: str | os.PathLike[str] | None = None,
    progress: ShowProgress = False,
) -> ExportPlan:
    """Writes a checkpoint in another format.

    Args:
        source: Path, URL or view of any checkpoint.
        target: Path of a new file for `safetensors` and `torch`, of a new or empty directory for
            `hf` and `dcp`.
        format: `safetensors`; `torch` (a `torch.save` file); `hf` (safetensors files and an index,
            as on the hub, or a PEFT adapter as `PeftModel.from_pretrained` reads it); or `dcp` (a
            checkpoint that stock DCP reads). If None, `torch` for a target that ends in `.pt`,
            `.pth`, `.ckpt` or `.bin`, else `safetensors`.
        include: Shell patterns of FQNs; everything if empty. `safetensors` and `hf` can't hold
            objects, which are left out.
        dtype: The dtype to cast floating-point tensors to, for example `bfloat16` or `bf16`;
            unchanged if None.
        strip_prefix: Prefix that is removed from names, for example `model.`.
        key_map: How to rename what `strip_prefix` leaves; see `LoadOptions.key_map`.
        assets: Folder with config and tokenizer for `hf`, as that of the model from which the
            training began: its files, but no weights, are copied. Those that the checkpoint has
            (see `hf_assets`) are written without it.
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
    asked = _Choice(format_of(target, format), include, dtype, strip_prefix, key_map, assets)
    contents = _contents(view, asked)
    plan, work = _plan(view, target, asked, contents), asked.work(view, contents)
    place: Any = plan.source if isinstance(source, CheckpointView) else source
    # Why resolved: a folder can't be renamed to a symbolic link.
    path = Path(os.path.realpath(target))
    choice: dict[str, Any] = {"include": list(include), "dtype": torch_dtype(dtype)}
    choice["key_map"] = contents.rename
    with (
        marks_removed_last(),
        reporting(progress, "exporting", plan.target) as meter,
        still_there(view),
    ):
        # Why: it may have been replaced long before.
        check_still_stands(view)
        if asked.is_copy(view):
            _copied(view, path, meter, partial(_for_stock, path))
        elif plan.format == "dcp":
            at = target_of(path, None)
            with new_checkpoint("exporting", at, work, progress=meter) as new:
                rewrite(view, place, path, choice, new)
        elif not take_over(path, work):
            with temporary_directory(path, work) as temporary:
                made = temporary
                if plan.format == "torch":
                    made = temporary / path.name
                    dcp_to_torch_save(place, made, **choice, progress=meter)
                else:
                    choice["tied_once"] = plan.format == "hf"
                    is_one = plan.format == "safetensors" or plan.adapter is not None
                    choice["file_bytes"] = _ONE_FILE_BYTES if is_one else _HUB_FILE_BYTES
                    choice["one_file"] = WEIGHTS_FILE if plan.adapter is not None else ""
                    HubFiles.of(place, temporary, **choice).write_all(progress=meter)
                if plan.format == "safetensors":
                    (made,) = temporary.glob("*.safetensors")
                write_files(temporary, contents.files)
                check_still_stands(view)
                path.parent.mkdir(parents=True, exist_ok=True)
                publish(os.fspath(made), os.fspath(path), create=False, sync=True)
    return plan


def copy(
    source: AnyPlace | CheckpointView, target: AnyPlace, *, progress: ShowProgress = False
) -> CheckpointView:
    """Copies a checkpoint, or a step with its items, to another place; returns a view of the copy.

    Every byte is verified on its way, as `verify` does it: what is damaged is not copied. The copy
    appears when all of it is durable; an interrupted copy is removed. Of one whose process
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
        DamagedCheckpointError: A file is missing, or its bytes are not those that were written.
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
    check_no_step(target, "target")
    with still_there(view):
        plan = plan_copy(view.storage, view.checkpoint)
    place = target_of(target, None)
    with marks_removed_last():
        copy_checkpoint(
            view.storage, plan, place, progress=progress, sources=[view],
            beside=partial(_items_copied, view, place), then=then,
        )  # fmt: skip
        return read_view(target)


def _for_stock(path: Path) -> None:
    if not (path / ".metadata").exists():
        write_metadata(path)


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
    check_free_bytes(path, plan.disk_bytes)


def _renaming(prefix: str, key_map: KeyMap | None) -> Rename | None:
    """Returns a function that removes a prefix from names, and then applies a key map."""
    rename: Rename | None = None
    if key_map is not None:
        from ray_dcp.torch_adapter.flatten import renamer

        rename = renamer(key_map)
    if not prefix:
        return rename

    def renamed(name: str) -> str | None:
        short = name.removeprefix(prefix) or name
        return short if rename is None else rename(short)

    return renamed

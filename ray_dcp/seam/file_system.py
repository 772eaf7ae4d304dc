"""DCP's file system writers and readers, with DCP's arguments and without their holes.

`ray_dcp.save` and `load` take them at their word and do their work natively. Here is what they do
when DCP itself calls them, in stock `save` and `load`: an error of a writer thread fails the save,
`.metadata` is complete before it is published and takes the place of the old one in one step, and
what is read is verified.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import queue
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import _fsspec_filesystem, filesystem
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ray_dcp.errors import CheckpointError, CoverageError, InvalidRequestError
from ray_dcp.format.metadata_in import decode_metadata
from ray_dcp.options import LoadOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.seam.lazy_metadata import DCP_VERSION, metadata_of
from ray_dcp.seam.planner_load import PlannedReads
from ray_dcp.seam.plugin_read import fill
from ray_dcp.store.opening import open_storage
from ray_dcp.transfer.checkpoint import Checkpoint
from ray_dcp.transfer.opening import read_checkpoint

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "is_default_registry",
]


_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+[.]distcp")


class FileSystemWriter(filesystem.FileSystemWriter):
    """DCP's `FileSystemWriter`: a directory of `.distcp` files and `.metadata`.

    In stock `save`, too, a save onto an existing checkpoint overwrites no file of it: until the new
    `.metadata` takes the old one's place, the old checkpoint loads. Its files are removed then.

    Args:
        path: Directory of the checkpoint.
        single_file_per_rank: As in DCP.
        sync_files: As in DCP.
        thread_count: As in DCP.
        per_thread_copy_ahead: As in DCP.
        cache_staged_state_dict: As in DCP.
        overwrite: As in DCP.
        _extensions: As in DCP.
        serialization_format: As in DCP.

    Example:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     writer = FileSystemWriter(root, thread_count=2)
        ...     _ = ray_dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        ...     os.path.exists(f"{root}/.metadata")
        True

    Source: `torch/distributed/checkpoint/filesystem.py`, `FileSystemWriter`.
    """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives the files of this save names that none before it has."""
        # Why digits: names stay of the form that DCP's have.
        token = str(10**12 + secrets.randbelow(9 * 10**12))
        return [
            replace(plan, storage_data=_StoragePrefix(plan.storage_data.prefix + token))
            if isinstance(plan.storage_data, _StoragePrefix)
            else plan
            for plan in super().prepare_global_plan(plans)
        ]

    def _write_data(
        self, planner: SavePlanner, file_queue: queue.Queue[Any]
    ) -> Future[list[WriteResult]]:
        """Writes with `thread_count` threads; what one of them raises is raised."""
        alone = copy.copy(self)
        alone.thread_count = 1
        results: list[list[WriteResult]] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                written = super(FileSystemWriter, alone)._write_data(planner, file_queue)
                results.append(written.wait())
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(1, _threads(self.thread_count))]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for some in results for result in some])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes `.metadata`.

        Raises:
            CoverageError: The results lack something that was planned. Nothing is published.
        """
        stored = {result.index: result.storage_data for some in results for result in some}
        _check_all_stored(metadata, stored)
        metadata.version = DCP_VERSION
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        own_rank = None if self.use_collectives else self.rank
        path = self._get_metadata_path(own_rank)
        temporary = f"{os.fspath(path)}.tmp"
        replaced = self._files_of(path) - {info.relative_path for info in stored.values()}
        with self.fs.create_stream(temporary, "wb") as stream:
            stream.write(pickle.dumps(metadata))
            stream.flush()
            if self.sync_files:
                _sync(stream)
        # Why no removal before: a rename takes the place of the old file in one step.
        self.fs.rename(temporary, path)
        for name in sorted(replaced):
            # Suppressed: nothing needs it any more, and the save stands.
            with contextlib.suppress(Exception):
                self.fs.rm_file(self.fs.concat_path(self.path, name))

    def _files_of(self, path: str | os.PathLike[str]) -> set[str]:
        """Returns the data files that a `.metadata` names; none if there is none to be read."""
        try:
            with self.fs.create_stream(path, "rb") as stream:
                found = decode_metadata(stream.read())
        except (OSError, CheckpointError):
            return set()
        return {name for name in found.table.files if _DATA_FILE.fullmatch(name)}

    def storage_meta(self) -> StorageMeta | None:
        """Returns where it saves, as text: paths do not unpickle on other systems."""
        return StorageMeta(checkpoint_id=os.fspath(self.checkpoint_id), save_id=self.save_id)


def _threads(thread_count: object) -> int:
    if isinstance(thread_count, bool) or not isinstance(thread_count, int) or thread_count < 1:
        raise InvalidRequestError(
            f"thread_count must be a whole number above 0, but is {thread_count!r}",
            key="thread_count",
        )
    return thread_count


def _sync(stream: Any) -> None:
    # Why not os.sync() where there is no file: it would wait for every disk of the machine.
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        os.fsync(stream.fileno())


def _check_all_stored(metadata: Metadata, stored: dict[MetadataIndex, Any]) -> None:
    missing = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            places = [MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks]
        else:
            places = [MetadataIndex(fqn)]
        missing += [place for place in places if place not in stored]
    if missing:
        told = ", ".join(f"{it.fqn!r} at {tuple(it.offset or ())}" for it in missing[:8])
        raise CoverageError(
            f"expected a result for everything that was planned, but {len(missing)} item(s) were "
            f"not written: {told}; .metadata is not published, save again",
            key=missing[0].fqn,
        )


class FileSystemReader(filesystem.FileSystemReader):
    """DCP's `FileSystemReader`, which in stock `load` reads as ray_dcp does.

    `.metadata` goes through a restricted unpickler, blocks are verified against their checksums
    where there are any, only what is needed is read, and objects load under `weights_only` rules.
    On a filesystem of the user's, with stream transforms of the user's, or for a rank's own
    metadata, it reads as torch's.

    Args:
        path: Directory of the checkpoint: ours, stock DCP's, or one of safetensors files.
        _extension_registry: As in DCP.

    Attributes:
        options: How it reads; `dtype`, `verify`, `weights_only` and `num_threads` count.

    Example:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/a")
        ...     state = {"w": torch.zeros(2)}
        ...     ray_dcp.load(state, storage_reader=FileSystemReader(f"{root}/a")).loaded
        ('w',)

    Source: `torch/distributed/checkpoint/filesystem.py`, `FileSystemReader`.
    """

    options: LoadOptions = LoadOptions()
    _checkpoint: Checkpoint | None = None
    _place: Target | None = None
    """Where it reads, if that is no local path."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes another checkpoint."""
        super().reset(checkpoint_id)
        self._checkpoint = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of the checkpoint that stands.

        Raises:
            CheckpointError: As `ray_dcp.load` does.
        """
        self._checkpoint = None
        if kwargs.get("rank") is not None or not self._reads_natively():
            return super().read_metadata(*args, **kwargs)
        checkpoint = read_checkpoint(open_storage(self._place or os.fspath(self.path)))
        metadata = metadata_of(checkpoint, checkpoint_id=os.fspath(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        self._checkpoint = checkpoint
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what is planned.

        Raises:
            CheckpointError: As `ray_dcp.load` does.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            return super().read_data(plan, planner)
        reads = PlannedReads(planner, checkpoint.table, self.options, self.rank or 0)
        for item in plan.items:
            reads.add(item)
        reads.check_complete()
        targets = reads.targets(Metadata({}), reads.boxes.finish)
        fill(open_storage(self._place or os.fspath(self.path)), checkpoint, targets, self.options)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _reads_natively(self) -> bool:
        return type(self.fs) is filesystem.FileSystem and is_default_registry(self)


def is_default_registry(reader: filesystem.FileSystemReader) -> bool:
    """Whether a reader knows no stream transforms but those that come with torch.

    Args:
        reader: Ours or torch's.
    """
    registry = getattr(reader.transforms, "extension_registry", None)
    if registry is None:
        return True
    return (
        type(registry) is ExtensionRegistry
        and registry.extensions == ExtensionRegistry().extensions
    )


class _Filesystem(_fsspec_filesystem.FileSystem):
    """torch's, which remembers its options and removes a broken file after it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self._storage_options: dict[str, Any] = {}

    def init_path(self, path: str | os.PathLike[str], **kwargs: Any) -> str | os.PathLike[str]:
        # Why: `reset` gives a path alone, and credentials must not be lost by it.
        self._storage_options = kwargs or self._storage_options
        return super().init_path(os.fspath(path), **self._storage_options)

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        try:
            fs: Any = self.fs
            with fs.open(os.fspath(path), mode) as stream:
                yield stream
        except BaseException:
            if any(letter in mode for letter in "w+a"):
                # Why here: within the block, closing would finish the upload after the removal.
                with contextlib.suppress(Exception):
                    self.rm_file(path)
            raise


class FsspecWriter(FileSystemWriter, _fsspec_filesystem.FsspecWriter):
    """DCP's `FsspecWriter`: `FileSystemWriter` to any URL that fsspec serves.

    Args:
        path: URL of the checkpoint.
        single_file_per_rank: As in DCP.
        sync_files: As in DCP; remote files are never waited for by `os.sync`.
        thread_count: As in DCP.
        per_thread_copy_ahead: As in DCP.
        overwrite: As in DCP.
        _extensions: As in DCP.
        serialization_format: As in DCP.
        **kwargs: For the fsspec filesystem. They stay when `checkpoint_id` names another path.

    Source: `torch/distributed/checkpoint/_fsspec_filesystem.py`, `FsspecWriter`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path, single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead,
            overwrite=overwrite, _extensions=_extensions,
            serialization_format=serialization_format, **kwargs,
        )  # fmt: skip
        self.fs: Any = _Filesystem()
        self.path = self.fs.init_path(path, **kwargs)


class FsspecReader(FileSystemReader, _fsspec_filesystem.FsspecReader):
    """DCP's `FsspecReader`: `FileSystemReader` from any URL that fsspec serves.

    Args:
        path: URL of the checkpoint.
        **kwargs: For the fsspec filesystem. They stay when `checkpoint_id` names another path.

    Source: `torch/distributed/checkpoint/_fsspec_filesystem.py`, `FsspecReader`.
    """

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.fs: Any = _Filesystem()
        self.path = self.fs.init_path(path, **kwargs)

    def _reads_natively(self) -> bool:
        protocol = getattr(self.fs.fs, "protocol", ())
        names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        return "file" in names and is_default_registry(self)

"""DCP's Hugging Face storages: safetensors files that other libraries read, without DCP's holes.

What a tensor becomes in a file is bytes and a dtype's code, whatever its number of dimensions; what
safetensors can't hold is refused before a file is made.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint._hf_utils import SHARDED_DIR_NAME
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ray_dcp.errors import InvalidRequestError, UnsupportedValueError
from ray_dcp.format.safetensors_frame import ALL_CODES, header, sharding_metadata
from ray_dcp.protocol.messages import Target
from ray_dcp.seam.file_system import FileSystemReader, FileSystemWriter
from ray_dcp.seam.hugging_face_whole import consolidate_safetensors_files
from ray_dcp.seam.tensors import dtype_name, host_bytes
from ray_dcp.store.location import AnyPlace, split_url
from ray_dcp.store.opening import as_target, open_storage, place_below
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.consolidation import file_name, write_index

__all__ = [
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
]


class HuggingFaceStorageWriter(FileSystemWriter, hf_storage.HuggingFaceStorageWriter):
    """DCP's `HuggingFaceStorageWriter`, in `ray_dcp.save` and in stock `save`.

    Every file appears under its name when it is complete. Sharded files also say each tensor's
    global shape, so that ray_dcp notices when one is missing.

    Args:
        path: Directory; also a URL or a `ray_dcp.Location`, which DCP's does not take.
        fqn_to_index_mapping: FQN to the number of its file, from 1; all in one file if None.
        thread_count: Files that a rank writes at a time.
        save_distributed: Every rank writes its shards; else whole tensors from rank 0.
        enable_consolidation: Shards go to `path/sharded`, and then whole tensors to `path`.
        thread_count_consolidation: Files that are consolidated at a time.

    Example:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     writer = HuggingFaceStorageWriter(root)
        ...     _ = ray_dcp.save({"scale": torch.tensor(2.5)}, storage_writer=writer)
        ...     sorted(os.listdir(root))
        ['model-00001-of-00001.safetensors', 'model.safetensors.index.json']

    Source: `torch/distributed/checkpoint/hf_storage.py`, `HuggingFaceStorageWriter`.
    """

    _place: Target | None = None
    """Where the whole files go, if that is no local path."""

    def __init__(
        self,
        path: AnyPlace,
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
    ) -> None:
        self._place = _elsewhere(path)
        local: Any = path if self._place is None else self._place.url
        super().__init__(
            local, fqn_to_index_mapping, thread_count, save_distributed, enable_consolidation,
            thread_count_consolidation,
        )  # fmt: skip
        self._name_path()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes another directory."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._place = _elsewhere(checkpoint_id, self._place)
            self._name_path()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the directory; elsewhere than on a local path there is nothing to prepare."""
        return super().prepare_local_plan(plan) if self._place is None else plan

    def _name_path(self) -> None:
        # Why: torch makes a path of what it is given, with one slash of the two in a URL.
        if self._place is not None:
            self.consolidated_output_path = self._place.url if self.enable_consolidation else None
            self.path: Any = self._files().url

    def _files(self) -> Target:
        """Returns where the files of the ranks go."""
        if self._place is None:
            return as_target(os.fspath(self.path))
        return (
            place_below(self._place, SHARDED_DIR_NAME) if self.enable_consolidation else self._place
        )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files.

        Raises:
            UnsupportedValueError: The state dict has values that safetensors can't hold; all are
                named, and nothing is written.
            InvalidRequestError: `fqn_to_index_mapping` lacks names.
        """
        _check_holdable(plan.items)
        data: Mapping[str, Any] = plan.storage_data or {}
        mapping = data.get("fqn_to_index_mapping")
        if mapping is not None:
            _check_mapped(mapping, [item.index.fqn for item in plan.items])
        largest = max(mapping.values()) if mapping else 1
        files: list[tuple[str, list[WriteItem]]] = []
        for index, items in self._split_by_storage_plan(mapping, plan.items).items():
            name = file_name(index, largest, data.get("shard_index"))
            files += [(_numbered(name, n), each) for n, each in enumerate(_once_each(items))]
        with ThreadPoolExecutor(max(1, self.thread_count)) as pool:
            written = [pool.submit(self._write_file, *file, planner) for file in files if file[1]]
            results = [result for each in written for result in each.result()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        entries, end = [], 0
        for item in items:
            chunk = _data(item).chunk
            begin, end = end, end + chunk.sizes.numel() * _data(item).properties.dtype.itemsize
            dtype = dtype_name(_data(item).properties.dtype)
            entries.append((item.index.fqn, dtype, tuple(chunk.sizes), begin, end))
        head = header(
            entries,
            sharding_metadata(
                {item.index.fqn: _data(item).chunk.offsets for item in items},
                {item.index.fqn: _data(item).size for item in items},
            ),
            codes=ALL_CODES,
        )
        payloads = (_bytes_of(item, planner) for item in items)
        pieces: Iterable[bytes | memoryview] = itertools.chain([head], payloads)
        if self._place is None:
            self._make_file(name, pieces)
        else:
            _upload(open_storage(self._files()), name, pieces)
        return [
            WriteResult(
                item.index, stop - begin, _StorageInfo(name, len(head) + begin, stop - begin)
            )
            for item, (_, _, _, begin, stop) in zip(items, entries, strict=True)
        ]

    def _make_file(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        path = Path(os.fspath(self.path), name)
        temporary = path.with_name(f".{name}.tmp")
        try:
            with self.fs.create_stream(temporary, "wb") as stream:
                for piece in pieces:
                    stream.write(piece)
                stream.flush()
                os.fsync(stream.fileno())
            self.fs.rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index of whole tensors, after it has consolidated if asked to.

        Raises:
            CoverageError: The sharded files lack a part of a tensor.
            InvalidRequestError: `fqn_to_index_mapping` lacks names.
        """
        stored = {result.index: result.storage_data for some in results for result in some}
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        if not self.save_distributed:
            file_of = {index.fqn: info.relative_path for index, info in stored.items()}
            write_index(self._files(), file_of, sum(it.length for it in stored.values()))
            return
        if not self.enable_consolidation or self.consolidated_output_path is None:
            return
        mapping = self.fqn_to_index_mapping or dict.fromkeys(metadata.state_dict_metadata, 1)
        consolidate_safetensors_files(
            self._files(),
            self._place or self.consolidated_output_path,
            {name: mapping[name] for name in metadata.state_dict_metadata},
            self.thread_count_consolidation,
        )


def _upload(storage: Storage, name: str, pieces: Iterable[bytes | memoryview]) -> None:
    writer = storage.open_writer(name)
    try:
        for piece in pieces:
            writer.write(piece)
        # Why only now: the file that is replaced stays until the new one is whole.
        storage.delete([name])
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def _check_holdable(items: Sequence[WriteItem]) -> None:
    wrong = []
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            wrong.append(f"{item.index.fqn!r} is no tensor")
        elif dtype_name(_data(item).properties.dtype) not in ALL_CODES:
            wrong.append(f"{item.index.fqn!r} is {_data(item).properties.dtype}")
    if wrong:
        raise UnsupportedValueError(
            f"safetensors files hold tensors of {', '.join(ALL_CODES)} alone, but "
            f"{'; '.join(wrong[:8])}; take them out of the state dict, or save with "
            f"ray_dcp.FileSystemWriter"
        )


def _check_mapped(mapping: Mapping[str, int], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in mapping]
    if missing:
        raise InvalidRequestError(
            f"expected fqn_to_index_mapping to name a file for every tensor, but it lacks "
            f"{', '.join(map(repr, missing[:8]))}",
            key=missing[0],
        )


def _data(item: WriteItem) -> Any:
    return item.tensor_data


def _once_each(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Deals items out so that no file has two shards of one tensor: a file names each once."""
    dealt: list[list[WriteItem]] = []
    count: dict[str, int] = {}
    for item in items:
        turn = count.get(item.index.fqn, 0)
        count[item.index.fqn] = turn + 1
        if turn == len(dealt):
            dealt.append([])
        dealt[turn].append(item)
    return dealt


def _numbered(name: str, turn: int) -> str:
    stem = name.removesuffix(".safetensors")
    return name if turn == 0 else f"{stem}.{turn}.safetensors"


def _bytes_of(item: WriteItem, planner: SavePlanner) -> memoryview:
    tensor: Any = planner.resolve_data(item)
    planned = _data(item)
    if tensor.shape != planned.chunk.sizes or tensor.dtype != planned.properties.dtype:
        raise InvalidRequestError(
            f"{type(planner).__name__}.resolve_data gave {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} for {item.index.fqn!r}, but planned "
            f"{planned.properties.dtype} of shape {tuple(planned.chunk.sizes)}",
            key=item.index.fqn,
        )
    return host_bytes(tensor.detach())


class HuggingFaceStorageReader(FileSystemReader, hf_storage.HuggingFaceStorageReader):
    """DCP's `HuggingFaceStorageReader`, which reads as ray_dcp does: only what is needed.

    Args:
        path: Directory of safetensors files; also a URL or a `ray_dcp.Location`, which DCP's does
            not take.
        thread_count: Threads that read, in stock `load`.

    Source: `torch/distributed/checkpoint/hf_storage.py`, `HuggingFaceStorageReader`.
    """

    def __init__(self, path: AnyPlace, thread_count: int = 1) -> None:
        place = _elsewhere(path)
        local: Any = path if place is None else place.url
        super().__init__(local, thread_count)
        self._go_to(place)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes another directory."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._go_to(_elsewhere(checkpoint_id, self._place))

    def _go_to(self, place: Target | None) -> None:
        self._place = place
        if place is not None:
            self.path: Any = place.url

    def read_metadata(self) -> Metadata:
        """Returns what the files' headers say.

        Raises:
            CheckpointError: As `ray_dcp.load` does.
        """
        # Why no arguments: there is no metadata of a single rank to fall back on.
        return super().read_metadata()


def _elsewhere(path: AnyPlace, before: Target | None = None) -> Target | None:
    """Returns the target of a place that is no local path; options stay with another URL."""
    if isinstance(path, (str, os.PathLike)):
        scheme = split_url(os.fspath(path))[0]
        if scheme in ("", "file", "local"):
            return None
        if before is not None and split_url(before.url)[0] == scheme:
            return replace(before, url=os.fspath(path))
    return as_target(path)

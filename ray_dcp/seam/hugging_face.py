"""DCP's Hugging Face storages: safetensors files that other libraries read, without DCP's holes.

What a tensor becomes in a file is bytes and a dtype's code, whatever its number of dimensions; what
safetensors can't hold is refused before a file is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ray_dcp.errors import InvalidRequestError, UnsupportedValueError
from ray_dcp.format.safetensors_frame import ALL_CODES, header, sharding_metadata
from ray_dcp.seam.file_system import FileSystemReader, FileSystemWriter
from ray_dcp.seam.tensors import dtype_name, host_bytes
from ray_dcp.transfer.consolidation import consolidate, file_name, write_index

__all__ = [
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
]


class HuggingFaceStorageWriter(FileSystemWriter, hf_storage.HuggingFaceStorageWriter):
    """DCP's `HuggingFaceStorageWriter`, in `ray_dcp.save` and in stock `save`.

    Every file appears under its name when it is complete. Sharded files also say each tensor's
    global shape, so that ray_dcp notices when one is missing.

    Args:
        path: Directory.
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
        path = Path(os.fspath(self.path), name)
        temporary = path.with_name(f".{name}.tmp")
        try:
            with self.fs.create_stream(temporary, "wb") as stream:
                stream.write(head)
                for item in items:
                    stream.write(_bytes_of(item, planner))
                stream.flush()
                os.fsync(stream.fileno())
            self.fs.rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return [
            WriteResult(
                item.index, stop - begin, _StorageInfo(name, len(head) + begin, stop - begin)
            )
            for item, (_, _, _, begin, stop) in zip(items, entries, strict=True)
        ]

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
            write_index(os.fspath(self.path), file_of, sum(it.length for it in stored.values()))
            return
        if not self.enable_consolidation or self.consolidated_output_path is None:
            return
        mapping = self.fqn_to_index_mapping or dict.fromkeys(metadata.state_dict_metadata, 1)
        consolidate_safetensors_files(
            os.fspath(self.path),
            self.consolidated_output_path,
            {name: mapping[name] for name in metadata.state_dict_metadata},
            self.thread_count_consolidation,
        )


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
        path: Directory of safetensors files.
        thread_count: Threads that read, in stock `load`.

    Source: `torch/distributed/checkpoint/hf_storage.py`, `HuggingFaceStorageReader`.
    """

    def read_metadata(self) -> Metadata:
        """Returns what the files' headers say.

        Raises:
            CheckpointError: As `ray_dcp.load` does.
        """
        # Why no arguments: there is no metadata of a single rank to fall back on.
        return super().read_metadata()


def consolidate_safetensors_files(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int] | None = None,
    num_threads: int = 1,
) -> None:
    """Makes whole tensors of the sharded files of a directory, and their index file.

    Right for every dtype and number of dimensions; memory is that of the page cache.

    Args:
        input_dir: Where the sharded files are.
        output_dir: Where the whole ones go.
        fqn_to_index_mapping: FQN to the number of its file, from 1; all in one file if None.
        num_threads: Files that are written at a time.

    Raises:
        InvalidRequestError: The mapping is empty, or names a tensor that is not there.
        CoverageError: A part of a tensor is in no file.
        DamagedCheckpointError: A file is damaged.

    Source: `torch/distributed/checkpoint/_consolidate_hf_safetensors.py`.
    """
    mapping = _mapping(input_dir, fqn_to_index_mapping)
    largest = max(mapping.values())
    file_of = {name: file_name(index, largest) for name, index in mapping.items()}
    total = consolidate(input_dir, output_dir, file_of, num_threads=num_threads)
    write_index(output_dir, file_of, total)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Does what `consolidate_safetensors_files` does, each rank some of the files.

    Args:
        input_dir: As there.
        output_dir: As there.
        fqn_to_index_mapping: As there.
        num_threads: Of each rank.
        process_group: The ranks; without an initialised group this process does all.

    Raises:
        CheckpointError: As `consolidate_safetensors_files`, on every rank.
    """
    mapping = _mapping(input_dir, fqn_to_index_mapping)
    rank, world_size = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    largest = max(mapping.values())
    own = {n: file_name(i, largest) for n, i in mapping.items() if i % world_size == rank}
    total: int | Exception = 0
    try:
        total = consolidate(input_dir, output_dir, own, num_threads=num_threads)
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        total = error
    totals: list[Any] = [total]
    if world_size > 1:
        totals = [None] * world_size
        dist.all_gather_object(totals, total, group=process_group)
    for each in totals:
        if isinstance(each, Exception):
            raise each
    if rank == 0:
        file_of = {name: file_name(index, largest) for name, index in mapping.items()}
        write_index(output_dir, file_of, sum(totals))
    if world_size > 1:
        dist.barrier(process_group)


def _mapping(input_dir: str, given: dict[str, int] | None) -> dict[str, int]:
    if given is None:
        given = dict.fromkeys(
            HuggingFaceStorageReader(input_dir).read_metadata().state_dict_metadata, 1
        )
    if not given or any(type(index) is not int or index < 1 for index in given.values()):
        raise InvalidRequestError(
            "expected fqn_to_index_mapping to map every FQN to the number of a file, from 1"
            if given
            else f"expected tensors to consolidate in {input_dir}, found none",
            key="fqn_to_index_mapping",
        )
    return given

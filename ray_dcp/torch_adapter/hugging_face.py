"""What `save` does for torch's `HuggingFaceStorageWriter`: its files, without its holes.

What a tensor becomes in a file is bytes and a dtype's code, whatever its number of dimensions; what
safetensors can't hold is refused before a file is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint._hf_utils import SHARDED_DIR_NAME
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError, UnsupportedValueError
from ray_dcp.format.safetensors import ALL_CODES, header, packed, sharding_metadata
from ray_dcp.io.consolidation import (
    consolidate,
    file_name,
    remove_replaced,
    write_file,
    write_index,
)
from ray_dcp.io.plain_files import INDEX_NAME
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.torch_adapter.tensors import dtype_name, host_bytes


class HuggingFaceFiles(StorageWriter):
    """Writes the files that torch's `HuggingFaceStorageWriter` is set up to write.

    Every file appears under its name when it is complete. Sharded files also say each tensor's
    global shape, so that a load notices when one is missing.

    Args:
        writer: Whose arguments count.
        place: Where the whole files go, or those of the ranks where none are made.
    """

    def __init__(self, writer: HuggingFaceStorageWriter, place: Target) -> None:
        self._place = place
        self._mapping = writer.fqn_to_index_mapping
        self._num_threads = max(1, writer.thread_count)
        self._is_sharded = writer.save_distributed
        self._consolidates = writer.save_distributed and writer.enable_consolidation
        self._num_consolidating = writer.thread_count_consolidation
        below = writer.enable_consolidation
        self._files = place_below(place, SHARDED_DIR_NAME) if below else place

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: the place was decided."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def storage_meta(self) -> StorageMeta:
        """Returns where the files are."""
        return StorageMeta(checkpoint_id=self._place.url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Takes every place."""
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Numbers the files of the ranks, from 1, where each writes its shards."""
        if not self._is_sharded:
            return plans
        return [replace(plan, storage_data=shard) for shard, plan in enumerate(plans, start=1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files.

        Raises:
            UnsupportedValueError: The state dict has values that safetensors can't hold; all are
                named, and nothing is written.
            InvalidRequestError: `fqn_to_index_mapping` lacks names.
        """
        _check_holdable(plan.items)
        files: dict[int, list[WriteItem]] = {}
        for item, index in zip(plan.items, self._indices(plan.items), strict=True):
            files.setdefault(index, []).append(item)
        largest = max(self._mapping.values()) if self._mapping else 1
        with ThreadPoolExecutor(self._num_threads) as pool:
            written = [
                pool.submit(self._write_file, _numbered(name, turn), each, planner)
                for index, items in files.items()
                for name in [file_name(index, largest, plan.storage_data)]
                for turn, each in enumerate(_once_each(items))
            ]
            results = [result for each in written for result in each.result()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _indices(self, items: Sequence[WriteItem]) -> list[int]:
        """Returns the number of the file of each item."""
        if self._mapping is None:
            return [1] * len(items)
        missing = [item.index.fqn for item in items if item.index.fqn not in self._mapping]
        if missing:
            raise InvalidRequestError(
                f"expected fqn_to_index_mapping to name a file for every tensor, but it lacks "
                f"{', '.join(map(repr, missing[:8]))}",
                key=missing[0],
            )
        return [self._mapping[item.index.fqn] for item in items]

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        entries = packed(
            (item.index.fqn, dtype_name(_data(item).properties.dtype), _data(item).chunk.sizes)
            for item in items
        )
        head = header(
            entries,
            sharding_metadata(
                {item.index.fqn: _data(item).chunk.offsets for item in items},
                {item.index.fqn: _data(item).size for item in items},
            ),
            codes=ALL_CODES,
        )
        payloads = (_bytes_of(item, planner) for item in items)
        write_file(open_storage(self._files), name, itertools.chain([head], payloads))
        return [
            WriteResult(
                item.index,
                it.end - it.begin,
                _StorageInfo(name, len(head) + it.begin, it.end - it.begin),
            )
            for item, it in zip(items, entries, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index of whole tensors, after it has consolidated if asked to.

        Only files of this save are consolidated; then those of an earlier one, which would be read
        with them, are deleted.

        Raises:
            CoverageError: The sharded files lack a part of a tensor.
        """
        stored = {result.index: result.storage_data for some in results for result in some}
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        written = {info.relative_path for info in stored.values()}
        if not self._is_sharded:
            file_of = {index.fqn: info.relative_path for index, info in stored.items()}
            write_index(self._files, file_of, sum(it.length for it in stored.values()))
        elif self._consolidates:
            mapping = self._mapping or dict.fromkeys(metadata.state_dict_metadata, 1)
            largest = max(mapping.values(), default=1)
            file_of = {
                name: file_name(mapping[name], largest) for name in metadata.state_dict_metadata
            }
            total = consolidate(
                self._files,
                self._place,
                file_of,
                num_threads=self._num_consolidating,
                only=written,
            )
            write_index(self._place, file_of, total)
            remove_replaced(self._place, set(file_of.values()))
        else:
            # Why: it is of an earlier save of whole tensors, and would decide.
            open_storage(self._files).delete([INDEX_NAME])
        remove_replaced(self._files, written)


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

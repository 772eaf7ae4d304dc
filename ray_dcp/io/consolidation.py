"""Sharded safetensors files into whole ones, byte by byte: right for every dtype, 0-d tensors too.

Each thread holds one tensor at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import CoverageError, InvalidRequestError
from ray_dcp.format.safetensors import ALL_CODES, Entry, header, packed
from ray_dcp.io.plain_files import INDEX_NAME, plain_files, plain_table
from ray_dcp.planning.coverage import lacks_parts
from ray_dcp.store.local import LocalWriter
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage

_OURS = re.compile(r"(shard-\d{5,}-)?model-\d{5,}-of-\d{5,}(\.\d+)?\.safetensors")
"""Names of `file_name`, and of further files of a rank."""


def file_name(index: int, largest: int, shard: int | None = None) -> str:
    """Returns the name of a file, as DCP and the Hugging Face hub give it.

    Args:
        index: From 1.
        largest: Highest index.
        shard: Of a rank, from 1; None for whole tensors.

    Examples:
        >>> file_name(1, 3, shard=2)
        'shard-00002-model-00001-of-00003.safetensors'
    """
    whole = f"model-{index:05d}-of-{largest:05d}.safetensors"
    return whole if shard is None else f"shard-{shard:05d}-{whole}"


def consolidate(
    input_dir: AnyPlace,
    output_dir: AnyPlace,
    file_of: Mapping[str, str],
    *,
    num_threads: int = 1,
    only: Collection[str] | None = None,
) -> int:
    """Writes whole tensors of sharded files into new files.

    Args:
        input_dir: Path, URL or other place where the sharded files are, directly.
        output_dir: Where the new files go; those of the same name there are replaced.
        file_of: FQN to the name of its file. Other tensors of `input_dir` are left out.
        num_threads: Files that are written at a time.
        only: Names of the sharded files, without what others left beside them; all if None.

    Returns:
        Bytes of all tensors that were written.

    Raises:
        InvalidRequestError: `file_of` names a tensor that no file has.
        CoverageError: The files lack a part of a tensor. Nothing is written.
        DamagedCheckpointError: A file is damaged.
        StorageError: A file can't be read or written.

    Complexity:
        O(bytes). A file appears under its name when it is complete and durable.
    """
    source, target = open_storage(input_dir), open_storage(output_dir)
    table = plain_table(source, only)
    number_of = {name: number for number, name in enumerate(table.names)}
    unknown = [name for name in file_of if name not in number_of]
    if unknown:
        raise InvalidRequestError(
            f"expected only tensors that {source.url} holds, but "
            f"{', '.join(map(repr, unknown[:8]))} are in none of its files",
            key=unknown[0],
        )
    _check_complete(table, [number_of[name] for name in file_of])
    files: dict[str, list[int]] = {}
    for name, file in file_of.items():
        files.setdefault(file, []).append(number_of[name])
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        work = [
            pool.submit(_write, table, source, target, file, numbers)
            for file, numbers in files.items()
        ]
        return sum(each.result() for each in work)


def write_file(
    storage: Storage, name: str, pieces: Iterable[bytes | bytearray | memoryview]
) -> None:
    """Writes a file that takes the place of another of its name when it is complete and durable.

    On a local path that is one step; elsewhere the old file is deleted just before.

    Args:
        storage: Where to.
        name: Of the file.
        pieces: Its bytes, in order.

    Raises:
        StorageError: It can't be written. A file that was there stays, or is gone if it failed in
            the end.
    """
    writer = storage.open_writer(name)
    try:
        for piece in pieces:
            writer.write(piece)
        if isinstance(writer, LocalWriter):
            writer.commit(create=False)
        else:
            storage.delete([name])
            writer.commit()
    except BaseException:
        writer.abort()
        raise


def write_index(output_dir: AnyPlace, file_of: Mapping[str, str], total_bytes: int) -> None:
    """Writes the index file that Hugging Face readers look for.

    Args:
        output_dir: Where the files are.
        file_of: FQN to the name of its file.
        total_bytes: Of all tensors.
    """
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(file_of)}
    open_storage(output_dir).write(INDEX_NAME, json.dumps(index, indent=2).encode())


def remove_replaced(place: AnyPlace, written: Collection[str]) -> None:
    """Deletes what an earlier save to a place left under names of `file_name`.

    Why: whoever reads the folder would read it as well.

    Args:
        place: Where the files of this save are, all of them complete.
        written: Their names, of files of whole tensors or of ranks.

    Raises:
        StorageError: They can't be deleted.
    """
    storage = open_storage(place)
    found = [entry.key for entry in plain_files(storage) if _OURS.fullmatch(entry.key)]
    storage.delete([key for key in found if key not in written])


def _check_complete(table: ChunkTable, numbers: list[int]) -> None:
    lacking = lacks_parts(table)
    short = [table.names[number] for number in numbers if lacking[number]]
    if short:
        raise CoverageError(
            f"the sharded files lack parts of {', '.join(map(repr, short[:8]))}: is the file of a "
            f"rank missing?",
            key=short[0],
        )


def _write(
    table: ChunkTable, source: Storage, target: Storage, file: str, numbers: list[int]
) -> int:
    """Writes one file, tensor after tensor; returns the bytes of all."""
    entries = packed(
        (
            table.names[number],
            table.dtypes[table.dtype[number]],
            table.shape[number, : table.ndim[number]].tolist(),
        )
        for number in numbers
    )
    tensors = (
        _gathered(table, source, number, entry)
        for number, entry in zip(numbers, entries, strict=True)
    )
    head = header(entries, {"format": "pt"}, codes=ALL_CODES)
    write_file(target, file, chain([head], tensors))
    return entries[-1].end


def _gathered(table: ChunkTable, source: Storage, number: int, entry: Entry) -> bytearray:
    """Returns the bytes of one tensor, of all its chunks."""
    data = bytearray(entry.end - entry.begin)
    raw, ndim = np.dtype(f"V{ITEMSIZE[entry.dtype]}"), len(entry.size)
    whole = np.ndarray(entry.size, raw, data)
    for chunk in np.flatnonzero(table.tensor == number).tolist():
        size = tuple(table.size[chunk, :ndim].tolist())
        start = table.offset[chunk, :ndim].tolist()
        box = tuple(slice(low, low + n) for low, n in zip(start, size, strict=True))
        part = bytearray(int(table.payload_bytes[chunk]))
        key = table.files[table.file[chunk]]
        source.read_into(key, int(table.payload_offset[chunk]), memoryview(part))
        whole[box] = np.ndarray(size, raw, part)
    return data

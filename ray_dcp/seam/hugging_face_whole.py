"""DCP's functions that make whole safetensors files of sharded ones, on any place.

The bytes are moved in `ray_dcp.transfer.consolidation`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ray_dcp.errors import InvalidRequestError
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage
from ray_dcp.transfer.consolidation import consolidate, file_name, write_index
from ray_dcp.transfer.plain_files import plain_table

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]


def consolidate_safetensors_files(
    input_dir: AnyPlace,
    output_dir: AnyPlace,
    fqn_to_index_mapping: dict[str, int] | None = None,
    num_threads: int = 1,
) -> None:
    """Makes whole tensors of the sharded files of a directory, and their index file.

    Right for every dtype and number of dimensions. Memory is that of the page cache; elsewhere than
    on local paths, one tensor a thread.

    Args:
        input_dir: Path, URL or `Location` where the sharded files are.
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
    input_dir: AnyPlace,
    output_dir: AnyPlace,
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


def _mapping(input_dir: AnyPlace, given: dict[str, int] | None) -> dict[str, int]:
    if given is None:
        given = dict.fromkeys(plain_table(open_storage(input_dir)).names, 1)
    if not given or any(type(index) is not int or index < 1 for index in given.values()):
        raise InvalidRequestError(
            "expected fqn_to_index_mapping to map every FQN to the number of a file, from 1"
            if given
            else f"expected tensors to consolidate in {input_dir}, found none",
            key="fqn_to_index_mapping",
        )
    return given

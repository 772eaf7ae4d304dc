"""Finds the raw bytes inside items that stock DCP wrote, whose place only their header tells.

The format of an item is known in `format.torch_items`; here its head is read and what it says is
compared with the chunk table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.stream_transforms import MAX_OBJECT_BYTES
from ray_dcp.format.table_check import volumes
from ray_dcp.format.torch_items import NeedMoreBytes, NotPlainTensor, TensorItem, parse_torch_save
from ray_dcp.plan.values import ChunkTable, Kind
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.blocks import read_stored

__all__ = ["ELEMENT_TYPES", "item_bytes_at_most", "locate_item", "parse_item", "view_of_item"]

_HEAD_BYTES = 4096

ELEMENT_TYPES = {size: np.dtype(f"V{size}") for size in range(1, 33)} | {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}
"""A numpy type that copies elements of a size, whatever they mean."""


def item_bytes_at_most(table: ChunkTable, chunk: int) -> int:
    """Returns how long the item of a chunk can be once its transforms are undone.

    Generous for tensors: a subclass may hold more than the elements that it shows.
    """
    if table.kind[table.tensor[chunk]] == Kind.OBJECT:
        return MAX_OBJECT_BYTES
    return 32 * max(int(volumes(table.size[chunk : chunk + 1])[0]), 0) + (16 << 20)


def locate_item(storage: Storage, table: ChunkTable, chunk: int) -> TensorItem | None:
    """Returns where the tensor of a large item lies, from the item's head alone.

    Returns:
        None when the item is no plain tensor: only `torch.load` can read it.

    Raises:
        DamagedCheckpointError: As for `parse_item`, or the file is gone or too short.
        StorageError: The file can't be read.
    """
    length = int(table.item_bytes[chunk])
    head_bytes = min(_HEAD_BYTES, length)
    while True:
        head = bytearray(head_bytes)
        key = table.files[table.file[chunk]]
        read_stored(storage, key, int(table.item_offset[chunk]), memoryview(head))
        try:
            return parse_item(table, chunk, memoryview(head))
        except NeedMoreBytes as exc:
            head_bytes = exc.num_bytes


def parse_item(table: ChunkTable, chunk: int, head: memoryview) -> TensorItem | None:
    """Returns where the tensor of an item lies, after comparing it with the chunk table.

    Returns:
        None when the item is no plain tensor: only `torch.load` can read it.

    Raises:
        NeedMoreBytes: `head` is too short.
        UnsafeCheckpointError: The item asks for code to run.
        DamagedCheckpointError: It is no item of `torch.save`, or holds another tensor.
    """
    name, file = table.names[table.tensor[chunk]], table.files[table.file[chunk]]
    try:
        item = parse_torch_save(head, int(table.item_bytes[chunk]))
    except NotPlainTensor:
        return None
    except DamagedCheckpointError as exc:
        exc.message = f"{name!r} in {file}: {exc.message}"
        raise
    tensor = table.tensor[chunk]
    size = tuple(table.size[chunk, : table.ndim[tensor]].tolist())
    dtype = table.dtypes[table.dtype[tensor]]
    if item.size != size or item.dtype != dtype:
        raise DamagedCheckpointError(
            f"expected {name!r} as {dtype} of size {size} in {file} at byte "
            f"{table.item_offset[chunk]}, found {item.dtype} of size {item.size}; load an earlier "
            f"step",
            key=file,
        )
    return item


def view_of_item(
    item: TensorItem, data: memoryview, itemsize: int, width: int
) -> npt.NDArray[np.generic]:
    """Returns the elements of an item's tensor as an array with `width` dimensions.

    Args:
        item: Where the tensor lies.
        data: The whole item.
        itemsize: Bytes of an element.
        width: At least the tensor's number of dimensions; more are added as 1, at the end.

    Raises:
        DamagedCheckpointError: The view reaches out of the item.
    """
    spare = width - len(item.size)
    payload = data[item.payload_offset : item.payload_offset + item.payload_bytes]
    try:
        return np.ndarray(
            (*item.size, *[1] * spare),
            ELEMENT_TYPES[itemsize],
            buffer=payload,
            offset=item.storage_offset * itemsize,
            strides=(*[stride * itemsize for stride in item.stride], *[itemsize] * spare),
        )
    except (ValueError, TypeError) as exc:
        raise DamagedCheckpointError(
            f"expected a tensor within its {item.payload_bytes} bytes, found one of size "
            f"{item.size}, stride {item.stride} from element {item.storage_offset}; load an "
            f"earlier step"
        ) from exc

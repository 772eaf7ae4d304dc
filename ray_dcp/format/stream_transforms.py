"""Undoes the stream transform that stock DCP can put around an item: zstd compression.

Which items have one `.metadata` tells. DCP's other transforms are plug-ins of their users, whom
only DCP's own reader calls.
Source: torch/distributed/checkpoint/_extension.py `ZStandard`; RFC 8878 3.1 (zstd frames).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow

from ray_dcp.errors import DamagedCheckpointError

pa: Any = pyarrow

MAX_OBJECT_BYTES = 4 << 30
"""Longest object that is unpacked. Why: a few bytes can unpack to any number of them."""
ZSTD = "stream.zstd/1"
"""The one transform that is known here, as `.metadata` names it."""
_ITEM_STARTS = (b"PK", b"\x80")
"""A zip of `torch.save`, and the bare pickles that it wrote before torch 1.6."""
_MAX_LAYERS = 4
_PIECE_BYTES = 1 << 20
_WAY_OUT = (
    "if it was saved with _extensions, load with "
    "storage_reader=FileSystemReader(path, _extension_registry=...)"
)


def unpacked_item(
    data: bytes | memoryview, transforms: Sequence[str], *, max_bytes: int = MAX_OBJECT_BYTES
) -> bytes | memoryview:
    """Returns an item as it was before the transforms that it went through.

    Args:
        data: One whole item, as stored.
        transforms: Their names, as `ForeignMetadata.transforms` has them; empty for none.
        max_bytes: Longest item to expect.

    Raises:
        DamagedCheckpointError: A transform is not known here; or the item is damaged, or longer
            than expected.
    """
    unknown = [name for name in transforms if name != ZSTD]
    if unknown:
        raise DamagedCheckpointError(
            f"expected the stream transform {ZSTD}, found {unknown[0][:100]!r}, which only its "
            f"own plug-in undoes; {_WAY_OUT}, else load an earlier step"
        )
    if len(transforms) > _MAX_LAYERS:
        raise DamagedCheckpointError(
            f"expected an item in at most {_MAX_LAYERS} layers of zstd, found {len(transforms)}"
        )
    for _ in transforms:
        data = _unpacked(data, max_bytes)
    return data


def check_plain(data: bytes | memoryview) -> None:
    """Checks that an item begins as `torch.save` begins all of its own.

    Raises:
        DamagedCheckpointError: It begins in another way.
    """
    if not bytes(data[:2]).startswith(_ITEM_STARTS):
        raise DamagedCheckpointError(
            f"expected an item of torch.save, found one that begins with "
            f"{bytes(data[:4]).hex() or 'nothing'}; {_WAY_OUT}, else load an earlier step"
        )


def _unpacked(data: bytes | memoryview, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    room = memoryview(bytearray(_PIECE_BYTES))
    try:
        with pa.CompressedInputStream(pa.py_buffer(data), "zstd") as stream:
            # Why not `read`: pyarrow 26 never frees what it took for a piece that fails to unpack.
            while count := stream.readinto(room):
                pieces.append(bytes(room[:count]))
                num_bytes += count
                if num_bytes > max_bytes:
                    break
    except OSError as error:
        raise DamagedCheckpointError(
            f"expected an item compressed with zstd, found {error}; load an earlier step"
        ) from error
    if num_bytes > max_bytes:
        raise DamagedCheckpointError(
            f"expected an item of at most {max_bytes} bytes, found one that unpacks to more; load "
            "an earlier step"
        )
    return b"".join(pieces)

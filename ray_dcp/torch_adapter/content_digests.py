"""Digests of the content of values, by which ranks detect replicas that differ.

Digests have 64 bits and cover all bytes of a value. Equal bytes have equal digests on every device.
A tensor on a GPU is digested there: only 64 bytes of each 64 KiB, and the bytes behind its last
whole 64 KiB, are copied to the host.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ray_dcp.core.checksums import block_check, block_checks, digest_bytes
from ray_dcp.core.values import UInt64Array
from ray_dcp.torch_adapter.tensors import device_bytes, host_bytes

SEGMENT_BYTES = 64 << 10
"""A digest combines the xxh3-64 of each segment, so that a GPU can hash many of them in
parallel."""

_SEGMENTS_AT_ONCE = 512
"""Temporarily takes three times as much device memory."""
_MOST_SUMS = 16 << 10
"""Most segments whose sums are kept: 64 MiB. Each pass over them is 380 operations."""
_MOST_END_BYTES = 256 << 20
_SCANNED_BYTES = 64
"""Bytes of each segment that are copied to the host."""


def bytes_digest(data: bytes | memoryview) -> int:
    """Returns a 64-bit digest of the data (half of its xxh3-128), never 0."""
    return int.from_bytes(digest_bytes(data)[:8], "little") or 1


def content_digest(tensor: torch.Tensor) -> int:
    """Returns a 64-bit digest of all elements of a plain tensor, never 0.

    Complexity: 2 us for a small CPU tensor; 10 to 20 GB/s per core.
    """
    if tensor.is_cuda:
        return content_digests_on_device([tensor])[0]
    data = host_bytes(tensor)
    if len(data) <= SEGMENT_BYTES:
        return block_check(data) or 1
    return _of_segments(block_checks(data, SEGMENT_BYTES))


def content_digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns `content_digest` of each tensor; those on a GPU are digested together."""
    on_device: dict[torch.device, list[int]] = defaultdict(list)
    found = [0] * len(tensors)
    for index, tensor in enumerate(tensors):
        if tensor.is_cuda:
            on_device[tensor.device].append(index)
        else:
            found[index] = content_digest(tensor)
    for indices in on_device.values():
        digests = content_digests_on_device([tensors[index] for index in indices])
        for index, value in zip(indices, digests, strict=True):
            found[index] = value
    return found


def content_digests_on_device(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns `content_digest` of tensors of one device, computed there by integer operations.

    Complexity: one copy to the host for each 256 MiB of bytes behind the last whole segments, at
    least one; up to 500 MiB of device memory, and a copy of one tensor that is not contiguous.
    """
    found: list[int] = []
    first = held = 0
    ends = [tensor.nbytes % SEGMENT_BYTES for tensor in tensors]
    for stop, end_bytes in enumerate(ends):
        if held + end_bytes > _MOST_END_BYTES:
            found += _digests_on_device(tensors[first:stop])
            first, held = stop, 0
        held += end_bytes
    return found + _digests_on_device(tensors[first:]) if first < len(tensors) else found


def _digests_on_device(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns `content_digest` of tensors of one device, with one copy to the host."""
    sums: list[torch.Tensor] = []
    scanned: list[torch.Tensor] = []
    ends: list[torch.Tensor] = []
    counts: list[int] = []

    def scan() -> None:
        if sums:
            scanned.append(_scanned(torch.cat(sums)).view(-1).view(torch.uint8))
            sums.clear()

    with torch.no_grad():
        for tensor in tensors:
            flat = device_bytes(tensor)
            counts.append(len(flat) // SEGMENT_BYTES)
            whole, end = flat.tensor_split([counts[-1] * SEGMENT_BYTES])
            # Why cloned: a view would keep a copy of the whole tensor alive.
            ends.append(end if tensor.is_contiguous() else end.clone())
            for piece in whole.split(_SEGMENTS_AT_ONCE * SEGMENT_BYTES):
                sums.append(_block_sums(piece))
                if sum(map(len, sums)) >= _MOST_SUMS:
                    scan()
        scan()
        data = host_bytes(torch.cat([*scanned, *ends]))
    behind = _SCANNED_BYTES * sum(counts)
    checks = _segment_checks(np.frombuffer(data[:behind], np.uint64).reshape(-1, 8))
    known = np.split(checks, np.cumsum(counts)[:-1])
    bounds = pairwise(np.cumsum([behind, *map(len, ends)]).tolist())
    last = [block_checks(data[low:high], SEGMENT_BYTES) for low, high in bounds]
    return [_of_segments(np.concatenate(own)) for own in zip(known, last, strict=True)]


def _of_segments(checks: UInt64Array) -> int:
    """Returns the digest of content whose segments have these checksums."""
    if len(checks) == 1:
        return int(checks[0]) or 1
    return bytes_digest(checks.astype("<u8").tobytes()) if len(checks) else block_check(b"")


# The rest is xxh3-64 of segments: blocks of 16 stripes of 8 words, the last stripe separately.
# Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md (long inputs, no seed).
# Operations on int64 wrap like those on uint64; only right shifts must be masked.

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME64_1 = 0x9E3779B1, 0x9E3779B185EBCA87
_START = (
    0xC2B2AE3D, _PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, _PRIME32_1,
)  # fmt: skip
_LOW_HALF = (1 << 32) - 1
_BLOCKS = SEGMENT_BYTES >> 10


def _secret_words(offset: int) -> tuple[int, ...]:
    """Returns 8 words of the secret, starting at any byte."""
    return struct.unpack_from("<8Q", _SECRET, offset)


@cache
def _words_on(device: torch.device, words: tuple[Any, ...]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.uint64).view(np.int64)).to(device)


@cache
def _keys_on(device: torch.device) -> torch.Tensor:
    keys = [[_secret_words(8 * stripe) for stripe in range(16)] for _ in range(_BLOCKS)]
    keys[-1][-1] = _secret_words(121)
    return _words_on(device, tuple(map(tuple, keys)))


def _block_sums(data: torch.Tensor) -> torch.Tensor:
    """Returns the amounts that each block of whole segments adds to the 8 sums of its segment.

    Args:
        data: uint8[n * 65536], n segments.

    Returns:
        int64[n, 64, 8].
    """
    words = data if data.storage_offset() % 8 == 0 else data.clone()
    words = words.view(torch.int64).view(-1, _BLOCKS, 16, 8)
    mixed = words ^ _keys_on(data.device)
    high = (mixed >> 32).bitwise_and_(_LOW_HALF)
    mixed.bitwise_and_(_LOW_HALF).mul_(high)
    swapped = words.sum(2).view(-1, _BLOCKS, 4, 2).flip(3).view(-1, _BLOCKS, 8)
    return mixed.sum(2).add_(swapped)


def _scanned(sums: torch.Tensor) -> torch.Tensor:
    """Returns the state after each segment from what its blocks add: int64[n, 64, 8] to [n, 8]."""
    found = _words_on(sums.device, _START).repeat(len(sums), 1)
    scramble = _words_on(sums.device, _secret_words(128))
    for block in range(_BLOCKS - 1):
        found += sums[:, block]
        found ^= (found >> 47).bitwise_and_((1 << 17) - 1)
        found.bitwise_xor_(scramble).mul_(_PRIME32_1)
    found += sums[:, _BLOCKS - 1]
    return found


def _segment_checks(scanned: UInt64Array) -> UInt64Array:
    """Returns the xxh3-64 of segments, uint64[n], given the result of `_scanned`."""
    keyed = scanned ^ np.array(_secret_words(11), np.uint64)
    result = _folded_product(keyed[:, 0::2], keyed[:, 1::2]).sum(1, dtype=np.uint64)
    result += np.uint64(SEGMENT_BYTES * _PRIME64_1 % (1 << 64))
    result ^= result >> np.uint64(37)
    result *= np.uint64(0x165667919E3779F9)
    return np.asarray(result ^ (result >> np.uint64(32)))


def _folded_product(one: UInt64Array, other: UInt64Array) -> UInt64Array:
    """Returns, for each 128-bit product, its low half xor its high half."""
    half, low = np.uint64(32), np.uint64(_LOW_HALF)
    a, b, c, d = one & low, one >> half, other & low, other >> half
    middle = (a * c >> half) + (b * c & low) + a * d
    return np.asarray(one * other ^ (b * d + (b * c >> half) + (middle >> half)))

"""Work on tensors of CUDA devices: copies to staging memory, and digests.

Copies go directly into staging memory, on a separate stream. They follow an event that the caller's
stream records when the state is captured, the moment of the save. Later work of the caller's stream
runs beside them, so the state must not be written before the copies are done:

    caller's stream   ---- step n ----*---- forward, backward of step n + 1 ----| may write
    copy stream                        `--- copies -----------------------------'
                                  moment of the save

Reused staging memory is registered with the driver (pinned). The device writes into pinned memory
by itself, at the rate of its bus; other copies go through a small buffer of the driver, and block
until they are done.

*Careful*: registered pages must not be unmapped, or the device would write to their old addresses.
So this module keeps each registered array until its owner, the staging memory, unregisters it.
*Careful*: a thread starts on device 0, and some calls of the driver create a context of hundreds
of MB on the device of their thread; so does leaving a stream of another device. So each such call
names its device.

Digests have 64 bits and cover all bytes of a value; by them ranks detect replicas that differ.
Equal bytes have equal digests on every device. A tensor on a GPU is digested there: only 64 bytes
of each 64 KiB, and the bytes behind its last whole 64 KiB, are copied to the host.
"""

from __future__ import annotations

import logging
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch

from ray_dcp.core.checksums import block_check, block_checks, digest_bytes
from ray_dcp.core.values import UInt64Array
from ray_dcp.errors import InternalError
from ray_dcp.torch_adapter.tensors import device_bytes, host_bytes, is_direct

logger = logging.getLogger(__name__)

_JOINED_BYTES = 8 << 20
"""Small tensors are joined on their device, up to this size at a time, and copied as one."""
_STRIDED_BYTES = 32 << 20
"""Tensors that are not contiguous are made contiguous on their device, about this much at a
time."""
_MOST_TEMPORARY_BYTES = 128 << 20
"""Device memory for both. Why so little: training may have allocated nearly all memory."""
_LEAST_BYTES = 256 << 10
"""Least free memory of a device for the copy of a tensor that is not contiguous."""

_registered: dict[int, np.ndarray] = {}
"""Memory registered with the driver, by address."""
# Why: the driver accepts no calls of a forked child, and the memory may be freed there.
os.register_at_fork(after_in_child=_registered.clear)


class Cuda:
    """Copies from devices of CUDA and ROCm, through torch's CUDA API. Thread-safe.

    A *mark* is an event: it follows all work that a stream had been given when it was recorded.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def in_use(self) -> bool:
        """Whether this process uses any such device."""
        used: bool = torch.cuda.is_initialized()
        return used

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is on such a device."""
        return tensor.is_cuda

    def now(self, device: torch.device) -> Any:
        """Returns a mark that follows all work of the caller's stream of a device so far.

        *Careful*: the caller's stream is known only in the caller's thread.
        """
        return torch.cuda.current_stream(device).record_event()

    def stream(self, device: torch.device, after: Any) -> torch.cuda.Stream:
        """Returns the copy stream of a device; its further work follows a mark."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_event(after)
        return stream

    def copy(
        self, stream: torch.cuda.Stream, target: np.ndarray, read: Callable[[], torch.Tensor]
    ) -> object:
        """Starts a copy; returns an object that must be kept alive until `drain`.

        Args:
            stream: A result of `stream`.
            target: uint8[n], in host memory.
            read: Returns uint8[n] on the device; called on the stream.
        """
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            source = read()
            torch.from_numpy(target).copy_(source, non_blocking=True)
        return source

    def give(self, stream: torch.cuda.Stream, work: Callable[[], Any]) -> None:
        """Starts work on a stream of `stream`; what it uses must be kept alive until `drain`."""
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            work()

    def drain(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Waits until a stream of `stream` has finished all its work so far."""
        with torch.cuda.device(device):
            # Why blocking: a spinning thread would take a processor from training meanwhile.
            stream.record_event(torch.cuda.Event(blocking=True)).synchronize()

    def pin(self, device: torch.device, memory: np.ndarray) -> Callable[[], None] | None:
        """Registers host memory for faster copies; returns a function that undoes it, or None.

        Args:
            device: A device that will copy; the registration is valid for the others too.
            memory: uint8[n], which must not be registered yet.

        Returns:
            None if the memory can't be registered.
        """
        if sum(map(len, list(_registered.values()))) + len(memory) > _most_pinned_bytes():
            return None
        address = int(memory.__array_interface__["data"][0])
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            if int(cudart.cudaHostRegister(address, len(memory), _PORTABLE)) != 0:
                # Otherwise the user's next kernel would report the error.
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)
                logger.info("Staging memory could not be pinned; copies from the GPU take longer")
                return None
        _registered[address] = memory

        def undo() -> None:
            if _registered.pop(address, None) is not None:
                with torch.cuda.device(device):
                    cudart.cudaHostUnregister(address)

        return undo


_PORTABLE = 1
"""`cudaHostRegisterPortable`: valid for all devices of the process."""


def _most_pinned_bytes() -> int:
    """Returns the most memory that a process registers: half of the machine's.

    Why: registered memory can't be swapped out or moved. Further memory is copied at the lower
    rate.
    """
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


CUDA = Cuda()
"""The instance of this process."""


class Moment:
    """The moment at which a state was captured, as a mark on each device of its tensors.

    Args:
        values: Values of the state; those that are no tensors are ignored.
        driver: Driver of the devices.
    """

    def __init__(self, values: Sequence[Any], driver: Cuda) -> None:
        self.driver = driver
        self.marks: dict[torch.device, Any] = {}
        # Why this check first: it spares a look at each tensor if no device was ever used.
        if driver.in_use():
            on = (v for v in values if isinstance(v, torch.Tensor) and driver.has(v))
            self.marks = {device: driver.now(device) for device in {v.device for v in on}}

    def filler(self, values: Sequence[Any], host: Any) -> DeviceFiller | None:
        """Returns a filler that copies values as of this moment; None if none is on a device.

        Args:
            values: The tensor of each row that the filler is called for.
            host: Filler for tensors in host memory.
        """
        return DeviceFiller(values, host, self.driver, self.marks) if self.marks else None


class DeviceFiller:
    """Implements `ray_dcp.stage.window_filler.Filler` for tensors on devices and in host memory.

    Args:
        values: The tensor of each row that the filler is called for.
        host: Filler for tensors in host memory.
        driver: Driver of the devices.
        marks: By device, the mark that the copies follow.
    """

    def __init__(
        self, values: Sequence[Any], host: Any, driver: Cuda, marks: Mapping[torch.device, Any]
    ) -> None:
        self._values = values
        self._host = host
        self._driver = driver
        self._marks = marks
        self._streams: dict[torch.device, Any] = {}
        self._under_way: list[object] = []
        self._temporary_bytes = 0
        self.pin = partial(driver.pin, next(iter(marks)))

    def fill(self, row: int, start: int, target: np.ndarray) -> None:
        """See `Filler.fill`."""
        tensor = self._values[row]
        if not self._driver.has(tensor):
            self._host.fill(row, start, target)
            return
        _check(row, start, len(target), tensor.nbytes)
        low, step = 0, len(target) if is_direct(tensor) else _STRIDED_BYTES
        while low < len(target):
            part = target[low : low + step]
            read = partial(device_part, tensor, start + low, len(part))
            try:
                self._copy(tensor.device, part, read, 0 if is_direct(tensor) else len(part))
            except torch.OutOfMemoryError:
                if len(part) <= _LEAST_BYTES:
                    raise
                step = len(part) // 4
                continue
            low += len(part)

    def fill_many(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], target: np.ndarray
    ) -> None:
        """See `Filler.fill_many`."""
        begin = 0
        items = list(zip(rows, starts, lengths, strict=True))
        for device, run in groupby(items, lambda item: self._device_of(item[0])):
            for part in _parts(list(run)) if device is not None else [list(run)]:
                end = begin + sum(length for _, _, length in part)
                if device is None:
                    self._host.fill_many(*map(list, zip(*part, strict=True)), target[begin:end])
                elif len(part) == 1:
                    self.fill(part[0][0], part[0][1], target[begin:end])
                else:
                    self._join_items(device, part, target[begin:end])
                begin = end

    def finish(self) -> None:
        """See `Filler.finish`."""
        try:
            self._wait()
        finally:
            self._host.finish()

    def _wait(self) -> None:
        """Waits until the devices have finished all work that they were given."""
        # Why a stack: if one device fails, the others still write.
        with ExitStack() as stack:
            stack.callback(self._under_way.clear)
            for device, stream in self._streams.items():
                stack.callback(self._driver.drain, device, stream)
        self._temporary_bytes = 0

    def _device_of(self, row: int) -> torch.device | None:
        tensor = self._values[row]
        return tensor.device if self._driver.has(tensor) else None

    def _join_items(
        self, device: torch.device, items: Sequence[tuple[int, int, int]], target: np.ndarray
    ) -> None:
        for row, start, length in items:
            _check(row, start, length, self._values[row].nbytes)

        def read() -> torch.Tensor:
            return torch.cat([device_part(self._values[row], s, n) for row, s, n in items])

        try:
            self._copy(device, target, read, len(target))
        except torch.OutOfMemoryError:
            begin = 0
            for row, start, length in items:
                self.fill(row, start, target[begin : begin + length])
                begin += length

    def _copy(
        self,
        device: torch.device,
        target: np.ndarray,
        read: Callable[[], torch.Tensor],
        temporary_bytes: int,
    ) -> None:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._driver.stream(device, self._marks[device])
        if self._temporary_bytes + temporary_bytes > _MOST_TEMPORARY_BYTES:
            self._wait()
        self._temporary_bytes += temporary_bytes
        with torch.no_grad():
            try:
                kept = self._driver.copy(stream, target, read)
            except torch.OutOfMemoryError:
                # Why again: copies in progress hold some of the device's memory.
                self._wait()
                kept = self._driver.copy(stream, target, read)
        self._under_way.append(kept)


def device_part(tensor: torch.Tensor, start: int, num_bytes: int) -> torch.Tensor:
    """Returns a range of `device_bytes`.

    Of a tensor that is not contiguous, only the rows with these bytes are made contiguous.

    Args:
        tensor: A plain tensor.
        start: First byte.
        num_bytes: Number of bytes.

    Examples:
        >>> device_part(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).T, 1, 2).tolist()
        [3, 2]
    """
    while tensor.dim() and num_bytes and not is_direct(tensor):
        row_bytes = tensor.nbytes // len(tensor)
        first, last = start // row_bytes, -(-(start + num_bytes) // row_bytes)
        start -= first * row_bytes
        if last - first > 1:
            tensor = tensor[first:last]
            break
        tensor = tensor[first]
    return device_bytes(tensor)[start : start + num_bytes]


def _parts(items: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    parts: list[list[tuple[int, int, int]]] = [[]]
    held = 0
    for item in items:
        if parts[-1] and held + item[2] > _JOINED_BYTES:
            parts.append([])
            held = 0
        parts[-1].append(item)
        held += item[2]
    return parts


def _check(row: int, start: int, num_bytes: int, whole: int) -> None:
    if start + num_bytes > whole:
        raise InternalError(
            f"expected bytes [{start}, {start + num_bytes}) of row {row}, found an item of {whole} "
            f"bytes; please report this"
        )


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

"""Copies from CUDA devices to staging memory.

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
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ray_dcp.errors import InternalError
from ray_dcp.torch_adapter.tensors import device_bytes, is_direct

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

"""Copies tensors of CUDA devices straight into staging memory, on a stream of their own.

The copies are ordered behind the moment of the save: an event that the caller's stream was given
when the state was captured. What the caller's stream is given later goes on beside them, so that
nobody may write into the state before the copies are done. Staging memory that is used again is
registered with the driver (pinned): the device then writes into it by itself, at the rate of its
bus, where a copy otherwise goes by way of a small buffer of the driver's and returns when it is
done.

*Careful*: pages that are registered must not be unmapped, or the device would write to where they
were. So this module keeps each such array until its owner, the staging memory, gives it back.
*Careful*: a thread begins on device 0, and some calls of the driver make a context on the device
of their thread, with hundreds of MB; so does leaving a stream of another device. So each such call
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

from ray_dcp.errors import InternalError, UnsupportedValueError
from ray_dcp.torch_adapter.tensors import lost_memory

logger = logging.getLogger(__name__)

_JOINED_BYTES = 8 << 20
"""Small tensors are joined on their device, this much at a time, and copied as one."""
_STRIDED_BYTES = 32 << 20
"""Tensors that are not contiguous are made so on their device, about this much at a time."""
_MOST_TEMPORARY_BYTES = 128 << 20
"""Memory of the devices for both. Why so little: training may have taken nearly all there is."""
_LEAST_BYTES = 256 << 10
"""Where a device has less memory than this, a tensor that is not contiguous can't be copied."""

_registered: dict[int, np.ndarray] = {}
"""What is registered with a driver, by address."""
# Why: the driver takes no calls of a child that was forked, and the memory may go there.
os.register_at_fork(after_in_child=_registered.clear)


class Cuda:
    """What copies from devices: those of CUDA and ROCm, as torch has them. Thread-safe.

    A *mark* stands for all that a stream had been given by then: an event.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def in_use(self) -> bool:
        """Whether this process uses any such device."""
        used: bool = torch.cuda.is_initialized()
        return used

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device."""
        return tensor.is_cuda

    def now(self, device: torch.device) -> Any:
        """Returns a mark behind all that the caller's stream of a device was given so far.

        *Careful*: which stream is the caller's is known in the caller's thread alone.
        """
        return torch.cuda.current_stream(device).record_event()

    def stream(self, device: torch.device, after: Any) -> torch.cuda.Stream:
        """Returns the stream beside the caller's, whose further work comes after a mark."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_event(after)
        return stream

    def copy(
        self, stream: torch.cuda.Stream, target: np.ndarray, read: Callable[[], torch.Tensor]
    ) -> object:
        """Begins to copy; returns what must be kept until `drain`.

        Args:
            stream: Of `stream`.
            target: uint8[n], in host memory.
            read: Returns uint8[n] on the device; called on the stream.
        """
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            source = read()
            torch.from_numpy(target).copy_(source, non_blocking=True)
        return source

    def give(self, stream: torch.cuda.Stream, work: Callable[[], Any]) -> None:
        """Begins work on a stream of `stream`; what it uses must be kept until `drain`."""
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            work()

    def drain(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Returns when all that a stream of `stream` was given so far is done."""
        with torch.cuda.device(device):
            # Why blocking: a thread that spins would take a processor from training meanwhile.
            stream.record_event(torch.cuda.Event(blocking=True)).synchronize()

    def pin(self, device: torch.device, memory: np.ndarray) -> Callable[[], None] | None:
        """Registers host memory for faster copies; returns what undoes it, None if it can't.

        Args:
            device: One that will copy; it serves the others as well.
            memory: uint8[n], which must not be registered yet.
        """
        if sum(map(len, list(_registered.values()))) + len(memory) > _most_pinned_bytes():
            return None
        address = int(memory.__array_interface__["data"][0])
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            if int(cudart.cudaHostRegister(address, len(memory), _PORTABLE)) != 0:
                # Or the next kernel of the user's would be told of it.
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
"""`cudaHostRegisterPortable`: for all devices of the process."""


def _most_pinned_bytes() -> int:
    """Returns how much memory a process registers at most: half of the machine's.

    Why: what is registered can't be swapped out or moved. More is copied at the slower rate.
    """
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


CUDA = Cuda()
"""Of this process."""


class Moment:
    """When a state was captured, as the devices of its tensors know it.

    Args:
        values: Tensors, and others.
        driver: Of the devices.
    """

    def __init__(self, values: Sequence[Any], driver: Cuda) -> None:
        self.driver = driver
        self.marks: dict[torch.device, Any] = {}
        # Why asked first: where no device was ever used nobody looks at each tensor.
        if driver.in_use():
            on = (v for v in values if isinstance(v, torch.Tensor) and driver.has(v))
            self.marks = {device: driver.now(device) for device in {v.device for v in on}}

    def filler(self, values: Sequence[Any], host: Any) -> DeviceFiller | None:
        """Returns what copies the values as they are at this moment; None if none is on a device.

        Args:
            values: The tensor behind each row that it is asked for.
            host: Copies those in host memory.
        """
        return DeviceFiller(values, host, self.driver, self.marks) if self.marks else None


class DeviceFiller:
    """Implements `ray_dcp.stage.copying.Filler` for tensors some of which are on devices.

    Args:
        values: The tensor behind each row that it is asked for.
        host: Copies those in host memory.
        driver: Of the devices.
        marks: Of each device: behind it the copies come.
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
                    self._join(device, part, target[begin:end])
                begin = end

    def finish(self) -> None:
        """See `Filler.finish`."""
        try:
            self._wait()
        finally:
            self._host.finish()

    def _wait(self) -> None:
        """Returns when what the devices were given is done."""
        # Why a stack: where one device fails, the others still write.
        with ExitStack() as stack:
            stack.callback(self._under_way.clear)
            for device, stream in self._streams.items():
                stack.callback(self._driver.drain, device, stream)
        self._temporary_bytes = 0

    def _device_of(self, row: int) -> torch.device | None:
        tensor = self._values[row]
        return tensor.device if self._driver.has(tensor) else None

    def _join(
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
                # Why once more: what is under way has some of the device's memory.
                self._wait()
                kept = self._driver.copy(stream, target, read)
        self._under_way.append(kept)


def device_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a plain tensor as uint8[n] in C order, on its device.

    A view of its memory when that is contiguous. See `tensors.host_bytes`.

    Raises:
        UnsupportedValueError: Its memory was freed: a kernel that reads it ends all use of CUDA.

    Examples:
        >>> device_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).T).tolist()
        [1, 3, 2, 4]
    """
    if (reason := lost_memory(tensor)) is not None:
        raise UnsupportedValueError(f"a tensor {reason}")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(-1).view(torch.uint8)


def device_part(tensor: torch.Tensor, start: int, num_bytes: int) -> torch.Tensor:
    """Returns some of the bytes of `device_bytes`.

    Of a tensor that is not contiguous no more than its rows with them are made so.

    Args:
        tensor: A plain one.
        start: The first byte.
        num_bytes: How many.

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


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its elements in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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

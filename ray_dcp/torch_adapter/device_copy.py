"""Copies tensors of CUDA devices straight into staging memory, on a stream of their own.

The stream waits for what the caller's has been given so far, so that the bytes are those of the
moment of the save, and training's own kernels may go on beside the copy. Staging memory that is
used again is registered with the driver (pinned): the device then writes into it by itself, at the
rate of its bus, where it otherwise goes by way of a small buffer of the driver's.

*Careful*: pages that are registered must not be unmapped, or the device would write to where they
were. So this module keeps each such array until it is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ray_dcp.errors import InternalError

logger = logging.getLogger(__name__)

_JOINED_BYTES = 8 << 20
"""Small tensors are joined on their device, this much at a time, and copied as one."""

_registered: dict[int, np.ndarray] = {}
"""What is registered with a driver, by address."""


class Cuda:
    """What copies from devices: those of CUDA and ROCm, as torch has them.

    Calls of one filler come from one thread.
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

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns a stream beside the caller's, which waits for all that one was given so far."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def copy(
        self, stream: torch.cuda.Stream, target: np.ndarray, read: Callable[[], torch.Tensor]
    ) -> object:
        """Begins to copy; returns what must be kept until `wait`.

        Args:
            stream: Of `stream`.
            target: uint8[n], in host memory.
            read: Returns uint8[n] on the device; called on the stream.
        """
        with torch.cuda.stream(stream):
            source = read()
            torch.from_numpy(target).copy_(source, non_blocking=True)
        return source

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Returns when all that was begun on a stream is done."""
        stream.synchronize()

    def pin(self, memory: np.ndarray) -> Callable[[], None] | None:
        """Registers host memory for faster copies; returns what undoes it, None if it can't."""
        address = int(memory.__array_interface__["data"][0])
        cudart: Any = torch.cuda.cudart()
        if int(cudart.cudaHostRegister(address, len(memory), 1)) != 0:
            # Or the next kernel of the user's would be told of it.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            logger.info("Staging memory could not be pinned; copies from the GPU take longer")
            return None
        _registered[address] = memory

        def undo() -> None:
            if _registered.pop(address, None) is not None:
                cudart.cudaHostUnregister(address)

        return undo


CUDA = Cuda()
"""Of this process."""


class DeviceFiller:
    """Implements `ray_dcp.stage.copying.Filler` for tensors some of which are on devices.

    Args:
        values: The tensor behind each row that it is asked for.
        host: Copies those in host memory.
        driver: Of the devices.
    """

    def __init__(self, values: Sequence[Any], host: Any, driver: Cuda) -> None:
        self._values = values
        self._host = host
        self._driver = driver
        self._streams: dict[torch.device, Any] = {}
        self._under_way: list[object] = []
        self._row = -1
        self._bytes: torch.Tensor | None = None
        self.pin = driver.pin

    def fill(self, row: int, start: int, target: np.ndarray) -> None:
        """See `Filler.fill`."""
        tensor = self._values[row]
        if not self._driver.has(tensor):
            self._host.fill(row, start, target)
            return
        _check(row, start, len(target), tensor.nbytes)

        def read() -> torch.Tensor:
            # Why kept: one that is not contiguous is made so each time it is asked for.
            if row != self._row or self._bytes is None:
                self._row, self._bytes = row, device_bytes(tensor)
            return self._bytes[start : start + len(target)]

        self._copy(tensor.device, target, read)

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
        # Why a stack: where one device fails, the others still write.
        with ExitStack() as stack:
            stack.callback(self._forget)
            for stream in self._streams.values():
                stack.callback(self._driver.wait, stream)
        self._host.finish()

    def _forget(self) -> None:
        self._under_way.clear()
        self._row, self._bytes = -1, None

    def _device_of(self, row: int) -> torch.device | None:
        tensor = self._values[row]
        return tensor.device if self._driver.has(tensor) else None

    def _join(
        self, device: torch.device, items: Sequence[tuple[int, int, int]], target: np.ndarray
    ) -> None:
        for row, start, length in items:
            _check(row, start, length, self._values[row].nbytes)

        def read() -> torch.Tensor:
            found = (device_bytes(self._values[row])[s : s + n] for row, s, n in items)
            return torch.cat(list(found))

        self._copy(device, target, read)

    def _copy(
        self, device: torch.device, target: np.ndarray, read: Callable[[], torch.Tensor]
    ) -> None:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._driver.stream(device)
        with torch.no_grad():
            self._under_way.append(self._driver.copy(stream, target, read))


def filler_for(values: Sequence[Any], host: Any, driver: Cuda = CUDA) -> DeviceFiller | None:
    """Returns what copies tensors some of which are on devices; None when none is.

    Args:
        values: As for `DeviceFiller`.
        host: As there.
        driver: As there.
    """
    return DeviceFiller(values, host, driver) if _any_on(driver, values) else None


def pin_for(values: Sequence[Any], driver: Cuda = CUDA) -> Callable[..., Any] | None:
    """Returns `Cuda.pin` if some values are tensors on such a device."""
    return driver.pin if _any_on(driver, values) else None


def _any_on(driver: Cuda, values: Sequence[Any]) -> bool:
    # Why asked first: where no device was ever used nobody looks at each tensor.
    return driver.in_use() and any(
        isinstance(value, torch.Tensor) and driver.has(value) for value in values
    )


def device_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a plain tensor as uint8[n] in C order, on its device.

    A view of its memory when that is contiguous. See `tensors.host_bytes`.

    Example:
        >>> device_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).T).tolist()
        [1, 3, 2, 4]
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(-1).view(torch.uint8)


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

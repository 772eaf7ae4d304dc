"""A played driver of devices: it does nothing before it has to, and finds what a real one hides.

Its devices' tensors lie in host memory. A stream is a line of work that is done when somebody waits
for a mark behind it, and no earlier: a copy that was not waited for has not happened. What the
caller's stream is given after the mark of a save (training) is done before the copies where
nothing keeps it from that, as on a device that is quick.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ray_dcp.torch_adapter.devices import Cuda


@dataclass
class Line:
    """A stream: work that is begun in its order. Some of it waits for a mark of another line."""

    name: str
    work: list[tuple[Callable[[], None], Mark | None]] = field(default_factory=list)
    done: int = 0

    def mark(self) -> Mark:
        return Mark(self, len(self.work))

    def run(self, end: int) -> None:
        while self.done < end:
            work, after = self.work[self.done]
            self.done += 1
            if after is not None:
                after.line.run(after.end)
            work()


@dataclass(frozen=True)
class Mark:
    line: Line
    end: int


class Played(Cuda):
    """The driver. Tensors are its devices' if their memory was given to `own`.

    Args:
        *own: Tensors of its devices.
        fails_at: The number of the copy that fails, when it is done: the device is lost then.
        memory_bytes: Of the device, for what copies need for a moment; None for any.
    """

    def __init__(
        self, *own: torch.Tensor, fails_at: int | None = None, memory_bytes: int | None = None
    ) -> None:
        self._own = {one.untyped_storage().data_ptr() for one in own}
        self.callers = Line("the caller's")
        self.lines: dict[str, Line] = {}
        self.told: list[str] = []
        self.registered: dict[int, int] = {}
        self.registered_on: list[str] = []
        self.num_copied = 0
        self.is_lost = False
        self._under_way: list[tuple[int, int]] = []
        self._fails_at = fails_at
        self.memory_bytes = memory_bytes
        self._temporary: list[weakref.ref[torch.Tensor]] = []
        self.most_temporary_bytes = 0

    def own(self, *tensors: torch.Tensor) -> None:
        self._own |= {one.untyped_storage().data_ptr() for one in tensors}

    def launch(self, work: Callable[[], None]) -> None:
        """Gives a kernel to the caller's stream."""
        self.callers.work.append((work, None))

    def synchronize(self) -> None:
        """Does all that every stream was given."""
        for line in [self.callers, *self.lines.values()]:
            line.run(len(line.work))

    @property
    def num_under_way(self) -> int:
        """Copies that were begun and not waited for."""
        return len(self._under_way)

    # What `Cuda` has

    def in_use(self) -> bool:
        return bool(self._own)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() in self._own

    def now(self, device: torch.device) -> Mark:
        self.told.append("now")
        return self.callers.mark()

    def stream(self, device: torch.device, after: Mark) -> Line:
        self.told.append("behind the caller's stream")
        line = self.lines.setdefault(str(device), Line(str(device)))
        line.work.append((lambda: None, after))
        return line

    def copy(self, stream: Line, target: np.ndarray, read: Callable[[], torch.Tensor]) -> object:
        self._check()
        self.told.append(f"copy {len(target)}")
        source = self._allocated(read())
        lies = weakref.ref(source)
        place = int(target.__array_interface__["data"][0]), len(target)
        pinned = self._holding(place)
        self._under_way.append(place)

        def run() -> None:
            if self.is_lost:
                return
            # Why done first: training goes ahead of a copy wherever nothing holds it up.
            self.callers.run(len(self.callers.work))
            if lies() is None:
                raise AssertionError("the memory of a copy was used again before it was done")
            if pinned != self._holding(place):
                raise AssertionError("staging memory was given back before a copy was done")
            self._under_way.remove(place)
            self.num_copied += 1
            if self.num_copied == self._fails_at:
                self.is_lost = True
                self._under_way.clear()
            self._check()
            # Why read again: the work of a stream is done in its order, and not when it is given.
            np.copyto(target, read().numpy())

        stream.work.append((run, None))
        return source

    def give(self, stream: Line, work: Callable[[], Any]) -> None:
        self._check()
        self.told.append("work")
        stream.work.append((work, None))

    def drain(self, device: torch.device, stream: Line) -> None:
        self.told.append("wait")
        self._check()
        stream.run(len(stream.work))

    def pin(self, device: torch.device, memory: np.ndarray) -> Callable[[], None]:
        place = int(memory.__array_interface__["data"][0])
        if any(low < place + len(memory) and place < high for low, high in self._ranges()):
            raise AssertionError("registered twice")
        self.registered[place] = len(memory)
        self.registered_on.append(str(device))

        def undo() -> None:
            low, high = place, place + self.registered[place]
            if any(begin < high and low < begin + n for begin, n in self._under_way):
                raise AssertionError("given back while a copy was under way")
            del self.registered[place]

        return undo

    def _check(self) -> None:
        """Raises as every call of a driver does whose device is lost."""
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _ranges(self) -> list[tuple[int, int]]:
        return [(low, low + length) for low, length in self.registered.items()]

    def _holding(self, place: tuple[int, int]) -> tuple[int, int] | None:
        """Returns the registered range that a place lies in.

        A copy may lie in one wholly or in none, as the driver refuses any other.
        """
        begin, end = place[0], place[0] + place[1]
        touched = [one for one in self._ranges() if one[0] < end and begin < one[1]]
        if touched and not (len(touched) == 1 and touched[0][0] <= begin and end <= touched[0][1]):
            raise RuntimeError("CUDA error: invalid argument")
        return touched[0] if touched else None

    def _allocated(self, source: torch.Tensor) -> torch.Tensor:
        """Counts what a copy takes of the device's memory, unless it is the state's own."""
        if self.has(source):
            return source
        self._temporary = [one for one in self._temporary if one() is not None]
        held = sum(tensor.nbytes for one in self._temporary if (tensor := one()) is not None)
        if self.memory_bytes is not None and held + source.nbytes > self.memory_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self._temporary.append(weakref.ref(source))
        self.most_temporary_bytes = max(self.most_temporary_bytes, held + source.nbytes)
        return source


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a nested state."""
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for one in inside for tensor in tensors_of(one)]

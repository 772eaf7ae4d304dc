"""Interrupts a save of stock DCP at its n-th call of the filesystem, for local directories.

For what stock DCP leaves at a place of ours when it dies there. It opens its files outside of any
`Storage`, so the methods of its own `FileSystem` are replaced while it saves.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed.checkpoint.state_dict_saver as stock
from torch.distributed.checkpoint.filesystem import FileSystem

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.io.checkpoint import newest_record
from ray_dcp.store.fault_injection import CrashError
from ray_dcp.store.storage import Storage
from tests.crash.array_states import State
from tests.crash.interruptions import CRASHES, CountedSteps, Interruption, Step, Variant
from tests.crash.invariants import Aftermath, expect, is_same, name_of, stock_state
from tests.crash.own_operations import torch_state
from tests.crash.registry import NEW, Place

__all__ = [
    "interrupted_stock",
    "ours_stands_or_both_are_named",
    "save_by_stock",
    "stock_dcp_sees_no_mixture",
]


def save_by_stock(place: Place, state: State = NEW) -> None:
    """Saves a state by stock DCP into the directory of a place.

    Raises:
        CheckpointException: It failed, or its process died: stock DCP wraps that as well.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(torch_state(state), checkpoint_id=place.url, no_dist=True)


def ours_stands_or_both_are_named(after: Aftermath) -> None:
    """Our checkpoint stands whole, or an error names it and the `.metadata` of stock DCP.

    Raises:
        AssertionError: It is not so.
    """
    try:
        stands = after.standing
    except DamagedCheckpointError as error:
        committed = newest_record(after.storage)
        expect(committed is not None, f"our manifest is gone, and the error says: {error}")
        named = (
            (f"{committed.slot:08d}", committed.manifest.attempt, ".metadata") if committed else ()
        )
        expect(all(name in str(error) for name in named), f"expected {named} in: {error}")
        return
    ours = [state for state in after.earlier if is_same(state, stands)]
    expect(bool(ours), f"{name_of(stands)} stands")


def stock_dcp_sees_no_mixture(after: Aftermath) -> None:
    """Stock DCP loads what it saved, or our checkpoint, whole, or finds nothing.

    Raises:
        AssertionError: It loads a mixture.
        Exception: What stock DCP raised.
    """
    stock_state(after.storage, (NEW, *after.states))


@contextmanager
def interrupted_stock(
    storage: Storage, at: int | None, variant: Variant
) -> Iterator[tuple[Storage, Interruption]]:
    """Interrupts the n-th call of stock DCP's `FileSystem`; see `interruptions.Interrupt`.

    Args:
        storage: A `LocalStorage`; it is returned as it is.
        at: Number of the call, from 0; None to count them only.
        variant: `before`, `after` or `torn`.
    """
    calls = _Calls(at, variant)
    with ExitStack() as stack:
        for name in ("rename", "rm_file", "mkdir"):
            stack.enter_context(mock.patch.object(FileSystem, name, calls.replaced(name)))
        stack.enter_context(mock.patch.object(FileSystem, "create_stream", calls.stream()))
        yield storage, calls


class _Calls(CountedSteps):
    def replaced(self, name: str) -> Callable[..., None]:
        """Returns what stands in for a method of `FileSystem`."""
        real = getattr(FileSystem, name)

        def call(system: FileSystem, path: Any, *args: Any) -> None:
            step = Step(name, str(path), changes=True, writes=False)
            self.act(step, lambda: real(system, path, *args))

        return call

    def stream(self) -> Callable[..., Any]:
        """Returns what stands in for `FileSystem.create_stream`."""

        @contextmanager
        def create_stream(system: FileSystem, path: Any, mode: str) -> Iterator[Any]:
            if "w" not in mode:
                with open(path, mode) as stream:
                    yield stream
                return
            opened: list[Any] = []
            step = Step("create", str(path), changes=True, writes=False)
            try:
                self.act(step, lambda: opened.append(open(path, mode, buffering=0)))  # noqa: SIM115
            except CrashError:
                for file in opened:
                    file.close()
                raise
            with opened[0] as file:
                stream = io.BufferedWriter(_File(file, self))
                yield stream
                stream.close()

        return create_stream

    def act(self, step: Step, act: Callable[[], object], half: Callable[[], object] = bool) -> None:
        """Does what a call asks for, or lets the process die before, after or half-way."""
        if self.stopped:
            raise CrashError(f"the process is dead, but asked for {step}")
        if not self.hits(step):
            act()
            return
        if self.variant not in CRASHES:
            raise NotImplementedError(f"stock DCP can only die here, not go on {self.variant}")
        {"before": bool, "after": act, "torn": half}[self.variant]()
        self.die(step)


class _File(io.RawIOBase):
    """A file that stock DCP writes, below the buffer that `open` puts before it."""

    def __init__(self, file: Any, calls: _Calls) -> None:
        super().__init__()
        self._file = file
        self._calls = calls

    def write(self, data: Any) -> int:
        """Writes, unless the process dies with it."""
        view = memoryview(data).cast("B")
        step = Step("write", str(self._file.name), changes=True, writes=len(view) > 1)
        self._calls.act(
            step, lambda: self._file.write(view), lambda: self._file.write(view[: len(view) // 2])
        )
        return len(view)

    def writable(self) -> bool:
        """It is there to be written."""
        return True

    def seekable(self) -> bool:
        """Its end can be told."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves to a place."""
        return int(self._file.seek(offset, whence))

    def fileno(self) -> int:
        """Returns the descriptor, for `os.fsync`."""
        return int(self._file.fileno())

"""Ways to interrupt an operation at its n-th call of the storage, or of the operating system.

`crashes` enumerates them. What the kernel itself may lose when the power is cut is not played.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from ray_dcp.coordinator import tasks
from ray_dcp.errors import InvalidRequestError, StorageError
from ray_dcp.place import voting
from ray_dcp.store import storage
from ray_dcp.store.storage import Storage
from tests.crash.registry import directory_of
from tests.support.storages import Call, CrashError, Effect, Fault, Script


@contextmanager
def one_call_at_a_time() -> Iterator[None]:
    """Makes calls that wait for a storage at the same time wait one after the other.

    Why: an operation is stopped before a call by its number, so that is the same call each time.
    """

    def in_turn(*calls: Callable[[], Any]) -> tuple[Any, ...]:
        return tuple(call() for call in calls)

    with (
        mock.patch.object(storage, "at_once", in_turn),
        mock.patch.object(tasks, "at_once", in_turn),
        mock.patch.object(voting, "at_once", in_turn),
    ):
        yield


# --- Calls of the storage -------------------------------------------------------------------------


Variant = Literal["before", "after", "torn", "refused", "lost", "broken"]
"""What becomes of the n-th call.

The process dies: `before` it; `after` it, without an answer; when half of its bytes were written
(`torn`). The process lives on with an error: nothing happened (`refused`); it happened (`lost`);
nothing happened, and every later call fails as well (`broken`)."""

CRASHES: tuple[Variant, ...] = ("before", "after", "torn")
_DEATHS: dict[Variant, Effect] = {"before": "before", "after": "after", "torn": "torn"}
ALL_VARIANTS: tuple[Variant, ...] = (*CRASHES, "refused", "lost", "broken")


@dataclass(frozen=True)
class Step:
    """One call that an operation made."""

    what: str
    where: str
    """Key or path."""
    changes: bool
    """It may change what is stored."""
    writes: bool
    """It writes bytes, so that half of them can be written."""

    def __str__(self) -> str:
        return f"{self.what} of {self.where!r}"

    def allows(self, variant: Variant) -> bool:
        """Returns whether a variant of this call says anything that no other does."""
        match variant:
            case "torn":
                return self.writes
            case "before" | "after" | "lost":
                # Why: what is stored is the same at the next change, and a read whose answer
                # is lost was refused.
                return self.changes
            case _:
                return True


Interrupt = Callable[[Storage, int | None, Variant], AbstractContextManager[tuple[Storage, Any]]]
"""From a storage, the number of the call (None for no interruption) and the variant to the storage
that the operation is to use, and what has the `steps` that it made, and whether it is `stopped`."""


@contextmanager
def interrupted_storage(
    storage: Storage, at: int | None, variant: Variant
) -> Iterator[tuple[Storage, Any]]:
    """Interrupts the n-th call of the storage; see `Interrupt`.

    A deleted key is a call of its own. `write` is atomic, so that it is never torn.
    """
    script = _StorageInterruption(at, variant)
    yield script.wrap(storage), script


class _StorageInterruption(Script):
    def __init__(self, at: int | None, variant: Variant) -> None:
        super().__init__()
        self._at = at
        self._variant = variant
        self._number = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every call so far."""
        return tuple(
            Step(
                call.operation,
                call.key,
                changes=call.operation not in ("read", "read_into", "list"),
                writes=call.operation == "writer.write",
            )
            for call in self.calls
        )

    def choose(self, call: Call) -> Fault | None:
        """See `Script.choose`."""
        number, self._number = self._number, self._number + 1
        if self._at is None or number < self._at:
            return None
        if number > self._at and self._variant != "broken":
            return None
        if self._variant in ("refused", "broken"):
            return Fault(operation=call.operation, error=_error(call, "was refused"))
        if self._variant == "lost":
            error = _error(call, "happened, but its answer was lost")
            return Fault(operation=call.operation, effect="after", error=error)
        return Fault(operation=call.operation, effect=_DEATHS[self._variant], stops=True)


def _error(call: Call, what: str) -> StorageError:
    return StorageError(f"scripted: {call} {what}", key=call.key or None)


# --- Calls of the operating system ----------------------------------------------------------------


_WRITES = frozenset({"write", "pwrite", "writev", "pwritev"})
"""Their second argument holds the bytes: one buffer, or several."""
CALLS = (
    "open", *sorted(_WRITES), "copy_file_range", "fdatasync", "fsync", "ftruncate", "link", "mkdir",
    "posix_fallocate", "remove", "rename", "replace", "rmdir", "sendfile", "symlink", "truncate",
    "unlink",
)  # fmt: skip
"""What is counted and interrupted: all functions of `os` that change or open files."""
_ON_TWO_FILES = frozenset({"copy_file_range", "link", "rename", "replace", "sendfile", "symlink"})
_PAGE = 4096
_CHANGING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@contextmanager
def interrupted_system(
    storage: Storage, at: int | None, variant: Variant
) -> Iterator[tuple[Storage, Any]]:
    """Interrupts the n-th call of the operating system; see `interruptions.Interrupt`.

    Args:
        storage: A `LocalStorage`; it is returned as it is.
        at: Number of the call, from 0; None to count them only.
        variant: What becomes of it. `refused` and `lost` give EIO, `broken` ENOSPC.

    Example:
        >>> import itertools, tempfile
        >>> from ray_dcp.store.local import LocalStorage
        >>> from tests.crash.crashes import check_crashes
        >>> number = itertools.count()
        >>> with tempfile.TemporaryDirectory() as root:
        ...     reached = check_crashes(
        ...         "save.first",
        ...         storage=lambda: LocalStorage(f"{root}/{next(number)}/step-1"),
        ...         interrupt=interrupted_system,
        ...         variants=["torn"],
        ...     )
        >>> reached.points["torn"] >= 3
        True
    """
    directory = directory_of(storage)
    if directory is None:
        raise InvalidRequestError(f"expected a LocalStorage, but found {type(storage).__name__}")
    system = _System(directory.parent, at, variant)
    with ExitStack() as stack:
        for name in (name for name in CALLS if hasattr(os, name)):
            stack.enter_context(mock.patch.object(os, name, system.replaced(name)))
        yield storage, system


class _System:
    def __init__(self, folder: Path, at: int | None, variant: Variant) -> None:
        self.steps: tuple[Step, ...] = ()
        self.stopped = False
        self._folder = os.path.realpath(folder)
        self._at, self._variant = at, variant
        self._lock = threading.Lock()

    def replaced(self, name: str) -> Callable[..., Any]:
        """Returns what stands in for a function of `os`."""
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._concerns(name, args, kwargs):
                return real(*args, **kwargs)
            if self.stopped:
                return _from_the_grave(name)
            with self._lock:
                number = len(self.steps)
                self.steps += (_step(name, args),)
            again = self._variant == "broken" and self._at is not None and number > self._at
            if number == self._at or again:
                return self._interrupt(name, real, args, kwargs)
            return real(*args, **kwargs)

        return call

    def _concerns(self, name: str, args: Any, kwargs: Any) -> bool:
        files = args[:2] if name in _ON_TWO_FILES else args[:1]
        folders = (value for key, value in kwargs.items() if key.endswith("dir_fd"))
        paths = (_path(file) for file in (*files, *folders) if file is not None)
        return any(f"{path}/".startswith(f"{self._folder}/") for path in paths)

    def _interrupt(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._variant in ("after", "lost"):
            made = real(*args, **kwargs)
            if name == "open":
                os.close(made)
        elif self._variant == "torn":
            real(args[0], _first_half(name, args[1]), *args[2:], **kwargs)
        if self._variant in CRASHES:
            self.stopped = True
            raise CrashError(f"the process died at {name} ({self._variant})")
        number = errno.ENOSPC if self._variant == "broken" else errno.EIO
        raise OSError(number, os.strerror(number))


def _path(file: Any) -> str:
    """Returns the path of a file that was given by its path or by its descriptor."""
    return os.path.realpath(f"/proc/self/fd/{file}" if isinstance(file, int) else os.fsdecode(file))


def _from_the_grave(name: str) -> None:
    # Why: what only removes may be called while an object is dropped, where nothing can be raised.
    if name not in ("unlink", "remove", "rmdir"):
        raise CrashError(f"the process is dead, but called {name}")


def _first_half(name: str, data: Any) -> Any:
    """Returns about half of what was to be written."""
    if not name.endswith("v"):
        return _half(memoryview(data))
    first, *rest = (memoryview(buffer) for buffer in data)
    return [first, *rest[: len(rest) // 2]] if rest else [_half(first)]


def _half(view: memoryview) -> memoryview:
    # Why whole pages: direct I/O takes nothing else.
    half = len(view) // 2
    return view[: half // _PAGE * _PAGE or half]


def _step(name: str, args: Any) -> Step:
    changes = name not in ("fsync", "fdatasync")
    if name == "open":
        changes = bool(args[1] & _CHANGING_FLAGS)
    return Step(name, str(args[0]), changes, writes=name in _WRITES and len(args[1]) > 0)

"""`FaultyStorage`: a storage that fails where a script says, and records what was asked of it.

For tests. A fault that was never hit fails the test, since it then proved nothing.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ray_dcp.errors import InternalError, InvalidRequestError, StorageError
from ray_dcp.store.paths import as_bytes_view
from ray_dcp.store.storage import Entry, PartWriter, Storage, StorageTraits

__all__ = ["Call", "Effect", "Fault", "FaultyStorage", "Operation"]

Operation = Literal[
    "read", "read_into", "write", "open_writer", "writer.write", "commit", "list", "delete"
]
Effect = Literal["before", "after", "torn", "flip"]


@dataclass(frozen=True)
class Call:
    """One operation that was asked for."""

    operation: Operation
    key: str
    """Key or prefix; the first key of a `delete`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, and when.

    Raises:
        InvalidRequestError: The effect can't happen to the operation.
    """

    operation: Operation
    key: str = "*"
    """Pattern (`fnmatch`) of the keys concerned."""
    nth: int = 1
    """The how-manieth call of this operation on these keys is hit, counted from 1."""
    effect: Effect = "before"
    """`before`: nothing happens. `after`: it happens, and the answer is lost. `torn`: the first
    half happens (`writer.write`, and `write` as on a storage that is not atomic). `flip`: one
    bit of what is read differs, and no error is raised."""
    error: StorageError | None = None
    """What is raised; by default a `StorageError` that says it was scripted."""

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[str, ...]] = {
            "torn": ("write", "writer.write"),
            "flip": ("read", "read_into"),
        }
        if self.operation not in allowed.get(self.effect, (self.operation,)):
            raise InvalidRequestError(
                f"effect {self.effect!r} happens to {', '.join(allowed[self.effect])}, "
                f"not to {self.operation!r}"
            )


class FaultyStorage:
    """Implements `Storage` by another one, except where a fault is scripted.

    Args:
        inner: The storage that does the work.
        script: Faults; each is hit at most once.

    Example:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> storage = FaultyStorage(MemoryStorage("doc"), [Fault(operation="read", key="a*")])
        >>> storage.list()
        []
        >>> storage.assert_hit()
        Traceback (most recent call last):
        ...
        ray_dcp.errors.InternalError: scripted faults were never hit: read of 'a*' (call 1)
    """

    def __init__(self, inner: Storage, script: Sequence[Fault] = ()) -> None:
        self._inner = inner
        self._script = tuple(script)
        self._counts = [0] * len(script)
        self._calls: builtins.list[Call] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """That of the inner storage."""
        return self._inner.url

    @property
    def traits(self) -> StorageTraits:
        """Those of the inner storage."""
        return self._inner.traits

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every operation asked for so far, in order."""
        with self._lock:
            return tuple(self._calls)

    def assert_hit(self) -> None:
        """Checks that every scripted fault happened.

        Raises:
            InternalError: Some did not; the message names them.
        """
        with self._lock:
            missed = [
                f"{fault.operation} of {fault.key!r} (call {fault.nth})"
                for fault, count in zip(self._script, self._counts, strict=True)
                if count < fault.nth
            ]
        if missed:
            raise InternalError(f"scripted faults were never hit: {', '.join(missed)}")

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        fault = self._meet("read", key)
        data = self._inner.read(key, start, num_bytes)
        if fault and fault.effect == "flip" and data:
            flipped = bytearray(data)
            flipped[len(data) // 2] ^= 1
            return bytes(flipped)
        _fail_after(fault)
        return data

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        fault = self._meet("read_into", key)
        self._inner.read_into(key, start, target)
        view = as_bytes_view(target)
        if fault and fault.effect == "flip" and len(view):
            view[len(view) // 2] ^= 1
            return
        _fail_after(fault)

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """See `Storage.write`."""
        fault = self._meet("write", key)
        view = as_bytes_view(data)
        half = len(view) // 2 if fault and fault.effect == "torn" else len(view)
        self._inner.write(key, view[:half], create=create)
        _fail_after(fault)

    def open_writer(self, key: str, *, sync: bool = True, direct: bool = True) -> PartWriter:
        """See `Storage.open_writer`."""
        fault = self._meet("open_writer", key)
        writer = self._inner.open_writer(key, sync=sync, direct=direct)
        if fault:
            writer.abort()
        _fail_after(fault)
        return _FaultyWriter(self, key, writer)

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        """See `Storage.list`."""
        fault = self._meet("list", prefix)
        entries = self._inner.list(prefix)
        _fail_after(fault)
        return entries

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        named = tuple(keys)
        fault = self._meet("delete", named[0] if named else "")
        self._inner.delete(named)
        _fail_after(fault)

    def _meet(self, operation: Operation, key: str) -> Fault | None:
        """Records a call; raises a fault that comes before it, returns one that comes later."""
        hit = None
        with self._lock:
            self._calls.append(Call(operation, key))
            for index, fault in enumerate(self._script):
                if fault.operation == operation and fnmatchcase(key, fault.key):
                    self._counts[index] += 1
                    if self._counts[index] == fault.nth and hit is None:
                        hit = fault
        if hit is not None and hit.effect == "before":
            raise _error(hit)
        return hit


class _FaultyWriter:
    """The writer that `FaultyStorage` gives out."""

    def __init__(self, storage: FaultyStorage, key: str, inner: PartWriter) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `PartWriter.write`."""
        fault = self._storage._meet("writer.write", self._key)
        view = as_bytes_view(data)
        self._inner.write(view[: len(view) // 2] if fault and fault.effect == "torn" else view)
        _fail_after(fault)

    def commit(self) -> None:
        """See `PartWriter.commit`."""
        fault = self._storage._meet("commit", self._key)
        self._inner.commit()
        _fail_after(fault)

    def abort(self) -> None:
        """See `PartWriter.abort`; it never fails."""
        self._inner.abort()


def _fail_after(fault: Fault | None) -> None:
    if fault is not None and fault.effect in ("after", "torn"):
        raise _error(fault)


def _error(fault: Fault) -> StorageError:
    return fault.error or StorageError(
        f"scripted fault: {fault.operation} of {fault.key!r} failed ({fault.effect})"
    )

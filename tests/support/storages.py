"""`FaultyStorage`: a storage that a script rules: it fails, waits, counts and records.

A `Script` has the faults. `ChangeScript` hits the change of a number, `Gate` makes calls wait,
`Counting` counts what is read, and `UnconditionalStorage` has no conditional writes. A fault that
was never hit fails the test, since it then proved nothing.
"""

from __future__ import annotations

import builtins
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import pytest

from ray_dcp.commit_protocol.commands import CreateRecord, RecordCreated, SlotTaken
from ray_dcp.coordinator.tasks import perform
from ray_dcp.errors import InternalError, StorageError
from ray_dcp.format.manifest import AbortRecord, encode_record
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import as_target, open_storage
from ray_dcp.store.storage import (
    BytesLike,
    Entry,
    KeyExistsError,
    KeyMissingError,
    PartWriter,
    PublishedFile,
    Reused,
    Storage,
    StorageTraits,
    StorageWrapper,
    as_bytes_view,
    os_failure,
    reuse_file,
)
from ray_dcp.view.checkpoint_view import CheckpointView

Operation = Literal[
    "read", "read_into", "write", "open_writer", "writer.write", "commit", "list", "delete",
    "reuse",
]  # fmt: skip
Effect = Literal["before", "after", "torn", "short", "flip"]

_WRITES = ("write", "writer.write")
_DOING: dict[Operation, str] = {
    "read_into": "read", "open_writer": "create a file for", "writer.write": "write",
    "commit": "publish",
}  # fmt: skip


class CrashError(BaseException):
    """The process died here. No code of ours may catch it; whoever asks the storage meets it."""


@dataclass(frozen=True)
class Call:
    """One operation that was asked for."""

    operation: Operation
    key: str
    """Key or prefix; of a `delete` of several keys, each is a call of its own."""

    def __str__(self) -> str:
        return f"{self.operation} of {self.key!r}"


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
    times: int | None = 1
    """How many calls in a row are hit from there; None for all."""
    effect: Effect = "before"
    """`before`: nothing happens, and an error is raised. `after`: it happens, and the answer is
    lost. `torn`: the first half is written (by `write` as on a storage that is not atomic), and an
    error is raised. `short`: the first half is written, and no error is raised. `flip`: one bit
    of what is read or written differs, and no error is raised."""
    error: StorageError | int | str | None = None
    """What is raised: an error as it is; an errno, as a filesystem reports it (`errno.ENOSPC`);
    the answer of an object store ("503 Slow Down"). By default one that says it was scripted."""
    stops: bool = False
    """The process dies with it: `CrashError` is raised, and for whatever is asked later."""


class Script:
    """Faults for all storages of a test: make one, hand out `wrap` or `opener`, then `check`.

    As a context manager it checks at the end, unless the test fails anyway.

    Args:
        faults: What goes wrong; where several fit a call, the first one happens.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)
        self._counts = [0] * len(self._faults)
        self._calls: list[Call] = []
        self._stopped = False
        self._kept: list[PartWriter] = []
        self._lock = threading.Lock()
        self.bytes_read: Counter[str] = Counter()
        """By key."""
        self.ranges = 0
        """How often some of them were read."""

    def __enter__(self) -> Script:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.check()

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every operation asked for so far, in order."""
        with self._lock:
            return tuple(self._calls)

    @property
    def stopped(self) -> bool:
        """The process is dead: nothing happens on storage any more."""
        return self._stopped

    def wrap(self, inner: Storage) -> FaultyStorage:
        """Returns a storage that follows this script."""
        return FaultyStorage(inner, self)

    def opener(self, target: AnyPlace) -> FaultyStorage:
        """Returns the storage of a target, following this script."""
        return self.wrap(open_storage(target))

    def check(self) -> None:
        """Checks that every fault happened.

        Raises:
            InternalError: Some did not; the message names them.
        """
        with self._lock:
            missed = [
                f"{fault.operation} of {fault.key!r} (call {fault.nth})"
                for fault, count in zip(self._faults, self._counts, strict=True)
                if count < fault.nth
            ]
        if missed:
            raise InternalError(f"scripted faults were never hit: {', '.join(missed)}")

    def choose(self, call: Call) -> Fault | None:
        """Returns what happens to a call; for subclasses. Called once a call, under a lock."""
        hit = None
        for index, fault in enumerate(self._faults):
            if fault.operation == call.operation and fnmatchcase(call.key, fault.key):
                self._counts[index] += 1
                behind = self._counts[index] - fault.nth
                if behind >= 0 and (fault.times is None or behind < fault.times):
                    hit = hit or fault
        return hit

    @contextmanager
    def call(self, operation: Operation, key: str, url: str) -> Iterator[Fault | None]:
        """Records a call; raises the fault that comes before it, or after what is done inside.

        Args:
            operation: Which.
            key: Of the call.
            url: Of the storage, for messages.

        Yields:
            What happens to the call.
        """
        with self._lock:
            if self._stopped:
                raise CrashError(f"the process is dead, but asked for {operation} of {key!r}")
            call = Call(operation, key)
            self._calls.append(call)
            fault = self.choose(call)
            if fault is not None and fault.effect == "before":
                self._stopped |= fault.stops
                raise _error(fault, call, url)
        yield fault
        if fault is not None and fault.effect in ("after", "torn"):
            self._stopped |= fault.stops
            raise _error(fault, call, url)

    def took(self, key: str, num_bytes: int) -> None:
        """Counts what was read."""
        with self._lock:
            self.bytes_read[key] += num_bytes
            self.ranges += 1

    def keep(self, writer: PartWriter) -> None:
        """Keeps the writer of a dead process: what it has written stays, as after a real crash."""
        self._kept.append(writer)


class FaultyStorage(StorageWrapper):
    """Implements `Storage` by another one, except where a fault is scripted.

    Args:
        inner: The storage that does the work.
        script: Faults, or the script that several storages share.
    """

    def __init__(self, inner: Storage, script: Script | Sequence[Fault] = ()) -> None:
        super().__init__(inner)
        self._script = script if isinstance(script, Script) else Script(script)

    @property
    def calls(self) -> tuple[Call, ...]:
        """See `Script.calls`."""
        return self._script.calls

    def assert_hit(self) -> None:
        """See `Script.check`."""
        self._script.check()

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        with self._call("read", key) as fault:
            data = self._inner.read(key, start, num_bytes)
        self._script.took(key, len(data))
        return bytes(_changed(data, fault))

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        with self._call("read_into", key) as fault:
            self._inner.read_into(key, start, target)
        self._script.took(key, len(target))
        view = as_bytes_view(target)
        view[:] = _changed(view, fault)

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """See `Storage.write`."""
        with self._call("write", key) as fault:
            self._inner.write(key, _changed(as_bytes_view(data), fault), create=create)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`."""
        with self._call("open_writer", key) as fault:
            writer = self._inner.open_writer(key, sync=sync)
            if fault is not None and fault.stops:
                self._script.keep(writer)
            elif fault is not None and fault.effect == "after":
                writer.abort()
        return _FaultyWriter(self._script, self.url, key, writer)

    def reuse(self, key: str, source: PublishedFile, end: bytes, *, sync: bool) -> Reused | None:
        """See `ray_dcp.store.storage.reuse_file`."""
        with self._call("reuse", key):
            return reuse_file(self._inner, key, source, end, sync=sync)

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        """See `Storage.list`."""
        with self._call("list", prefix):
            return self._inner.list(prefix)

    def unpublished(self) -> Sequence[Entry]:
        """Returns the unpublished files of the inner storage; nothing if it does not list them."""
        listed: Callable[[], Sequence[Entry]] | None = getattr(self._inner, "unpublished", None)
        if listed is None:
            return ()
        with self._call("list", ".tmp-"):
            return listed()

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`; every key is a call."""
        failures: builtins.list[StorageError] = []
        for key in keys:
            try:
                with self._call("delete", key):
                    self._inner.delete([key])
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _call(self, operation: Operation, key: str) -> AbstractContextManager[Fault | None]:
        return self._script.call(operation, key, self.url)


class _FaultyWriter:
    """The writer that `FaultyStorage` gives out."""

    def __init__(self, script: Script, url: str, key: str, inner: PartWriter) -> None:
        self._script = script
        self._url = url
        self._key = key
        self._inner = inner

    def write(self, data: BytesLike) -> None:
        """See `PartWriter.write`."""
        with self._script.call("writer.write", self._key, self._url) as fault:
            self._inner.write(_changed(as_bytes_view(data), fault))

    def commit(self) -> None:
        """See `PartWriter.commit`."""
        with self._script.call("commit", self._key, self._url):
            self._inner.commit()

    def abort(self) -> None:
        """See `PartWriter.abort`; it never fails, and the dead don't clean up."""
        if not self._script.stopped:
            self._inner.abort()

    def __del__(self) -> None:
        # Why: a dropped writer may remove its file, which a process that died can't do.
        if self._script.stopped:
            self._script.keep(self._inner)


def _changed(data: bytes | memoryview, fault: Fault | None) -> bytes | memoryview:
    """Returns what is read or written in place of some bytes."""
    if fault is None or not len(data):
        return data
    if fault.effect in ("torn", "short"):
        return data[: len(data) // 2]
    if fault.effect != "flip":
        return data
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    return bytes(flipped)


def _error(fault: Fault, call: Call, url: str) -> BaseException:
    error = fault.error
    if fault.stops:
        return CrashError(f"the process died at {call} ({fault.effect})")
    if isinstance(error, StorageError):
        return error
    where = f"{url.rstrip('/')}/{call.key}" if call.key else url
    doing = _DOING.get(call.operation, call.operation)
    if isinstance(error, int):
        return os_failure(OSError(error, os.strerror(error)), doing, call.key, where)
    if error is not None:
        return StorageError(
            f"could not {doing} {where}: the storage answered {error}", key=call.key
        )
    return StorageError(f"scripted fault: {call} failed ({fault.effect})", key=call.key or None)


# --- Scripts of other kinds -----------------------------------------------------------------------


class ChangeScript(Script):
    """Makes the change of one number go wrong: a written key, a published part file, a deleted key.

    Args:
        at: Number of the change, from 0; None for none.
        lasting: All later ones go wrong as well.
        effect: Of the fault: nothing happens, or it happens and the answer is lost.
        stops: The process dies with it.
    """

    def __init__(
        self,
        at: int | None,
        *,
        lasting: bool = False,
        effect: Literal["before", "after"] = "before",
        stops: bool = False,
    ) -> None:
        super().__init__()
        self._at = at
        self._lasting = lasting
        self._how: dict[str, Any] = {"effect": effect, "stops": stops}
        self.changes: list[Call] = []

    @property
    def hit(self) -> bool:
        """It was reached."""
        return self._at is not None and len(self.changes) > self._at

    def choose(self, call: Call) -> Fault | None:
        """See `Script.choose`."""
        if call.operation not in ("write", "commit", "delete"):
            return None
        number = len(self.changes)
        self.changes.append(call)
        if self._at is None or number < self._at or (number > self._at and not self._lasting):
            return None
        return Fault(operation=call.operation, **self._how)


class Gate(Script):
    """Lets no bytes pass whose key matches before it is opened: for ranks that are slow or stuck.

    Args:
        pattern: Of the keys that wait.
        on_arrival: Called once in the thread that comes first, before it waits.
    """

    def __init__(
        self, pattern: str = "*.distcp", on_arrival: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._pattern = pattern
        self._on_arrival = on_arrival
        self.reached = threading.Event()
        self.opened = threading.Event()

    def open(self) -> None:
        """Lets all pass from now on."""
        self.opened.set()

    def wait(self, key: str) -> None:
        """Waits, if the gate is closed to a key."""
        if fnmatchcase(key, self._pattern):
            with self._lock:
                first = not self.reached.is_set()
                self.reached.set()
            if first:
                self._on_arrival()
            self.opened.wait(180)

    @contextmanager
    def call(self, operation: Operation, key: str, url: str) -> Iterator[Fault | None]:
        """See `Script.call`."""
        if operation in ("read", "read_into", *_WRITES):
            self.wait(key)
        with super().call(operation, key, url) as fault:
            yield fault


class Counting(FaultyStorage):
    """Counts what is read of each key."""

    def __init__(self, url: str) -> None:
        super().__init__(open_storage(url))
        self.bytes_read = self._script.bytes_read

    @property
    def ranges(self) -> int:
        """How many reads there were."""
        return self._script.ranges

    @property
    def payload_bytes(self) -> int:
        """How many bytes were read of data files."""
        data = (".distcp", ".safetensors")
        return sum(n for key, n in self.bytes_read.items() if key.endswith(data))


def interpose(
    patch: pytest.MonkeyPatch,
    kind: type,
    method: str,
    pattern: str,
    act: Callable[[], object] | BaseException,
    *,
    after: bool = False,
    times: int | None = 1,
) -> list[object]:
    """Has something happen in the moment before calls of any storage of a class.

    Args:
        patch: Undoes it.
        kind: The class.
        method: Its method, whose first argument is a key or prefix.
        pattern: Of URL and key of the calls that are concerned.
        act: What happens, or what the call raises.
        after: Whether it happens after the call was made, instead of before.
        times: The first so many calls; None for all.

    Returns:
        What each `act` returned so far.
    """
    inner, num_calls, found = getattr(kind, method), 0, list[object]()

    def call(self: Any, key: str = "", *more: Any, **how: Any) -> Any:
        nonlocal num_calls
        is_concerned = num_calls != times and fnmatchcase(f"{self.url}/{key}", pattern)
        num_calls += is_concerned
        result = inner(self, key, *more, **how) if after or not is_concerned else None
        if is_concerned:
            if isinstance(act, BaseException):
                raise act
            found.append(act())
        return result if after or not is_concerned else inner(self, key, *more, **how)

    patch.setattr(kind, method, call)
    return found


def counted_view(path: object) -> tuple[CheckpointView, Counting]:
    """Returns a view that reads through a counting storage."""
    storage = Counting(str(path))
    return CheckpointView(storage, read_checkpoint(storage, checks_later=True)), storage


class UnconditionalStorage(StorageWrapper):
    """Implements `Storage` by another one, without its `create_if_absent`.

    Who creates a key looks whether it is free and puts the value then; of two who do so at once,
    both win and the later one's value stands.

    Args:
        inner: The storage that does the work.
        between: Called with the key before each put of a value, after whoever creates it has
            looked: what a test lets somebody else do meanwhile.

    Example:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> place = MemoryStorage("unconditional")
        >>> storage = UnconditionalStorage(place, between=lambda key: place.write(key, b"theirs"))
        >>> storage.traits.create_if_absent
        False
        >>> storage.write("slot", b"ours", create=True)
        >>> place.read("slot")
        b'ours'
    """

    def __init__(self, inner: Storage, *, between: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(inner)
        self._between = between

    @property
    def traits(self) -> StorageTraits:
        """Those of the inner storage, but it does not create if absent."""
        return replace(self._inner.traits, create_if_absent=False)

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """See `Storage.write`; `create` only looks first."""
        if create:
            self._look(key)
        self._between(key)
        self._inner.write(key, data)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`; `commit` only looks first."""
        return _Writer(self, key, self._inner.open_writer(key, sync=sync))

    def _look(self, key: str) -> None:
        try:
            self._inner.read(key, 0, 0)
        except KeyMissingError:
            return
        raise KeyExistsError(f"could not create {self.url}/{key}: it exists", key=key)


class _Writer:
    """The writer that `UnconditionalStorage` gives out."""

    def __init__(self, storage: UnconditionalStorage, key: str, inner: PartWriter) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner
        self._committed = False

    def write(self, data: BytesLike) -> None:
        """See `PartWriter.write`."""
        self._inner.write(data)

    def commit(self) -> None:
        """See `PartWriter.commit`; replaces what came since it looked."""
        if self._committed:
            return
        self._storage._look(self._key)
        self._storage._between(self._key)
        self._storage._inner.delete([self._key])
        self._inner.commit()
        self._committed = True

    def abort(self) -> None:
        """See `PartWriter.abort`; it never fails."""
        self._inner.abort()


# --- Races ----------------------------------------------------------------------------------------


def race_for_a_slot(storage: Storage, num_committers: int) -> list[int]:
    """Has committers create a record in one slot; returns who is told that it won.

    All others have to be told who stands there.
    """
    target = as_target("memory://the-storage-is-given")
    barrier = threading.Barrier(num_committers)
    results: dict[int, object] = {}

    def commit(number: int) -> None:
        record = encode_record(AbortRecord(attempt=f"{number:016x}", reason="race", rank=None))
        barrier.wait()
        results[number] = perform(CreateRecord(target, 1, record), lambda _: storage)

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(num_committers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(result) for result in results.values()} <= {RecordCreated, SlotTaken}, results
    won = [n for n, result in results.items() if isinstance(result, RecordCreated)]
    taken = {r.attempt for r in results.values() if isinstance(r, SlotTaken)}
    assert taken == {f"{n:016x}" for n in won}
    return won


def race_often(place: Callable[[str], object], num_committers: int, rounds: int) -> None:
    """Races again and again. Each time exactly one has to win."""
    for number in range(rounds):
        storage = open_storage(place(f"{number}"))
        assert storage.traits.create_if_absent, storage
        won = race_for_a_slot(storage, num_committers)
        assert len(won) == 1, f"round {number}: {won}"

"""Leases: the writer lease of a root, the readers' leases on steps, and whether their holders live.

The writer lease lets one process at a time write to a root, and a holder that lost it
learns so. It is a numbered file, created only if absent: the highest number holds it. A process
that wants it checks its holder first. While the holder lives, the newcomer is refused. A holder
that has ended is succeeded; if it still runs after all, it finds a higher number before its next
save.

A reader's lease protects a step from deletion while it is read. The reader writes its lease and
then fences the deletions that are announced; whoever deletes announces that and then looks for
leases. See `ray_dcp.io.records`.

Whether a holder lives is known on one machine from the operating system. On another machine only
its renewals show: a file that the holder keeps changing. Clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from ray_dcp.core.processes import OwnProcess, start_thread
from ray_dcp.errors import CheckpointError, CheckpointExistsError, InvalidRequestError
from ray_dcp.format.names import READING
from ray_dcp.io.reserve import freeing, keep_reserve
from ray_dcp.manager.catalogue import FOLDER, Root
from ray_dcp.store.storage import KeyExistsError, Storage, read_if_there


@dataclass(frozen=True)
class LeaseHolder:
    """A process, with what distinguishes it from all others."""

    machine: str
    """Host, boot and process namespace."""
    pid: int
    started: str
    """When the process began, in the kernel's words: a pid is used again."""
    host: str = ""
    nonce: str = ""
    """Tells two holders of one process."""
    root: str = ""
    """Path or URL of the run, as this process calls it: a copy of a run has a copy of its lease."""

    def encode(self, beat: int = 0, **more: float) -> bytes:
        """Returns it as it is stored, with more numbers beside it."""
        return json.dumps({**asdict(self), "beat": beat, **more}, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> LeaseHolder | None:
        """Returns what is stored; None for anything else."""
        try:
            found = json.loads(data)
            return cls(
                str(found["machine"]),
                int(found["pid"]),
                str(found["started"]),
                str(found["host"]),
                str(found["nonce"]),
                str(found.get("root", "")),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def is_same_process(self, other: LeaseHolder) -> bool:
        """Tells whether two holders are one process."""
        return (self.machine, self.pid, self.started) == (other.machine, other.pid, other.started)

    def lives_here(self, here: LeaseHolder) -> bool | None:
        """Tells whether it lives, as this process sees it; None where another machine would know.

        Args:
            here: This process.
        """
        if self.machine != here.machine:
            return None
        started = _started(self.pid)
        return _exists(self.pid) if started is None else started == self.started

    def __str__(self) -> str:
        return f"process {self.pid or '?'} on {self.host or 'an unknown host'}"


def this_process() -> LeaseHolder:
    """Returns this process, with a nonce of its own."""
    host = socket.gethostname()
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    started = _started(pid) or ""
    return LeaseHolder(f"{host} {boot} {space}", pid, started, host, secrets.token_hex(6))


def _started(pid: int) -> str | None:
    """Returns when a process began; "" when it has ended, None when /proc does not show it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    """Returns whether a process exists, also where /proc hides those of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _read_holder(storage: Storage, key: str) -> tuple[bytes | None, LeaseHolder | None]:
    """Returns a lease as stored, None if there is none; and its holder, None if unreadable."""
    for _ in range(2):  # one answer of a server, or of a bad cable, is no proof of damage
        data = read_if_there(storage, key)
        holder = None if data is None else LeaseHolder.decode(data)
        if data is None or holder is not None:
            break
    return data, holder


def renewed(beat: Callable[[int], object], every_s: float) -> Callable[[], None]:
    """Renews a lease in a thread, again and again.

    Args:
        beat: Renews it; gets the number of the renewal, from 1. Its errors are ignored: the next
            renewal comes soon.
        every_s: How often, in seconds.

    Returns:
        What ends that, and waits for a renewal that is in progress.

    Raises:
        LimitError: No thread can be started.
    """
    over = threading.Event()

    def run() -> None:
        for number in count(1):
            if over.wait(every_s):
                return
            with suppress(Exception):
                beat(number)

    def stop() -> None:
        over.set()
        thread.join(every_s)

    thread = start_thread(run, "ray_dcp beat")
    return stop


LEASE_S = 30.0
"""Time without a renewal after which a holder on another machine counts as dead, in seconds."""

_BEATS = 3
"""Renewals within that time."""
_MOST_TRIES = 20
_RIGHT = re.compile(r"writer-(\d{8,16})\.(json|beat|released)")
_UNREADABLE = LeaseHolder("", 0, "")
"""Of a lease that can't be read: it is held until somebody says otherwise."""

logger = logging.getLogger(__name__)


class WriterLease:
    """The writer lease of a root, once this process has taken it.

    Args:
        root: Where.
        lease_s: Time without a renewal after which a holder on another machine counts as dead, in
            seconds.
        holder: Who takes it; this process by default.
        wait: Lets seconds pass.
        beats: Renew it in a thread, so that others see that this process lives.

    Attributes:
        failures: How many holders before this one ended without giving it back.
        ran_s: How long holders before this one had it, until their last commits, in seconds.
    """

    def __init__(
        self,
        root: Root,
        *,
        lease_s: float = LEASE_S,
        holder: LeaseHolder | None = None,
        wait: Callable[[float], object] | None = None,
        beats: bool = True,
    ) -> None:
        self._root = root
        self._lease_s = lease_s
        self._holder = replace(holder or this_process(), root=root.url)
        self._wait = wait or threading.Event().wait
        self._beats = beats
        self._stop: Callable[[], None] = lambda: None
        self._number = 0
        self.failures = 0
        self.ran_s = 0.0

    @property
    def is_taken(self) -> bool:
        """Whether this process took it and did not give it back."""
        return self._number > 0

    def holder(self) -> LeaseHolder | None:
        """Returns who has the lease now, or had it last without giving it back; None for nobody.

        Raises:
            StorageError: The storage failed.
        """
        return self._held(self._root.shared)[1]

    def take(self, *, even_if_held: bool = False, now_s: float = 0.0, last_s: float = 0.0) -> None:
        """Takes the lease; does nothing when this process has it, by `check`.

        Args:
            even_if_held: Also from a holder that lives; it is refused from then on.
            now_s: Seconds since 1970.
            last_s: When the newest step was committed, in seconds since 1970.

        Raises:
            CheckpointExistsError: Another process has it, and lives; or somebody else took it
                from this one.
            LimitError: There is no thread to renew it.
            StorageError: The storage failed.
        """
        if self.is_taken:
            self.check()
            return
        storage = self._root.shared
        for _ in range(_MOST_TRIES):
            number, holder = self._held(storage)
            if holder is not None and not even_if_held and self._lives(storage, number, holder):
                raise self._refusal(number, holder)
            has_failed = holder is not None and not holder.is_same_process(self._holder)
            self._count(storage, number, has_failed, last_s)
            content = self._holder.encode(since_s=now_s, failures=self.failures, ran_s=self.ran_s)
            try:
                name = _name(number + 1)
                freeing(storage, partial(storage.write, name, content, create=True))
            except KeyExistsError:
                continue
            if has_failed:
                logger.info("%s was written by %s, which has ended", self._root.url, holder)
            if self._beats and storage.traits.shared:
                self._stop = renewed(partial(self._beat, number + 1), self._lease_s / _BEATS)
            self._number = number + 1
            self._remove_older(storage)
            keep_reserve(storage)
            return
        raise CheckpointExistsError(
            f"{self._root.url} changed its writer {_MOST_TRIES} times meanwhile; which jobs write "
            f"there? Use one root a job",
            checkpoint_id=self._root.url,
        )

    def _refusal(self, number: int, holder: LeaseHolder) -> CheckpointExistsError:
        url = self._root.url
        if holder is _UNREADABLE:
            told = (
                f"Who writes to {url} is not known, as its lease can't be read. If no job does, "
                f"remove {FOLDER}/{_name(number)} there; CheckpointManager(takeover=True) does "
                f"without"
            )
        elif holder.root not in ("", url):
            told = (
                f"{url} has the writer lease of {holder}, which lives and writes to {holder.root}. "
                f"If this is a copy of that run, CheckpointManager(takeover=True) makes it a run "
                f"of its own, which that process never notices. If both are one directory, use one "
                f"root a job, or end that process"
            )
        else:
            told = (
                f"{url} is written by {holder}, which lives. Use one root a job; or "
                f"end that process, or close its manager; to read what it writes takes "
                f"no writer lease (restore, all_steps, follow). "
                f"CheckpointManager(takeover=True) takes it away"
            )
        return CheckpointExistsError(told, checkpoint_id=url)

    def check(self) -> None:
        """Checks that this process still has the lease.

        Raises:
            CheckpointExistsError: Another one took it.
            InvalidRequestError: It was never taken.
            StorageError: The storage failed.
        """
        if not self.is_taken:
            raise InvalidRequestError("the writer lease was not taken; call take() first")
        storage = self._root.shared
        highest, _ = _highest(storage)
        if highest == self._number:
            return
        other = self._holder_of(storage, highest)
        raise CheckpointExistsError(
            f"{self._root.url} is written by {other or 'another manager'} since this manager "
            f"opened it; nothing is saved or deleted by this one any more. Use one root a job, or "
            f"end the other one and make the manager anew",
            checkpoint_id=self._root.url,
        )

    def give_back(self) -> None:
        """Lets others take the lease at once. Does nothing when another one has it.

        Raises:
            StorageError: The storage failed.
        """
        self._stop()
        if not self.is_taken:
            return
        number, self._number = self._number, 0
        storage = self._root.shared
        if _highest(storage)[0] == number:
            storage.write(_name(number, "released"), b"")

    def _held(self, storage: Storage) -> tuple[int, LeaseHolder | None]:
        """Returns the highest number, and its holder unless it was given back."""
        number, is_released = _highest(storage)
        return number, None if is_released else self._holder_of(storage, number)

    def _holder_of(self, storage: Storage, number: int) -> LeaseHolder | None:
        data, holder = _read_holder(storage, _name(number))
        return None if data is None else holder or _UNREADABLE

    def _count(self, storage: Storage, number: int, has_failed: bool, last_s: float) -> None:
        """Takes over what the holder before counted, and adds that one."""
        # Why suppressed: a file that can't be read proves nothing.
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            before = json.loads(read_if_there(storage, _name(number)) or b"{}")
            self.failures = int(before["failures"]) + has_failed
            ran_s = last_s - float(before["since_s"])
            self.ran_s = float(before["ran_s"]) + min(max(0.0, ran_s), _LONGEST_RUN_S)

    def _lives(self, storage: Storage, number: int, holder: LeaseHolder) -> bool:
        if holder is _UNREADABLE:
            return True
        if holder.is_same_process(self._holder):
            return False  # an earlier manager of this process: the later one counts
        lives = holder.lives_here(self._holder)
        if lives is not None:
            return lives
        logger.info(
            "%s was written by %s; looking for %g s whether it still is",
            self._root.url,
            holder,
            self._lease_s,
        )
        first = read_if_there(storage, _name(number, "beat"))
        for _ in range(_BEATS + 1):
            self._wait(self._lease_s / _BEATS)
            if read_if_there(storage, _name(number, "beat")) != first:
                return True
        return False

    def _remove_older(self, storage: Storage) -> None:
        found = (_RIGHT.fullmatch(entry.key) for entry in storage.list("writer-"))
        storage.delete([one[0] for one in found if one and int(one[1]) < self._number])

    def _beat(self, number: int, beat: int) -> None:
        self._root.shared.write(_name(number, "beat"), str(beat).encode())


_LONGEST_RUN_S = 90 * 24 * 3600.0
"""What one holder counts for at most: one wrong clock must not hide all failures from then on."""


def _name(number: int, kind: str = "json") -> str:
    return f"writer-{number:08d}.{kind}"


def _highest(storage: Storage) -> tuple[int, bool]:
    """Returns the number of the newest lease (0 for none), and whether nobody holds it."""
    keys = {entry.key for entry in storage.list("writer-")}
    leases = (found for found in map(_RIGHT.fullmatch, keys) if found and found[2] == "json")
    number = max((int(found[1]) for found in leases), default=0)
    return number, not number or _name(number, "released") in keys


class ReaderLease:
    """Keeps a step while it is entered. Look whether the step is there *after* that.

    Attributes:
        unsure: Why the step may be deleted all the same, in words; "" where it can't be.

    Args:
        root: Where.
        step: Which step.
        lease_s: Time without a renewal after which a reader on another machine counts as dead, in
            seconds.
        holder: Who reads; this process by default.
        beats: Renew it in a thread, so that others see that this process lives.

    Raises:
        StorageError: When entered: the lease could not be written, or a deletion of the step that
            is announced could not be ended.
    """

    def __init__(
        self,
        root: Root,
        step: int,
        *,
        lease_s: float,
        holder: LeaseHolder | None = None,
        beats: bool = True,
    ) -> None:
        self._holder = holder or this_process()
        self._root = root
        self._step = step
        self._lease_s = lease_s
        self._beats = beats
        self._process = OwnProcess()
        self._stop: Callable[[], None] = lambda: None
        self.unsure = ""

    @property
    def _key(self) -> str:
        return f"{READING}{self._step}.{self._holder.nonce}"

    def __enter__(self) -> ReaderLease:
        storage = self._root.shared
        storage.write(self._key, self._holder.encode())
        try:
            reason = f"step {self._step} is read by {self._holder}"
            self.unsure = self._root.fence(reason, self._step)
            if self._beats and storage.traits.shared:
                self._stop = renewed(self._beat, self._lease_s / _BEATS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._process.is_this:
            return  # a child that was forked ends inside: its parent reads on
        self._stop()
        # Why suppressed: the reader is done, and a lease ends with the process that holds it.
        with suppress(CheckpointError):
            self._root.shared.delete([self._key])

    def _beat(self, number: int) -> None:
        self._root.shared.write(self._key, self._holder.encode(number))


class Readers:
    """Decides whether the readers of steps are live.

    Args:
        lease_s: Time without a renewal after which a reader on another machine counts as dead, in
            seconds.
        holder: Who asks; this process by default.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        holder: LeaseHolder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease_s = lease_s
        self._holder = holder or this_process()
        self._clock = clock
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Content of leases, and since when it is that."""

    def is_live(self, shared: Storage, key: str) -> bool:
        """Returns whether a lease is held; removes it where its holder has ended.

        Args:
            shared: What managers share.
            key: Of the lease.

        Raises:
            StorageError: The storage failed.
        """
        data, holder = _read_holder(shared, key)
        if data is None:
            return False
        if holder is None:
            if key not in self._seen:
                logger.warning(
                    "%s/%s can't be read: its step stays. If nobody reads the step, remove that "
                    "file",
                    shared.url,
                    key,
                )
            self._seen[key] = (data, 0.0)
            return True
        lives = holder.lives_here(self._holder)
        if lives is None:
            now_s = self._clock()
            if self._seen.get(key, (b"", 0.0))[0] != data:
                self._seen[key] = (data, now_s)
            lives = now_s - self._seen[key][1] < self._lease_s
        if not lives:
            shared.delete([key])
        return lives

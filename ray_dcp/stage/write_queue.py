"""`WriteQueue`: the windows that ranks hand to a node, and the threads that write them to storage.

Writing begins with the first window. The queue knows neither ranks nor coordinator: its caller
calls its methods, from any thread, and receives reports. Its threads run at a lower priority than
training, for processors and for the disk.

A `Job` is one rank's share of one save while a node holds and writes it; `StagedPieces` gives its
bytes to a writer. The queue keeps plans and layouts of the last saves, so that a plan is not sent
with every save, and written checkpoints for loads.
"""

from __future__ import annotations

import copy
import ctypes
import os
import platform
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.values import RankPlan
from ray_dcp.errors import CheckpointError, LimitError, ParticipantError, SaveCancelledError
from ray_dcp.io.threads import run_tasks
from ray_dcp.io.writer import part_key, write_pieces
from ray_dcp.stage.allocator import SlotAllocator
from ray_dcp.stage.memory import ObjectSlots, StagingMemory, WindowBytes
from ray_dcp.stage.memory_tier import Part, TierEntry, TierFile, kept_file, too_many
from ray_dcp.stage.values import (
    Grant,
    InFlight,
    Slot,
    StageKey,
    StageOrder,
    StageProgress,
    StageReport,
    StagerOptions,
    Unknown,
)
from ray_dcp.stage.windows import StagingLayout, lay_out_windows
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage

_JOBS_KEPT = 64
"""Finished jobs whose reports are kept for a coordinator that asks, when nobody releases them."""
_PLANS_KEPT = 16
_NUM_WRITERS = 4
"""Part files that a node writes at a time: enough to overlap the waits for a storage; each takes
a processor from training while it makes checksums."""
_NICE = 5
"""Of the writers, with a low priority for the disk: training goes first wherever both want a
processor. Not the lowest: a processor that is never free would hold up the commit."""

_T = TypeVar("_T")


def _remember(known: OrderedDict[Hashable, _T], name: Hashable, value: _T) -> None:
    """Takes what was used last, and forgets what was used long ago."""
    known[name] = value
    known.move_to_end(name)
    while len(known) > _PLANS_KEPT:
        known.popitem(last=False)


_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call ioprio_set."""
_IO_PRIORITY = {"low": (2 << 13) | 7, "idle": 3 << 13}
"""Best effort, last of eight; only while nobody else wants the disk."""


def step_behind(nice: int, io_priority: Literal["low", "idle"]) -> None:
    """Lowers the priority of the calling thread, as far as the system lets it.

    Args:
        nice: 0 to 19; more is further behind.
        io_priority: For the disk; counts where its I/O scheduler knows priorities.
    """
    # Suppressed: without it training is slowed a little, which is no reason to fail a save.
    with suppress(OSError, AttributeError):
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            # Careful: on Linux this is the priority of a thread, although it says process.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None and platform.system() == "Linux":
        ctypes.CDLL(None).syscall(number, 1, 0, _IO_PRIORITY[io_priority])


class WriteQueue:
    """Holds and writes what ranks hand over.

    *Invariant*: a slot is given to somebody else only when no writer reads it and its rank has
    said that it fills it no more (`deliver`, `seal`, `cancel(by_rank=True)`), or is dead.

    Args:
        channels: By name: `"shared"` and `"object_store"`, or one of them.
        report: Gets what became of each file, in a thread of its own; returns when the report is
            delivered, or can't be.
        opener: What opens a storage.
    """

    def __init__(
        self,
        channels: dict[str, Channel],
        report: Callable[[Any, StageReport], None],
        opener: Callable[[Target], Storage] = open_storage,
    ) -> None:
        self._channels = channels
        self._lock = threading.RLock()
        self._jobs: dict[StageKey, Job] = {}
        self._report = report
        self._opener = opener
        self._turn = threading.BoundedSemaphore(_NUM_WRITERS)
        self._plans: OrderedDict[Hashable, RankPlan] = OrderedDict()
        self._layouts: OrderedDict[Hashable, StagingLayout] = OrderedDict()

    def begin(self, order: StageOrder, reporter: Any) -> Grant | Unknown:
        """Takes an order, and returns the first windows' slots; may be none as yet.

        The same order again is the same job.

        Args:
            order: What is handed over.
            reporter: Who gets its reports; passed on to `report`.

        Returns:
            `Unknown("plan")` when the plan has to be sent with it.

        Raises:
            LimitError: There is no such channel here, or its windows are too short.
        """
        with self._lock:
            known = self._jobs.get(order.key)
            if known is not None:
                return Grant(tuple(known.slots))
            channel = self._channels.get(order.channel)
            if channel is None or order.window_bytes > channel.slot_bytes:
                raise LimitError(
                    f"expected windows of at most {channel.slot_bytes if channel else 0} bytes in "
                    f"the {order.channel} of this node, but found {order.window_bytes}. Give all "
                    f"nodes the same StagerOptions and equal stores",
                    key="window_bytes",
                )
            job = self._admit(order, reporter, channel)
            if job is None:
                return Unknown("plan")
            windows = [job.layout.files_of(window) for window in range(job.layout.num_windows)]
            keep = order.options.keep_in_memory > 0
            channel.allocator.begin(order.key, order.owner, windows, keep=keep)
            self._pump(channel)
            return Grant(tuple(job.slots))

    def more(self, key: StageKey, have: int) -> Future[Grant | Unknown]:
        """Returns the slots of windows from `have` on, as soon as there is one.

        The future's result is `Unknown("job")` when that is so; it raises why the job ends.
        """
        future: Future[Grant | Unknown] = Future()
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                future.set_result(Unknown("job"))
            else:
                job.wants_more.append((have, future))
                self._settle(job)
        return future

    def deliver(self, key: StageKey, window: int, data: Sequence[np.ndarray] | None = None) -> None:
        """Accepts a full window. Twice is fine, and so is a job that is not known.

        Args:
            key: Whose.
            window: Which. In shared memory, this one and all before it.
            data: Its bytes, in runs; None when they are in its slot.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.error is not None or window >= len(job.slots):
                return
            if job.is_over and job.rank_is_done:
                return
            channel, slots = job.channel, job.slots
            first = 0 if data is None else window
            came = [number for number in range(first, window + 1) if number not in job.windows]
            if not came:
                return
            for number in came:
                if data is not None:
                    job.windows[number] = channel.objects.hold(slots[number], data)
                elif channel.arena is not None:
                    view = channel.arena.slot(slots[number].index)
                    job.windows[number] = WindowBytes([view])
                channel.allocator.delivered(key, number)
            self._start(job)
            job.changed.notify_all()
            self._pump(job.channel)
            self._settle(job)

    def fail_unreadable(self, key: StageKey, reason: str) -> None:
        """Fails a job whose objects Ray's store does not return; `seal` and `more` raise that."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None:
                self._fail(job, unreadable(key.rank, reason))

    def seal(self, key: StageKey) -> Future[bool | Unknown]:
        """Returns when the rank may go on: all windows are here.

        The future's result is `Unknown("job")` when that is so; it raises why the job ends.
        """
        future: Future[bool | Unknown] = Future()
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                future.set_result(Unknown("job"))
                return future
            job.rank_is_done = job.rank_is_done or len(job.windows) == job.layout.num_windows
            job.wants_seal.append(future)
            self._settle(job)
        return future

    def stuck(self, after_s: float) -> list[str]:
        """Returns the keys at which writers of jobs that have failed hang in the storage.

        A writer that moves no byte gives its turn back, so that other saves do not wait for it. One
        whose save may take no longer is cancelled: where all its ranks are dead nobody else does.

        Args:
            after_s: Without a byte, or since the job failed, in seconds.
        """
        now_s = time.monotonic()
        found = []
        with self._lock:
            for job in list(self._jobs.values()):
                missing = set(job.files) - job.reports.keys() if job.is_working else ()
                for turn in job.turns:
                    if now_s - turn.moved_s > after_s:
                        turn.give_back()
                write_timeout_s = job.order.options.write_timeout_s
                if missing and now_s - job.moved_s > write_timeout_s + after_s:
                    self.cancel(job.order.key, f"as nothing was written for {write_timeout_s:g} s")
                if missing and job.error is not None and now_s - job.failed_s > after_s:
                    attempt = job.order.key.attempt
                    found += [part_key(job.plan.files[file], attempt) for file in sorted(missing)]
        return found

    def is_needed(self) -> bool:
        """Returns whether a job has bytes that its rank may not have any more."""
        with self._lock:
            return any(
                job.error is None and job.rank_is_done and not job.is_over
                for job in self._jobs.values()
            )

    def cancel(self, key: StageKey, reason: str = "", *, by_rank: bool = False) -> None:
        """Gives a job up. Nobody is told of its files any more; what was written stays.

        Args:
            key: Which; one that is not known is fine.
            reason: Why, for the rank if it waits.
            by_rank: The rank itself says so, and that it fills its slots no more.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                return
            job.rank_is_done |= by_rank
            job.is_dropped = True
            job.tells_error = False
            self._fail(job, SaveCancelledError(f"staging was cancelled {reason}".strip()))

    def release(self, key: StageKey, *, committed: bool = False) -> None:
        """Forgets a job and its reports; one that is still at work is cancelled first.

        Args:
            key: Which; one that is not known is fine.
            committed: It was; what is to be kept in memory stays then.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                return
            job.is_committed, job.is_released = committed, True
            if job.is_over and job.rank_is_done:
                job.is_dropped = not committed
                self._tidy(job)
            elif not (committed and job.is_written):
                self.cancel(key, "because its outcome is known")
            # Else only the answer to its last report is missing; then it is kept or forgotten.

    def process_died(self, process: str) -> None:
        """Takes that a rank is dead: what it had handed over whole is written, the rest not."""
        with self._lock:
            for job in list(self._jobs.values()):
                if job.order.process == process:
                    job.rank_is_done = True
                    if len(job.windows) < job.layout.num_windows:
                        self._fail(job, died(job.order.key.rank))
                    self._tidy(job)

    # To be looked at

    def progress(self, key: StageKey) -> StageProgress | None:
        """Returns how far a job is; None when it is not known."""
        with self._lock:
            job = self._jobs.get(key)
            return None if job is None else job.progress()

    def awaits(self, key: StageKey) -> bool:
        """Returns whether the save may still need the reports of a job."""
        with self._lock:
            job = self._jobs.get(key)
            return job is not None and not (job.is_released or job.is_dropped)

    def shares(self, attempt: str) -> list[StageProgress]:
        """Returns how far each share of an attempt is."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.order.key.attempt == attempt]
            return [job.progress() for job in jobs if not job.is_dropped]

    def kept(self, attempt: str) -> TierEntry | None:
        """Returns what is kept of an attempt; None when nothing is."""
        with self._lock:
            jobs = [
                job
                for job in self._jobs.values()
                if job.is_kept and job.order.key.attempt == attempt and self._keeps(job)
            ]
            if not jobs:
                return None
            # Why of one: ranks of a node stage in the same way, but for one in another container.
            channel, name = jobs[0].channel, jobs[0].order.channel
            files = {
                file.key: file
                for job in jobs
                if job.channel is channel
                for file in job.kept_files()
            }
            address = None if channel.arena is None else channel.arena.address
            return TierEntry(name, address, tuple(files.values()))

    def kept_attempts(self) -> set[str]:
        """Returns the attempts of which something is kept."""
        with self._lock:
            return {job.order.key.attempt for job in self._jobs.values() if job.is_kept}

    def fetch(self, channel: str, parts: Sequence[Part]) -> np.ndarray | None:
        """Returns bytes of staging memory as uint8[n]; None when they are gone.

        Args:
            channel: Of the `TierEntry`.
            parts: As `TierFile.find` gave them: one after the other. What is nowhere is 0.
        """
        memory = self._channels[channel].arena or self._channels[channel].objects
        found = np.zeros(sum(part.num_bytes for part in parts), dtype=np.uint8)
        return found if memory.read_into(parts, found.data) else None

    def in_flight(self, url: str) -> list[InFlight]:
        """Returns the saves to a place, or below it, that may still be committed.

        Args:
            url: Of a checkpoint, or of the folder that it is in.
        """
        below = url.rstrip("/") + "/"
        with self._lock:
            return [
                InFlight(job.order.target, job.order.key.attempt, job.is_over)
                for job in self._jobs.values()
                if job.error is None
                and not (job.is_committed or job.is_dropped)
                and (job.order.target.url.rstrip("/") + "/").startswith(below)
            ]

    def used_bytes(self) -> int:
        """Returns how much staging memory is granted now."""
        with self._lock:
            return sum(c.allocator.num_used * c.slot_bytes for c in self._channels.values())

    def num_active(self) -> int:
        """Returns how many jobs are not over."""
        with self._lock:
            return sum(not (job.is_over and job.rank_is_done) for job in self._jobs.values())

    def expect(self, owner: str, num_bytes: int, channel: str) -> list[int]:
        """Returns the slots that a rank will get first for so many bytes that go by a channel."""
        with self._lock:
            own = self._channels[channel]
            return own.allocator.expect(owner, -(-num_bytes // own.slot_bytes))

    def owned(self, owner: str) -> tuple[int, ...]:
        """Returns the slots that a rank had last; one of its name may need them next."""
        with self._lock:
            channel = self._channels.get("shared")
            return () if channel is None else tuple(channel.allocator.owned(owner))

    def warm(self, index: int) -> None:
        """Touches the memory of a slot, all of it: a save may have filled only a part."""
        channel = self._channels["shared"]
        if channel.arena is None:
            return
        channel.arena.touch(index)
        with self._lock:
            channel.allocator.warm.add(index)

    def shrink(self, owners: Collection[str]) -> None:
        """Gives memory back to the machine that no rank has used but those that are gone.

        Args:
            owners: Those that are there, or may come again: their slots stay warm.
        """
        channel = self._channels.get("shared")
        while channel is not None and channel.arena is not None:
            # Why one by one: to free a slot takes some milliseconds, in which others wait.
            with self._lock:
                index = channel.allocator.cool(owners)
                if index is None:
                    return
                channel.arena.discard(index)

    # With the lock held

    def _admit(self, order: StageOrder, reporter: Any, channel: Channel) -> Job | None:
        """Returns a new job; None where its plan came neither with it nor with an earlier order."""
        plan = order.plan or self._plans.get(order.plan_id)
        if plan is None:
            return None
        _remember(self._plans, order.plan_id, plan)
        name = (order.plan_id, order.deferred_bytes, order.window_bytes)
        layout = self._layouts.get(name)
        if layout is None:
            layout = lay_out_windows(plan, order.deferred_bytes, order.window_bytes)
        _remember(self._layouts, name, layout)
        changed = threading.Condition(self._lock)
        job = self._jobs[order.key] = Job(order, plan, layout, reporter, channel, changed)
        jobs = self._jobs.values()
        over = [one for one in jobs if one.is_over and one.rank_is_done and not one.is_kept]
        for old in over[:-_JOBS_KEPT]:
            self._forget(old)
        return job

    def _keeps(self, job: Job) -> bool:
        """Returns whether the bytes of a job that has ended stay, and notes that they do."""
        job.is_kept = (
            job.order.options.keep_in_memory > 0
            and not job.is_dropped
            and job.error is None
            and job.is_written
            and job.channel.allocator.is_whole(job.order.key)
        )
        return job.is_kept

    def _surplus(self) -> list[Job]:
        """Returns the jobs whose bytes are not to stay any longer."""
        kept = [job for job in self._jobs.values() if job.is_kept]
        gone = too_many(
            [
                (job.run, job.order.key.attempt, job.order.options.keep_in_memory, job.is_committed)
                for job in kept
            ]
        )
        return [job for job in kept if job.order.key.attempt in gone or not self._keeps(job)]

    def _pump(self, channel: Channel) -> None:
        granted = channel.allocator.grants()
        for grant in granted:
            if channel.arena is not None:
                channel.arena.mark(grant.slot)
            self._jobs[grant.job].slots.append(grant.slot)
        for grant in channel.allocator.ended():
            gone = channel.objects.release(grant.slot)
            if grant.job in self._jobs:
                self._jobs[grant.job].windows[grant.window] = gone
            self._free_later(channel, grant.slot, gone)
        names = dict.fromkeys(grant.job for grant in granted)
        # Why afterwards: what is answered may lead to further grants, which come behind these.
        for name in names:
            if name in self._jobs:
                self._settle(self._jobs[name])

    def _settle(self, job: Job) -> None:
        """Answers what can be answered of `more` and `seal`."""
        error = job.failure()
        for have, future in list(job.wants_more):
            if error is not None or len(job.slots) > have:
                job.wants_more.remove((have, future))
                answer(future, error, None if error else Grant(tuple(job.slots[have:])))
        if job.wants_seal and error is None and len(job.windows) == job.layout.num_windows:
            self._start(job)
            error = job.failure()
            job.is_sealed = job.rank_is_done = job.is_sealed or error is None
        for waiting in job.wants_seal if error is not None or job.is_sealed else ():
            answer(waiting, error, True)
        if error is not None or job.is_sealed:
            job.wants_seal.clear()
        self._tidy(job)

    def _fail(self, job: Job, error: CheckpointError) -> None:
        if job.error is None and not job.is_over:
            job.error, job.failed_s = error, time.monotonic()
            if job.tells_error:
                self._start(job)
        for turn in job.turns:
            turn.give_back()
        if not job.is_working:
            job.is_over = True
        job.changed.notify_all()
        self._settle(job)

    def _start(self, job: Job) -> None:
        if job.is_working or job.is_over:
            return
        job.is_working = True
        try:
            threading.Thread(target=self._work, args=(job,), daemon=True).start()
        except RuntimeError as exc:
            job.is_working = False
            # Why no report: it would take a thread. The rank is told, which waits for an answer.
            job.tells_error = False
            self._fail(job, no_thread(job.order.key.rank, exc))

    def _tidy(self, job: Job) -> None:
        if job.is_over and job.rank_is_done and not self._keeps(job):
            (self._forget if job.is_released else self._drop)(job)
            return
        for old in self._surplus() if job.is_kept else ():
            old.is_dropped, old.is_kept = True, False
            self._forget(old)

    def _forget(self, job: Job) -> None:
        self._drop(job)
        self._jobs.pop(job.order.key, None)

    def _drop(self, job: Job) -> None:
        if job.channel.arena is not None:
            job.windows.clear()
        job.channel.allocator.drop(job.order.key)
        self._pump(job.channel)

    def _free_later(self, channel: Channel, slot: Slot, gone: WindowBytes) -> None:
        def free() -> None:
            with self._lock:
                if not gone.is_gone:
                    self._free_later(channel, slot, gone)
                    return
                channel.allocator.gone(slot)
                self._pump(channel)

        timer = threading.Timer(channel.linger_s, free)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the node has no thread left: better too early than never
            channel.allocator.gone(slot)

    # In the threads of a job

    def _work(self, job: Job) -> None:
        try:
            threads = min(job.order.options.num_threads, max(len(job.files), 1))
            run_tasks(job.files, lambda file: self._write(job, file), threads)
        except BaseException as exc:  # noqa: BLE001 - told to whoever collects the receipts
            # Suppressed: nobody takes reports any more.
            with suppress(BaseException):
                for file in job.files:
                    if file not in job.reports:
                        self._tell(job, file, unwritten(job, file, exc))
        with self._lock:
            job.is_working, job.is_over = False, True
            self._settle(job)

    def _write(self, job: Job, file: int) -> None:
        step_behind(_NICE, "low")
        turn = _Turn(self._turn)
        with self._lock:
            job.turns.add(turn)
        try:
            turn.acquire()
            passed = self._passed(job, file, turn)
            report = write_staged(job, file, turn, passed, self._opener)
        finally:
            turn.release()
            with self._lock:
                job.turns.discard(turn)
        self._tell(job, file, report)

    def _passed(self, job: Job, file: int, turn: _Turn) -> Callable[[int | None, int], None]:
        def passed(window: int | None, num_bytes: int) -> None:
            with self._lock:
                job.written_bytes += num_bytes
                job.moved_s = turn.moved_s = time.monotonic()
                if window is not None:
                    job.channel.allocator.read(job.order.key, window, file)
                    self._pump(job.channel)

        return passed

    def _tell(self, job: Job, file: int, report: StageReport) -> None:
        with self._lock:
            job.reports[file] = report
            silent = job.error is not None and not job.tells_error
        if not silent:
            self._report(job.reporter, report)
        with self._lock:
            job.channel.allocator.finished(job.order.key, file)
            self._pump(job.channel)
            self._settle(job)


class _Turn:
    """The turn of one writer among those that may write at a time.

    Its writer may hang in a storage that never answers, and the saves of others must not wait for
    that: the turn is given back when the job fails, or when nothing moves.

    Args:
        turns: Of all writers.

    Attributes:
        moved_s: When its writer began, or last wrote a byte; by the monotonic clock.
    """

    def __init__(self, turns: threading.Semaphore) -> None:
        self.moved_s = float("inf")
        self._turns = turns
        self._lock = threading.Lock()
        self._is_held = False
        self._given_back = threading.Event()

    def acquire(self) -> None:
        """Waits for the turn; not after it was given back."""
        if self._given_back.is_set():
            return
        self._turns.acquire()
        self.moved_s = time.monotonic()
        with self._lock:
            self._is_held = True
        if self._given_back.is_set():
            self.release()

    def release(self) -> None:
        """Lets another writer write."""
        with self._lock:
            was_held, self._is_held = self._is_held, False
        self.moved_s = float("inf")
        if was_held:
            self._turns.release()

    def give_back(self) -> None:
        """Lets another writer write from now on, whatever this one waits for."""
        self._given_back.set()
        self.release()


LINGER_S = 1.5
"""Ray frees objects once a second (`free_objects_period_milliseconds`), and has to hear of them."""


@dataclass(eq=False)
class Channel:
    """A kind of staging memory: shared by the node, or objects of Ray's store."""

    slot_bytes: int
    allocator: SlotAllocator[StageKey]
    arena: StagingMemory | None = None
    """Where the slots are; None where windows come as objects."""
    objects: ObjectSlots = field(default_factory=ObjectSlots)
    linger_s: float = LINGER_S
    """How long the memory of an object is in use after its last reference is gone, in seconds."""


def object_channel(limit_bytes: int, options: StagerOptions) -> Channel:
    """Returns one whose windows are objects, of so many bytes."""
    slot_bytes = options.window_bytes_within(limit_bytes)
    allocator = SlotAllocator[StageKey](max(limit_bytes // slot_bytes, 1), linger=True)
    return Channel(slot_bytes, allocator)


def shared_channel(limit_bytes: int, options: StagerOptions) -> Channel:
    """Returns one with shared memory of so many bytes.

    Raises:
        LimitError: There is no such memory on this machine.
    """
    slot_bytes = options.window_bytes_within(limit_bytes)
    num_slots = max(limit_bytes // slot_bytes, 1)
    arena = StagingMemory.create(num_slots, slot_bytes)
    return Channel(slot_bytes, SlotAllocator(num_slots), arena)


@dataclass(eq=False)
class Job:
    """What a `WriteQueue` knows of one `StageKey`. Guarded by its lock."""

    order: StageOrder
    plan: RankPlan
    layout: StagingLayout
    reporter: Any
    """Who gets the reports; the queue only passes it on."""
    channel: Channel
    changed: threading.Condition
    slots: list[Slot] = field(default_factory=list)
    windows: dict[int, WindowBytes] = field(default_factory=dict)
    """Bytes of the windows that are here, or were."""
    reports: dict[int, StageReport] = field(default_factory=dict)
    """By position in `plan.files`."""
    written_bytes: int = 0
    moved_s: float = field(default_factory=lambda: time.monotonic())
    """When bytes last reached the storage, or the job began; by the monotonic clock."""
    turns: set[_Turn] = field(default_factory=set)
    """Of its writers."""
    error: CheckpointError | None = None
    """Why it ends early."""
    failed_s: float = 0.0
    """When that happened; by the monotonic clock."""
    tells_error: bool = True
    """Whether that is reported, for every file that is not written."""
    is_sealed: bool = False
    rank_is_done: bool = False
    """The rank writes into its slots no more."""
    is_working: bool = False
    is_over: bool = False
    is_kept: bool = False
    """Written, and its bytes stay for loads."""
    is_committed: bool = False
    """Its rank was told so."""
    is_released: bool = False
    """Its rank knows the outcome: it is forgotten as soon as it is over, if it is not kept."""
    is_dropped: bool = False
    """It failed, or was cancelled: nobody will load it."""
    wants_more: list[tuple[int, Future[Grant | Unknown]]] = field(default_factory=list)
    wants_seal: list[Future[bool | Unknown]] = field(default_factory=list)

    @property
    def files(self) -> tuple[int, ...]:
        """Positions in `plan.files` of those to write."""
        return tuple(range(len(self.plan.files)))

    @property
    def is_written(self) -> bool:
        """Whether there is a receipt for each of its files."""
        told = self.reports
        return len(told) == len(self.files) and all(one.receipt for one in told.values())

    @property
    def run(self) -> str:
        """The folder of the checkpoints that it belongs to."""
        return self.order.target.url.rstrip("/").rpartition("/")[0]

    def kept_files(self) -> tuple[TierFile, ...]:
        """Returns where the bytes of each file lie, by the keys of the attempt."""
        return tuple(
            kept_file(
                part_key(self.plan.files[file], self.order.key.attempt),
                self.layout,
                file,
                self.slots,
            )
            for file in self.files
        )

    def failure(self) -> CheckpointError | None:
        """Returns a copy of why it ends early, to be raised in another thread."""
        return None if self.error is None else copy.copy(self.error)

    def progress(self) -> StageProgress:
        """Returns how far it is."""
        return StageProgress(
            self.order.key,
            self.layout.total_bytes,
            self.written_bytes,
            self.is_sealed,
            tuple(self.reports.values()),
        )


class StagedPieces:
    """Implements `PieceSource` on the windows of a job; waits for those that are not here yet.

    Args:
        job: Whose.
        file: Position in `plan.files`.
        turn: Held by the writing thread; given up while it waits.
        passed: Told of each window whose bytes for this file are written, and of how many bytes
            are written since the last time.
    """

    def __init__(
        self,
        job: Job,
        file: int,
        turn: _Turn,
        passed: Callable[[int | None, int], None],
    ) -> None:
        self.before_wait: Callable[[], None] = lambda: None
        layout = job.layout
        low, high = layout.file_first[file : file + 2].tolist()
        own = slice(low, high)
        self._job = job
        self._turn = turn
        self._passed = passed
        self._window = layout.window[own].tolist()
        self._offset = layout.offset[own].tolist()
        self._length = layout.num_bytes[own].tolist()
        self._file_end = layout.file_end[own].tolist()
        self._segments: dict[int, list[int]] = {}
        for segment, piece in enumerate(layout.piece[own].tolist()):
            self._segments.setdefault(piece, []).append(segment)
        self._current = (-1, WindowBytes(()))
        self._done = 0

    def small(self, first: int, stop: int) -> Iterator[memoryview]:
        """See `PieceSource.small`."""
        segments = self._segments
        for piece in range(first, stop):
            found = segments.get(piece)
            yield next(self._views(found[0]), _EMPTY) if found else _EMPTY

    def parts(self, piece: int) -> Iterator[memoryview]:
        """See `PieceSource.parts`."""
        return chain.from_iterable(map(self._views, self._segments.get(piece, ())))

    def num_bytes(self, piece: int) -> int:
        """See `PieceSource.num_bytes`."""
        return sum(self._length[segment] for segment in self._segments.get(piece, ()))

    def written(self, end: int) -> None:
        """See `PieceSource.written`."""
        num_bytes = 0
        while self._done < len(self._window) and self._file_end[self._done] <= end:
            num_bytes += self._length[self._done]
            window = self._window[self._done]
            self._done += 1
            is_last = self._done == len(self._window) or self._window[self._done] != window
            if is_last:
                self._passed(window, num_bytes)
                num_bytes = 0
        if num_bytes:
            self._passed(None, num_bytes)

    def _views(self, segment: int) -> Iterator[memoryview]:
        window = self._window[segment]
        if window != self._current[0]:
            self._current = (window, self._wait_for(window))
        return self._current[1].views(self._offset[segment], self._length[segment])

    def _wait_for(self, window: int) -> WindowBytes:
        job = self._job
        with job.changed:
            if job.error is None and window in job.windows:
                return job.windows[window]
        # Why: what is packed lies in windows that others may wait for, and this one for them.
        self.before_wait()
        self._turn.release()
        try:
            with job.changed:
                while job.error is None and window not in job.windows:
                    job.changed.wait()
                if job.error is not None:
                    # Why no name for it: it would hold this frame, and so the bytes, in a circle.
                    raise copy.copy(job.error)
                view = job.windows[window]
        finally:
            self._turn.acquire()
        return view


def write_staged(
    job: Job,
    file: int,
    turn: _Turn,
    passed: Callable[[int | None, int], None],
    opener: Callable[[Target], Storage],
) -> StageReport:
    """Writes one file of a job and returns what became of it. Never raises.

    Args:
        job: Whose.
        file: Position in `plan.files`.
        turn: See `StagedPieces`; held by the caller.
        passed: See `StagedPieces`.
        opener: What opens the storage.
    """
    order, plan = job.order, job.plan.files[file]
    try:
        pieces = StagedPieces(job, file, turn, passed)
        storage = opener(order.target)
        receipt = write_pieces(storage, plan, order.key.attempt, pieces, options=order.options)
    except Exception as exc:  # noqa: BLE001 - told to whoever collects the receipts
        return unwritten(job, file, exc)
    return StageReport(order.key, plan.file, receipt)


def unwritten(job: Job, file: int, error: BaseException) -> StageReport:
    """Returns the report of a file that could not be written.

    Args:
        job: Whose.
        file: Position in `plan.files`.
        error: Why.
    """
    plan = job.plan.files[file]
    if not isinstance(error, CheckpointError):
        error = CheckpointError(
            f"writing staged bytes failed: {type(error).__name__}: {error}", key=plan.key
        )
    # Why a copy: the report stays, and the frames of a traceback hold views of the bytes.
    return StageReport(job.order.key, plan.file, None, copy.copy(error))


def no_thread(rank: int, error: RuntimeError) -> LimitError:
    """Returns the error for a share that the stager has no thread to write with."""
    return LimitError(
        f"expected the node's stager to start a thread that writes the bytes of rank {rank}, but "
        f"{error}: the node has as many processes and threads as it may. Raise the limit (ulimit "
        f"-u, or pids of the container), or end what needs them, and save again",
        rank=rank,
    )


def died(rank: int) -> ParticipantError:
    """Returns the error for a rank that ended in the middle of handing over."""
    return ParticipantError(
        f"rank {rank} died before the stager had all its bytes; restart it and save again",
        rank=rank,
    )


def unreadable(rank: int, reason: str) -> ParticipantError:
    """Returns the error for objects that Ray's store does not return."""
    return ParticipantError(
        f"expected the bytes that rank {rank} put into Ray's object store, but Ray did not return "
        f"them to the stager: {reason}; save again",
        rank=rank,
    )


def answer(future: Future[Any] | None, error: CheckpointError | None, result: Any) -> None:
    """Ends a future that somebody may wait for."""
    # Suppressed: whoever waited has given up.
    with suppress(Exception):
        if future is None:
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


_EMPTY = memoryview(b"")

"""The spool of a node: windows that ranks hand over, and the threads that write them.

Writing begins with the first window. Who talks to ranks and coordinator is not known here: it
calls these methods, from any thread, and is handed reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ray_dcp.errors import CheckpointError, LimitError, SaveCancelledError
from ray_dcp.protocol.messages import Target
from ray_dcp.stage.arena import Arena
from ray_dcp.stage.jobs import (
    Channel,
    Job,
    answer,
    died,
    lost_memory,
    no_thread,
    unwritten,
    write_staged,
)
from ray_dcp.stage.known_plans import KnownPlans
from ray_dcp.stage.priority import step_behind
from ray_dcp.stage.spool_state import SpoolState
from ray_dcp.stage.values import (
    Grant,
    Slot,
    StageKey,
    StageOrder,
    StageReport,
    StagerOptions,
    Unknown,
)
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.threads import run_tasks

__all__ = ["Spool"]


class Spool(SpoolState):
    """Holds and writes what ranks hand over.

    *Invariant*: a slot is given to somebody else only when no writer reads it and its rank has
    said that it fills it no more (`deliver`, `seal`, `cancel(by_rank=True)`), or is dead.

    Args:
        channels: By name: `"arena"` and `"store"`, or one of them.
        options: How to write.
        report: Gets what became of each file, in a thread of its own; returns when the report is
            delivered, or can't be.
        opener: What opens a storage.
    """

    def __init__(
        self,
        channels: dict[str, Channel],
        options: StagerOptions,
        report: Callable[[Any, StageReport], None],
        opener: Callable[[Target], Storage] = open_storage,
    ) -> None:
        super().__init__(channels)
        self._options = options
        self._report = report
        self._opener = opener
        self._turn = threading.BoundedSemaphore(options.num_writers)
        self._known = KnownPlans()

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
                return self._grant(known, 0)
            channel = self._channels.get(order.channel)
            if channel is None or order.window_bytes > channel.slot_bytes:
                raise LimitError(
                    f"expected windows of at most {channel.slot_bytes if channel else 0} bytes in "
                    f"the {order.channel} of this node, but found {order.window_bytes}. Give all "
                    f"nodes the same StagerOptions and equal stores",
                    key="window_bytes",
                )
            plan = self._known.plan(order)
            if plan is None:
                return Unknown("plan")
            layout = self._known.layout(order, plan)
            job = self._add(Job(order, plan, layout, reporter, channel, channel.arena, self._new()))
            wanted = set(job.files)
            windows = [layout.files_of(window) & wanted for window in range(layout.num_windows)]
            keep = channel.arena is not None and order.options.keep_in_memory > 0
            channel.ledger.begin(order.key, order.owner, windows, keep=keep)
            self._pump(channel)
            return self._grant(job, 0)

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

    def deliver(self, key: StageKey, window: int, data: memoryview | None = None) -> None:
        """Takes that a window is full. Twice is fine, and so is a job that is not known.

        Args:
            key: Whose.
            window: Which. In shared memory, this one and all before it.
            data: Its bytes; None when they are in its slot.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.error is not None or window >= len(job.slots):
                return
            if job.is_over and job.rank_is_done:
                return
            if job.arena is not None:
                came = {
                    number: job.arena.slot(job.slots[number].index)
                    for number in range(window + 1)
                    if number not in job.windows
                }
            else:
                came = {window: data} if data is not None and window not in job.windows else {}
            if not came:
                return
            for number, content in came.items():
                job.windows[number] = content
                if job.channel is not None:
                    job.channel.ledger.delivered(key, number)
            self._start(job)
            job.changed.notify_all()
            self._pump(job.channel)
            self._settle(job)

    def seal(self, key: StageKey) -> Future[bool | Unknown]:
        """Tells when the rank may go on: all windows are here, and none would be missed later.

        A rank that stages in the arena need not have delivered its last windows: it says by this
        call that all are full. The future's result is `Unknown("job")` when that is so; it raises
        why the job ends.
        """
        future: Future[bool | Unknown] = Future()
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                future.set_result(Unknown("job"))
                return future
            if job.arena is not None:
                self.deliver(key, len(job.slots) - 1)
            job.rank_is_done = job.rank_is_done or len(job.windows) == job.layout.num_windows
            job.wants_seal.append(future)
            self._settle(job)
        return future

    def adopt(
        self, order: StageOrder, reporter: Any, arena: Arena, slots: tuple[Slot, ...]
    ) -> bool | Unknown:
        """Writes from the memory of a stager that died, which the rank still had open.

        Args:
            order: What the rank had handed over to that one.
            reporter: Who gets the reports.
            arena: That memory.
            slots: Of all windows.

        Returns:
            `Unknown("plan")` when the plan has to be sent with it.
        """
        with self._lock:
            if order.key in self._jobs:
                return True
            plan = self._known.plan(order)
            if plan is None:
                return Unknown("plan")
            layout = self._known.layout(order, plan)
            job = self._add(Job(order, plan, layout, reporter, None, arena, self._new()))
            job.is_sealed = job.rank_is_done = True
            job.slots = list(slots)
            job.windows = {w: arena.slot(slot.index) for w, slot in enumerate(slots)}
            if len(slots) != layout.num_windows:
                job.error = lost_memory(order.key.rank)
            self._start(job)
            if job.is_over and job.error is not None:
                raise job.error
            return True

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
            job.rank_is_done = job.rank_is_done or by_rank
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
                if job.order.process == process and job.channel is not None:
                    job.rank_is_done = True
                    if len(job.windows) < job.layout.num_windows:
                        self._fail(job, died(job.order.key.rank))
                    self._tidy(job)

    # With the lock held

    def _grant(self, job: Job, have: int) -> Grant:
        freed = job.channel.ledger.freed(job.order.key) if job.channel else ()
        return Grant(tuple(job.slots[have:]), freed)

    def _pump(self, channel: Channel | None) -> None:
        granted = channel.ledger.grants() if channel else ()
        for grant in granted:
            if channel is not None and channel.arena is not None:
                channel.arena.mark(grant.slot)
            self._jobs[grant.job].slots.append(grant.slot)
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
                answer(future, error, None if error else self._grant(job, have))
        if job.wants_seal and error is None and not job.is_sealed and job.channel is not None:
            ledger = job.channel.ledger
            if ledger.may_seal(job.order.key):
                self._start(job)
                error = job.failure()
            if error is None and ledger.may_seal(job.order.key):
                ledger.seal(job.order.key)
                job.is_sealed = job.rank_is_done = True
        for waiting in job.wants_seal if error is not None or job.is_sealed else ():
            answer(waiting, error, True)
        if error is not None or job.is_sealed:
            job.wants_seal.clear()
        self._tidy(job)

    def _fail(self, job: Job, error: CheckpointError) -> None:
        if job.error is None and not job.is_over:
            job.error = error
            if job.tells_error:
                self._start(job)
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
        if job.is_over and job.rank_is_done and not self._shelf.takes(job):
            (self._forget if job.is_released else self._drop)(job)
            return
        for old in self._shelf.surplus() if job.is_kept else ():
            old.is_dropped, old.is_kept = True, False
            self._forget(old)

    def _forget(self, job: Job) -> None:
        self._drop(job)
        self._jobs.pop(job.order.key, None)

    def _drop(self, job: Job) -> None:
        job.windows.clear()
        if job.channel is not None:
            job.channel.ledger.drop(job.order.key)
            self._pump(job.channel)

    def _forget_freed(self, job: Job) -> None:
        """Lets go of objects of the store that count no more."""
        if job.arena is None and job.channel is not None:
            for window in job.channel.ledger.freed(job.order.key):
                job.windows[window] = memoryview(b"")

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
        step_behind(self._options.nice, self._options.io_priority)
        with self._turn:
            passed = self._passed(job, file)
            report = write_staged(job, file, self._turn, passed, self._opener)
        self._tell(job, file, report)

    def _passed(self, job: Job, file: int) -> Callable[[int | None, int], None]:
        def passed(window: int | None, num_bytes: int) -> None:
            with self._lock:
                job.written_bytes += num_bytes
                if window is not None and job.channel is not None:
                    job.channel.ledger.read(job.order.key, window, file)
                    self._pump(job.channel)
                    self._forget_freed(job)

        return passed

    def _tell(self, job: Job, file: int, report: StageReport) -> None:
        with self._lock:
            job.reports[file] = report
            silent = job.error is not None and not job.tells_error
        if not silent:
            self._report(job.reporter, report)
        with self._lock:
            if job.channel is not None:
                job.channel.ledger.finished(job.order.key, file)
                self._forget_freed(job)
                self._pump(job.channel)
            self._settle(job)

"""`WriteQueue`: the windows of a node that wait until they are written to storage.

Writing begins with the first window. The queue knows neither ranks nor coordinator: its caller
calls its methods, from any thread, and receives reports. Its threads run at a lower priority than
training.

A `Job` is one rank's share of one save while a node holds and writes it; `StagedPieces` gives its
bytes to a writer. The queue keeps written checkpoints for loads.
"""

from __future__ import annotations

import copy
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ray_dcp.commit_protocol.messages import PartsHeld, PartsWritten, Target
from ray_dcp.core import bounds
from ray_dcp.core.processes import run_tasks, start_thread
from ray_dcp.errors import CheckpointError, LimitError, ParticipantError, SaveCancelledError
from ray_dcp.io.writer import part_key
from ray_dcp.stage.budget import Room, WindowBudget
from ray_dcp.stage.orders import (
    Grant,
    Holder,
    InFlight,
    StagedWindow,
    StageKey,
    StageOrder,
    StageProgress,
    Unknown,
)
from ray_dcp.stage.staged_pieces import unwritten, write_staged
from ray_dcp.stage.tier_files import Part, TierEntry, too_many
from ray_dcp.stage.window_bytes import WindowBytes
from ray_dcp.stage.windows import lay_out_windows
from ray_dcp.stage.write_job import Job
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage

_JOBS_KEPT = 64
"""Finished jobs whose reports are kept for a coordinator that asks, when nobody releases them."""
_NICE = 5
"""Of the writers: training goes first wherever both want a processor. Not the lowest: a processor
that is never free would hold up the commit."""


def step_behind(nice: int) -> None:
    """Lowers the priority of the calling thread, as far as the system lets it.

    Args:
        nice: The niceness, from 0 to 19; a thread of a higher one runs later.
    """
    # Suppressed: without it training is slowed a little, which is no reason to fail a save.
    with suppress(OSError, AttributeError):
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            # Careful: on Linux this is the priority of a thread, although it says process.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class WriteQueue:
    """Holds and writes what ranks hand over.

    *Invariant*: a window counts in the budget until nobody refers to its bytes: no writer, no
    load, and no rank that has not said so (`deliver`, `seal`, `cancel(by_rank=True)`) and lives.

    Args:
        limit_bytes: Most bytes of windows at a time.
        window_bytes: Length of the longest window.
        report: Receives what became of each file, in a thread of its own; returns when the report
            is delivered, or can't be.
        opener: Opens a storage.
        linger_s: See `LINGER_S`.
    """

    def __init__(
        self,
        limit_bytes: int,
        window_bytes: int,
        report: Callable[[Any, PartsWritten], None],
        opener: Callable[[Target], Storage] = open_storage,
        *,
        linger_s: float = bounds.LINGER_S,
    ) -> None:
        self._lock = threading.RLock()
        self._budget: WindowBudget[StageKey] = WindowBudget(limit_bytes)
        self._window_bytes = window_bytes
        self._linger_s = linger_s
        self._leaving: deque[tuple[float, WindowBytes, Room[StageKey]]] = deque()
        self._here: dict[tuple[StageKey, int], WindowBytes] = {}
        """The bytes of each window that has room and was delivered, also of a forgotten job."""
        self._lent: dict[Hashable, list[WindowBytes]] = {}
        self._told_missing = False
        self._jobs: dict[StageKey, Job] = {}
        self._report = report
        self._opener = opener

    def begin(self, order: StageOrder, reporter: Any) -> Grant:
        """Registers an order, and returns how many windows have room; may be none as yet.

        The same order again is the same job.

        Args:
            order: The rank's share of the save.
            reporter: Who receives the reports; passed on to `report`.

        Raises:
            LimitError: Its windows are too long.
        """
        with self._lock:
            known = self._jobs.get(order.key)
            if known is not None:
                return Grant(known.num_granted)
            if order.window_bytes > self._window_bytes:
                raise LimitError(
                    f"expected windows of at most {self._window_bytes} bytes in the object store "
                    f"of this node, but found {order.window_bytes}. Give all nodes the same "
                    f"StagerOptions and equal stores",
                    key="window_bytes",
                )
            over = [
                one for one in self._jobs.values() if one.state.is_at_rest and not self._stays(one)
            ]
            for old in over[:-_JOBS_KEPT]:
                self._forget(old)
            layout = lay_out_windows(order.plan, order.deferred_bytes, order.window_bytes)
            changed, hold_s = threading.Condition(self._lock), 2 * self._linger_s
            job = self._jobs[order.key] = Job(order, layout, reporter, changed, hold_s)
            windows = [
                (num_bytes, layout.files_of(number))
                for number, num_bytes in enumerate(layout.used_bytes.tolist())
            ]
            self._budget.begin(order.key, windows, keep=order.options.keep_in_memory > 0)
            own = self._of_one_save(job)
            if self._bytes_over_limit(own) > 0:
                # Why: to wait for room while windows are held would hold up the ranks.
                for one in own:
                    one.hold_s = 0.0
            self._pump()
            return Grant(job.num_granted)

    def more(self, key: StageKey, have: int) -> Future[Grant | Unknown]:
        """Returns how many windows have room, as soon as there are more than `have`.

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

    def deliver(
        self, key: StageKey, window: int, runs: Sequence[np.ndarray], ref: Any = None
    ) -> None:
        """Accepts a full window. A second delivery, or an unknown job, has no effect.

        Args:
            key: Key of the share.
            window: Number of the window.
            runs: Bytes of the window, in consecutive runs.
            ref: Reference by which other processes of this node get the same bytes; it is held as
                long as they are.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.error is not None or job.state.is_at_rest:
                return
            if window in job.windows or window >= job.num_granted:
                return
            job.windows[window] = self._here[key, window] = WindowBytes(runs, ref)
            self._budget.delivered(key, window)
            if job.is_complete:
                job.to("all_here")
            self._start_writers(job)
            job.changed.notify_all()
            self._pump()
            self._settle(job)

    def fail_unreadable(self, key: StageKey, reason: str) -> None:
        """Fails a job whose objects Ray's store does not return; `seal` and `more` raise that."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None:
                error = ParticipantError(
                    f"expected the bytes that rank {key.rank} put into Ray's object store, but Ray "
                    f"did not return them to the stager: {reason}; save again",
                    rank=key.rank,
                )
                self._fail(job, "failed", error)

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
            if job.is_complete:  # it may have no window at all
                job.to("all_here")
                self._start_writers(job)
            job.wants_seal.append(future)
            self._settle(job)
        return future

    def held(self, key: StageKey, stager: str) -> tuple[Any, PartsHeld] | None:
        """Returns who is to know that all bytes of a share are here, and the report of it.

        Args:
            key: Key of the share.
            stager: Name of the stager that this queue belongs to.

        Returns:
            None if the save does not need it any more.
        """
        with self._lock:
            if not self.awaits(key):
                return None
            job = self._jobs[key]
            about = (key.save, key.rank, key.attempt, key.epoch, stager)
            return job.reporter, PartsHeld(*about, job.phases(), job.layout.total_bytes)

    def stuck(self, after_s: float) -> list[str]:
        """Returns the keys at which writers of jobs that have failed hang in the storage.

        A job whose save may take no longer is cancelled: where all its ranks are dead nobody else
        does.

        Args:
            after_s: Time without a written byte, or since the job failed, in seconds.
        """
        now_s = time.monotonic()
        found = []
        with self._lock:
            for job in list(self._jobs.values()):
                is_working = job.state.writers == "working"
                missing = set(job.files) - job.reports.keys() if is_working else ()
                write_timeout_s = job.order.options.write_timeout_s
                if missing and now_s - job.moved_s > write_timeout_s + after_s:
                    self.cancel(job.order.key, f"as nothing was written for {write_timeout_s:g} s")
                if missing and job.error is not None and now_s - job.failed_s > after_s:
                    attempt = job.order.key.attempt
                    found += [
                        part_key(job.order.plan.files[file], attempt) for file in sorted(missing)
                    ]
        return found

    def is_needed(self) -> bool:
        """Returns whether a job has bytes that its rank may not have any more."""
        with self._lock:
            return any(job.state.is_needed for job in self._jobs.values())

    def cancel(self, key: StageKey, reason: str = "", *, by_rank: bool = False) -> None:
        """Cancels a job. Its files are not reported any more; written files stay.

        Args:
            key: Key of the share; an unknown one is ignored.
            reason: Reason, for the rank if it waits.
            by_rank: Whether the rank itself cancels its share, and delivers nothing more.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                return
            if by_rank:
                job.to("rank_left")
            error = SaveCancelledError(f"staging was cancelled {reason}".strip())
            self._fail(job, "cancelled", error)

    def release(self, key: StageKey, *, committed: bool = False) -> None:
        """Removes a job and its reports; one that is still at work is cancelled first.

        Args:
            key: Key of the share; an unknown one is ignored.
            committed: Whether the save was committed; the bytes that are to be kept in memory then
                stay.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                return
            if committed and job.is_written:
                # Maybe only the answer to its last report is missing; then it is kept or forgotten.
                job.to("committed")
                self._tidy(job)
                return
            self.cancel(key, "because its outcome is known")
            job.to("released")
            self._tidy(job)

    def process_died(self, process: str) -> None:
        """Marks a rank dead: its complete shares are written, and its other shares fail."""
        with self._lock:
            for job in list(self._jobs.values()):
                if job.order.process == process and job.state.rank == "filling":
                    job.to("rank_left")
                    rank = job.order.key.rank
                    error = ParticipantError(
                        f"rank {rank} on {platform.node()} died before the stager had all its "
                        f"bytes; restart it and save again",
                        rank=rank,
                    )
                    self._fail(job, "failed", error)

    # To be looked at

    def progress(self, key: StageKey) -> StageProgress | None:
        """Returns the progress of a job; None if it is unknown."""
        with self._lock:
            job = self._jobs.get(key)
            return None if job is None else job.progress()

    def awaits(self, key: StageKey) -> bool:
        """Returns whether the save may still need the reports of a job."""
        with self._lock:
            job = self._jobs.get(key)
            return job is not None and job.state.is_reported

    def shares(self, attempt: str) -> list[StageProgress]:
        """Returns the progress of each share of an attempt."""
        with self._lock:
            return [
                job.progress()
                for job in self._jobs.values()
                if job.order.key.attempt == attempt
                and (job.state.is_of_use or job.state.is_reported)
            ]

    def in_flight(self, url: str) -> list[InFlight]:
        """Returns the saves to a place, or below it, that may still be committed.

        Args:
            url: URL of a checkpoint, or of the folder that contains it.
        """
        below = url.rstrip("/") + "/"
        with self._lock:
            return [
                job.in_flight()
                for job in self._jobs.values()
                if job.state.fate == "open"
                and (job.order.target.url.rstrip("/") + "/").startswith(below)
            ]

    def used_bytes(self) -> int:
        """Returns how many bytes of memory windows take now, also those that are about to go."""
        with self._lock:
            return self._budget.used_bytes

    def limit(self, limit_bytes: int, kept_bytes: int) -> None:
        """Changes the most bytes of windows; see `WindowBudget.limit`."""
        with self._lock:
            self._budget.limit(limit_bytes, kept_bytes)
            self._pump()

    def holders(self) -> tuple[Holder, ...]:
        """Returns the saves that have room now, those with most of it first."""
        now_s = time.monotonic()
        with self._lock:
            found: dict[tuple[str, str], Holder] = {}
            for key, num_bytes in self._budget.granted().items():
                job = self._jobs.get(key)
                if job is None:
                    continue
                at = (key.save.session, job.order.target.url)
                one = found.get(at, Holder(*at, 0, now_s - job.moved_s))
                quiet_s = min(one.quiet_s, now_s - job.moved_s)
                found[at] = replace(one, num_bytes=one.num_bytes + num_bytes, quiet_s=quiet_s)
        return tuple(sorted(found.values(), key=lambda one: -one.num_bytes))

    def num_active(self) -> int:
        """Returns the number of jobs that have not ended."""
        with self._lock:
            return sum(not job.state.is_at_rest for job in self._jobs.values())

    # For loads

    def kept(self, attempt: str) -> TierEntry | None:
        """Returns the index of the bytes of an attempt in memory; None if there are none."""
        with self._lock:
            jobs = [job for job in self._kept_jobs() if job.order.key.attempt == attempt]
            files = {file.key: file for job in jobs for file in job.kept_files()}
            return TierEntry(tuple(files.values())) if files else None

    def kept_attempts(self) -> set[str]:
        """Returns the attempts that have bytes in memory."""
        with self._lock:
            return {job.order.key.attempt for job in self._kept_jobs()}

    def lend(self, borrower: Hashable, windows: Sequence[StagedWindow]) -> list[Any]:
        """Returns what others on this node get the bytes of windows by; None for what is gone.

        The windows count until `take_back`.

        Args:
            borrower: Name of the borrower.
            windows: The windows to lend.
        """
        refs = []
        with self._lock:
            for window in windows:
                found = self._window(window)
                refs.append(None if found is None else found.ref)
                if found is not None and found.ref is not None:
                    found.borrowers.add(borrower)
                    self._lent.setdefault(borrower, []).append(found)
        return refs

    def take_back(self, borrower: Hashable) -> None:
        """Ends a borrower's use of windows."""
        with self._lock:
            for window in self._lent.pop(borrower, ()):
                window.borrowers.discard(borrower)

    def borrowers(self) -> list[Hashable]:
        """Returns the borrowers of windows."""
        with self._lock:
            return list(self._lent)

    def fetch(self, parts: Sequence[Part]) -> list[np.ndarray] | None:
        """Returns views of staged bytes, one run behind the other; None when some are gone.

        Args:
            parts: Parts as `TierFile.find` returns them. Parts that are no longer in memory are
                omitted.
        """
        runs: list[np.ndarray] = []
        with self._lock:
            for part in parts:
                found = None if part.window is None else self._window(part.window)
                if part.window is not None and (found is None or not found.has_bytes):
                    return None
                views = found.views(part.offset, part.num_bytes) if found else ()
                runs += [np.frombuffer(view, np.uint8) for view in views]
        return runs

    # With the lock held

    def _window(self, window: StagedWindow) -> WindowBytes | None:
        job = self._jobs.get(window.share)
        return None if job is None else job.windows.get(window.number)

    def _stays(self, job: Job) -> bool:
        """Returns whether the bytes of a job that is at rest stay."""
        return (
            job.order.options.keep_in_memory > 0
            and job.state.is_at_rest
            and job.state.is_of_use
            and job.is_written
            and self._budget.is_whole(job.order.key)
        )

    def _kept_jobs(self) -> list[Job]:
        return [job for job in self._jobs.values() if self._stays(job)]

    def _pump(self) -> None:
        granted = self._budget.grants()
        for room in granted:
            granted_to = self._jobs[room.job]
            granted_to.num_granted += 1
            granted_to.changed.notify_all()
        whose = dict.fromkeys(room.job for room in granted)
        for room in self._budget.ended():
            gone = self._here.pop((room.job, room.window), WindowBytes(()))
            gone.release()
            self._free_later(gone, room)
            # Why: one that was kept until now may have to be forgotten.
            whose[room.job] = None
        # Why afterwards: what is answered may lead to further grants, which come behind these.
        for name in whose:
            if name in self._jobs:
                self._settle(self._jobs[name])

    def _settle(self, job: Job) -> None:
        """Answers the calls of `more` and `seal` that can be answered."""
        error = job.failure()
        # Why: who asked has given up, and asks again.
        job.wants_more = [one for one in job.wants_more if not one[1].done()]
        for have, future in list(job.wants_more):
            if error is not None or job.num_granted > have:
                job.wants_more.remove((have, future))
                answer(future, error, None if error else Grant(job.num_granted, self._missing(job)))
        if error is not None or job.state.rank == "handed_over":
            for waiting in job.wants_seal:
                answer(waiting, error, True)
            job.wants_seal.clear()
        self._tidy(job)

    def _missing(self, job: Job) -> int:
        """Returns by how much the budget is too small for what ranks stage now of a job's save."""
        missing = self._bytes_over_limit(self._of_one_save(job))
        if self._told_missing or missing <= 0:
            return 0
        self._told_missing = True
        return missing

    def _of_one_save(self, job: Job) -> list[Job]:
        own = job.order.key
        return [
            one
            for key, one in self._jobs.items()
            if (key.save, key.attempt) == (own.save, own.attempt)
        ]

    def _bytes_over_limit(self, jobs: Sequence[Job]) -> int:
        staged = sum(int(one.layout.used_bytes.sum()) for one in jobs)
        return staged - self._budget.limit_bytes

    def _fail(
        self, job: Job, event: Literal["failed", "cancelled"], error: CheckpointError
    ) -> None:
        job.to(event)
        if job.error is None and job.state.fate == event:
            job.error, job.failed_s = error, time.monotonic()
        if event == "failed" and job.state.fate == "failed":
            self._start_writers(job)  # its threads report what is not written
        job.changed.notify_all()
        self._settle(job)

    def _start_writers(self, job: Job) -> None:
        if job.state.writers != "idle":
            return
        job.to("writers_started")
        try:
            rank = job.order.key.rank
            start_thread(partial(self._write_files, job), f"ray_dcp writes what rank {rank} staged")
        except LimitError as error:
            # Why no report: it would take a thread. The rank gets the error, as it waits for one.
            refused = copy.copy(error)  # the frames of its traceback hold the staged bytes
            refused.rank = rank
            self._fail(job, "cancelled", refused)
            job.to("writers_ended")
            self._settle(job)

    def _tidy(self, job: Job) -> None:
        if not job.state.is_at_rest:
            return
        if not self._stays(job):
            (self._forget if job.state.is_forgotten else self._drop)(job)
            return
        kept = self._kept_jobs()
        gone = too_many(
            [
                (
                    one.run,
                    one.order.key.attempt,
                    one.order.options.keep_in_memory,
                    one.state.fate == "committed",
                )
                for one in kept
            ]
        )
        for old in kept:
            if old.order.key.attempt in gone:
                self._forget(old)

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.order.key, None)
        self._drop(job)

    def _drop(self, job: Job) -> None:
        for window in job.windows.values():
            window.release()
        self._budget.drop(job.order.key)
        self._pump()

    def _free_later(self, gone: WindowBytes, room: Room[StageKey]) -> None:
        self._leaving.append((time.monotonic() + self._linger_s, gone, room))
        if len(self._leaving) == 1:
            self._look_later()

    def _look_later(self) -> None:
        timer = threading.Timer(max(self._leaving[0][0] - time.monotonic(), 0.0), self._free_unused)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the node has no thread left: better too early than never
            while self._leaving:
                self._budget.freed(self._leaving.popleft()[2])

    def _free_unused(self) -> None:
        """Frees what nobody has referred to for long enough."""
        with self._lock:
            now_s = time.monotonic()
            due = []
            while self._leaving and self._leaving[0][0] <= now_s:
                due.append(self._leaving.popleft())
            for _, gone, room in due:
                if gone.is_gone:
                    self._budget.freed(room)
                else:
                    self._leaving.append((now_s + self._linger_s, gone, room))
            if self._leaving:
                self._look_later()
            self._pump()

    # In the threads of a job

    def _write_files(self, job: Job) -> None:
        try:
            threads = min(job.order.options.num_threads, max(len(job.files), 1))
            run_tasks(job.files, lambda file: self._write(job, file), threads)
        except BaseException as exc:  # noqa: BLE001 - told to whoever collects the receipts
            # Suppressed: nobody takes reports any more.
            with suppress(BaseException):
                for file in job.files:
                    if file not in job.reports:
                        self._report_file(job, file, unwritten(job, file, exc))
        with self._lock:
            job.to("writers_ended")
            self._settle(job)

    def _write(self, job: Job, file: int) -> None:
        step_behind(_NICE)

        def passed(window: int | None, num_bytes: int) -> None:
            with self._lock:
                job.written_bytes += num_bytes
                job.moved_s = time.monotonic()
                if window is not None:
                    self._budget.read(job.order.key, window, file)
                    self._pump()

        self._report_file(job, file, write_staged(job, file, passed, self._opener))

    def _report_file(self, job: Job, file: int, report: PartsWritten) -> None:
        with self._lock:
            job.reports[file] = report
            silent = job.state.fate in ("cancelled", "released")
        if not silent:
            self._report(job.reporter, report)
        with self._lock:
            self._budget.finished(job.order.key, file)
            self._pump()
            self._settle(job)


def answer(future: Future[Any], error: CheckpointError | None, result: Any) -> None:
    """Ends a future that somebody may wait for."""
    # Suppressed: whoever waited has given up.
    with suppress(Exception):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

"""Files that several ranks of a node have a part of, while the node holds and writes them.

The thread of the lowest rank's job writes such a file, once all ranks have begun to hand over; the
threads of the others wait until it is known what became of it. A file is as alive as each of its
jobs: when one of them fails, so do the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray_dcp.errors import CheckpointError, ParticipantError, SaveCancelledError
from ray_dcp.plan.values import FilePlan
from ray_dcp.protocol.messages import Target
from ray_dcp.stage.jobs import Job, StagedPieces
from ray_dcp.stage.slots import Line
from ray_dcp.stage.values import StageReport
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.writer import part_key, write_joint

__all__ = ["JointFiles", "Passed", "line_of"]

Passed = Callable[[Job, int], Callable[["int | None", int], None]]
"""Job and position of the file → what `StagedPieces` calls as it goes on."""


def line_of(job: Job) -> Line | None:
    """Returns a job's place among those that it writes a file with; None where it writes alone."""
    joint = _joint_files(job)
    if not joint:
        return None
    # Invariant: a rank with a part of such a file has no other file.
    ranks = job.plan.files[joint[0]].company.tolist()
    place = ranks.index(job.order.key.rank)
    return Line(_name(job, joint[0]), place, len(ranks), job.layout.num_fixed_windows)


@dataclass(eq=False)
class _Joint:
    """One file. Guarded by the spool's lock."""

    company: tuple[int, ...]
    changed: threading.Condition
    extents: dict[int, tuple[Job, int]] = field(default_factory=dict)
    is_begun: bool = False
    is_writing: bool = False
    outcome: StageReport | None = None
    is_told: bool = False

    def end(self, report: StageReport) -> None:
        if self.outcome is None:
            self.outcome = report
        self.changed.notify_all()

    def is_known(self) -> bool:
        """Whether those that do not write it may go on: nobody reads their bytes any more."""
        return self.outcome is not None and self.is_told and not self.is_writing


class JointFiles:
    """Those of a spool.

    Args:
        lock: Of the spool.
        turn: Held by a writing thread.
        opener: What opens a storage.

    Attributes:
        lines: For the ledgers of the spool: in which order windows are granted.
    """

    def __init__(
        self,
        lock: threading.RLock,
        turn: threading.Semaphore,
        opener: Callable[[Target], Storage],
    ) -> None:
        self._lock = lock
        self._turn = turn
        self._opener = opener
        self.lines: dict[Any, dict[int, Any]] = {}
        self._adopted: dict[Any, set[int]] = {}
        self._files: dict[tuple[str, str], _Joint] = {}

    def leads(self, job: Job) -> bool:
        """Returns whether it is the thread of a job that writes a file of several."""
        rank = job.order.key.rank
        return any(job.plan.files[file].company[0] == rank for file in _joint_files(job))

    def adopt(self, line: Line | None) -> None:
        """Takes that a job's windows all lie in the memory of another stager; none waits for it."""
        if line is not None:
            self._adopted.setdefault(line.name, set()).add(line.place)
            self._remember(line)

    def _remember(self, line: Line | None) -> None:
        """Puts those that were adopted into a line, which may be made anew."""
        places = self._adopted.get(line.name) if line is not None else None
        if line is not None and places:
            known = self.lines.setdefault(line.name, {})
            known.update(dict.fromkeys(places - known.keys()))

    def enter(self, job: Job) -> None:
        """Takes a new job, with the lock held."""
        self._remember(line_of(job))
        for file in _joint_files(job):
            plan = job.plan.files[file]
            joint = self._files.get(_name(job, file))
            if joint is None or (joint.outcome is not None and joint.outcome.receipt is None):
                company = tuple(plan.company.tolist())
                joint = _Joint(company, threading.Condition(self._lock))
                self._files[_name(job, file)] = joint
            joint.extents[job.order.key.rank] = (job, file)
            joint.changed.notify_all()

    def beside(self, job: Job) -> list[Job]:
        """Returns the jobs that a job writes a file with, with the lock held."""
        joints = [self._files.get(_name(job, file)) for file in _joint_files(job)]
        extents = [each for joint in joints if joint for each in joint.extents.values()]
        return [other for other, _ in extents if other is not job]

    def fail(self, job: Job, error: CheckpointError) -> list[Job]:
        """Takes that a job ends early, with the lock held; returns those that end with it."""
        found = []
        for file in _joint_files(job):
            joint = self._files.get(_name(job, file))
            entered = joint.extents.get(job.order.key.rank) if joint is not None else None
            if joint is None or entered is None or entered[0] is not job or joint.outcome:
                continue
            joint.is_told = True
            joint.end(StageReport(job.order.key, job.plan.files[file].file, None, error))
            found += [other for other, _ in joint.extents.values() if other is not job]
        return found

    def write(self, job: Job, file: int, passed: Passed) -> tuple[StageReport, bool]:
        """Returns what became of a file, and whether this job is the one that is to tell it.

        Returns to the others when that is told. Waits for `write_timeout_s` at most for what others
        have to do first.
        """
        timeout_s = job.order.options.write_timeout_s
        with self._lock:
            joint = self._files.get(_name(job, file))
            entered = joint.extents.get(job.order.key.rank) if joint is not None else None
            if joint is None or entered is None or entered[0] is not job:
                # It failed, and others have begun anew.
                error = job.failure() or SaveCancelledError("this share was handed over anew")
                return StageReport(job.order.key, job.plan.files[file].file, None, error), True
            leads = job.order.key.rank == joint.company[0] and not joint.is_begun
            joint.is_begun = joint.is_begun or leads
        if leads:
            self._lead(joint, job, file, timeout_s, passed)
        with self._lock:
            if not leads and not joint.changed.wait_for(joint.is_known, timeout_s):
                joint.end(_late(job, file, joint, timeout_s))
                joint.changed.wait_for(lambda: not joint.is_writing)
            report = joint.outcome or _late(job, file, joint, timeout_s)
            return replace(report, key=job.order.key), leads

    def told(self, job: Job, file: int) -> None:
        """Takes that whoever has to know what became of a file does, with the lock held."""
        joint = self._files.get(_name(job, file))
        if joint is not None:
            joint.is_told = True
            joint.changed.notify_all()

    def leave(self, job: Job) -> None:
        """Takes that a job is over, with the lock held."""
        for file in _joint_files(job):
            joint = self._files.get(_name(job, file))
            if joint is not None and all(other.is_over for other, _ in joint.extents.values()):
                name = _name(job, file)
                del self._files[name]
                self._adopted.pop(name, None)
                if not any(self.lines.get(name, {}).values()):
                    self.lines.pop(name, None)

    def _lead(self, joint: _Joint, job: Job, file: int, timeout_s: float, passed: Passed) -> None:
        with self._lock:
            joint.changed.wait_for(
                lambda: joint.outcome is not None or len(joint.extents) == len(joint.company),
                timeout_s,
            )
            if joint.outcome is None and len(joint.extents) < len(joint.company):
                joint.end(_late(job, file, joint, timeout_s))
            if joint.outcome is not None:
                return
            extents = [joint.extents[rank] for rank in joint.company]
            joint.is_writing = True

        def watched(one: Job, position: int) -> Callable[[int | None, int], None]:
            go_on = passed(one, position)

            def tell(window: int | None, num_bytes: int) -> None:
                go_on(window, num_bytes)
                if joint.outcome is not None:
                    raise SaveCancelledError("this file was given up, with a part of it")

            return tell

        with self._turn:
            report = self._write_all(job, extents, watched)
        with self._lock:
            joint.is_writing = False
            joint.end(report)

    def _write_all(
        self, job: Job, extents: Sequence[tuple[Job, int]], passed: Passed
    ) -> StageReport:
        """Writes a file. Never raises."""
        order = job.order
        plans: list[FilePlan] = [one.plan.files[file] for one, file in extents]
        try:
            pieces = [
                StagedPieces(one, file, self._turn, passed(one, file)) for one, file in extents
            ]
            receipt = write_joint(
                self._opener(order.target), plans, order.key.attempt, pieces, options=order.options
            )
        except CheckpointError as exc:
            return StageReport(order.key, plans[0].file, None, exc)
        except Exception as exc:  # noqa: BLE001 - told to whoever collects the receipts
            error = CheckpointError(
                f"writing staged bytes failed: {type(exc).__name__}: {exc}", key=plans[0].key
            )
            return StageReport(order.key, plans[0].file, None, error)
        return StageReport(order.key, plans[0].file, receipt)


def _joint_files(job: Job) -> list[int]:
    return [file for file in job.files if len(job.plan.files[file].company)]


def _name(job: Job, file: int) -> tuple[str, str]:
    attempt = job.order.key.attempt
    return attempt, part_key(job.plan.files[file], attempt)


def _late(job: Job, file: int, joint: _Joint, timeout_s: float) -> StageReport:
    missing = sorted(set(joint.company) - set(joint.extents))
    plan = job.plan.files[file]
    error = ParticipantError(
        f"expected ranks {', '.join(map(str, joint.company))}, which share {plan.key}, to hand "
        f"their bytes to one stager within SaveOptions.write_timeout_s={timeout_s:g} s, but "
        + (f"ranks {', '.join(map(str, missing))} did not" if missing else "it was not written"),
        rank=missing[0] if missing else None,
        key=plan.key,
    )
    return StageReport(job.order.key, plan.file, None, error)

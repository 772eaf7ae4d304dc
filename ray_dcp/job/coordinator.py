"""`JobCoordinator`: the actor, owned by no trainer, that commits the steps of a run.

There is one for a run in a cluster, detached. It holds the run's writer lease, follows the parts of
the steps that are being saved, and creates the record of each. It belongs to one driver at a time,
and ends when that one is gone and nothing is being saved. What it decides is in
`commit_protocol.job_step`; what it writes is what a `CheckpointManager` writes for a step of items.

The storage has the truth: whether a part is durable is read from the part's own records. Messages
of ranks only say when to look.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from ray_dcp.commit_protocol.job_step import (
    ENDED,
    Abandoned,
    Begun,
    Command,
    Commit,
    CommitEnded,
    Discard,
    Durable,
    Event,
    Failed,
    Follow,
    Gone,
    JobStepMachine,
    Left,
    Overdue,
    Phase,
    Staged,
    processes_of,
)
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import bounds
from ray_dcp.core.processes import begin
from ray_dcp.core.wire_error import cause_of, from_wire, text_of, to_wire
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    LimitError,
    ParticipantError,
    SaveCancelledError,
)
from ray_dcp.format.job_parts import PartRecord
from ray_dcp.job.kept_parts import KeptParts
from ray_dcp.job.step_files import create_record, part_source, reason_of, remove_parts
from ray_dcp.job.value import ValueWriters
from ray_dcp.manager.catalogue import Root, StepFound
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.settings import Settings
from ray_dcp.manager.step_target import StepTarget
from ray_dcp.options import SaveOptions
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.place.outcome import outcome
from ray_dcp.session import ray_calls
from ray_dcp.session.names import job_coordinator_name
from ray_dcp.session.ray_calls import Caller
from ray_dcp.store.environment import StorageVariables

WATCH_S = 0.5
"""Interval at which Ray's tables are read for processes that ended, in seconds."""


UNUSED_S = 60.0
"""How long a coordinator stays that no driver attached to, in seconds."""

MOST_CALLS = 10_000
"""Most calls that wait at once."""

_FOLLOW_S = (0.25, 1.0)
"""The first and the longest pause before a look at a part's records, in seconds. *Why* so long: who
saves a part says when to look, unless it was killed."""
_PUT_S = (0.02, 0.25)
"""The same for a look at whether a value is there; in between a tenth of what it took so far, so
that no step is a quarter longer by the pauses."""

_MOST_THREADS = 64
"""Most calls of a storage at once."""

_MOST_KEPT = 64
"""Number of ended steps whose outcome is remembered."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Driver:
    """The process that opens the steps of a run, by one `JobCheckpoints`."""

    nonce: str
    process: Caller


@dataclass(frozen=True)
class JobSettings:
    """How the steps of a run are saved."""

    target: Target
    """Place of the run."""
    settings: Settings
    """Those of a manager of the run, with an item for each part."""
    options: SaveOptions
    """Of values; its deadlines are those of the steps."""


@dataclass(frozen=True)
class Opened:
    """A step that was opened."""

    attempt: str
    """Attempt that commits it."""
    name: str
    """Its folder in the run."""
    folders: Mapping[str, str]
    """Folder of each part, below the step's."""


@dataclass(frozen=True)
class PartStatus:
    """How far a part is."""

    is_begun: bool
    is_staged: bool
    is_durable: bool
    kept_from: int | None = None


@dataclass(frozen=True)
class Status:
    """How far a step is."""

    phase: Phase
    is_over: bool
    """Whether it has ended, and the parts of a step that was given up are deleted."""
    error: CheckpointError | None
    parts: Mapping[str, PartStatus]


@dataclass
class _Running:
    """A step that is or was being saved."""

    place: StepTarget
    machine: JobStepMachine[Any]
    is_over: bool = False
    kept: dict[str, int] = field(default_factory=dict)
    wrapped: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    looks: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set for a part whose records are to be read at once."""
    saving: set[asyncio.Task[Any]] = field(default_factory=set)
    """What this coordinator does itself to save parts: values, and those that are kept."""

    def folder_of(self, part: str) -> str:
        return f"{self.place.name}/{self.place.folder_of(part)}"

    def status(self) -> Status:
        parts = {
            name: PartStatus(
                bool(one.begun), one.is_staged, one.is_durable, self.kept.get(name)
            )
            for name, one in self.machine.parts.items()
        }  # fmt: skip
        return Status(self.machine.phase, self.is_over, self.machine.error, parts)


class JobCoordinator:
    """The actor; its methods may be called again with the same arguments, if an answer was lost."""

    def __init__(self) -> None:
        self._values = ValueWriters()
        self._driver: Driver | None = None
        self._writer: Writer | None = None
        self._kept: KeptParts | None = None
        self._checking: Future[None] | None = None
        self._job: JobSettings | None = None
        self._steps: dict[str, _Running] = {}
        """By attempt, in the order in which they were opened."""
        self._opened: dict[str, Opened] = {}
        """By the id of the request."""
        self._attaching = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._self = ray.get_runtime_context().current_actor
        self._loop = asyncio.get_event_loop()
        # Why so many: some may be stuck in a storage, and the others have to go on.
        self._loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, "ray_dcp job"))
        self._last_used_s = self._loop.time()
        self._tasks.add(ray_calls.run_for_ever(self._watch(), self._self, no_restart=True))

    # --- the driver --------------------------------------------------------------------------

    async def attach(self, driver: Driver, job: JobSettings, variables: StorageVariables) -> None:
        """Makes a driver the one that writes the run, after the steps of the one before ended.

        Args:
            driver: The driver.
            job: How it saves.
            variables: What its storages read in the environment now.

        Raises:
            CheckpointExistsError: Another process writes the run, and lives.
            StorageError: The storage failed.
        """
        async with self._attaching:
            if self._driver is not None and self._driver.nonce == driver.nonce:
                variables.become()
                return
            await self._replace_driver(driver, job)
            variables.become()
            self._job = job
            root = Root(job.target)
            self._writer, self._kept = Writer(root, job.settings), KeptParts(root, job.settings)
            try:
                left = await asyncio.to_thread(self._writer.remove_leftovers)
            except BaseException:
                await asyncio.to_thread(self._writer.close)
                self._writer = None
                raise
            for name, error in left.items():
                logger.warning("%s of %s could not be deleted: %s", name, job.target.url, error)
            self._driver = driver

    async def _replace_driver(self, driver: Driver, job: JobSettings) -> None:
        before = self._driver
        if before is not None:
            is_same = before.process == driver.process
            gone = is_same or await self._has_ended(before.process, job.settings.takeover)
            if not gone and not job.settings.takeover:
                raise CheckpointExistsError(
                    f"{job.target.url} is written by {before.process}, which lives. End it, or "
                    f"make JobCheckpoints(takeover=True) to take the run away from it",
                    checkpoint_id=job.target.url,
                )
            for running in self._running():
                if not is_same:
                    self._receive(running, Gone(frozenset({before.process})))
                elif not running.machine.is_left:
                    step = running.place.step
                    if not job.settings.takeover:
                        raise CheckpointExistsError(
                            f"step {step} of {job.target.url} is open in this process, by another "
                            f"JobCheckpoints. Use that one, or leave the step's block first",
                            checkpoint_id=job.target.url,
                            step=step,
                        )
                    error = SaveCancelledError(
                        f"another JobCheckpoints of this process took the run while step {step} "
                        f"was open",
                        step=step,
                    )
                    self._receive(running, Abandoned(error))
        # Why now: it opens no more steps while those that are staged are waited for.
        self._driver = None
        for running in self._running():
            await self._await(running, lambda one: one.is_over)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
            self._writer = None

    async def _has_ended(self, process: Caller, at_once: bool) -> bool:
        """Returns whether a process has ended; waits a moment for that, unless `at_once`."""
        end_s = self._loop.time() + (0.0 if at_once else bounds.DRIVER_END_S)
        while process not in await asyncio.to_thread(ray_calls.gone, {process}):
            if self._loop.time() >= end_s:
                return False
            await asyncio.sleep(WATCH_S)
        return True

    async def detach(self, nonce: str) -> None:
        """Lets a driver go, which opens no more steps; what is being saved goes on."""
        if self._driver is not None and self._driver.nonce == nonce:
            for running in self._running():
                if not running.machine.is_left:
                    step = running.place.step
                    error = SaveCancelledError(
                        f"JobCheckpoints was closed while step {step} was open", step=step
                    )
                    self._receive(running, Abandoned(error))
            self._driver = None
            self._last_used_s = -UNUSED_S

    async def open(self, nonce: str, request: str, step: int, details: Mapping[str, Any]) -> Opened:
        """Opens a step, which from then on expects its parts.

        Args:
            nonce: Of the driver.
            request: Id of this call.
            step: Number of the step.
            details: Metrics, metadata and tags; see `Writer.begin`.

        Raises:
            CheckpointError: As `CheckpointManager.save`.
        """
        writer, job = self._of_driver(nonce)
        async with self._opening:
            if request in self._opened:
                return self._opened[request]
            for other in self._running():
                if not other.machine.is_left:
                    raise InvalidRequestError(
                        f"step {other.place.step} is still open, so that step {step} can't be "
                        f"opened; leave its block, or call its cancel(), first",
                        step=step,
                    )
            place = await asyncio.to_thread(partial(writer.begin, step, **details))
            parts = [*job.settings.named]
            driver = self._driver
            if driver is None or driver.nonce != nonce:
                await asyncio.to_thread(writer.finish, place, False)
                self._of_driver(nonce)
            machine = JobStepMachine[Any](step, parts, driver.process if driver else None)
            self._steps[place.attempt] = _Running(place, machine)
            opened = Opened(place.attempt, place.name, {p: place.folder_of(p) for p in parts})
            self._opened[request] = opened
            self._forget()
            return opened

    async def loaded(
        self,
        nonce: str,
        step: int | None,
        attempt: str,
        skipped: Sequence[tuple[int, str, CheckpointError]],
    ) -> None:
        """Accepts from which step the driver goes on; see `Writer.loaded`.

        Args:
            nonce: Of the driver.
            step: The step; None if all are damaged.
            attempt: Attempt that committed it; "" if its bytes were not verified.
            skipped: Number, attempt and error of the newer steps that are damaged.

        Raises:
            CheckpointExistsError: Another driver took its place, or another process the run.
            StorageError: The storage failed.
        """
        writer, _ = self._of_driver(nonce)

        def record() -> None:
            errors = {}
            if skipped:
                # Careful: who lost the run marks nothing; what was saved again since is whole.
                writer.take_lease()
                known = {(one.step, one.attempt) for one in writer.look().steps.values()}
                errors = {one: error for one, seen, error in skipped if (one, seen) in known}
            writer.loaded(step, attempt, errors)

        await asyncio.to_thread(record)

    def _of_driver(self, nonce: str) -> tuple[Writer, JobSettings]:
        """Returns what the driver of the run writes with.

        Raises:
            CheckpointExistsError: Another driver took its place.
        """
        driver = self._driver
        if self._writer is None or self._job is None or driver is None or driver.nonce != nonce:
            who = "nobody" if driver is None else str(driver.process)
            raise CheckpointExistsError(
                f"this JobCheckpoints does not write its run any more: {who} does since. Make it "
                f"anew, and go on from latest()"
            )
        return self._writer, self._job

    def _forget(self) -> None:
        over = [attempt for attempt, one in self._steps.items() if one.is_over]
        for attempt in over[:-_MOST_KEPT]:
            del self._steps[attempt]
        for request in [*self._opened][:-_MOST_KEPT]:
            if self._opened[request].attempt not in self._steps:
                del self._opened[request]

    def _running(self) -> list[_Running]:
        return [one for one in self._steps.values() if not one.is_over]

    # --- the parts ---------------------------------------------------------------------------

    async def tell(self, attempt: str, event: Event[Any]) -> None:
        """Accepts what a rank says about a part.

        Raises:
            InvalidRequestError: The step is not being saved any more.
            CheckpointError: See `JobStepMachine.receive`.
        """
        self._receive(self._step_of(attempt), event)
        if isinstance(event, Staged) and event.is_durable:
            await self.look(attempt, event.part)

    async def look(self, attempt: str, part: str) -> None:
        """Accepts that a part's records say how its save ended."""
        running = self._steps.get(attempt)
        if running is not None and part in running.looks:
            running.looks[part].set()

    async def leave(self, nonce: str, attempt: str, error: CheckpointError | None) -> None:
        """Accepts that the driver left a step, with an error or without."""
        self._of_driver(nonce)
        running = self._step_of(attempt)
        self._receive(running, Left() if error is None else Abandoned(error))
        if error is None and running.machine.phase not in ENDED:
            options = self._job.options if self._job is not None else SaveOptions()
            begin_s, write_s = options.plan_timeout_s, options.write_timeout_s
            self._expire(running, Overdue("opened", begin_s, only_unbegun=True))
            self._expire(running, Overdue("opened", begin_s + write_s))

    async def cancel(self, attempt: str, error: CheckpointError) -> bool:
        """Gives a step up; returns False if its commit has begun."""
        running = self._step_of(attempt)
        self._receive(running, Abandoned(error))
        return running.machine.phase == "given up"

    async def wait(self, attempt: str, until: str, timeout_s: float) -> Status | None:
        """Returns how far a step is, once it is as far as is asked or the time is over.

        None if this coordinator does not know the step: it ended long ago, or under another one.

        Args:
            attempt: Attempt of the step.
            until: "staged", "over", or "" to return at once.
            timeout_s: In seconds.
        """
        running = self._steps.get(attempt)
        if running is None:
            return None

        def is_there(one: _Running) -> bool:
            if until == "staged" and one.machine.phase not in ("opened", "given up"):
                return True
            return one.is_over or not until

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._await(running, is_there), timeout_s)
        return running.status()

    async def put(
        self, nonce: str, attempt: str, part: str, refs: Sequence[Any], version: int | None
    ) -> None:
        """Begins to save a value as a part.

        Args:
            nonce: Of the driver.
            attempt: Attempt of the step.
            part: Name of the part.
            refs: The reference of the value.
            version: Version of the part.

        Raises:
            InvalidRequestError: The step has no such part, or it is saved already.
        """
        _, job = self._of_driver(nonce)
        running = self._step_of(attempt)
        if self._begin(running, part, f"put of {refs[0].hex()}", version):
            self._save(running, part, self._put(running, part, refs, job))

    async def keep(self, nonce: str, attempt: str, part: str) -> None:
        """Begins to take a part from the last committed step that has it.

        Raises:
            InvalidRequestError: The step has no such part, or it is saved already.
            CheckpointNotFoundError: No committed step has it.
        """
        writer, _ = self._of_driver(nonce)
        running = self._step_of(attempt)
        # Why: an earlier step that is being saved may be the one that has it.
        await self._await_earlier(running)
        source = await asyncio.to_thread(part_source, writer, part, running.machine.step)
        found, record = source
        version = None if record is None else record.version
        if self._begin(running, part, f"keep of step {found.step}", version):
            running.kept[part] = found.step
            if record is not None and record.is_value:
                running.wrapped.add(part)
            self._save(running, part, self._keep(running, part, found))

    def _begin(self, running: _Running, part: str, who: str, version: int | None) -> bool:
        """Returns whether a part begins now: a call whose answer was lost comes again."""
        known = running.machine.parts.get(part)
        is_new = known is None or 0 not in known.begun
        self._receive(running, Begun(part, 0, who, version))
        return is_new

    async def _put(
        self, running: _Running, part: str, refs: Sequence[Any], job: JobSettings
    ) -> None:
        machine, place = running.machine, running.place
        begin_s = self._loop.time()
        while not ray_calls.wait(refs, num_returns=1, timeout=0)[0]:
            if machine.phase in ENDED:
                return
            pause_s = (self._loop.time() - begin_s) / 10
            await asyncio.sleep(min(max(pause_s, _PUT_S[0]), _PUT_S[1]))
        attempt = new_attempt()
        async with self._values.holding(refs[0], attempt) as actor:
            if await actor.hold.remote(part, place.step, attempt, [*refs]):
                running.wrapped.add(part)
            self._receive(running, Staged(part, 0, 1, attempt, outlives=True))
            target = Root(job.target).below(running.folder_of(part))
            variables = StorageVariables.of_this_process()
            await actor.write.remote(target, attempt, job.options, variables)
        await self.look(place.attempt, part)

    async def _keep(self, running: _Running, part: str, found: StepFound) -> None:
        kept = self._kept
        if kept is None:
            return
        attempt = await asyncio.to_thread(kept.link, found, part, running.folder_of(part))
        self._receive(running, Staged(part, 0, 1, attempt, outlives=True))
        await self.look(running.place.attempt, part)

    def _save(self, running: _Running, part: str, work: Any) -> None:
        task = self._start(self._contained(running, part, work))
        running.saving.add(task)
        task.add_done_callback(running.saving.discard)

    async def _contained(self, running: _Running, part: str, work: Any) -> None:
        """Runs what saves a part; an error gives the step up."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - Ray raises much, and nobody else waits
            self._receive(running, Failed(part, _as_ours(error, part)))

    # --- what the machine commands ---------------------------------------------------------------

    def _step_of(self, attempt: str) -> _Running:
        running = self._steps.get(attempt)
        if running is None:
            raise InvalidRequestError(
                "the step of this part is not being saved any more: it was committed or given up "
                "long ago, or by a coordinator that ended. Open a step with JobCheckpoints.step"
            )
        return running

    def _receive(self, running: _Running, event: Event[Any]) -> None:
        before = running.machine.phase
        for command in running.machine.receive(event):
            self._carry_out(running, command)
        if before == "opened" and running.machine.phase != "opened" and self._job is not None:
            options = self._job.options
            timeout_s = options.write_timeout_s + options.commit_timeout_s
            self._expire(running, Overdue("staged", timeout_s))
        if running.machine.phase in ("committed", "unknown"):
            running.is_over = True
        self._changed(running)

    def _carry_out(self, running: _Running, command: Command) -> None:
        match command:
            case Follow(part, attempt):
                running.looks[part] = asyncio.Event()
                self._start(self._follow(running, part, attempt))
            case Commit():
                self._start(self._commit(running))
            case Discard(error):
                self._start(self._discard(running, error))

    def _changed(self, running: _Running) -> None:
        running.changed.set()
        running.changed = asyncio.Event()

    async def _await(self, running: _Running, is_there: Callable[[_Running], bool]) -> None:
        while not is_there(running):
            await running.changed.wait()

    async def _await_earlier(self, running: _Running) -> None:
        for attempt, other in [*self._steps.items()]:
            if attempt == running.place.attempt:
                return
            await self._await(other, lambda one: one.is_over)

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _expire(self, running: _Running, event: Overdue) -> None:
        self._loop.call_later(event.timeout_s, self._receive, running, event)

    async def _follow(self, running: _Running, part: str, attempt: str) -> None:
        """Reads the records of a part until they say how its save ended."""
        writer = self._writer
        if writer is None:
            return None
        target, pause_s = writer.root.below(running.folder_of(part)), _FOLLOW_S[0]
        while running.machine.phase not in ENDED:
            look = running.looks[part]
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(look.wait(), pause_s)
            look.clear()
            pause_s = min(1.5 * pause_s, _FOLLOW_S[1])
            try:
                found = await asyncio.to_thread(outcome, target, attempt)
            except Exception as error:  # noqa: BLE001 - the deadline of the step bounds it
                logger.info("The records of %s can't be read: %s", target.url, error)
                found = "open"
            if found == "committed":
                if self._kept is not None and part not in running.kept:
                    self._kept.wrote(attempt)
                return self._receive(running, Durable(part, attempt))
            if found == "aborted":
                why = await asyncio.to_thread(reason_of, target, attempt)
                aborted = CheckpointError(f"its save was aborted: {why}", step=running.place.step)
                return self._receive(running, Failed(part, aborted))
        return None

    async def _commit(self, running: _Running) -> None:
        writer = self._writer
        if writer is None:
            return
        # Why in order: a run in which a later step is committed and an earlier one not yet would
        # go on from either.
        await self._await_earlier(running)
        records = {
            name: PartRecord(
                attempt=one.attempt,
                version=one.version,
                kept_from=running.kept.get(name),
                is_value=name in running.wrapped,
            )
            for name, one in running.machine.parts.items()
        }
        what = f"the commit of step {running.place.step}"
        error: CheckpointError | None
        try:
            error = await self._in_time(what, create_record, writer, running.place, records)
        except Exception as failed:  # noqa: BLE001 - what did not return may create it later
            error = CommitUnknownError(
                f"{to_wire(failed, what).message} Ask ray_dcp.outcome later",
                attempt=running.place.attempt,
                step=running.place.step,
            )
        is_unknown = isinstance(error, CommitUnknownError)
        committed = True if error is None else None if is_unknown else False
        await self._try(what, writer.finish, running.place, committed)
        self._receive(running, CommitEnded(error))
        if committed and running.kept:
            self._check_kept(running.place)

    def _check_kept(self, place: StepTarget) -> None:
        """Begins to read the kept parts that are due, unless some are still being read."""
        if self._kept is not None and (self._checking is None or self._checking.done()):
            check = partial(self._kept.check_due, place.name, place.step)
            # Suppressed: the node has no thread left, and the next step tries again.
            with suppress(LimitError):
                self._checking = begin(check, "ray_dcp reads kept parts")

    async def _discard(self, running: _Running, error: CheckpointError) -> None:
        """Deletes the parts of a step that was given up."""
        writer = self._writer
        if running.saving:
            # Why: what is being written would be there again after it was deleted.
            await asyncio.wait([*running.saving], timeout=self._commit_timeout_s)
        if writer is not None:
            attempts = {name: one.attempt for name, one in running.machine.parts.items()}
            what = f"the end of step {running.place.step}"
            await self._try(what, remove_parts, writer, running.place, attempts, error)
            await self._try(what, writer.finish, running.place, False)
        running.is_over = True
        self._changed(running)

    @property
    def _commit_timeout_s(self) -> float:
        options = SaveOptions() if self._job is None else self._job.options
        return options.commit_timeout_s

    async def _in_time(self, what: str, work: Callable[..., T], *arguments: Any) -> T:
        """Returns the result of work in a thread.

        Raises:
            DeadlineError: The storage is stuck in it; the thread is left to itself.
        """
        timeout_s = self._commit_timeout_s
        try:
            return await asyncio.wait_for(asyncio.to_thread(work, *arguments), timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineError(
                f"expected the storage to answer within {timeout_s:g} s (commit_timeout_s), but "
                f"{what} still waits for it, and is left to itself."
            ) from None

    async def _try(self, what: str, work: Callable[..., object], *arguments: Any) -> None:
        """Does work in a thread; the step ends whatever becomes of it."""
        try:
            await self._in_time(what, work, *arguments)
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            logger.warning("After %s: %s: %s", what, type(error).__name__, error)

    # --- life --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if self._attaching.locked():
                self._last_used_s = self._loop.time()
            processes: set[Any] = set()
            for running in self._running():
                processes |= processes_of(running.machine.parts.values())
            processes = {one for one in processes if isinstance(one, Caller)}
            driver = self._driver
            if driver is not None:
                processes.add(driver.process)
            try:
                gone = await asyncio.to_thread(ray_calls.gone, processes)
            except (CheckpointError, RayError) as error:
                logger.info("Processes that ended are not seen now: %s", error)
                continue
            for running in self._running() if gone else ():
                self._receive(running, Gone(frozenset(gone)))
            is_unused = driver is None and self._loop.time() - self._last_used_s > UNUSED_S
            if driver is not None:
                is_unused = driver.process in gone and self._driver is driver
            if is_unused and not self._running() and not self._attaching.locked():
                await self._end()

    async def _end(self) -> None:
        """Gives the writer lease back, and ends the actor."""
        async with self._attaching:
            writer, self._writer, self._driver = self._writer, None, None
            if writer is not None:
                await asyncio.to_thread(writer.remover.drain, 60.0)
                await asyncio.to_thread(writer.close)
            ray_calls.kill(self._self, no_restart=True)


# --- what runs in threads ------------------------------------------------------------------------


def _as_ours(error: Exception, part: str) -> CheckpointError:
    cause = cause_of(error)
    if isinstance(cause, RayError):
        return ParticipantError(f"the writer of the value died: {text_of(cause)}", key=part)
    if cause is not error:
        return from_wire(error, "the writer of the value")
    return to_wire(error, "the job's coordinator", key=part, kind=InternalError)


@ray_calls.starting_no_ray()
def job_coordinator_of(run: str, *, namespace: str) -> Any:
    """Returns the handle of a run's coordinator, and creates the actor if there is none.

    It runs on any node, preferably the caller's, and outlives its creator.

    Args:
        run: Absolute path or URL of the run.
        namespace: Ray namespace of the actor.
    """
    actor = ray.remote(JobCoordinator).options(
        name=job_coordinator_name(run, namespace),
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=MOST_CALLS,
        num_cpus=0,
        # Why explicit: as for the coordinator of a session.
        scheduling_strategy="DEFAULT",
    )
    return ray_calls.named_actor(actor)


def this_driver(nonce: str) -> Driver:
    """Returns this process as the driver of a run."""
    return Driver(nonce, ray_calls.this_caller(os.getpid()))

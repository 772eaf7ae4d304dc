"""`CollectiveActions`: what the ranks of a manager do together: decide, save, commit, restore.

All ranks call every method in the same order. `RestoreReport` names the restored step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ray_dcp import events
from ray_dcp.asynchronous import SaveHandle, run_async_save
from ray_dcp.commit_protocol.messages import OpKey, Reply, Request, Target
from ray_dcp.commit_protocol.vote import Decision, Fenced, Lost, Open, Won
from ray_dcp.core import bounds
from ray_dcp.core.quantities import seconds_text, size_text
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    DamagedCheckpointError,
    InvalidRequestError,
    SaveSkippedError,
    StorageError,
)
from ray_dcp.events import contained
from ray_dcp.loading import run_load
from ray_dcp.manager.agreement import T, agree
from ray_dcp.manager.allocation_end import node_of_ray
from ray_dcp.manager.background import Finisher, in_time
from ray_dcp.manager.catalogue import Root, StepFound, look_at_step
from ray_dcp.manager.preemption import Preemption
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.manager.restore_order import MOST_LOOKS, Wanted, candidates, targets_of
from ray_dcp.manager.retention import Trust
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.save_policies import SaveFacts, asks_only_the_step
from ray_dcp.manager.settings import Item, Settings, states_of
from ray_dcp.manager.step_commit import commit_step
from ray_dcp.manager.step_target import StepTarget
from ray_dcp.options import LoadOptions
from ray_dcp.place.outcome import outcome, settle
from ray_dcp.rank.rank_load import drive, first_that_loads, with_time_to_join
from ray_dcp.rank.rank_save import result_or_error
from ray_dcp.saving import check_options, run_save
from ray_dcp.session.session import Session
from ray_dcp.store.opening import place_below
from ray_dcp.store.storage import is_full
from ray_dcp.torch_adapter.dispatch import decide_load, decide_save
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.operation_log import OperationLog
from ray_dcp.view.progress import ShowProgress
from ray_dcp.view.verify import verify

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A committed step."""

    step: int
    checkpoint_id: str
    """Path or URL of its folder."""
    created_s: float
    """Time of the save by the clock of rank 0, in seconds since the epoch; 0 for checkpoints of
    stock DCP."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's metadata."""
    tags: frozenset[str] = frozenset()
    items: tuple[str, ...] = ()
    """Names of its items; empty for a step of one state."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RestoreReport:
    """The result of `CheckpointManager.restore` on this rank."""

    step: int
    """The restored step."""
    checkpoint_id: str
    """Path or URL of its folder."""
    reports: Mapping[str, LoadReport]
    """The report of each item by name; that of a step of one state is under ""."""
    items: Mapping[str, str] = field(default_factory=dict)
    """Folder of each item or part of the step, below its folder; empty for a step of one state."""
    skipped: tuple[tuple[int, CheckpointError], ...] = ()
    """`(step, error)` of newer steps that `auto` could not load, newest first; equal on all
    ranks."""

    def __repr__(self) -> str:
        items = ", ".join(name for name in self.reports if name)
        read = size_text(sum(one.bytes_read for one in self.reports.values()))
        took = seconds_text(sum(sum(one.seconds.values()) for one in self.reports.values()))
        skipped = ", ".join(f"{step} ({type(error).__name__})" for step, error in self.skipped)
        return (
            f"RestoreReport(step {self.step}, {self.checkpoint_id!r}, "
            f"{f'items {items}, ' if items else ''}{read} read in {took}"
            f"{f', skipped {skipped}' if skipped else ''})"
        )

    @property
    def report(self) -> LoadReport:
        """The report of a step of one state, or of the first item."""
        return next(iter(self.reports.values()))


def _any_told(facts: Sequence[Sequence[Any]]) -> bool:
    return any(is_told for is_told, _ in facts)


def _nodes(facts: Sequence[Sequence[Any]]) -> list[str]:
    return [node for _, node in facts]


@dataclass
class CollectiveActions:
    """One rank's part in what the ranks of a manager do together."""

    root: Root
    settings: Settings
    writer: Writer
    """Decides on rank 0; other ranks only scan the storage with it."""
    preemption: Preemption
    """Preemption notices of this process."""
    session: Callable[[], Session]
    """Returns the session of this rank; all ranks create it in the first call."""
    finisher: Finisher
    """Waits for asynchronous saves."""
    read_only: bool = False
    """Whether nothing may be written, so that no step is marked as damaged."""

    def agree(self, what: str, decide: Callable[[Sequence[Any]], Any], **more: Any) -> Any:
        """Returns the decision of rank 0; see the function `agree`."""
        where = f"{what} in {self.root.url}"
        return agree(self.session(), where, decide, self.settings.options, **more)

    def should_save(self, step: int) -> bool:
        """Returns whether a step is due, the same on all ranks.

        Raises:
            InvalidRequestError: The step is invalid.
            CheckpointError: The ranks could not agree.
        """
        due = self._due_alone(step)
        if due is not None:
            return due
        return bool(
            self.agree(
                f"whether step {step} is due",
                lambda found: self.writer.due(step, _any_told(found), nodes=_nodes(found)),
                facts=self._facts(),
            )
        )

    def _facts(self) -> list[Any]:
        """Returns by what rank 0 decides whether a step is due: a notice, and a node of Ray."""
        return [self.preemption.is_told, node_of_ray() if self.writer.needs_nodes else ""]

    def _due_alone(self, step: int) -> bool | None:
        """Returns whether a step is due; None if only the ranks together can decide that."""
        self.settings.names.name_of(step)
        policy = self.settings.policy
        if policy is None:
            return False
        alone = bool(policy.due(SaveFacts(step=step)))
        if asks_only_the_step(policy) or (step % self.settings.sync_every and not alone):
            return alone
        return None

    def is_preempted(self, step: int) -> bool:
        """Returns whether a rank was notified that its machine is being taken away.

        Raises:
            CheckpointError: The ranks could not agree.
        """
        told = self.agree(f"preemption at step {step}", any, facts=self.preemption.is_told)
        if told:
            self.preemption.tell()
        return bool(told)

    def save(
        self,
        step: int,
        state_dict: Any,
        force: bool,
        details: Mapping[str, Any],
        progress: ShowProgress = False,
    ) -> bool:
        """Saves a step if it is due; returns whether it was.

        Raises:
            CheckpointError: As `CheckpointManager.save`.
        """
        try:
            return self._save(step, state_dict, force, details, progress)
        except StorageError as error:
            # Why not CommitUnknownError: that step may still be committed.
            if not is_full(error):
                raise
            options = self.settings.options
            has_room = self.agree(
                f"room for step {step}",
                lambda _: self.writer.make_room(step, details["metrics"]),
                timeout_s=options.plan_timeout_s + options.commit_timeout_s,
            )
            if not has_room:
                raise
            told = "Step %d is saved once more, after older steps were deleted: %s"
            logger.warning(told, step, error)
        return self._save(step, state_dict, True, details, progress)

    def _save(
        self,
        step: int,
        state_dict: Any,
        force: bool,
        details: Mapping[str, Any],
        progress: ShowProgress,
    ) -> bool:
        place, states = self._begin_step(step, state_dict, force, details)
        if place is None:
            return False
        with self._record_outcome(place, self._leader()):
            for name, state in states.items():
                run = partial(run_save, progress=progress)
                self._run_item(run, "save", place, name, state, {})
            self._commit(place, None)
        return True

    def save_async(
        self,
        step: int,
        state_dict: Any,
        force: bool,
        details: Mapping[str, Any],
        save_parts: Callable[[StepTarget], object] | None = None,
        **options: Any,
    ) -> bool:
        """Saves a step in the background if it is due; returns once its bytes are copied.

        Args:
            step: The step.
            state_dict: As given to `CheckpointManager.save_async`.
            force: Whether to save the step even if it is not due.
            details: Metrics, metadata, tags and whether to replace; see `Writer.begin`.
            save_parts: Saves parts beside the state of the step; called on rank 0 alone. The state
                is saved, and the step committed, when they are durable.
            **options: Fields of `SaveOptions` that replace those of the items.

        Returns:
            Whether the step is being saved. False if it is not due, or if
            `SaveOptions(when_full="skip")` skipped it.

        Raises:
            CheckpointError: As `CheckpointManager.save_async`.
        """
        place, states = self._begin_step(step, state_dict, force, details, save_parts)
        if place is None:
            return False
        try:
            # Why staged in the call: the caller gets no handle to wait for.
            handles = self._staged(place, states, {**options, "staging": "call"})
        except SaveSkippedError as error:
            logger.info("Step %d is skipped: %s", step, error)
            return False
        # Why now: operations must be numbered in the order of the calls, which threads don't keep.
        key = self.session().next_key() if self.settings.named else None
        writer = self._leader()

        def finish() -> None:
            with self._record_outcome(place, writer):
                for error in [handle.exception() for handle in handles]:
                    if error is not None and not isinstance(error, CommitUnknownError):
                        raise error
                for handle in handles:
                    self._check_committed(handle)
                self._commit(place, key)

        self.finisher.add(step, place.created_s, finish)
        return True

    def _staged(
        self, place: StepTarget, states: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[SaveHandle]:
        """Starts the saves of all items, and returns their handles once their bytes are copied."""
        handles: list[SaveHandle] = []
        try:
            for name, state in states.items():
                handles.append(
                    self._run_item(run_async_save, "async_save", place, name, state, options)
                )
                error = handles[-1].exception() if handles[-1].done() else None
                if isinstance(error, SaveSkippedError):
                    raise error
        except BaseException:
            for handle in handles:
                handle.cancel()
            with self._record_outcome(place, self._leader()):
                raise
        return handles

    def _check_committed(self, handle: SaveHandle) -> None:
        """Waits for the end of a save; queries the storage if its outcome is unknown.

        Raises:
            CheckpointError: The checkpoint is not committed.
            CommitUnknownError: The storage does not know the outcome either.
        """
        try:
            handle.result()
        except CommitUnknownError as unknown:
            url, found = handle.checkpoint_id, ""
            for pause_s in bounds.ASK_AGAIN_S:
                time.sleep(pause_s)
                with suppress(CheckpointError):
                    found = outcome(replace(self.root.target, url=url), unknown.attempt)
                if found == "committed":
                    return
                if found == "aborted":
                    raise CheckpointError(
                        f"It was aborted: {unknown.message}", checkpoint_id=url
                    ) from unknown
            raise

    def _begin_step(
        self,
        step: int,
        state_dict: Any,
        force: bool,
        details: Mapping[str, Any],
        save_parts: Callable[[StepTarget], object] | None = None,
    ) -> tuple[StepTarget | None, dict[str, Any]]:
        """Begins a step that is due; returns its place (None if it is not), and states by item."""
        self.settings.names.name_of(step)
        if not force and self._due_alone(step) is False:
            return None, {}
        if self.settings.order == "any":
            self.finisher.wait_for(step)
        states, error = result_or_error(
            lambda: states_of(self.settings.items, state_dict),
            "looking at the state",
            self.session().rank,
        )
        left = threading.Event()

        def decide(facts: Sequence[Sequence[Any]]) -> tuple[Mapping[str, Any], bool] | None:
            told = _any_told(facts)
            if not self.writer.due(step, told, force=force, nodes=_nodes(facts)):
                return None
            place = self.writer.begin(
                step, preempted=told, wanted=lambda: not left.is_set(), **details
            )
            return vars(place), save_parts is not None

        try:
            decided = self.agree(f"saving step {step}", decide, facts=self._facts(), error=error)
        except BaseException:
            left.set()
            self.writer.give_up(step)
            raise
        if decided is None:
            return None, {}
        fields, has_parts = decided
        place = StepTarget(**fields)
        if has_parts:
            self._save_parts(place, save_parts)
        return place, states or {}

    def _save_parts(
        self, place: StepTarget, save_parts: Callable[[StepTarget], object] | None
    ) -> None:
        """Saves the parts beside the state of a step on rank 0, while the others wait.

        Raises:
            CheckpointError: A part can't be saved; the same on all ranks.
        """
        options = self.settings.options

        def decide(_: Sequence[Any]) -> None:
            if save_parts is not None:
                save_parts(place)

        try:
            self.agree(
                f"the parts of step {place.step}",
                decide,
                timeout_s=options.plan_timeout_s + options.write_timeout_s,
            )
        except BaseException:
            with self._record_outcome(place, self._leader()):
                raise

    def _run_item(
        self,
        run: Callable[..., T],
        operation: str,
        place: StepTarget,
        name: str,
        state: Any,
        options: Mapping[str, Any],
    ) -> T:
        """Runs the save of one item by `run_save` or `run_async_save`, and returns its result."""
        item = self.settings.items[name]
        target = self.root.below(place.name)
        path = place_below(target, place.folder_of(name)) if name else target
        planner = item.planner_for_save()
        with OperationLog(operation, checkpoint_id=path, planner=planner) as log:
            result = run(
                decide_save(planner, None, path),
                self.session(),
                state,
                replace(item.save_options, **options),
                path,
                log=log,
            )
            if isinstance(result, SaveHandle):
                log.uploading(result)
            return result

    def _commit(self, place: StepTarget, key: OpKey | None) -> None:
        """Commits a step of named items: rank 0 saves a checkpoint that refers to them.

        Raises:
            CommitUnknownError: It is unknown whether the step is committed.
            CheckpointError: The step is not committed, and never will be.
        """
        if not self.settings.named:
            return
        folders = {name: place.folder_of(name) for name in self.settings.named}

        def decide(_: Sequence[Any]) -> None:
            commit_step(self.root, place, folders)

        # Why so long: one rank after the other learns that the items are committed.
        timeout_s = self.settings.options.plan_timeout_s + self.settings.options.commit_timeout_s
        what = f"the commit of step {place.step}"
        try:
            self.agree(what, decide, key=key, timeout_s=timeout_s)
        except CheckpointError as error:
            self._settle(place, error, what, timeout_s)

    def _settle(
        self, place: StepTarget, error: CheckpointError, what: str, timeout_s: float
    ) -> None:
        """Returns if a step's records show that it is committed; otherwise prevents the commit.

        Why: the commit may have happened before the ranks lost each other, or may still happen.
        """
        ended: Decision
        target, rank = self.root.below(place.name), self.session().rank
        try:
            ended = in_time(
                timeout_s,
                what,
                lambda: settle(target, place.attempt, reason=error.message, rank=rank),
            )
        except StorageError as silent:
            ended = Open(silent)
        match ended:
            case Won() | Lost():
                logger.warning("%s happened, though the ranks lost each other: %s", what, error)
            case Fenced():
                raise error
            case Open(why):
                raise CommitUnknownError(
                    f"{what} failed, and the storage did not report whether it happened: {error}; "
                    f"{why}. Ask ray_dcp.outcome({target.url!r}, {place.attempt!r}) later",
                    attempt=place.attempt,
                    step=place.step,
                ) from error

    def _leader(self) -> Writer | None:
        """Returns the writer that decides now, on rank 0; None on other ranks."""
        return self.writer if self.session().rank == 0 else None

    @contextmanager
    def _record_outcome(self, place: StepTarget, writer: Writer | None) -> Iterator[None]:
        """Reports the outcome of a save to the writer that began it.

        Args:
            place: Place of the step.
            writer: On rank 0. *Why not* `self.writer`: another may decide by the end of the save.
        """
        committed: bool | None = False
        no_space = False
        try:
            yield
            committed = True
        except BaseException as error:
            # Why: an interrupt may come after the commit.
            if isinstance(error, CommitUnknownError) or not isinstance(error, Exception):
                committed = None
            no_space = isinstance(error, StorageError) and is_full(error)
            raise
        finally:
            what = f"the end of step {place.step}"
            with contained(f"Recording {what}"):
                if writer is not None:
                    # Why also here: another interrupt may come before the thread begins.
                    writer.give_up(place.step)
                    finish = partial(writer.finish, place, committed, no_space=no_space)
                    in_time(self.settings.options.commit_timeout_s, what, finish)

    # Restoring

    def restore(
        self,
        wanted: Wanted,
        state_dict: Mapping[str, Any],
        options: LoadOptions | None,
        progress: ShowProgress = False,
        trust: Trust | None = None,
    ) -> RestoreReport:
        """Loads a step into a state dict, in place; see `CheckpointManager.restore`.

        Args:
            wanted: The requested step.
            state_dict: Values to fill.
            options: Options of the load; those of the item if None.
            progress: As for `load`.
            trust: Which steps are trusted; others are not restored then.
        """
        is_number = isinstance(wanted, int) and not isinstance(wanted, bool)
        if not is_number and wanted not in ("latest", "best", "auto"):
            raise InvalidRequestError(
                f"expected a step, 'latest', 'best' or 'auto', but found {wanted!r}", key="step"
            )
        if is_number and trust is not None:
            raise InvalidRequestError(
                f"trust= chooses among the steps for 'latest', 'best' or 'auto', but step {wanted} "
                f"was chosen by its number; leave one of the two out",
                key="trust",
            )
        check_options(options, LoadOptions)
        with ExitStack() as leases:
            # Why here: the thread that decides may begin after the caller has left.
            left = threading.Event()
            leases.callback(left.set)

            def decide(_: Sequence[Any]) -> list[tuple[int, str, dict[str, str]]]:
                return [
                    (one.step, one.name, {} if one.info is None else dict(one.info.items))
                    for one in self._choose_steps(wanted, leases, left, trust)
                ]

            told = self.agree(f"which step is {wanted!r}", decide)
            tries = {step: (self.root.below(name), saved) for step, name, saved in told}
            overwritten: defaultdict[str, set[str]] = defaultdict(set)

            def load(step: int, is_late: bool = False) -> dict[str, LoadReport]:
                if self.settings.parts_beside and tries[step][1]:
                    self._check_parts(step, *tries[step])
                parts = targets_of(*tries[step], self.settings, state_dict, step)
                return self._load(step, parts, options, overwritten, is_late, progress)

            if wanted == "auto":
                step, reports, skipped = self._load_first(list(tries), load)
            else:
                (step,) = tries
                reports, skipped = load(step), []
            if self.session().rank == 0 and not self.read_only:
                with contained(f"Recording what was loaded from {self.root.url}"):
                    self._record_load(step, state_dict, options, reports, dict(skipped))
        paths = tuple((tries[number][0].url, error) for number, error in skipped)
        return RestoreReport(
            step=step,
            checkpoint_id=tries[step][0].url,
            reports={
                part: replace(report, step=step, skipped=paths) for part, report in reports.items()
            },
            items=tries[step][1],
            skipped=tuple(skipped),
        )

    def _check_parts(self, step: int, folder: Target, parts: Mapping[str, str]) -> None:
        """Raises on all ranks if a part beside the state of a step is damaged; rank 0 reads them.

        Raises:
            DamagedCheckpointError: One is.
            StorageError: The storage can't read one.
        """
        options = self.settings.items[""].load_options

        def decide(_: Sequence[Any]) -> None:
            for name, part in parts.items() if options.verify != "never" else ():
                place = place_below(folder, part)
                report = verify(place)
                if report.unread:
                    told = f"the part {name!r} can't be verified: {report.unread[0]}"
                    raise StorageError(told, checkpoint_id=place.url, step=step)
                if report.problems:
                    told = f"the part {name!r} is damaged: {report.problems[0]}"
                    raise DamagedCheckpointError(told, checkpoint_id=place.url, step=step)

        self.agree(f"the parts of step {step}", decide, timeout_s=options.read_timeout_s)

    def _record_load(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        options: LoadOptions | None,
        reports: Mapping[str, LoadReport],
        skipped: Mapping[int, CheckpointError],
    ) -> None:
        """Lets the writer know which step was loaded, and which were damaged. On rank 0."""
        found = self.writer.catalogue.steps.get(step)
        named = self.settings.named
        chosen = [options or item.load_options for item in self.settings.items.values()]
        # Why all this: what is left out of a load was not read, nor what came from memory.
        is_all = all(one.verify == "always" and one.strict is not False for one in chosen)
        is_all = is_all and {*named} <= ({*state_dict} if named else set())
        is_all = is_all and not any(
            one.bytes_from_memory or one.unexpected for one in reports.values()
        )
        attempt = found.attempt if found is not None and is_all else ""
        self.writer.loaded(step, attempt, skipped)

    def _choose_steps(
        self, wanted: Wanted, leases: ExitStack, left: threading.Event, trust: Trust | None
    ) -> list[StepFound]:
        """Returns the steps to try, after protecting the first one from deletion. On rank 0.

        Args:
            wanted: The requested step.
            leases: Gets the lease.
            left: Set when the caller has stopped waiting.
            trust: Which steps are trusted.
        """
        for _ in range(MOST_LOOKS):
            found = candidates(wanted, self.writer.look(), self.settings, self.root.url, trust)
            first = found[0]
            lease = ReaderLease(self.root, first.step, lease_s=self.settings.lease_s)
            try:
                leases.enter_context(lease)
                if left.is_set():
                    leases.close()
                if lease.is_held and lease.unsure:
                    logger.warning("%s", lease.unsure)
            except StorageError as error:
                # Why not raised: what can be read is loaded.
                logger.info("Step %d is read without a lease: %s", first.step, error)
                return found
            # Why again: the step may have been deleted before the lease was written.
            if look_at_step(self.root, first.name, first.step) is not None:
                return found
            lease.__exit__()
        raise StorageError(
            f"{self.root.url} was deleted from {MOST_LOOKS} times while a step was looked for: "
            f"who deletes there all the time? Try again when that is over",
            checkpoint_id=self.root.url,
        )

    def _load(
        self,
        step: int,
        parts: Sequence[tuple[str, Item, Target, Any]],
        options: LoadOptions | None,
        overwritten: Mapping[str, set[str]],
        is_late: bool,
        progress: ShowProgress,
    ) -> dict[str, LoadReport]:
        """Loads the items of a step; see `run_load` about what was `overwritten`."""
        reports: dict[str, LoadReport] = {}
        try:
            for part, item, path, state in parts:
                chosen, planner = options or item.load_options, item.planner_for_load()
                with OperationLog("load", checkpoint_id=path, planner=planner) as log:
                    reports[part] = run_load(
                        decide_load(planner, None, path),
                        self.session(),
                        state,
                        with_time_to_join(chosen) if is_late else chosen,
                        path,
                        overwritten=overwritten[part],
                        log=log,
                        progress=progress,
                    )
        except CheckpointError as error:
            for part, report in reports.items():
                overwritten[part].update(report.loaded)
            error.step = step if error.step is None else error.step
            raise
        return reports

    def _load_first(
        self, steps: Sequence[int], load: Callable[[int, bool], dict[str, LoadReport]]
    ) -> tuple[int, dict[str, LoadReport], list[tuple[int, CheckpointError]]]:
        """Loads the first step that can be loaded; returns also the skipped ones."""

        def load_one(step: int, is_late: bool) -> Generator[Request, Reply, dict[str, LoadReport]]:
            yield from ()  # `load` makes its own requests.
            return load(step, is_late)

        found, skipped = drive(first_that_loads(steps, load_one), self.session().call)
        if found is None:
            told = "; ".join(f"step {step}: {error.message}" for step, error in skipped)
            raise DamagedCheckpointError(
                f"expected a step that can be loaded, but none of {len(skipped)} step(s) in "
                f"{self.root.url} can be loaded: {told}. The state dict may hold parts of what was "
                f"tried. `ray-dcp verify` lists all the damage",
                checkpoint_id=self.root.url,
            )
        if skipped and self.session().rank == 0:
            for number, error in skipped:
                events.warn(
                    f"Restored step {found[0]} of {self.root.url} instead of the newer step "
                    f"{number}, which can't be loaded: {error}. It neither counts for retention "
                    f"nor is it deleted, and may be saved again; look at it with `ray-dcp verify`",
                    stacklevel=4,
                )
        return *found, skipped

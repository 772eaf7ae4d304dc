"""`CheckpointManager`: the checkpoints of a run, step by step.

`collective_actions` contains what all ranks do together, `root_writer` what rank 0 does for them.
Managers that are open when the process ends are closed then, so that their saves end.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from ray_dcp.core import bounds
from ray_dcp.core.processes import OwnProcess
from ray_dcp.core.wire_error import add_note
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.names import STEP_NAME, StepNames
from ray_dcp.job.part import Part, check_no_part, check_run
from ray_dcp.manager.background import Ended, Finisher, in_time
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.collective_actions import CollectiveActions, RestoreReport, SavedStep
from ray_dcp.manager.preemption import Preemption
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.manager.restore_order import Wanted, best_step_of, candidates
from ray_dcp.manager.retention import Mode, Order, RetentionPolicy, Trust, TrustRule
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.save_policies import SaveFacts, SavePolicy
from ray_dcp.manager.settings import (
    Item,
    Settings,
    items_of,
    retention_of,
    save_policy_of,
    trust_of,
)
from ray_dcp.manager.step_export import StepExport, StepExporter
from ray_dcp.options import LoadOptions, plain_integer
from ray_dcp.rank.rank_load import StepRange
from ray_dcp.saving import session_for
from ray_dcp.store.opening import target_of
from ray_dcp.view.progress import ShowProgress

logger = logging.getLogger(__name__)


def _close_at_exit(manager: CheckpointManager) -> None:
    """Registers a manager with saves in progress, so that it is closed when the process ends."""
    _open.add(manager)
    # Why with each save: handlers run in reverse order of registration, and this one has to run
    # before Ray's, which `import ray` registers and which closes the connection.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


_open: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()
# Why: a forked child lacks the threads that end the saves.
os.register_at_fork(after_in_child=_open.clear)


def _close_all() -> None:
    for manager in list(_open):
        try:
            manager.close()
        except CheckpointError as error:
            logger.error("At the end of the process, of %r: %s", manager, error)


_SAVE_PART = (
    "a manager commits steps of its own: give the part to ray_dcp.save(state, checkpoint_id=part), "
    "or async_save, on all ranks that save it"
)


class CheckpointManager:
    """Saves, keeps and restores the checkpoints of a run.

    Each step is a checkpoint in a folder of the root, such as `step-00000500`. The storage alone
    determines which steps are committed. All ranks create the manager, and call its methods in the
    same order. Methods that only read (`all_steps`, `latest_step`, `best_step`, `step_info`,
    `reading`, `follow`) can be called by any process at any time.

    A root has one writer at a time; a second one is refused. Reading needs no writer lease.

    Args:
        path: Path or URL of the root.
        save_interval: Number of steps between saves. Without it and `save_policy`, every call
            saves.
        max_to_keep: Number of newest steps to keep; 0 keeps all. `retention` replaces it.
        max_pending_async: Maximum number of asynchronous saves in progress; the next one waits.
        num_of_threads: Number of threads with which a rank writes; 1 leaves it to
            `SaveOptions.num_threads`.
        process_group: The ranks; the default group if None.
        chkpt_on_preemption: Whether a step is due when a rank receives SIGTERM or calls
            `notice_preemption`. The first SIGTERM does not end the process then.
        save_policy: When a step is due: `EverySteps(100) | EveryMinutes(30)`.
        retention: Which steps are kept: `LatestN(3) | BestN(2, "loss") | KeepEverySteps(10_000)`.
            The newest step and tagged steps are always kept.
        item: How steps of one state are saved and loaded.
        items: Makes each step consist of several named items, each saved and loaded in its own way.
            The state dict then has one entry for each name.
        step_name: Pattern of folder names.
        also_read: Further patterns of step folders that are read: `("{step}",
            "global_step{step}")`.
        order: "increasing" refuses steps that are not newer than all others. "any" accepts them,
            and replaces a committed step; which step is older is decided by the order of the saves
            then: for what is kept, "latest" and "auto".
        read_only: Whether saving and deleting are refused.
        takeover: Whether to take the writer lease from a process that is alive.
        sync_every: The ranks communicate about clocks and preemption at multiples of this step.
        lease_s: Time without a renewal after which a writer or reader on another machine counts as
            dead, in seconds.
        on_failure: Called in a thread, with step and error, when an asynchronous save fails.
        trust: Which steps are trusted: the name of a metric or a tag, or a function of `StepFacts`
            that returns True, False, or None without a verdict. 0 and NaN are verdicts against a
            step. Retention always keeps the newest trusted step.
        hold_s: Retention keeps a step without a verdict by `trust` for so long, in seconds.
        export: Which steps are exported in the background, for example as Hugging Face models. A
            failed export is logged and emits the event `export.failed`; the run goes on.
        no_dist: Whether this process is alone, regardless of the process group.

    Raises:
        InvalidRequestError: An argument is invalid, or two contradict each other.

    Examples:
        >>> import tempfile, torch
        >>> root = tempfile.TemporaryDirectory()
        >>> with CheckpointManager(root.name, 100, max_to_keep=2) as manager:
        ...     for step in range(301):
        ...         saved = manager.save(step, {"w": torch.full((2,), float(step))})
        ...     manager.join()
        ...     manager.all_steps()
        [200, 300]
        >>> state = {"w": torch.zeros(2)}
        >>> with CheckpointManager(root.name, 100) as manager:
        ...     manager.restore("latest", state).step, state["w"].tolist()
        (300, [300.0, 300.0])
        >>> root.cleanup()
    """

    # Source: `torch_xla/experimental/distributed_checkpoint/manager.py`.

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int | None = None,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        num_of_threads: int = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
        *,
        save_policy: SavePolicy | None = None,
        retention: RetentionPolicy | None = None,
        item: Item | None = None,
        items: Mapping[str, Item] | None = None,
        step_name: str = STEP_NAME,
        also_read: tuple[str, ...] = (),
        order: Order = "increasing",
        read_only: bool = False,
        takeover: bool = False,
        sync_every: int = 1,
        lease_s: float = bounds.LEASE_S,
        on_failure: Callable[[int, CheckpointError], object] | None = None,
        trust: TrustRule | None = None,
        hold_s: float | None = None,
        export: StepExport | None = None,
        no_dist: bool = False,
    ) -> None:
        self._settings = Settings(
            policy=save_policy_of(
                save_interval, save_policy, preemption=chkpt_on_preemption, read_only=read_only
            ),
            kept=retention_of(max_to_keep, retention),
            names=StepNames(step_name, also_read),
            items=items_of(items, item, max_pending_async, num_of_threads),
            order=order,
            takeover=takeover,
            sync_every=sync_every,
            lease_s=lease_s,
            trust=trust_of(trust, hold_s),
        )
        check_run(path)
        self._root = Root(target_of(path, None))
        self._exporter = None
        if export is not None:
            self._exporter = StepExporter(self._root, self._settings, export)
        self._writer = Writer(self._root, self._settings, after_commit=self._begin_export)
        # Refuses one of several processes that are not in a group, which only saves have to be.
        self._check_grouped = partial(session_for, process_group, no_dist, saves=True)
        self._preemption = Preemption()
        self._on_failure = on_failure
        self._actions = CollectiveActions(
            self._root,
            self._settings,
            self._writer,
            self._preemption,
            partial(session_for, process_group, no_dist),
            Finisher(self._save_ended),
            read_only,
        )
        self._max_pending = max_pending_async
        self._failed: list[Ended] = []
        self._read_only = read_only
        self._listens = chkpt_on_preemption and not read_only
        self._closed = False
        self._process = OwnProcess()
        self._wait: Callable[[float], object] = threading.Event().wait
        if self._listens:
            self._preemption.listen()

    def __repr__(self) -> str:
        return f"CheckpointManager({self._root.url!r})"

    # Reading: by any process at any time

    @property
    def path(self) -> str:
        """Absolute path or URL of the root."""
        return self._root.url

    @property
    def retention(self) -> RetentionPolicy | None:
        """Which steps are kept; None if all are."""
        return self._settings.kept

    @property
    def order(self) -> Order:
        """In which order steps are saved: "increasing" or "any"."""
        return self._settings.order

    def all_steps(self) -> list[int]:
        """Scans the storage, and returns the committed steps in ascending order.

        Raises:
            StorageError: The storage can't be read.

        Complexity:
            One listing, and one small read for each step that is new since the last scan.
        """
        return list(self._writer.look().steps)

    def latest_step(self, *, trust: TrustRule | None = None) -> int | None:
        """Returns the newest committed step; None if there is none.

        That is the highest one; with `order="any"`, the one that was saved last.

        Args:
            trust: Only steps that are trusted; see `CheckpointManager`.
        """
        found, order = self._writer.look(), self._settings.order
        steps = found.oldest_first(order) if trust is None else found.trusted(Trust(trust), order)
        return steps[-1].step if steps else None

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """Returns the step with the best value of a metric; None if no step has it.

        Args:
            metric: Name of the metric; that of the retention's `BestN` if None.
            mode: "min" or "max"; if None, that of `BestN`, or else "min".

        Raises:
            InvalidRequestError: No metric is given, and the retention does not have exactly one
                `BestN`.
        """
        settings = self._settings
        return best_step_of(self._writer.look(), settings.kept, metric, mode, settings.order)

    def step_info(self, step: int) -> SavedStep:
        """Returns the metrics, metadata, tags, items and path of a step.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            InvalidRequestError: The step is no integer from 0.
        """
        step, catalogue = self._number(step), self._writer.look()
        (found,) = candidates(step, catalogue, self._settings, self.path)
        return SavedStep(
            step=step,
            checkpoint_id=self._root.below(found.name).url,
            created_s=found.created_s,
            metrics=catalogue.metrics_of(found),
            metadata={} if found.info is None else dict(found.info.metadata),
            tags=catalogue.tags.get(step, frozenset()),
            items=() if found.info is None else tuple(sorted(found.info.items)),
        )

    @contextmanager
    def reading(self, step: int) -> Iterator[str]:
        """Returns a context manager that protects a step from deletion by any process.

        It warns if the step may be deleted nevertheless: this process may only read the run, or the
        storage has no conditional creation and a deletion was announced before.

        Args:
            step: The step.

        Yields:
            Path or URL of the step's folder.

        Raises:
            CheckpointNotFoundError: The step is not committed, or is being deleted.
            InvalidRequestError: The step is no integer from 0.
            StorageError: The storage failed to write the lease.
        """
        step = self._number(step)
        with ReaderLease(self._root, step, lease_s=self._settings.lease_s) as lease:
            if lease.unsure:
                warnings.warn(lease.unsure, UserWarning, stacklevel=3)
            yield self.step_info(step).checkpoint_id

    def follow(
        self,
        *,
        newer_than: int | None = None,
        timeout_s: float | None = None,
        poll_s: float = 10.0,
        trust: TrustRule | None = None,
    ) -> Iterator[int]:
        """Yields the newest step whenever there is a new one, for evaluation beside the training.

        The step is not deleted while the body of the loop runs. After a `rewind`, the steps that
        are saved from then on are new, those with earlier numbers included.

        Args:
            newer_than: Yield only later steps than this one.
            timeout_s: Stop when there was no new step for this time, in seconds; None never stops.
            poll_s: Interval of scans, in seconds.
            trust: Only steps that are trusted; see `CheckpointManager`.

        Yields:
            A committed step.

        Raises:
            InvalidRequestError: `newer_than` is no integer.
            StorageError: The storage can't be read.
        """
        wanted, seen = StepRange(newer_than=newer_than), set[tuple[int, str]]()
        since_s = time.monotonic()
        given = None if trust is None else Trust(trust)
        while not self._closed:
            found = self._writer.look()
            steps = [
                (one.step, one.attempt)
                for one in found.oldest_first(self._settings.order)
                if given is None or found.is_trusted(one, given)
            ]
            if steps and steps[-1][0] in wanted and steps[-1] not in seen:
                try:
                    with self.reading(steps[-1][0]):
                        # Why all: after a rewind, only steps that are saved from then on are new.
                        seen.update(steps)
                        yield steps[-1][0]
                except CheckpointNotFoundError:
                    continue  # It was deleted after the scan.
                since_s = time.monotonic()
                continue
            if timeout_s is not None and time.monotonic() - since_s >= timeout_s:
                return
            self._wait(poll_s if timeout_s is None else min(poll_s, timeout_s))

    # Saving: by all ranks

    def should_save(self, step: int) -> bool:
        """Returns whether a step is due, the same on all ranks.

        Args:
            step: The step, from 0.

        Raises:
            InvalidRequestError: The step is invalid.
            CheckpointError: The ranks could not agree. Policies that use the step alone need no
                agreement.
        """
        self._check_open()
        return self._actions.should_save(plain_integer(step))

    def save_facts(self) -> SaveFacts:
        """Returns the facts by which a save policy would decide now. Complete on rank 0 only.

        Examples:
            >>> import tempfile
            >>> from ray_dcp.manager import EveryOptimal
            >>> policy = EveryOptimal()
            >>> with tempfile.TemporaryDirectory() as root:
            ...     with CheckpointManager(root, save_policy=policy) as manager:
            ...         policy.describe(manager.save_facts())
            'no save was measured yet'
        """
        return self._writer.facts(self._writer.newest or 0)

    def save(
        self,
        step: int,
        state_dict: Any,
        force: bool = False,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Collection[str] = (),
        replace: bool = False,
        progress: ShowProgress = False,
    ) -> bool:
        """Saves a step if it is due, and returns once it is committed.

        Args:
            step: The step, from 0; must be newer than all steps that are committed or being saved.
            state_dict: As for `ray_dcp.save`; with `items`, a state dict for each item.
            force: Whether to save even if the step is not due.
            metrics: Numbers by name; None for a metric that the step does not have. Those of rank 0
                are used, as for the next two arguments.
            metadata: Values that JSON can represent; returned by `step_info`.
            tags: Tags to add. A tagged step is kept.
            replace: Whether the step may replace a committed one, atomically.
            progress: As for `ray_dcp.save`; it names the item, or the step, that is saved.

        Returns:
            Whether the step was due.

        Raises:
            InvalidRequestError: The step is committed already, or not newer than the newest one; a
                metric by which steps are kept is missing; metadata or tags are invalid; the manager
                is closed or read-only.
            CheckpointExistsError: Another process writes to this root.
            CheckpointError: As `ray_dcp.save`; earlier steps are unchanged.
        """
        self._check_writable()
        check_no_part(step, "the number of a step", _SAVE_PART)
        self._check_grouped()
        told = {"metrics": metrics, "metadata": metadata, "tags": tags, "replace": replace}
        return self._actions.save(plain_integer(step), state_dict, force, told, progress)

    def save_async(
        self,
        step: int,
        state_dict: Any,
        force: bool = False,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Collection[str] = (),
        replace: bool = False,
    ) -> bool:
        """Saves a step in the background if it is due, and returns once its bytes are copied.

        Waits while `max_pending_async` saves are in progress. `all_steps` includes the step once it
        is committed. A failed save is reported by `join`, by `on_failure`, and in the log.

        Args:
            step: As for `save`, like the other arguments.
            state_dict: May change when this returns.
            force: See `save`.
            metrics: See `save`.
            metadata: See `save`.
            tags: See `save`.
            replace: See `save`.

        Returns:
            Whether the step is being saved. False if it was not due, or if
            `SaveOptions(when_full="skip")` skipped it.

        Raises:
            CheckpointError: As `save`, if the error occurs before the bytes are copied.
        """
        self._check_writable()
        check_no_part(step, "the number of a step", _SAVE_PART)
        self._check_grouped()
        _close_at_exit(self)
        told = {"metrics": metrics, "metadata": metadata, "tags": tags, "replace": replace}
        is_saving = self._actions.save_async(plain_integer(step), state_dict, force, told)
        # Why one more: the save before those in progress has ended, so that nothing waits here.
        self._failed += self._failures(leave=self._max_pending + 1)
        return is_saving

    def _failures(self, leave: int = 0) -> list[Ended]:
        return [one for one in self._actions.finisher.ended(leave) if one.error is not None]

    def _begin_export(self, step: int) -> None:
        if self._exporter is not None:
            _close_at_exit(self)
            with self._writer.lock:
                steps = dict(self._writer.catalogue.steps)
            self._exporter.committed(step, steps)

    def _save_ended(self, ended: Ended) -> None:
        if ended.error is not None and self._on_failure is not None:
            self._on_failure(ended.step, ended.error)

    def join(self) -> None:
        """Waits for all saves in progress, and for deletions.

        Raises:
            CheckpointError: An asynchronous save failed since `join` was last called. This is the
                first error, with notes on the others. The step is not committed.
        """
        self._check_process()
        failed, self._failed = self._failed + self._failures(), []
        if not self._writer.remover.drain(bounds.DRAIN_S):
            logger.warning("Deletions in %s still go on after %g s", self.path, bounds.DRAIN_S)
        errors = [one.error for one in failed if one.error is not None]
        if errors:
            for one in failed[1:]:
                add_note(errors[0], f"Step {one.step} failed as well: {one.error}")
            raise errors[0]

    def reached_preemption(self, step: int) -> bool:
        """Returns whether a rank was notified that its machine is being taken away.

        Args:
            step: The step at which all ranks call this.

        Raises:
            InvalidRequestError: `chkpt_on_preemption` is False.
            CheckpointError: The ranks could not agree.
        """
        self._check_open()
        if not self._listens:
            raise InvalidRequestError(
                "Preemption detection not enabled. Make the manager with chkpt_on_preemption=True",
                key="chkpt_on_preemption",
            )
        return self._actions.is_preempted(plain_integer(step))

    def notice_preemption(self) -> None:
        """Records that this machine is being taken away: the next step is due on all ranks."""
        self._preemption.tell()

    # Restoring and changing: by all ranks

    def restore(
        self,
        step: Wanted | Part,
        state_dict: Any,
        *,
        options: LoadOptions | None = None,
        progress: ShowProgress = False,
        trust: TrustRule | None = None,
    ) -> RestoreReport:
        """Loads a step into a state dict, in place.

        Args:
            step: Number of the step; "latest" for the newest committed one; "best" for the best one
                by the metric of the retention's `BestN`; "auto" for the newest one that can be
                loaded. "auto" skips damaged steps with a warning, the same on all ranks; they may
                be saved again. A `Part` of a committed step of this run is loaded as that item of
                that step.
            state_dict: As for `ray_dcp.load`; with `items`, a state dict for each requested item,
                and of a `Part`, the one of that item.
            options: Options of the load; those of the item if None.
            progress: As for `ray_dcp.load`; it names the item, or the step, that is loaded.
            trust: "latest", "best" and "auto" choose among the steps that are trusted; see
                `CheckpointManager`. That of rank 0 counts. Newer steps stay: to train on from a
                trusted step, `rewind` to it, or make the manager with `order="any"`.

        Returns:
            The restored step, and the report of each load.

        Raises:
            CheckpointNotFoundError: There is no such step; the message lists the existing ones.
            DamagedCheckpointError: The step is damaged; with "auto", all steps are.
            InvalidRequestError: The items of the step are not those of the manager.
            CheckpointError: As `ray_dcp.load`.
        """
        self._check_open()
        if isinstance(step, Part):
            step.check_loadable()
            if not step.url.startswith(f"{self.path.rstrip('/')}/"):
                raise InvalidRequestError(
                    f"expected a part of a step in {self.path}, but the part {step.name!r} of step "
                    f"{step.step} lies in {step.url}; load it with ray_dcp.load(state, "
                    f"checkpoint_id=part)",
                    step=step.step,
                    key=step.name,
                )
            state_dict = {step.name: state_dict}
            step = step.step
        return self._actions.restore(
            plain_integer(step),
            state_dict,
            options,
            progress,
            None if trust is None else Trust(trust),
        )

    def delete(self, step: int, *, force: bool = False) -> None:
        """Deletes a step.

        Args:
            step: The step.
            force: Whether to delete it even if it has tags or is being read. That of rank 0 counts.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            InvalidRequestError: The step is no integer from 0, another program wrote it, or it is
                being saved; or it has tags or readers, which the message names, and `force` is not
                given.
            CheckpointError: Another process writes to this root, or has protected the step
                meanwhile.
        """
        self._check_writable()
        step = self._number(step)
        self._actions.agree(
            f"deleting step {step}", lambda _: self._writer.delete(step, force=force)
        )

    def rewind(self, step: int, *, force: bool = False) -> list[int]:
        """Deletes all later steps, so that training can continue from a step.

        Args:
            step: The newest step that is kept. It need not be committed where steps are saved in
                increasing order; with `order="any"`, later steps are those saved after it.
            force: Whether to delete steps that have tags or are being read. That of rank 0 counts.

        Returns:
            The deleted steps, newest first.

        Raises:
            InvalidRequestError: As `delete`, for one of the steps or several; nothing is deleted.
            CheckpointError: As `delete`; steps that were not yet deleted remain.
        """
        self._check_writable()
        step = self._number(step)
        gone: list[int] = self._actions.agree(
            f"rewinding to step {step}", lambda _: self._writer.rewind(step, force=force)
        )
        return list(gone)

    def tag(self, step: int, tag: str, *, remove: bool = False) -> None:
        """Adds a tag to a step, which protects it from deletion, or removes the tag.

        Warns as `reading` does.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            InvalidRequestError: The step or the tag is invalid.
            CheckpointExistsError: Another process writes to this root.
        """
        self._check_writable()
        step = self._number(step)
        self._actions.agree(
            f"the tag {tag!r} of step {step}",
            lambda _: self._writer.tag(step, tag, remove=remove),
        )

    # The end

    def close(self) -> None:
        """Waits for saves, exports and deletions, and releases the writer lease.

        May be called repeatedly.

        Raises:
            CheckpointError: As `join`.
        """
        if self._closed:
            return
        if not self._process.is_this:
            self._closed = True
            return
        try:
            self.join()
        finally:
            if self._exporter is not None:
                self._exporter.close()
                # Why again: retention could not delete a step while it was exported.
                self._writer.remover.drain(bounds.DRAIN_S)
            self._preemption.stop()
            try:
                in_time(bounds.CLOSE_S, f"closing {self!r}", self._writer.close)
            except StorageError as error:
                logger.warning("%s", error)
            # Why last: the lease of a close that is interrupted is released by the next call.
            self._closed = True
            _open.discard(self)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            # Why only logged: it must not hide the error that ended the block.
            logger.error("%s, when %r was closed: %s", type(failed).__name__, self, failed)

    def _number(self, step: int) -> int:
        """Returns a step as an int, integers of other libraries included, after checking it."""
        step = plain_integer(step)
        self._settings.names.name_of(step)
        return step

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise InvalidRequestError(f"{self!r} is closed; make another one")

    def _check_process(self) -> None:
        # Why: a forked child would write and delete with the lease of its parent.
        self._process.check(
            repr(self), "Make a manager of its own there; one that looks or restores is read_only"
        )

    def _check_writable(self) -> None:
        self._check_open()
        if self._read_only:
            raise InvalidRequestError(
                f"this manager of {self.path} is read_only; make one without it to save, delete or "
                f"tag",
                key="read_only",
            )

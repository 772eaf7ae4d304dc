"""`CheckpointManager`: the checkpoints of a run, step by step.

`collective_actions` and `restoring` have what all ranks do together, `root_writer` what rank 0 does
for them. Managers that are open when the process ends are closed then: their saves end first.
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
from typing import Any

import torch.distributed as dist

from ray_dcp.core.processes import OwnProcess
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.names import STEP_NAME
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.collective_actions import CollectiveActions, in_time
from ray_dcp.manager.leases import LEASE_S, ReaderLease
from ray_dcp.manager.preemption import Preemption
from ray_dcp.manager.restoring import (
    RestoreReport,
    SavedStep,
    Wanted,
    best_step_of,
    candidates,
    restore,
    saved_step,
)
from ray_dcp.manager.retention import Mode, RetentionPolicy
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.save_policy import SaveFacts, SavePolicy
from ray_dcp.manager.settings import Item, Settings
from ray_dcp.manager.steps import Order
from ray_dcp.options import LoadOptions
from ray_dcp.runtime.records import target_of

logger = logging.getLogger(__name__)


def _close_at_exit(manager: CheckpointManager) -> None:
    """Has a manager that has saves under way closed at the end of the process."""
    _open.add(manager)
    # Why with each save: handlers run in reverse order, and Ray's own, which ends the connection,
    # comes with the first `import ray`.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


_open: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()
# Why: a forked child has none of the threads that end their saves.
os.register_at_fork(after_in_child=_open.clear)


def _close_all() -> None:
    for manager in list(_open):
        try:
            manager.close()
        except CheckpointError as error:
            logger.error("At the end of the process, of %r: %s", manager, error)


DRAIN_S = 300.0
"""How long `join` waits for deletions, in seconds."""
CLOSE_S = 120.0
"""How long `close` waits until others may write, in seconds."""


class CheckpointManager:
    """The checkpoints of a run: when to save, which to keep, which to restore.

    Each step is a checkpoint in a folder of the root, as `step-00000500`. What is committed is read
    off the storage. All ranks make the manager, and call its methods in the same order; those that
    only look (`all_steps`, `latest_step`, `best_step`, `step_info`, `reading`, `follow`) any
    process may call at any time.

    A root has one writer at a time, and a second one is refused; readers
    need no writer lease.

    Args:
        path: Path or URL of the root.
        save_interval: Steps between saves; or give `save_policy`. With neither every call saves.
        max_to_keep: Newest steps to keep, 0 for all; or give `retention`.
        max_pending_async: Asynchronous saves under way at a time; the next one waits.
        num_of_threads: Threads with which a rank writes; 1 leaves it to `SaveOptions.num_threads`.
        process_group: The ranks; the default group if None.
        chkpt_on_preemption: Save as well when a rank gets SIGTERM, or calls
            `notice_preemption`. A first SIGTERM does not end the process then.
        save_policy: When to save: `EverySteps(100) | EveryMinutes(30)`.
        retention: What to keep: `LatestN(3) | BestN(2, "loss") | KeepEverySteps(10_000)`. Whatever
            it decides, the newest step and those with a tag are kept.
        item: How steps of one state are saved and loaded.
        items: Makes a step of several named states, each saved and loaded in its own way; the state
            dict then has one for each name.
        step_name: How folders are named.
        also_read: Further names of step folders that are read: `("{step}", "global_step{step}")`.
        order: "increasing" refuses a step that is not newer than all others; "any" takes it, and
            replaces one that is there.
        read_only: Refuse to save and delete.
        takeover: Take the writer lease away from a process that lives.
        sync_every: Ranks agree about clocks and preemption at steps that this divides.
        lease_s: Time without a renewal after which a writer or reader elsewhere counts as dead, in
            seconds.
        on_failure: Called with step and error, in a thread, when an asynchronous save fails.
        no_dist: This process is alone, whatever the process group.

    Raises:
        InvalidRequestError: An argument has a value that it can't have, or two contradict each
            other.

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

    Source: `torch_xla/experimental/distributed_checkpoint/manager.py`.
    """

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
        lease_s: float = LEASE_S,
        on_failure: Callable[[int, CheckpointError], object] | None = None,
        no_dist: bool = False,
    ) -> None:
        self._settings = Settings(
            save_interval=save_interval,
            max_to_keep=max_to_keep,
            max_pending_async=max_pending_async,
            num_of_threads=num_of_threads,
            chkpt_on_preemption=chkpt_on_preemption,
            save_policy=save_policy,
            retention=retention,
            item=item,
            items=items,
            step_name=step_name,
            also_read=also_read,
            order=order,
            read_only=read_only,
            takeover=takeover,
            sync_every=sync_every,
            lease_s=lease_s,
            on_failure=on_failure,
        )
        self._root = Root(target_of(path, None))
        self._writer = Writer(self._root, self._settings)
        self._preemption = Preemption()
        self._actions = CollectiveActions(
            self._root, self._settings, self._writer, self._preemption, process_group, no_dist
        )
        self._closed = False
        self._process = OwnProcess()
        self._wait: Callable[[float], object] = threading.Event().wait
        if self._settings.listens:
            self._preemption.listen()

    def __repr__(self) -> str:
        return f"CheckpointManager({self._root.url!r})"

    # Looking: by any process at any time

    @property
    def path(self) -> str:
        """Absolute path or URL of the root."""
        return self._root.url

    def all_steps(self) -> list[int]:
        """Returns the committed steps, ascending, by a new look at the storage.

        Raises:
            StorageError: It can't be read.

        Complexity:
            One listing, and one small read for each step that is new since the last look.
        """
        return list(self._writer.look().steps)

    def latest_step(self) -> int | None:
        """Returns the newest committed step; None when there is none."""
        return max(self.all_steps(), default=None)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """Returns the step with the best value of a metric; None where no step has it.

        Args:
            metric: Name; that of the retention's `BestN` if None.
            mode: "min" or "max"; that of `BestN`, or else "min", if None.

        Raises:
            InvalidRequestError: It is not clear which metric is meant.
        """
        return best_step_of(self._writer.look(), self._settings.kept, metric, mode)

    def step_info(self, step: int) -> SavedStep:
        """Returns what is known of a step: metrics, metadata, tags, items, and where it is.

        Raises:
            CheckpointNotFoundError: It is not committed.
        """
        catalogue = self._writer.look()
        (found,) = candidates(step, catalogue, self._settings.kept, self.path)
        return saved_step(found, self.path, catalogue.tags.get(step, frozenset()))

    @contextmanager
    def reading(self, step: int) -> Iterator[str]:
        """Keeps a step from being deleted while it is entered, by whichever process writes.

        Warns where a deletion that was announced before may still happen: on a storage that can't
        create a file only if there is none.

        Args:
            step: Which step.

        Yields:
            Path or URL of its folder.

        Raises:
            CheckpointNotFoundError: It is not committed, or is being deleted.
            StorageError: The lease could not be written.
        """
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
    ) -> Iterator[int]:
        """Waits for new steps, and gives the newest each time; for evaluation beside the training.

        While the body of the loop runs, the step is not deleted.

        Args:
            newer_than: Only later steps than this; any if None.
            timeout_s: The iterator ends when no new step comes for so long; never if None.
            poll_s: How often to look, in seconds.

        Yields:
            A step that was committed.

        Raises:
            StorageError: The storage can't be read.
        """
        last = -1 if newer_than is None else newer_than
        since_s = time.monotonic()
        while not self._closed:
            newest = self.latest_step()
            if newest is not None and newest > last:
                try:
                    with self.reading(newest):
                        last = newest
                        yield newest
                except CheckpointNotFoundError:
                    continue  # deleted since it was listed: there is a newer one
                since_s = time.monotonic()
                continue
            if timeout_s is not None and time.monotonic() - since_s >= timeout_s:
                return
            self._wait(poll_s if timeout_s is None else min(poll_s, timeout_s))

    # Saving: by all ranks

    def should_save(self, step: int) -> bool:
        """Tells whether a step is due, on all ranks the same.

        Args:
            step: From 0.

        Raises:
            InvalidRequestError: It is no step.
            CheckpointError: The ranks could not agree; not where the policy looks only at the step.
        """
        self._check_open()
        return self._actions.should_save(step)

    def save_facts(self) -> SaveFacts:
        """Returns what a save policy may look at now, as far as this process knows: rank 0 does.

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
    ) -> bool:
        """Saves a step if it is due, and returns once it is committed.

        Args:
            step: From 0, newer than all that are committed or under way.
            state_dict: As for `ray_dcp.save`; with `items`, a state dict for each of them.
            force: Save whether it is due or not.
            metrics: Numbers by name; rank 0's count, as for the next two.
            metadata: Of what JSON can hold; `step_info` returns it.
            tags: While a step has one it is kept; those that it has already stay.
            replace: Take the place of a step that is committed, atomically.

        Returns:
            Whether the step was due.

        Raises:
            InvalidRequestError: The step is committed already, or not newer than the newest; a
                metric by which steps are kept is missing or NaN; metadata or tags can't be taken;
                the manager is closed or only reads.
            CheckpointExistsError: Another process writes to this root.
            CheckpointError: As `ray_dcp.save`; earlier steps are as they were.
        """
        self._check_writable()
        told = {"metrics": metrics, "metadata": metadata, "tags": tags, "replace": replace}
        return self._actions.save(step, state_dict, force, told)

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

        Waits while `max_pending_async` saves are under way. The step is in `all_steps` when it is
        committed. A save that fails is reported by `join`, by `on_failure`, and in the log.

        Args:
            step: As for `save`, like the others.
            state_dict: May change when this returns.
            force: Save whether it is due or not.
            metrics: See `save`.
            metadata: See `save`.
            tags: See `save`.
            replace: See `save`.

        Returns:
            Whether the step was due.

        Raises:
            CheckpointError: As `save`, as far as it shows before the bytes are copied.
        """
        self._check_writable()
        _close_at_exit(self)
        told = {"metrics": metrics, "metadata": metadata, "tags": tags, "replace": replace}
        return self._actions.save_async(step, state_dict, force, told)

    def join(self) -> None:
        """Waits for all saves that are under way, and for deletions.

        Raises:
            CheckpointError: An asynchronous save failed since `join` was last called; the first
                one, with notes on the others. The step is not committed.
        """
        self._check_process()
        self._actions.finisher.wait()
        if not self._writer.remover.drain(DRAIN_S):
            logger.warning("Deletions in %s still go on after %g s", self.path, DRAIN_S)
        failed = self._actions.finisher.failures()
        if failed:
            error = failed[0][1]
            for step, other in failed[1:]:
                error.__notes__ = [
                    *getattr(error, "__notes__", ()),
                    f"Step {step} failed as well: {other}",
                ]
            raise error

    def reached_preemption(self, step: int) -> bool:
        """Returns whether some rank was notified that its machine is taken away.

        Args:
            step: At which all ranks ask.

        Raises:
            InvalidRequestError: `chkpt_on_preemption` is False.
            CheckpointError: The ranks could not agree.
        """
        self._check_open()
        if not self._settings.listens:
            raise InvalidRequestError(
                "Preemption detection not enabled. Make the manager with chkpt_on_preemption=True",
                key="chkpt_on_preemption",
            )
        return self._actions.is_preempted(step)

    def notice_preemption(self) -> None:
        """Tells that this rank's machine is to be taken away: the next step is due on all ranks."""
        self._preemption.tell()

    # Restoring and changing: by all ranks

    def restore(
        self, step: Wanted, state_dict: Any, *, options: LoadOptions | None = None
    ) -> RestoreReport:
        """Loads a step into a state dict, in place.

        Args:
            step: Its number; "latest", the newest committed one; "best", by the metric of the
                retention's `BestN`; "auto", the newest that can be loaded: a damaged one is passed
                over with a warning, on all ranks alike, and may then be saved again.
            state_dict: As for `ray_dcp.load`; with `items`, a state dict for those that are wanted.
            options: How; those of the item if None.

        Returns:
            Which step, and what each load did.

        Raises:
            CheckpointNotFoundError: There is no such step; the message lists those there are.
            DamagedCheckpointError: It is damaged; with "auto" all are.
            InvalidRequestError: The step consists of other items than the manager has.
            CheckpointError: As `ray_dcp.load` does.
        """
        self._check_open()
        return restore(self._actions, step, state_dict, options)

    def delete(self, step: int) -> None:
        """Deletes a step, as rank 0 decides, and returns when that is done.

        Raises:
            CheckpointNotFoundError: It is not committed.
            InvalidRequestError: It was not written by ray_dcp, or is being saved.
            CheckpointError: Another process writes to this root, or reads the step.
        """
        self._check_writable()
        self._actions.agree(f"deleting step {step}", lambda _: self._writer.delete(step))

    def rewind(self, step: int) -> list[int]:
        """Deletes all steps after one, so that training can go on from there.

        Args:
            step: The newest that stays; it need not be committed itself.

        Returns:
            What was deleted, newest first.

        Raises:
            CheckpointError: As `delete`; steps that were not yet deleted stay.
        """
        self._check_writable()
        gone: list[int] = self._actions.agree(
            f"rewinding to step {step}", lambda _: self._writer.rewind(step)
        )
        return list(gone)

    def tag(self, step: int, tag: str, *, remove: bool = False) -> None:
        """Gives a tag to a step, which keeps it, or takes it away.

        Warns as `reading` does.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            InvalidRequestError: The tag can't be part of a file name.
            CheckpointExistsError: Another process writes to this root.
        """
        self._check_writable()
        self._actions.agree(
            f"the tag {tag!r} of step {step}",
            lambda _: self._writer.tag(step, tag, remove=remove),
        )

    # The end

    def close(self) -> None:
        """Waits for saves and deletions, and lets others write to the root. May be repeated.

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
            self._closed = True
            _open.discard(self)
            self._preemption.stop()
            try:
                in_time(CLOSE_S, f"closing {self!r}", self._writer.close)
            except StorageError as error:
                logger.warning("%s", error)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            # Why only logged: what ended the block must not be hidden by it.
            logger.error("%s, when %r was closed: %s", type(failed).__name__, self, failed)

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise InvalidRequestError(f"{self!r} is closed; make another one")

    def _check_process(self) -> None:
        # Why: a child that was forked would write, and delete, with the lease of its parent.
        self._process.check(
            repr(self), "Make a manager of its own there; one that looks or restores is read_only"
        )

    def _check_writable(self) -> None:
        self._check_open()
        if self._settings.read_only:
            raise InvalidRequestError(
                f"this manager of {self.path} is read_only; make one without it to save, delete or "
                f"tag",
                key="read_only",
            )

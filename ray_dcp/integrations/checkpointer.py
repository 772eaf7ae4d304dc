"""`Checkpointer`: saves and restores the state of a Ray Train run, on every rank of `train_fn`.

`checkpointer` creates the one of a worker, and checks the arguments.

It stands on the parts of a `CheckpointManager`: `CollectiveActions` save and restore, `Writer`
holds the lease and deletes, `Finisher` returns the outcomes of saves in the same calls on all
ranks. Added here is what Ray Train needs: reports, requested saves, and folder names that are used
once.

Reports to Ray Train are throttled. Its controller registers one report per poll, and `report`
blocks while an earlier one is not yet registered. If saves are faster than that, only the newest
ones are reported. All ranks make the same decision, as it depends only on values that are equal on
all of them: the steps, their outcomes, and the times at which rank 0 began them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ray_dcp import events
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import bounds
from ray_dcp.core.processes import Stop
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    InvalidRequestError,
    RankDisagreementError,
    SaveCancelledError,
    StorageError,
)
from ray_dcp.integrations import ray_train
from ray_dcp.integrations.ray_train import (
    DueReport,
    JoinedGroup,
    RunFacts,
    join,
    needed_steps,
    parse,
)
from ray_dcp.integrations.replica_groups import join_replicas
from ray_dcp.integrations.save_requests import REQUESTS, RequestedSave, save_fits
from ray_dcp.job.part import check_no_part
from ray_dcp.job.value import read_value, save_values, value_ref
from ray_dcp.manager.background import Ended, Finisher
from ray_dcp.manager.collective_actions import CollectiveActions, RestoreReport
from ray_dcp.manager.preemption import Preemption
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.manager.retention import RetentionPolicy, Trust, TrustRule
from ray_dcp.manager.save_policies import EverySteps, SaveFacts
from ray_dcp.manager.settings import Item, Settings, check_item_name, trust_of
from ray_dcp.manager.step_target import StepTarget
from ray_dcp.options import LoadOptions, SaveOptions, check_whole, plain_integer
from ray_dcp.saving import warm_staging
from ray_dcp.stage.memory_tier import NodeMemory
from ray_dcp.store.opening import place_below
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.state import check_mapping, stateful_to_state_dict
from ray_dcp.view.progress import ShowProgress

logger = logging.getLogger(__name__)


def _refuse_fresh_start(path: str | None, url: str, error: CheckpointNotFoundError) -> None:
    """Raises if Ray Train has registered a checkpoint of a run in which none was found.

    Args:
        path: Path of the checkpoint that Ray Train has registered, or None.
        url: URL of the folder that was searched.
        error: Error of the search.

    Raises:
        CheckpointNotFoundError: Ray Train has registered a checkpoint.
    """
    if path is None:
        return
    if parse(path) is None:
        way_out = (
            f"It was not saved by a ray_dcp.train.checkpointer: load it by ray_dcp.load(state, "
            f"checkpoint_id={path!r}) or as it was saved, and do not call restore(); or give the "
            f"run another RunConfig(name=...)"
        )
    else:
        way_out = (
            "Its files were deleted, moved or are out of reach here. Bring them back, or give the "
            "run another RunConfig(name=...) to begin anew on purpose"
        )
    raise CheckpointNotFoundError(
        f"Expected the checkpoint that Ray Train has registered for this run, {path}, but in {url} "
        f"none is committed. {way_out}",
        checkpoint_id=path,
    ) from error


_OTHER_RUN = (
    "the steps of a Ray Train run are its own: give the part to ray_dcp.async_save(state, "
    "checkpoint_id=part), or to load, in train_fn, on all workers"
)


def _check_parts(parts: object) -> None:
    """Checks the names of the parts of a step, and that none is the token of another step's part.

    Raises:
        InvalidRequestError: A name or a value is invalid.
    """
    if parts is None:
        return
    if not isinstance(parts, Mapping):
        raise InvalidRequestError(
            f"parts must be a dict of names to references or values, as {{'buffer': ref}}, but is "
            f"a {type(parts).__name__}",
            key="parts",
        )
    for name, value in parts.items():
        check_item_name(name)
        check_no_part(value, f"a reference or a value as the part {name!r}", _OTHER_RUN)


_SLACK = 1.5
"""Minimum time between reports, in poll intervals of the controller. *Why above 1*: the duration of
a poll adds to the interval."""

OnError = Literal["warn", "raise"]


@dataclass
class _Begun:
    """A save whose outcome has not been processed yet."""

    metrics: Mapping[str, Any]
    """As they are reported to Ray Train."""
    validation: Any = False
    """Argument of `ray.train.report`."""
    request: RequestedSave | None = None
    """The request that caused the save, if it is answered when the save ends."""
    begun_s: float = field(default_factory=time.monotonic)
    stage_s: float | None = None
    """Time that training waited, in seconds; None until the call returns."""
    created_s: float = 0.0
    """See `Ended`."""


class Checkpointer:
    """Saves and restores the checkpoints of a Ray Train run. Created by `checkpointer`.

    It is a context manager. All ranks call its methods in the same order.

    Args:
        facts: Properties of the run.
        group: This rank's membership in the worker group.
        folder: Name of the folder in the run's storage.
        on_error: What to do if a save fails.
        check_preemption_every: Number of calls per check for preempted nodes; 0 never checks.

    Attributes:
        restored: Report of the last `restore` on this rank; None if nothing was restored.
        restored_parts: Places of the parts of the restored step, by name; see `ref` and `value`.
    """

    def __init__(
        self,
        facts: RunFacts,
        group: JoinedGroup,
        folder: str = "checkpoints",
        on_error: OnError = "warn",
        check_preemption_every: int = 0,
    ) -> None:
        self.restored: LoadReport | None = None
        self.restored_parts: Mapping[str, Target] = {}
        self._lease: ReaderLease | None = None
        """Protects a restored step with parts, which are read later. On rank 0."""
        self._facts = facts
        self._group = group
        self._folder = folder
        self._on_error = on_error
        self._check_every = check_preemption_every
        self._num_checks = 0
        self._notice: Any = None
        self._root = group.writer.root
        self._settings = group.settings
        self._actions = CollectiveActions(
            self._root,
            group.settings,
            group.writer,
            Preemption(),
            lambda: group.session,
            Finisher(self._record_end),
        )
        self._begun: dict[int, _Begun] = {}
        self._unreported: dict[int, _Begun] = {}
        """Committed saves, oldest first."""
        self._reported_s = -math.inf
        """Time of the save that was reported last."""
        self._was_warned = False
        self._last_step = -1
        self._decided: tuple[int, bool, RequestedSave | None] = (-1, False, None)
        self._closed = False
        self._owner = REQUESTS.open()

    def __repr__(self) -> str:
        return f"Checkpointer({self.url!r}, rank={self._facts.rank})"

    @property
    def url(self) -> str:
        """Path or URL of the folder with the steps, as accepted by `ray_dcp.load_newest`."""
        return self._root.url

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        progress: ShowProgress = False,
        trust: TrustRule | None = None,
    ) -> int | None:
        """Loads the newest committed step of the run into a state, in place; returns its number.

        The step is chosen from the run's storage, whatever Ray Train has registered. Bytes that
        nodes still hold in their memory tier are read from there. The step may have been saved by
        any number of ranks. If the newest step can't be loaded, the next older one is loaded, with
        a warning that names each skipped step.

        A later call waits for the saves in progress and returns to the newest step; the next step
        to save must be newer than that one.

        Parts that were saved with the step are verified before it is chosen, and then given by
        `ref` and `value`. The step is not deleted before the checkpointer is closed.

        Args:
            state: As for `save`. Modules and optimizers are loaded in place; other values that are
                not `Stateful` are replaced.
            progress: As for `ray_dcp.load`.
            trust: Restore the newest step that is trusted: the name of a metric or a tag, or a
                function of `StepFacts`, as for `CheckpointManager`. That of rank 0 counts.

        Returns:
            The step; None if nothing was ever committed in this run.

        Raises:
            CheckpointNotFoundError: Ray Train has registered a checkpoint of this run, but none
                exists: its files were removed, or another program saved it. Or there are steps,
                but none is trusted.
            DamagedCheckpointError: All steps are damaged.
            CheckpointError: As for `ray_dcp.load_newest`.
        """
        self._check_open()
        check_no_part(state, "the state of this rank", _OTHER_RUN)
        trusted = None if trust is None else Trust(trust)
        self._process(self._actions.finisher.ended())
        self._group.leave_others()
        registered = ray_train.registered()
        memory = NodeMemory(self._group.session.namespace)
        memory.await_staged(self.url, self._group.staged_s, Stop())
        try:
            report = self._actions.restore("auto", state, None, progress, trusted)
        except CheckpointNotFoundError as error:
            if error.key == "trust":
                raise  # Why not anew: what was trained since would be lost without a word.
            _refuse_fresh_start(registered, self.url, error)
            logger.info("Nothing is committed in %s: the run begins", self.url)
            self._warm(state)
            return None
        self.restored = report.report
        self._hold_parts(report)
        self._warm(state)
        self._register(report.checkpoint_id, registered, trusted)
        self._last_step = report.step
        self._decided = (-1, False, None)
        REQUESTS.went_back(report.step, self._owner)
        return report.step

    def ref(self, name: str, *, node_id: str = "") -> Any:
        """Returns an `ObjectRef` of a part of the restored step, which a task reads.

        Args:
            name: Name of the part.
            node_id: Hex id of the node on which it is read; "" for any.

        Raises:
            InvalidRequestError: The restored step has no such part.
        """
        return value_ref(self._part(name), node_id)

    def value(self, name: str) -> Any:
        """Returns the value of a part of the restored step, read by this process.

        Raises:
            InvalidRequestError: The restored step has no such part.
            CheckpointError: As `ray_dcp.read_state_dict`.
        """
        return read_value(self._part(name))

    def should_save(self, step: int) -> bool:
        """Returns whether `save` would save this step, the same on all ranks.

        If the state is expensive to build, call this first, and skip `save` if it returns False.

        Args:
            step: Argument of the following `save`.

        Raises:
            InvalidRequestError: `step` is invalid or not newer than the last saved step, or the
                checkpointer is closed.
        """
        step = plain_integer(step)
        if self._is_again(step):
            return False
        self._check_new(step)
        self._group.steps()
        if self._decided[0] == step:
            return self._decided[1]
        request = REQUESTS.at(step, self._owner) or self._preemption_request(step)
        policy = self._settings.policy
        due = request is not None or (policy is not None and policy.due(SaveFacts(step=step)))
        self._decided = (step, due, request)
        return due

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        validation: Any = False,
        parts: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves a state in the background if its step is due. Call it after every step.

        Returns once the bytes are copied, and the parts are durable. After the commit, a later call
        reports the checkpoint to Ray Train on all ranks, with `NO_UPLOAD`, the metrics and the
        step.

        A step is due if it is a multiple of `save_interval`, or if the run is about to be resized
        or a node is preempted (`SaveBeforeResize`).

        Args:
            step: The step; must be newer than the last saved or restored step.
            state: Values by name. Modules and optimizers may be passed directly, and can then be
                loaded by any number of ranks. Other `Stateful` values are saved by their
                `state_dict()`.
            metrics: Numbers and strings by name, for Ray Train. Those of rank 0 are used.
            force: Save even if the step is not due. Must be the same on all ranks.
            validation: As for `ray.train.report`: True or a `ValidationTaskConfig` makes Ray Train
                run the function of the trainer's `ValidationConfig` on this checkpoint. The step is
                then always reported, and not deleted before the validation has ended; what that
                returns are metrics of the step. Must be the same on all ranks.
            parts: What is committed with the state, by name: an `ObjectRef`, such as that of an
                actor's answer, or a value. A task on a node that has the object writes it, as a
                checkpoint in the step's folder; if one fails, the step is not saved. Those of rank
                0 are used. Ask `should_save` first where they are expensive to make.

        Returns:
            Whether the step was due or forced.

        Raises:
            InvalidRequestError: The step or the metrics are invalid, or the checkpointer is closed.
            RankDisagreementError: The ranks do not save the same steps.
            CheckpointError: With `on_error="raise"`: this save or an earlier one failed.
        """
        check_no_part(step, "the number of a step", _OTHER_RUN)
        step = plain_integer(step)
        if self._is_again(step):
            return False
        self._check_new(step)
        told = ray_train.check_metrics(metrics)
        check_mapping(state)
        _check_parts(parts)
        due = self.should_save(step)
        request = self._decided[2]
        if not due and not force:
            return False
        self._warn_of_ignored_steps()
        self._last_step = step
        self._group.has_steps = True
        self._decided = (-1, False, None)
        lingers = request is not None and request.linger_s > 0
        begun = _Begun({"step": step, **told}, validation, None if lingers else request)
        self._begun[step] = begun
        committed = False
        try:
            refused = self._start_save(step, state, told, parts, waits=request is not None)
            begun.stage_s = time.monotonic() - begun.begun_s
            max_pending = self._settings.options.max_pending
            ended = self._actions.finisher.ended(0 if lingers else max_pending) + refused
            committed = any(one.step == step and one.error is None for one in ended)
            self._process(ended)
        finally:
            if lingers and request is not None:
                # The controller waits, and registers no reports. The next worker group reports the
                # checkpoint that it restores.
                REQUESTS.ended(request, committed)
        self._report_to_train()
        return True

    def close(self) -> None:
        """Waits for the saves in progress, and reports the newest one to Ray Train.

        Every rank must call it. The end of a `with` block calls it, unless there is an error. Does
        nothing if it was called before.

        Raises:
            CheckpointError: With `on_error="raise"`: a save failed.
        """
        if self._closed:
            return
        try:
            self._process(self._actions.finisher.ended())
            if self._group.gather(None):
                self._report_to_train(final=True)
            self._group.writer.remover.drain(bounds.DELETION_END_S)
        finally:
            self._leave(bounds.DELETION_END_S)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # Why not wait: other ranks may be dead, or may be waiting for this one. Staged saves
            # are committed without this process.
            self._leave(0.0)

    # Saves and their outcomes

    def _start_save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any],
        parts: Mapping[str, Any] | None,
        *,
        waits: bool,
    ) -> list[Ended]:
        """Starts a save; returns its outcome if it failed to start."""
        parts = parts or {}
        details = {"metrics": ray_train.numbers_in(metrics), "parts": sorted(parts)}
        options = {"when_full": "wait"} if waits else {}

        def save_parts(place: StepTarget) -> None:
            folder = self._root.below(place.name)
            save_values(
                parts,
                step,
                lambda name: place_below(folder, place.folder_of(name)),
                self._settings.options,
            )

        save = save_parts if parts else None
        try:
            if not self._group.gather(step):
                request = self._begun.pop(step).request
                if request is not None:
                    REQUESTS.ended(request, False)
                return []
            self._actions.writer = self._group.writer
            if not self._actions.save_async(step, state, True, details, save, **options):
                self._begun.pop(step)  # Skipped by `when_full`.
            return []
        except CheckpointError as error:
            ended = Ended(step, error)
            self._record_end(ended)
            if isinstance(error, InvalidRequestError):
                raise  # The call is wrong, whatever `on_error` is.
            return [ended]

    def _record_end(self, ended: Ended) -> None:
        """Records how long a save took, and answers its request. Called in any thread."""
        begun = self._begun[ended.step]
        took_s = time.monotonic() - begun.begun_s
        if ended.error is None:
            REQUESTS.took(took_s if begun.stage_s is None else begun.stage_s, took_s)
        if begun.request is not None:
            REQUESTS.ended(begun.request, ended.error is None)

    def _process(self, ended: list[Ended]) -> None:
        """Processes the outcomes of saves, in the order of their calls."""
        failed: CheckpointError | None = None
        for one in ended:
            begun = self._begun.pop(one.step)
            if one.error is None:
                begun.created_s = one.created_s or 0.0
                self._unreported[one.step] = begun
                continue
            if isinstance(one.error, SaveCancelledError):
                logger.info("Step %d is not saved: %s", one.step, one.error)
                continue  # Cancelled, which is not a failure.
            self._group.failed()
            if isinstance(one.error, CommitUnknownError) and not self._facts.replicas_of:
                raise one.error  # Ranks that know the outcome would wait for this one in a report.
            self._warn(f"Step {one.step} is not saved: {type(one.error).__name__}: {one.error}")
            causes = [one.error, *(cause for cause, _ in one.error.failures.values())]
            # Careful: ranks that do not make the same calls would wait for each other.
            is_misuse = any(isinstance(cause, RankDisagreementError) for cause in causes)
            if self._on_error == "raise" or is_misuse:
                failed = failed or one.error
        if failed is not None:
            raise failed

    def _report_to_train(self, *, final: bool = False) -> None:
        """Reports committed saves to Ray Train: the newest if it is due, and those to validate.

        Collective.
        """
        self._group.tidy(self._begun)
        reports = self._group.agreed_reports(self._due(final), self._actions.agree)
        for step, name, metrics, paused_s in reports:
            begun = self._unreported.pop(step, None)
            self._report(step, name, metrics, False if begun is None else begun.validation)
            if paused_s is not None:
                self._reported_s = paused_s
                self._unreported = {
                    one: left for one, left in self._unreported.items() if one > step
                }

    def _due(self, final: bool) -> list[DueReport]:
        """Returns which committed saves this rank would report now."""
        newest = max(self._unreported, default=None)
        if newest is None:
            return []
        created_s = self._unreported[newest].created_s
        # Why `0 <=`: a clock that was set back must not suppress reports.
        too_soon = 0 <= created_s - self._reported_s < self._facts.poll_s * _SLACK
        is_due = final or not too_soon
        return [
            (
                step,
                self._settings.names.name_of(step),
                begun.metrics,
                created_s if is_due and step == newest else None,
            )
            for step, begun in self._unreported.items()
            if begun.validation or (is_due and step == newest)
        ]

    def _report(
        self, step: int, name: str, metrics: Mapping[str, Any], validation: Any = False
    ) -> None:
        checkpoint = self._facts.checkpoint(f"{self._folder}/{name}")
        self._group.report(checkpoint, metrics, validation)
        if self._group.needed is not None:
            known = ray_train.ReportedStep(ray_train.numbers_in(metrics), bool(validation))
            self._group.needed.add({step: known})
        if self._group.session.rank == 0:
            self._group.writer.remover.wake()

    def _hold_parts(self, report: RestoreReport) -> None:
        """Keeps the places of a restored step's parts, and on rank 0 a lease on the step."""
        self._let_go()
        folder = replace(self._root.target, url=report.checkpoint_id)
        self.restored_parts = {n: place_below(folder, one) for n, one in report.items.items()}
        if self.restored_parts and self._group.session.rank == 0:
            lease = ReaderLease(self._root, report.step, lease_s=self._settings.lease_s)
            try:
                lease.__enter__()
                self._lease = lease
            except StorageError as error:
                # Why not raised: what can be read is given.
                logger.info("Step %d is read without a lease: %s", report.step, error)

    def _let_go(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.__exit__()

    def _part(self, name: str) -> Target:
        if name not in self.restored_parts:
            there = ", ".join(self.restored_parts) or "no parts"
            raise InvalidRequestError(
                f"the step that was restored has {there}, but was asked for {name!r}; give it to "
                f"save(step, state, parts={{{name!r}: ref}})",
                key=str(name),
            )
        return self.restored_parts[name]

    def _register(
        self, checkpoint_id: str, registered: str | None, trust: Trust | None = None
    ) -> None:
        """Reports the restored checkpoint unless Ray Train has registered it or a newer one."""
        folder, known = parse(checkpoint_id), parse(registered or "")
        if folder is None or folder.name == self._settings.names.name_of(folder.step):
            return  # Saved by this group, and reported like all its saves.
        if self._facts.replicas_of and (known is None or known.step < folder.step):
            return  # A report needs all workers; the next save that all make is reported.
        if known is None or known < folder:
            found = self._group.writer.catalogue.steps.get(folder.step)
            metrics = found.info.metrics if found is not None and found.info is not None else {}
            self._report(folder.step, folder.name, {**metrics, "step": folder.step})
        elif known.step > folder.step and trust is not None:
            logger.info("Restored step %d, the newest that is trusted", folder.step)
        elif known.step > folder.step:
            self._warn(
                f"Restored step {folder.step}, although Ray Train has registered the newer step "
                f"{known.step} ({known.name}), which is no longer there or damaged"
            )

    def _preemption_request(self, step: int) -> RequestedSave | None:
        """Returns a request for a save if Ray Train notified of a preempted node. Collective."""
        self._num_checks += 1
        if not self._check_every or self._num_checks % self._check_every:
            return None
        from ray.train import get_preemption_info

        info = get_preemption_info()
        if info is None or info == self._notice:
            return None
        self._notice = info
        left_s = None if info.deadline_ms is None else info.deadline_ms / 1000 - time.time()
        # Why rank 0 decides: clocks and measured times differ between ranks. Why not by Ray Train:
        # its broadcast would wait for a rank whose node has gone by now.
        try:
            fits = self._actions.agree(
                "whether a save fits", lambda _: save_fits(left_s, REQUESTS.seconds()[0])
            )
        except CheckpointError as error:
            self._warn(f"No save before a node is taken away: {error}")
            return None
        return RequestedSave(f"preemption-{step}", "preemption", step - 1) if fits else None

    def _warm(self, state: Mapping[str, Any]) -> None:
        """Prepares staging memory and the node agent, so that the first save is not slower."""
        try:
            warm_staging(self._group.session, stateful_to_state_dict(state), self._settings.options)
        except CheckpointError as error:
            # Why not raised: the save raises the same error, subject to `on_error`.
            logger.warning("Saves are not made ready for: %s", error)

    def _warn_of_ignored_steps(self) -> None:
        """Warns, once, if the run has steps but saves without having restored one."""
        if self._group.has_steps and self.restored is None and not self._was_warned:
            self._warn(
                f"{self.url} has steps of earlier workers of this run, but restore() was not "
                f"called or found none committed: training began anew. Call restore(state) before "
                f"the first save, or give the run another name"
            )
        self._was_warned = True

    def _warn(self, text: str) -> None:
        # Why each replica: rank 0 may be the one that died.
        if self._facts.rank == 0 or self._facts.replicas_of:
            logger.warning(text)
            # Why both: a run shows the log, and a test or a notebook shows the Python warning.
            events.warn(text, stacklevel=4)

    def _leave(self, timeout_s: float) -> None:
        self._closed = True
        self._let_go()
        REQUESTS.close(self._owner)
        self._group.leave(timeout_s)

    def _is_again(self, step: int) -> bool:
        """Returns whether a replica has not moved on: it makes a step again that lost another."""
        self._check_open()
        return bool(self._facts.replicas_of) and step == self._last_step

    def _check_new(self, step: int) -> None:
        self._check_open()
        self._settings.names.name_of(step)  # It raises for an invalid step.
        if step <= self._last_step:
            raise InvalidRequestError(
                f"step {step} is not newer than step {self._last_step}, which was saved or "
                f"restored last; begin with restore(state) + 1, and count on",
                key="step",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError(
                f"the checkpointer of {self.url} is closed: save and restore before close(), or "
                f"before its with block ends",
                rank=self._facts.rank,
            )


def checkpointer(
    *,
    folder: str = "checkpoints",
    max_to_keep: int = 0,
    save_interval: int = 1,
    on_error: OnError = "warn",
    options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
    storage_options: Mapping[str, object] | None = None,
    check_preemption_every: int = 0,
    retention: RetentionPolicy | None = None,
    trust: TrustRule | None = None,
    hold_s: float | None = None,
) -> Checkpointer:
    """Returns the checkpointer of the Ray Train run that this worker belongs to.

    Every rank calls it once, inside `train_fn`, with the same arguments, and then calls the methods
    of the checkpointer in the same order. Checkpoints are written to `folder` in the run's own
    storage (`RunConfig`), directly from the workers' nodes.

    Args:
        folder: Name of a folder in the run's storage.
        max_to_keep: Number of newest committed steps that ray_dcp keeps; 0 keeps all. Leave it at 0
            if Ray Train deletes checkpoints by `CheckpointConfig(num_to_keep=...)`.
        save_interval: `save` saves the steps that are multiples of this.
        on_error: What to do if a save fails: `"warn"` logs a warning and continues; `"raise"`
            raises on every rank, which ends the worker group. Calls that differ between ranks
            always raise.
        options: Options of saves. `keep_in_memory` makes restarts fast.
        load_options: Options of loads.
        storage_options: Credentials and options of an `s3://`, `gs://` or `az://` storage path;
            by default those of its URL and of the environment.
        check_preemption_every: Number of `save` calls per check of
            `ray.train.get_preemption_info()`, which is a barrier of all ranks. With 0, only
            `SaveBeforeResize` in `RunConfig(callbacks=[...])` checks, which costs nothing while no
            node is preempted.

        retention: Which committed steps ray_dcp keeps, as for `ray_dcp.CheckpointManager`, instead
            of `max_to_keep`: `LatestN(2) | BestN(1, "val_loss")`. Metrics are the numbers given to
            `save` and those that Ray Train's validation of the step returned. Steps without a
            metric are not among its best.
        trust: Which steps are trusted, as for `ray_dcp.CheckpointManager`: retention always keeps
            the newest of them. Not with `CheckpointConfig(num_to_keep=...)`.
        hold_s: Retention keeps a step without a verdict by `trust` for so long, in seconds.

    Raises:
        InvalidRequestError: This is not a Ray Train worker, or an argument is invalid.
        CheckpointExistsError: Another live run of this name writes here.
        CheckpointError: The storage can't be listed, or the ranks can't connect.

    Examples:
        ```py
        def train_fn(config):
            model = ray.train.torch.prepare_model(Model())
            optimizer = torch.optim.AdamW(model.parameters())
            state = {"model": model, "optimizer": optimizer}
            with ray_dcp.train.checkpointer(save_interval=100, max_to_keep=3) as ckpt:
                done = ckpt.restore(state)
                for step in range(0 if done is None else done + 1, 10_000):
                    loss = train_one_step(model, optimizer, step)
                    ckpt.save(step, state, metrics={"loss": loss})
        ```
    """
    save_interval = check_whole(save_interval, "save_interval", 1)
    check_preemption_every = check_whole(check_preemption_every, "check_preemption_every")
    if on_error not in get_args(OnError):
        raise InvalidRequestError(
            f"on_error must be 'warn' or 'raise', but is {on_error!r}", key="on_error"
        )
    item = Item(
        save_options=SaveOptions() if options is None else options,
        load_options=LoadOptions() if load_options is None else load_options,
    )
    # Why any order: a run that begins anew beside older steps is only warned.
    settings = Settings(
        policy=EverySteps(save_interval),
        items={"": item},
        order="any",
        trust=trust_of(trust, hold_s),
        parts_beside=True,
    )
    facts = ray_train.run_facts()
    if trust is not None and facts.num_to_keep is not None:
        raise InvalidRequestError(
            f"trust= keeps the newest trusted step, but by "
            f"CheckpointConfig(num_to_keep={facts.num_to_keep}) Ray Train deletes it without "
            f"asking. Leave that out, and give max_to_keep= or retention= here",
            key="trust",
        )
    if facts.replicas_of and check_preemption_every:
        raise InvalidRequestError(
            f"check_preemption_every={check_preemption_every} asks Ray Train for preempted nodes, "
            f"which is a barrier of all workers; with replica groups (TorchftConfig) there is no "
            f"such notice. Leave it at 0: the replicas that are left train on",
            key="check_preemption_every",
        )
    needed = needed_steps(max_to_keep, retention, facts.num_to_keep)
    joined = join_replicas if facts.replicas_of else join
    group = joined(facts, folder, settings, needed, storage_options)
    return Checkpointer(facts, group, folder, on_error, check_preemption_every)

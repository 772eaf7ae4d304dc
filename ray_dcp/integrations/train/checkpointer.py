"""`Checkpointer`: saves and restores the state of a Ray Train run, on every rank of `train_fn`.

`checkpointer` creates the one of a worker, and checks the arguments.

All ranks make the same saves in the same order, and each save has the same outcome on all of them.
Each rank therefore determines without communication which saves have ended (`UnderWay`), in the
same call as the others: a new save has waited until at most `max_pending` others were in progress.

`Pace` throttles reports to Ray Train. Its controller registers one report per poll, and `report`
blocks while an earlier one is not yet registered. If saves are faster than that, only the newest
ones are reported. All ranks make the same decision, as it depends only on values that are equal on
all of them: the steps, their outcomes, and the time of each plan in its manifest.

`Warned` logs warnings for the operator of a run: fallbacks, failed saves, ignored steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ray_dcp import events
from ray_dcp.asynchronous import SaveHandle, run_async_save
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.checks import check_whole
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    InvalidRequestError,
    RankDisagreementError,
    SaveCancelledError,
    SaveSkippedError,
)
from ray_dcp.format.names import StepNames
from ray_dcp.format.step_info import info_key
from ray_dcp.integrations.train import reports
from ray_dcp.integrations.train.joining import (
    Group,
    RunFacts,
    StepFolder,
    join,
    parse,
    run_facts,
)
from ray_dcp.integrations.train.save_requests import REQUESTS, Asked
from ray_dcp.loading import run_load_newest
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.rank_load import StepRange
from ray_dcp.runtime.tasks import outcome
from ray_dcp.saving import warm_staging
from ray_dcp.torch_adapter.dispatch import decide_save
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.state import check_mapping, stateful_to_state_dict

ASK_AGAIN_S = (0.0, 0.5, 2.0)
"""Pauses before each query of the storage for an unknown outcome, in seconds."""

logger = logging.getLogger(__name__)


@dataclass
class Save:
    """A save that has been started."""

    folder: StepFolder
    target: Target
    metrics: Mapping[str, Any]
    handle: SaveHandle
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def was_skipped(self) -> bool:
        """Whether the save was skipped, because too many others were in progress."""
        return self.handle.done() and isinstance(self.handle.exception(), SaveSkippedError)


@dataclass(frozen=True)
class Ended:
    """The outcome of a save."""

    save: Save
    error: CheckpointError | None = None
    """Why the save is not committed, the same on all ranks; None if it is."""
    created_s: float | None = None
    """Time of the plan, by the coordinator's clock."""


class UnderWay:
    """The saves whose outcome has not been processed yet.

    Args:
        max_pending: Maximum number of saves in progress.
        ask: Returns the outcome of an attempt at a target.
        wait: Waits for a number of seconds.
    """

    def __init__(
        self,
        max_pending: int,
        *,
        ask: Callable[[Target, str], str] | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._max_pending = max_pending
        self._ask = ask or outcome
        self._wait = wait
        self._saves: list[Save] = []

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def newest(self) -> Save | None:
        """The save that was started last; None if its outcome has been processed."""
        return self._saves[-1] if self._saves else None

    def add(self, save: Save) -> None:
        """Registers a save that has been started."""
        self._saves.append(save)

    def ended(self, *, all_of_them: bool = False) -> list[Ended]:
        """Returns the saves that have ended, in the order of their calls, the same on all ranks.

        Args:
            all_of_them: Wait for all saves.

        Raises:
            CommitUnknownError: The outcome of a save can't be determined. Other ranks may know it.
        """
        newest = self._saves[-1:]
        if newest and newest[0].was_skipped:
            self._saves.pop()
            skipped = [self._end_of(newest[0])]
            return [*(self.ended(all_of_them=True) if all_of_them else []), *skipped]
        count = len(self._saves) if all_of_them else max(0, len(self._saves) - self._max_pending)
        found = []
        for _ in range(count):
            found.append(self._end_of(self._saves[0]))
            self._saves.pop(0)
        return found

    def _end_of(self, save: Save) -> Ended:
        error = save.handle.exception()
        if isinstance(error, CommitUnknownError):
            error = self._settle(save, error)
        if error is None:
            return Ended(save, created_s=getattr(save.handle.result(), "created_s", None))
        if isinstance(error, CheckpointError):
            return Ended(save, error)
        raise error

    def _settle(self, save: Save, error: CommitUnknownError) -> CheckpointError | None:
        """Determines an unknown outcome from storage; returns why the save is not committed."""
        for pause_s in ASK_AGAIN_S:
            self._wait(pause_s)
            try:
                found = self._ask(save.target, error.attempt)
            except CheckpointError:
                continue
            if found == "committed":
                return None
            if found == "aborted":
                return CheckpointError(
                    f"It was aborted: {error.message}", checkpoint_id=save.target.url
                )
        # Why raised regardless of `on_error`: ranks that know the outcome would wait for this one.
        raise error


def is_misuse(error: CheckpointError) -> bool:
    """Returns whether an error reports that the ranks do not make the same calls."""
    causes = [error, *(cause for cause, _ in error.failures.values())]
    return any(isinstance(cause, RankDisagreementError) for cause in causes)


@dataclass
class Warned:
    """Logs warnings for the operator, on rank 0 only.

    Args:
        rank: This rank.
    """

    rank: int
    num_failed: int = 0
    """Number of failed saves since the last committed one."""
    _of_steps: bool = False

    def fell_back(self, report: LoadReport, registered: StepFolder | None) -> None:
        """Warns that newer steps than the restored one could not be used."""
        if self.rank:
            return
        for path, error in report.damaged:
            self._say(
                f"Restored step {report.step} ({report.checkpoint_id}) instead of the newer "
                f"{path}, which is damaged: {error}. Look at it with `ray-dcp verify {path}`"
            )
        if registered is not None and registered.step > (report.step or 0):
            self._say(
                f"Restored step {report.step}, although Ray Train has registered the newer step "
                f"{registered.step} ({registered.name}), which is no longer there or damaged"
            )

    def failed(self, step: int, error: CheckpointError) -> None:
        """Warns about a failed save."""
        self.num_failed += 1
        if self.rank == 0:
            self._say(
                f"Step {step} is not saved ({self.num_failed} in a row now): "
                f"{type(error).__name__}: {error}"
            )

    def ignored_steps(self, has_steps: bool, restored: LoadReport | None, url: str) -> None:
        """Warns, once, if the run has steps but saves without having restored one."""
        if has_steps and restored is None and not self._of_steps and self.rank == 0:
            self._say(
                f"{url} has steps of earlier workers of this run, but restore() was not called or "
                f"found none committed: training began anew. Call restore(state) before the first "
                f"save, or give the run another name"
            )
        self._of_steps = True

    def _say(self, text: str) -> None:
        logger.warning(text)
        # Why both: a run shows the log, and a test or a notebook shows the Python warning.
        events.warn(text, stacklevel=4)


_SLACK = 1.5
"""Minimum time between reports, in poll intervals of the controller. *Why above 1*: the duration of
a poll adds to the interval."""


@dataclass
class Pace:
    """Throttles reports.

    Args:
        interval_s: Poll interval of Ray Train's controller, in seconds.
    """

    interval_s: float
    last_s: float | None = None
    """Time of the plan of the save that was reported last."""

    def is_due(self, created_s: float | None, *, final: bool = False) -> bool:
        """Returns whether to report the newest committed save; if so, counts it as reported.

        Args:
            created_s: Time of its plan, by the coordinator's clock; None if this rank has no
                manifest.
            final: This is the last call.

        Examples:
            >>> pace = Pace(2.0)
            >>> [pace.is_due(created_s) for created_s in (100.0, 101.0, 104.0)]
            [True, False, True]
        """
        # Why `0 <=`: a clock that was set back must not suppress reports.
        too_soon = (
            created_s is not None
            and self.last_s is not None
            and 0 <= created_s - self.last_s < self.interval_s * _SLACK
        )
        if too_soon and not final:
            return False
        self.last_s = created_s
        return True


OnError = Literal["warn", "raise"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a checkpointer, the same on all ranks; see `checkpointer`.

    Raises:
        InvalidRequestError: An argument has an invalid value.
    """

    folder: str = "checkpoints"
    save_interval: int = 1
    on_error: OnError = "warn"
    options: SaveOptions = field(default_factory=SaveOptions)
    load_options: LoadOptions = field(default_factory=LoadOptions)
    check_preemption_every: int = 0

    def __post_init__(self) -> None:
        check_whole(self.save_interval, "save_interval", 1)
        check_whole(self.check_preemption_every, "check_preemption_every")
        if self.on_error not in get_args(OnError):
            raise InvalidRequestError(
                f"on_error must be 'warn' or 'raise', but is {self.on_error!r}", key="on_error"
            )
        for name, kind in (("options", SaveOptions), ("load_options", LoadOptions)):
            given = getattr(self, name)
            if not isinstance(given, kind):
                raise InvalidRequestError(
                    f"{name} must be {kind.__name__}, but is {given!r}", key=name
                )


class Checkpointer:
    """Saves and restores the checkpoints of a Ray Train run. Created by `checkpointer`.

    It is a context manager. All ranks call its methods in the same order.

    Args:
        facts: Properties of the run.
        group: This rank's membership in the worker group.
        settings: See `checkpointer`.

    Attributes:
        restored: Report of the last `restore` on this rank; None if nothing was restored.
    """

    def __init__(self, facts: RunFacts, group: Group, settings: Settings) -> None:
        self.restored: LoadReport | None = None
        self._facts = facts
        self._group = group
        self._settings = settings
        self._preemption = reports.Preemption(settings.check_preemption_every, facts.rank)
        self._under_way = UnderWay(settings.options.max_pending)
        self._pace = Pace(facts.poll_s)
        self._untold: list[Ended] = []
        self._warned = Warned(facts.rank)
        self._last_step = -1
        self._decided: tuple[int, bool, Asked | None] = (-1, False, None)
        self._closed = False
        # Why one thread: its storage operations stay in order, and training does not wait for them.
        self._aside = ThreadPoolExecutor(1, "ray_dcp train") if facts.rank == 0 else None
        self._owner = REQUESTS.open()

    def __repr__(self) -> str:
        return f"Checkpointer({self._group.root.url!r}, rank={self._facts.rank})"

    @property
    def url(self) -> str:
        """Path or URL of the folder with the steps, as accepted by `ray_dcp.load_newest`."""
        return self._group.root.url

    def restore(self, state: MutableMapping[str, Any]) -> int | None:
        """Loads the newest committed step of the run into a state, in place; returns its number.

        The step is chosen from the run's storage, whatever Ray Train has registered. Bytes that
        nodes still hold in their memory tier are read from there. The step may have been saved by
        any number of ranks. If the newest step can't be loaded, the next older one is loaded, with
        a warning that names each skipped step.

        A later call waits for the saves in progress and returns to the newest step; the next step
        to save must be newer than that one.

        Args:
            state: As for `save`. Modules and optimizers are loaded in place; other values that are
                not `Stateful` are replaced.

        Returns:
            The step; None if nothing was ever committed in this run.

        Raises:
            CheckpointNotFoundError: Ray Train has registered a checkpoint of this run, but none
                exists: its files were removed, or another program saved it.
            DamagedCheckpointError: All steps are damaged.
            CheckpointError: As for `ray_dcp.load_newest`.
        """
        self._check_open()
        self._take(self._under_way.ended(all_of_them=True))
        registered = reports.registered()
        try:
            if not self._group.has_steps:
                raise CheckpointNotFoundError("nothing was ever saved here", checkpoint_id=self.url)
            report = run_load_newest(
                self._group.session,
                state,
                self._settings.load_options,
                self._group.root.target,
                None,
                StepRange(),
            )
        except CheckpointNotFoundError as error:
            reports.refuse_fresh_start(registered, self._group.root.url, error)
            logger.info("Nothing is committed in %s: the run begins", self._group.root.url)
            self._warm(state)
            return None
        self.restored = report
        step = report.step or 0
        self._warned.fell_back(report, parse(registered or ""))
        self._warm(state)
        self._register(report, registered)
        self._last_step = step
        self._decided = (-1, False, None)
        REQUESTS.went_back(step, self._owner)
        return step

    def should_save(self, step: int) -> bool:
        """Returns whether `save` would save this step, the same on all ranks.

        If the state is expensive to build, call this first, and skip `save` if it returns False.

        Args:
            step: Argument of the following `save`.

        Raises:
            InvalidRequestError: `step` is invalid or not newer than the last saved step, or the
                checkpointer is closed.
        """
        self._check_new(step)
        if self._decided[0] == step:
            return self._decided[1]
        asked = REQUESTS.at(step, self._owner) or self._preemption.asks(step)
        due = asked is not None or step % self._settings.save_interval == 0
        self._decided = (step, due, asked)
        return due

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
    ) -> bool:
        """Saves a state in the background if its step is due. Call it after every step.

        Returns once the bytes are copied. After the commit, a later call reports the checkpoint to
        Ray Train on all ranks, with `NO_UPLOAD`, the metrics and the step.

        A step is due if it is a multiple of `save_interval`, or if the run is about to be resized
        or a node is preempted (`SaveBeforeResize`).

        Args:
            step: The step; must be newer than the last saved or restored step.
            state: Values by name. Modules and optimizers may be passed directly, and can then be
                loaded by any number of ranks. Other `Stateful` values are saved by their
                `state_dict()`.
            metrics: Numbers and strings by name, for Ray Train. Those of rank 0 are used.
            force: Save even if the step is not due. Must be the same on all ranks.

        Returns:
            Whether the step was due or forced.

        Raises:
            InvalidRequestError: The step or the metrics are invalid, or the checkpointer is closed.
            RankDisagreementError: The ranks do not save the same steps.
            CheckpointError: With `on_error="raise"`: this save or an earlier one failed.
        """
        self._check_new(step)
        told = reports.check_metrics(metrics)
        due = self.should_save(step)
        asked = self._decided[2]
        if not due and not force:
            return False
        self._warned.ignored_steps(self._group.has_steps, self.restored, self._group.root.url)
        self._last_step = step
        self._group.has_steps = True
        self._decided = (-1, False, None)
        self._begin(step, state, {"step": step, **told}, waits=asked is not None)
        lingers = asked is not None and asked.linger_s > 0
        try:
            self._take(self._under_way.ended(all_of_them=lingers))
        finally:
            if asked is not None:
                self._answer(asked, step)
        self._tell()
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
            self._take(self._under_way.ended(all_of_them=True))
            self._tell(final=True)
        finally:
            self._leave(wait=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # Why not wait: other ranks may be dead, or may be waiting for this one. Staged saves
            # are committed without this process.
            self._leave(wait=False)

    # Saves and their outcomes

    def _begin(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any], *, waits: bool
    ) -> None:
        check_mapping(state)
        folder = self._group.folder_of(step)
        target = self._group.root.below(folder.name)
        self._later(lambda: self._note(folder, metrics))
        begun_s = time.monotonic()
        # Why stage in the call: the user has no handle to wait for.
        options = replace(self._settings.options, staging="call")
        handle = run_async_save(
            decide_save(None, None, target),
            self._group.session,
            state,
            replace(options, when_full="wait") if waits else options,
            target,
        )
        stage_s = time.monotonic() - begun_s
        handle.add_done_callback(lambda done: _took(done, begun_s, stage_s))
        self._under_way.add(Save(folder, target, metrics, handle))

    def _take(self, ended: list[Ended]) -> None:
        """Processes the outcomes of saves, in the order of their calls."""
        failed: CheckpointError | None = None
        for one in ended:
            if one.error is None:
                self._untold.append(one)
                self._warned.num_failed = 0
                continue
            if isinstance(one.error, SaveCancelledError):
                logger.info("Step %d is not saved: %s", one.save.folder.step, one.error)
                continue  # Skipped by `when_full`, or cancelled: not a failure.
            self._warned.failed(one.save.folder.step, one.error)
            if self._settings.on_error == "raise" or is_misuse(one.error):
                failed = failed or one.error
        if failed is not None:
            raise failed

    def _tell(self, *, final: bool = False) -> None:
        """Reports the newest committed save to Ray Train if a report is due. Collective."""
        if self._untold and self._pace.is_due(self._untold[-1].created_s, final=final):
            newest = self._untold[-1].save
            self._untold.clear()
            self._report(newest.folder, newest.metrics)

    def _report(self, folder: StepFolder, metrics: Mapping[str, Any]) -> None:
        reports.report(self._facts.checkpoint(f"{self._settings.folder}/{folder.name}"), metrics)
        retention = self._group.retention
        if retention is not None:
            self._later(lambda: retention.told(folder))

    def _answer(self, asked: Asked, step: int) -> None:
        """Records the outcome of a requested save, now or when the save ends.

        If the worker group is about to end, the call then blocks (`Asked.linger_s`). The save is
        not reported to Ray Train before: the controller waits and registers no reports. The next
        group reports the checkpoint that it restores.
        """
        save = self._under_way.newest
        if save is None:
            REQUESTS.ended(asked, any(one.save.folder.step == step for one in self._untold))
        else:
            save.handle.add_done_callback(
                lambda done: REQUESTS.ended(asked, done.exception() is None)
            )

    def _register(self, report: LoadReport, registered: str | None) -> None:
        """Reports the restored checkpoint unless Ray Train has registered it or a newer one."""
        folder, known = parse(report.checkpoint_id or ""), parse(registered or "")
        if folder is None or folder == self._group.folder_of(folder.step):
            return  # Saved by this group, and reported like all its saves.
        if known is None or known < folder:
            storage = self._group.root.open(folder.name)
            metrics = reports.read_metrics(storage) if self._facts.rank == 0 else {}
            self._report(folder, {**metrics, "step": folder.step})

    # Beside training, on rank 0

    def _later(self, do: Callable[[], object]) -> Future[object] | None:
        return None if self._aside is None else self._aside.submit(_logged, do)

    def _note(self, folder: StepFolder, metrics: Mapping[str, Any]) -> None:
        data = reports.encoded_metrics(folder.step, metrics)
        self._group.root.open(folder.name).write(info_key(0), data)

    def _warm(self, state: Mapping[str, Any]) -> None:
        """Prepares staging memory and the node agent, so that the first save is not slower."""
        try:
            warm_staging(self._group.session, stateful_to_state_dict(state), self._settings.options)
        except CheckpointError as error:
            # Why not raised: the save raises the same error, subject to `on_error`.
            logger.warning("Saves are not made ready for: %s", error)

    def _leave(self, *, wait: bool) -> None:
        self._closed = True
        REQUESTS.close(self._owner)
        if self._aside is not None:
            self._aside.shutdown(wait=wait, cancel_futures=not wait)
        try:
            self._group.leave()
        except CheckpointError as error:
            logger.info("The writer lease of %s was not given back: %s", self.url, error)

    def _check_new(self, step: int) -> None:
        self._check_open()
        StepNames().name_of(step)  # raises for an invalid step
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


def _took(done: Future[Any], begun_s: float, stage_s: float) -> None:
    if done.exception() is None:
        REQUESTS.took(stage_s, time.monotonic() - begun_s)


def _logged(do: Callable[[], object]) -> None:
    try:
        do()
    except Exception as error:  # noqa: BLE001 - nobody waits for it, and no save depends on it
        logger.warning("Beside training: %s: %s", type(error).__name__, error)


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
    settings = Settings(
        folder=folder,
        save_interval=save_interval,
        on_error=on_error,
        options=SaveOptions() if options is None else options,
        load_options=LoadOptions() if load_options is None else load_options,
        check_preemption_every=check_preemption_every,
    )
    facts = run_facts()
    group = join(facts, folder, max_to_keep, storage_options, reports.broadcast)
    return Checkpointer(facts, group, settings)

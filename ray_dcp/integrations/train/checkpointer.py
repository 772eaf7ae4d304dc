"""`Checkpointer`: what `train_fn` of a Ray Train run saves and restores with, on every rank.

`checkpointer` makes the one of a worker, and checks what all ranks pass.

All ranks make the same saves in the same order, and a save has one outcome on all of them. So each
rank finds by itself which saves have ended (`UnderWay`), at the same call as the others: a save
that began has waited until no more than `max_pending` others were left.

`Pace` throttles reports: which committed saves are reported to Ray Train, and when. Ray Train
registers one report each time that its controller looks, and `report` waits while one is not taken.
So of saves that follow each other faster not all are reported: the newest counts. Every rank
decides alone and alike, as what they decide by is the same on all: the steps, their outcomes, and
when each was planned, as its manifest says.

`Warned` has the warnings for the operator of a run: fallbacks, failed saves, steps left aside.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ray_dcp.asynchronous import SaveHandle, run_async_save
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import reporting
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
from ray_dcp.torch_adapter.dispatch import decide_save
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.state import check_mapping, stateful_to_state_dict
from ray_dcp.warming import warm_staging

ASK_AGAIN_S = (0.0, 0.5, 2.0)
"""When a storage is asked for an outcome that nobody told, in seconds after one another."""

logger = logging.getLogger(__name__)


@dataclass
class Save:
    """One that was begun."""

    folder: StepFolder
    target: Target
    metrics: Mapping[str, Any]
    handle: SaveHandle
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def was_skipped(self) -> bool:
        """Whether it ended at once, as enough others were under way."""
        return self.handle.done() and isinstance(self.handle.exception(), SaveSkippedError)


@dataclass(frozen=True)
class Ended:
    """How one ended."""

    save: Save
    error: CheckpointError | None = None
    """Why it is not committed; the same on all ranks."""
    created_s: float | None = None
    """When it was planned, by the coordinator's clock."""


class UnderWay:
    """The saves that have not been looked at since they were begun.

    Args:
        max_pending: How many may be under way at a time.
        ask: Returns the outcome of an attempt, by its place.
        wait: Lets seconds pass.
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
        """The one that was begun last; None when it has ended."""
        return self._saves[-1] if self._saves else None

    def add(self, save: Save) -> None:
        """Notes a save that was begun."""
        self._saves.append(save)

    def ended(self, *, all_of_them: bool = False) -> list[Ended]:
        """Returns those that have ended, on all ranks the same, in the order of their calls.

        Args:
            all_of_them: Wait for the others as well.

        Raises:
            CommitUnknownError: Nobody can say how one ended: what other ranks know of it may be
                something else.
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
        """Returns why a save is not committed whose outcome this rank was not told."""
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
        # Why raised whatever on_error says: ranks that know more would wait for this one.
        raise error


def is_misuse(error: CheckpointError) -> bool:
    """Tells whether an error says that the ranks do not make the same calls."""
    causes = [error, *(cause for cause, _ in error.failures.values())]
    return any(isinstance(cause, RankDisagreementError) for cause in causes)


@dataclass
class Warned:
    """What was said so far; only rank 0 says anything.

    Args:
        rank: This rank.
    """

    rank: int
    num_failed: int = 0
    """Saves that failed since one was committed."""
    _of_steps: bool = False

    def fell_back(self, report: LoadReport, registered: StepFolder | None) -> None:
        """Tells of newer steps than the one that was restored."""
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
        """Tells of a save that failed."""
        self.num_failed += 1
        if self.rank == 0:
            self._say(
                f"Step {step} is not saved ({self.num_failed} in a row now): "
                f"{type(error).__name__}: {error}"
            )

    def ignored_steps(self, has_steps: bool, restored: LoadReport | None, url: str) -> None:
        """Tells, once, that a run is saved anew that was not restored though it could be."""
        if has_steps and restored is None and not self._of_steps and self.rank == 0:
            self._say(
                f"{url} has steps of earlier workers of this run, but restore() was not called or "
                f"found none committed: training began anew. Call restore(state) before the first "
                f"save, or give the run another name"
            )
        self._of_steps = True

    def _say(self, text: str) -> None:
        logger.warning(text)
        # Why both: a run shows the one in its log, and a test or a notebook the other.
        reporting.warn(text, stacklevel=4)


_SLACK = 1.5
"""Times the interval of the controller: what it needs to look is on top of it."""


@dataclass
class Pace:
    """What was reported last.

    Args:
        interval_s: How often Ray Train's controller looks, in seconds.
    """

    interval_s: float
    last_s: float | None = None
    """When what was reported last was planned."""

    def is_due(self, created_s: float | None, *, final: bool = False) -> bool:
        """Tells whether to report the newest save that is committed, and takes it as reported.

        Args:
            created_s: When it was planned, by the coordinator's clock; None when its manifest does
                not travel.
            final: No later call will come.

        Examples:
            >>> pace = Pace(2.0)
            >>> [pace.is_due(created_s) for created_s in (100.0, 101.0, 104.0)]
            [True, False, True]
        """
        # Why above zero: a clock that was set back must not keep a run from being reported.
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
    """What all ranks give alike; see `checkpointer`.

    Raises:
        InvalidRequestError: An argument has a value that it can't have.
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
    """The checkpoints of a Ray Train run; made by `checkpointer`. A context manager.

    Args:
        facts: Of the run.
        group: This rank's place in it.
        settings: See `checkpointer`.

    Attributes:
        restored: What `restore` did on this rank; None before, and when there was nothing.
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
        # Why one thread: what it does to the storage has an order, and training does not wait.
        self._aside = ThreadPoolExecutor(1, "ray_dcp train") if facts.rank == 0 else None
        self._owner = REQUESTS.open()

    def __repr__(self) -> str:
        return f"Checkpointer({self._group.root.url!r}, rank={self._facts.rank})"

    @property
    def url(self) -> str:
        """Path or URL of the folder in which the steps lie; `ray_dcp.load_newest` takes it."""
        return self._group.root.url

    def restore(self, state: MutableMapping[str, Any]) -> int | None:
        """Loads the newest committed step of the run into a state, in place; returns its number.

        Whatever Ray Train has registered: what counts is what is committed in the run's storage.
        Bytes that the nodes still keep in memory come from there. The step may have been saved by
        any number of ranks. Where the newest can't be loaded the next older one is, with a
        warning that names each that was passed over.

        Called again later it goes back to the newest step, after waiting for saves that are under
        way; steps are counted from there on.

        Args:
            state: As for `save`. Modules and optimizers are loaded in place, other values that are
                no `Stateful` are replaced in it.

        Returns:
            The step; None when nothing was ever committed in this run.

        Raises:
            CheckpointNotFoundError: Ray Train has registered a checkpoint of this run, but none
                is there: its files are gone, or somebody else saved it.
            DamagedCheckpointError: All are damaged.
            CheckpointError: As `ray_dcp.load_newest`.
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
        """Tells whether `save` would save a step now, on all ranks the same.

        For states that are expensive to make: `save` may be left out where this is False.

        Args:
            step: The one that `save` would be called with.

        Raises:
            InvalidRequestError: It is no step, or not newer than the last one saved; or the
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
        """Saves a state in the background if its step is due; call it after every step.

        Returns once the bytes are copied. When they are committed, a later call tells Ray Train:
        with `NO_UPLOAD`, on all ranks alike, with these metrics and the step among them.

        Due is a step that `save_interval` divides, and one at which the run is about to be resized
        or a node to be taken away (`SaveBeforeResize`).

        Args:
            step: Newer than the last one that was saved or restored.
            state: Values by name. Modules and optimizers may be given as they are, and fit any
                number of ranks then; other `Stateful` values give their `state_dict()`.
            metrics: Of numbers and texts, for Ray Train. Rank 0's count.
            force: Save whether it is due or not; the same on all ranks.

        Returns:
            Whether the step was due.

        Raises:
            InvalidRequestError: The step or the metrics can't be taken, or the checkpointer is
                closed.
            RankDisagreementError: The ranks do not save the same steps.
            CheckpointError: With `on_error="raise"`: a save failed, this one or one before.
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
        """Waits for the saves that are under way, and tells Ray Train of the newest.

        Every rank calls it; leaving a `with` block does, unless by an error. Does nothing when
        it was called before.

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
            # Why nobody is waited for: other ranks may be dead, or wait for this one. What is
            # staged is committed without this process.
            self._leave(wait=False)

    # What becomes of a save

    def _begin(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any], *, waits: bool
    ) -> None:
        check_mapping(state)
        folder = self._group.folder_of(step)
        target = self._group.root.below(folder.name)
        self._later(lambda: self._note(folder, metrics))
        begun_s = time.monotonic()
        # Why in the call: it returns to a user who has no handle to wait for.
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
        """Takes in how saves have ended, in the order of their calls."""
        failed: CheckpointError | None = None
        for one in ended:
            if one.error is None:
                self._untold.append(one)
                self._warned.num_failed = 0
                continue
            if isinstance(one.error, SaveCancelledError):
                logger.info("Step %d is not saved: %s", one.save.folder.step, one.error)
                continue  # By when_full, or by who cancelled it: nothing failed.
            self._warned.failed(one.save.folder.step, one.error)
            if self._settings.on_error == "raise" or is_misuse(one.error):
                failed = failed or one.error
        if failed is not None:
            raise failed

    def _tell(self, *, final: bool = False) -> None:
        """Reports to Ray Train what is to be reported now, on all ranks alike."""
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
        """Says how a save that was asked for has ended, or has that said when it ends.

        Lingers where the workers are ended now. The save is not reported before: the controller
        waits, and takes no report meanwhile. The next group reports what it restores.
        """
        save = self._under_way.newest
        if save is None:
            REQUESTS.ended(asked, any(one.save.folder.step == step for one in self._untold))
        else:
            save.handle.add_done_callback(
                lambda done: REQUESTS.ended(asked, done.exception() is None)
            )

    def _register(self, report: LoadReport, registered: str | None) -> None:
        """Reports what was restored, where Ray Train was not told of it before."""
        folder, known = parse(report.checkpoint_id or ""), parse(registered or "")
        if folder is None or folder == self._group.folder_of(folder.step):
            return  # Of this group: it is told like all others.
        if known is None or known < folder:
            storage = self._group.root.open(folder.name)
            metrics = reports.read_metrics(storage) if self._facts.rank == 0 else {}
            self._report(folder, {**metrics, "step": folder.step})

    # Aside of training, on rank 0

    def _later(self, do: Callable[[], object]) -> Future[object] | None:
        return None if self._aside is None else self._aside.submit(_logged, do)

    def _note(self, folder: StepFolder, metrics: Mapping[str, Any]) -> None:
        data = reports.encoded_metrics(folder.step, metrics)
        self._group.root.open(folder.name).write(info_key(0), data)

    def _warm(self, state: Mapping[str, Any]) -> None:
        """Gets memory and the node's stager ready, so that the first save is as fast as others."""
        try:
            warm_staging(self._group.session, stateful_to_state_dict(state), self._settings.options)
        except CheckpointError as error:
            # Why not raised: a save says so too, and is what on_error is for.
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
        StepNames().name_of(step)  # raises for what is no step
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
    """Returns what saves and restores the state of the Ray Train run that this worker belongs to.

    Every rank calls it once, inside `train_fn`, with the same arguments; and then the methods of
    what it returns, in the same order. Checkpoints go into `folder` of the run's own storage
    (`RunConfig`), straight from the workers' nodes.

    Args:
        folder: Name of a folder in the run's storage.
        max_to_keep: Newest committed steps that ray_dcp keeps, 0 for all. Leave it out where Ray
            Train keeps `CheckpointConfig(num_to_keep=...)`.
        save_interval: `save` saves the steps that this divides.
        on_error: What happens when a save fails: `"warn"` and go on, or `"raise"` on every rank,
            which ends the worker group. A call that differs between ranks is raised in any case.
        options: How to save; `keep_in_memory` makes restarts quick.
        load_options: How to restore.
        storage_options: Credentials and options of an `s3://`, `gs://` or `az://` storage path;
            by default those of its URL, and of the environment.
        check_preemption_every: Ask `ray.train.get_preemption_info()` at every so manieth `save`,
            which is a barrier of all ranks. 0 leaves that to `SaveBeforeResize` in
            `RunConfig(callbacks=[...])`, which costs nothing while nobody is preempted.

    Raises:
        InvalidRequestError: This is no Ray Train worker, or an argument is wrong.
        CheckpointExistsError: Another run of this name lives and writes here.
        CheckpointError: The storage can't be listed, or the ranks do not find each other.

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

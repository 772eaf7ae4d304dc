"""`Checkpointer`: what `train_fn` of a Ray Train run saves and restores with, on every rank.

How it is made is in `making`; names, reports and deletions are decided in the modules beside.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

from ray_dcp.asynchronous import run_async_save
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    SaveCancelledError,
)
from ray_dcp.format.step_info import info_key
from ray_dcp.integrations.train import telling
from ray_dcp.integrations.train.board import BOARD, Asked
from ray_dcp.integrations.train.context import RunFacts
from ray_dcp.integrations.train.joining import Group
from ray_dcp.integrations.train.names import StepFolder, check_step, parse
from ray_dcp.integrations.train.pacing import Committed, Pace
from ray_dcp.integrations.train.underway import Ended, Save, UnderWay, is_misuse
from ray_dcp.integrations.train.warning import Warned
from ray_dcp.loading import run_load_newest
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.newest import StepRange
from ray_dcp.seam.paths import decide_save
from ray_dcp.seam.report import LoadReport
from ray_dcp.seam.state import check_mapping, stateful_to_state_dict
from ray_dcp.store.opening import open_storage
from ray_dcp.warming import warm_staging

__all__ = ["Checkpointer", "OnError"]

OnError = Literal["warn", "raise"]

logger = logging.getLogger(__name__)


class Checkpointer:
    """The checkpoints of a Ray Train run; made by `checkpointer`. A context manager.

    Args:
        facts: Of the run.
        group: This rank's place in it.
        folder: In which the steps lie.
        save_interval: As for `checkpointer`, like the rest.
        on_error: See there.
        options: See there.
        load_options: See there.
        check_preemption_every: See there.

    Attributes:
        restored: What `restore` did on this rank; None before, and when there was nothing.
    """

    def __init__(
        self,
        facts: RunFacts,
        group: Group,
        folder: str,
        save_interval: int,
        on_error: OnError,
        options: SaveOptions,
        load_options: LoadOptions,
        check_preemption_every: int,
    ) -> None:
        self.restored: LoadReport | None = None
        self._facts = facts
        self._group = group
        self._folder = folder
        self._interval = save_interval
        self._on_error = on_error
        self._options = options
        self._load_options = load_options
        self._preemption = telling.Preemption(check_preemption_every, facts.rank)
        self._under_way = UnderWay(options.max_pending)
        self._pace = Pace(facts.poll_s)
        self._untold: list[Ended] = []
        self._warned = Warned(facts.rank)
        self._last_step = -1
        self._decided: tuple[int, bool, Asked | None] = (-1, False, None)
        self._closed = False
        # Why one thread: what it does to the storage has an order, and training does not wait.
        self._aside = ThreadPoolExecutor(1, "ray_dcp train") if facts.rank == 0 else None
        self._owner = BOARD.open()

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
        registered = telling.registered()
        try:
            self._group.check_has_steps()
            report = run_load_newest(
                self._group.session, state, self._load_options, self._group.root.target, None,
                StepRange(),
            )  # fmt: skip
        except CheckpointNotFoundError as error:
            telling.refuse_fresh_start(registered, self._group.root.url, error)
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
        BOARD.went_back(step, self._owner)
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
        asked = BOARD.at(step, self._owner) or self._preemption.asks(step)
        due = asked is not None or step % self._interval == 0
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
        told = telling.check_metrics(metrics)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        handle = run_async_save(
            decide_save(None, None, target), self._group.session, state,
            replace(self._options, when_full="wait") if waits else self._options, target,
        )  # fmt: skip
        stage_s = time.monotonic() - begun_s
        handle.add_done_callback(lambda done: _took(done, begun_s, stage_s))
        self._under_way.add(Save(folder, target, metrics, handle))

    def _take(self, ended: list[Ended]) -> None:
        """Takes in how saves have ended, in the order of their calls."""
        failed: CheckpointError | None = None
        for one in ended:
            if one.error is None:
                self._untold.append(one)
                self._later(partial(self._keeper_notes, one))
                self._warned.num_failed = 0
                continue
            if isinstance(one.error, SaveCancelledError):
                logger.info("Step %d is not saved: %s", one.save.folder.step, one.error)
                continue  # By when_full, or by who cancelled it: nothing failed.
            self._warned.failed(one.save.folder.step, one.error)
            if self._on_error == "raise" or is_misuse(one.error):
                failed = failed or one.error
        if failed is not None:
            raise failed

    def _tell(self, *, final: bool = False) -> None:
        """Reports to Ray Train what is to be reported now, on all ranks alike."""
        due = self._pace.due(
            [Committed(one.save.folder.step, one.created_s) for one in self._untold], final=final
        )
        if due is None:
            return
        newest = self._untold[-1].save
        self._untold.clear()
        self._report(newest.folder, newest.metrics)

    def _report(self, folder: StepFolder, metrics: Mapping[str, Any]) -> None:
        telling.report(self._facts.checkpoint(f"{self._folder}/{folder.name}"), metrics)
        keeper = self._group.keeper
        if keeper is not None:
            self._later(lambda: keeper.told(folder))

    def _answer(self, asked: Asked, step: int) -> None:
        """Says how a save that was asked for has ended, or has that said when it ends.

        Lingers where the workers are ended now. The save is not reported before: the controller
        waits, and takes no report meanwhile. The next group reports what it restores.
        """
        save = self._under_way.newest
        if save is None:
            BOARD.ended(asked, any(one.save.folder.step == step for one in self._untold))
        else:
            save.handle.add_done_callback(lambda done: BOARD.ended(asked, done.exception() is None))

    def _register(self, report: LoadReport, registered: str | None) -> None:
        """Reports what was restored, where Ray Train was not told of it before."""
        folder, known = parse(report.checkpoint_id or ""), parse(registered or "")
        if folder is None or folder == self._group.folder_of(folder.step):
            return  # Of this group: it is told like all others.
        if known is None or known < folder:
            metrics = self._metrics_of(folder) if self._facts.rank == 0 else {}
            self._report(folder, {**metrics, "step": folder.step})

    def _metrics_of(self, folder: StepFolder) -> dict[str, Any]:
        return telling.read_metrics(open_storage(self._group.root.below(folder.name)))

    # Aside of training, on rank 0

    def _later(self, do: Callable[[], object]) -> Future[object] | None:
        return None if self._aside is None else self._aside.submit(_logged, do)

    def _note(self, folder: StepFolder, metrics: Mapping[str, Any]) -> None:
        data = telling.encoded_metrics(folder.step, metrics)
        open_storage(self._group.root.below(folder.name)).write(info_key(0), data)

    def _keeper_notes(self, one: Ended) -> None:
        if self._group.keeper is not None:
            self._group.keeper.committed(one.save.folder)

    def _warm(self, state: Mapping[str, Any]) -> None:
        """Gets memory and the node's stager ready, so that the first save is as fast as others."""
        try:
            warm_staging(self._group.session, stateful_to_state_dict(state), self._options)
        except CheckpointError as error:
            # Why not raised: a save says so too, and is what on_error is for.
            logger.warning("Saves are not made ready for: %s", error)

    def _leave(self, *, wait: bool) -> None:
        self._closed = True
        BOARD.close(self._owner)
        if self._aside is not None:
            self._aside.shutdown(wait=wait, cancel_futures=not wait)
        try:
            self._group.leave()
        except CheckpointError as error:
            logger.info("The right to write to %s was not given back: %s", self.url, error)

    def _check_new(self, step: int) -> None:
        self._check_open()
        if check_step(step) <= self._last_step:
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
        BOARD.took(stage_s, time.monotonic() - begun_s)


def _logged(do: Callable[[], object]) -> None:
    try:
        do()
    except Exception as error:  # noqa: BLE001 - nobody waits for it, and no save depends on it
        logger.warning("Beside training: %s: %s", type(error).__name__, error)

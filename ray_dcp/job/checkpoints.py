"""`JobCheckpoints`: the steps of a job whose parts different groups of processes save."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray_dcp import events
from ray_dcp.core import bounds
from ray_dcp.core.processes import OwnProcess
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    ParticipantError,
    StorageError,
)
from ray_dcp.format.job_parts import PartRecord
from ray_dcp.format.names import STEP_NAME, StepNames
from ray_dcp.job.committed import CommittedStep
from ray_dcp.job.coordinator import (
    JobSettings,
    job_coordinator_of,
    this_driver,
)
from ray_dcp.job.part import check_run
from ray_dcp.job.step import JobStep, Line
from ray_dcp.job.step_files import folders_of, read_parts
from ray_dcp.job.value import verify_all
from ray_dcp.manager.catalogue import Root, StepFound, look, look_at_step
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.manager.retention import RetentionPolicy
from ray_dcp.manager.settings import Item, Settings, WaysOut, check_item_name, retention_of
from ray_dcp.options import SaveOptions, plain_integer
from ray_dcp.saving import check_options
from ray_dcp.session import ray_calls
from ray_dcp.session.call_bound import CallBound
from ray_dcp.session.names import NAMESPACE, job_coordinator_name
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import target_of
from ray_dcp.view.verify import verify

logger = logging.getLogger(__name__)

_MOST_LOOKS = 20
"""How often a step is chosen again because it was deleted before it was protected."""


_WAYS_OUT = WaysOut(
    save_over="delete it first with `ray-dcp rm {run}@{step}`",
    go_back="delete those after it, each with `ray-dcp rm {run}@STEP`",
    await_save="JobStep.result()",
    maker="JobCheckpoints",
)


class JobCheckpoints:
    """Saves steps of several parts by one commit, and finds the newest one.

    A part is saved by a group of ranks (`JobStep.part`), is a value of Ray's object store
    (`JobStep.put`), or is taken from an earlier step (`JobStep.keep`). A step exists when all its
    parts are durable and its one record is created, by an actor that no trainer owns; until then
    there is nothing but the steps before. It is a step of a run as `CheckpointManager(items=...)`
    saves them, and each part is a checkpoint that stock DCP reads.

    One driver writes a run at a time. Another one is refused while it lives.

    Args:
        path: Path or URL of the run, or a `Location`. All nodes see it.
        parts: Names of the parts that each step has.
        max_to_keep: Number of newest steps to keep; 0 keeps all. `retention` replaces it.
        retention: Which steps are kept; the newest and tagged ones always are.
        step_name: Pattern of folder names.
        options: How values are written; its deadlines hold for the steps.
        takeover: Whether to take the run from a driver, or another cluster, that is alive.
        read_only: Whether `step` is refused; `latest` then waits for no step that is being saved.
        lease_s: Time without a renewal after which a writer or reader on another machine counts as
            dead, in seconds.

    Raises:
        InvalidRequestError: An argument is invalid.

    Examples:
        Of a driver, with `trainers` that call `ray_dcp.save(state, checkpoint_id=part)`::

            run = ray_dcp.JobCheckpoints("s3://bucket/rl", parts=("policy", "buffer", "cursor"))
            with run.step(120) as step:
                saved = [one.save.remote(step.part("policy")) for one in trainers]
                step.put("buffer", buffer.state_dict.remote())
                step.put("cursor", cursor.state_dict())
                ray.get(saved)
            step.result()
    """

    def __init__(
        self,
        path: AnyPlace,
        parts: Sequence[str],
        *,
        max_to_keep: int = 0,
        retention: RetentionPolicy | None = None,
        step_name: str = STEP_NAME,
        options: SaveOptions | None = None,
        takeover: bool = False,
        read_only: bool = False,
        lease_s: float = bounds.LEASE_S,
    ) -> None:
        check_options(options, SaveOptions)
        check_run(path)
        if isinstance(parts, str) or not parts:
            raise InvalidRequestError(
                f"parts must be the names of the parts, as ('policy', 'buffer'), but is {parts!r}",
                key="parts",
            )
        self._options = options or SaveOptions()
        self._settings = Settings(
            kept=retention_of(max_to_keep, retention),
            names=StepNames(step_name),
            items={check_item_name(name): Item(save_options=self._options) for name in parts},
            takeover=takeover,
            lease_s=lease_s,
            ways_out=_WAYS_OUT,
        )
        self._root = Root(target_of(path, None))
        self._read_only = read_only
        self._nonce = secrets.token_hex(8)
        self._process = OwnProcess()
        self._line: Line | None = None

    @property
    def path(self) -> str:
        """Path or URL of the run."""
        return self._root.url

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts."""
        return tuple(self._settings.items)

    def step(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Collection[str] = (),
    ) -> JobStep:
        """Opens a step, which expects all its parts.

        Args:
            step: The step, from 0; must be newer than all steps that are committed or being saved.
            metrics: Numbers by name, by which a retention may keep steps.
            metadata: Values that JSON can represent.
            tags: Tags to add. A tagged step is kept.

        Returns:
            The step, a context manager. Leaving it waits until all parts are staged.

        Raises:
            InvalidRequestError: The step is committed already, or not newer than the newest one;
                an argument is invalid; there is no Ray.
            CheckpointExistsError: Another driver writes the run.
            StorageError: The storage failed.
        """
        if self._read_only:
            raise InvalidRequestError(
                "this JobCheckpoints is read_only; make one without it to save", key="read_only"
            )
        number = plain_integer(step)
        self._settings.names.name_of(number)
        line, request = self._attached(), secrets.token_hex(8)
        details = {"metrics": metrics, "metadata": metadata, "tags": tags}
        opened = line.call(
            lambda actor: actor.open.remote(line.nonce, request, number, details),
            step=number,
            timeout_s=self._options.plan_timeout_s,
        )
        return JobStep(line, number, opened)

    def all_steps(self) -> list[int]:
        """Returns the committed steps, ascending.

        Raises:
            StorageError: The storage can't be read.
        """
        return [*look(self._root, self._settings.names).steps]

    def latest(self, *, verifies: bool = True) -> CommittedStep | None:
        """Returns the newest step whose record and parts are whole; None if there is no step.

        A driver that saves waits first for the steps that an earlier driver left being saved. A
        damaged step is skipped with a warning that names the part; so the step is the same for
        everyone to whom its parts are handed. Unless this is `read_only`, it is also marked: steps
        may be saved again from the one that is returned on, of the damaged ones' numbers as well.
        If none is whole, all are marked, and the run may begin anew.

        Args:
            verifies: Whether all bytes of a step are read and compared with their checksums before
                it is returned, by tasks on the cluster's nodes. Without it, damage is found when
                a part is loaded.

        Raises:
            DamagedCheckpointError: There are steps, but none is whole.
            CheckpointExistsError: Another driver writes the run.
            StorageError: The storage can't be read.
        """
        line = None if self._read_only else self._attached()
        skipped: list[tuple[StepFound, CheckpointError]] = []
        num_gone = 0
        while num_gone < _MOST_LOOKS:
            catalogue = look(self._root, self._settings.names)
            passed = {(one.step, one.attempt) for one, _ in skipped}
            steps = [
                one
                for one in catalogue.oldest_first("increasing")
                if (one.step, one.attempt) not in passed
            ]
            if not steps:
                break
            found = steps[-1]
            lease = self._lease(found.step)
            try:
                if look_at_step(self._root, found.name, found.step) is None:
                    num_gone += 1  # It was deleted before it was protected.
                    _end(lease)
                    continue
                parts, problem = self._check(found, verifies)
                if problem is None and line is not None:
                    self._tell_loaded(line, found, skipped, verifies)
            except BaseException:
                _end(lease)
                raise
            if problem is None:
                for one, why in skipped:
                    events.warn(
                        f"Step {found.step} of {self.path} is taken instead of the newer step "
                        f"{one.step}, which is damaged: {why}. It neither counts for retention nor "
                        f"is it deleted, and may be saved again; look at it with `ray-dcp verify`",
                        stacklevel=2,
                    )
                return CommittedStep(self._root, found, parts, lease)
            _end(lease)
            skipped.append((found, problem))
        else:
            raise StorageError(
                f"the newest step of {self.path} was deleted {num_gone} times in a row before it "
                f"was protected; call latest again, and look at what deletes steps there",
                checkpoint_id=self.path,
            )
        if not skipped:
            return None
        if line is not None:
            self._tell_loaded(line, None, skipped, False)
        told = "; ".join(f"step {one.step}: {why.message}" for one, why in skipped)
        raise DamagedCheckpointError(
            f"expected a step that is whole in {self.path}, but all are damaged: {told}. The run "
            f"may begin anew, also with steps of these numbers; look at them with `ray-dcp verify`",
            checkpoint_id=self.path,
        )

    def at(self, step: int) -> CommittedStep:
        """Returns a committed step, protected from deletion until it is closed.

        Its bytes are verified when they are loaded.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            DamagedCheckpointError: Its record can't be read.
            StorageError: The storage failed.
        """
        number = plain_integer(step)
        name = self._settings.names.name_of(number)
        lease = self._lease(number)
        try:
            found = look_at_step(self._root, name, number)
            if found is None:
                raise CheckpointNotFoundError(
                    f"expected a committed step {number} in {self.path}, but there is none; its "
                    f"steps are {', '.join(map(str, self.all_steps()[-5:])) or 'none'}",
                    checkpoint_id=self.path,
                    step=number,
                )
            return CommittedStep(self._root, found, read_parts(self._root, found), lease)
        except BaseException:
            _end(lease)
            raise

    def close(self) -> None:
        """Gives the run up: a step that is open is given up, one that is staged is committed.

        May be called repeatedly. A driver that ends without it does the same.
        """
        line, self._line = self._line, None
        # Suppressed: its actor has ended, and with it the lease.
        if line is not None and self._process.is_this:
            with suppress(ParticipantError):
                line.call(lambda actor: actor.detach.remote(line.nonce), step=0)

    def __enter__(self) -> JobCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JobCheckpoints({self.path!r}, parts={self.parts!r})"

    def _attached(self) -> Line:
        """Returns the line to the run's coordinator, which is made if there is none."""
        self._process.check(repr(self), "Make a JobCheckpoints of its own there")
        if ray_calls.this_connection() is None:
            raise InvalidRequestError(
                "a job's steps are committed by an actor of its Ray, but this process has none; "
                "call ray.init first, or save steps of one group of ranks by CheckpointManager"
            )
        target = self._root.target
        job = JobSettings(target, self._settings, self._options)
        # Why with each step: keys are renewed.
        driver, variables = this_driver(self._nonce), ray_calls.storage_variables()
        name = job_coordinator_name(target.url, NAMESPACE)
        ray_calls.call_actor(
            f"the coordinator of {self.path}",
            lambda _: job_coordinator_of(target.url, namespace=NAMESPACE),
            lambda actor: actor.attach.remote(driver, job, variables),
            # Why so long: it waits for the steps that an earlier driver left.
            CallBound(
                self._options.plan_timeout_s
                + self._options.write_timeout_s
                + self._options.commit_timeout_s
            ),
        )
        self._line = Line(name, NAMESPACE, self._nonce, self._root)
        return self._line

    def _tell_loaded(
        self,
        line: Line,
        found: StepFound | None,
        skipped: Sequence[tuple[StepFound, CheckpointError]],
        is_verified: bool,
    ) -> None:
        """Lets the run's coordinator know which step is taken, and mark those that are damaged."""
        attempt = found.attempt if is_verified and found is not None else ""
        passed = [(one.step, one.attempt, error) for one, error in skipped]
        step = None if found is None else found.step
        line.call(
            lambda actor: actor.loaded.remote(line.nonce, step, attempt, passed),
            step=step or 0,
            timeout_s=self._options.plan_timeout_s,
        )

    def _lease(self, step: int) -> ReaderLease | None:
        lease = ReaderLease(self._root, step, lease_s=self._settings.lease_s)
        try:
            lease.__enter__()
        except StorageError as error:
            # Why not raised: what can be read is loaded.
            logger.info("Step %d is read without a lease: %s", step, error)
            return None
        return lease

    def _check(
        self, found: StepFound, verifies: bool
    ) -> tuple[dict[str, PartRecord], CheckpointError | None]:
        """Returns the parts of a step, and what is damaged of it; None if it is whole."""
        try:
            parts = read_parts(self._root, found)
            if verifies:
                self._verify(found)
        except DamagedCheckpointError as error:
            return {}, error
        except CheckpointNotFoundError as error:
            missing = f"a part is missing: {error.message}"
            where = error.checkpoint_id
            return {}, DamagedCheckpointError(missing, checkpoint_id=where, step=found.step)
        return parts, None

    def _verify(self, found: StepFound) -> None:
        """Reads all bytes of a step.

        Raises:
            DamagedCheckpointError: A part is damaged; the error has its place, and a key in it.
            CheckpointNotFoundError: A part is missing.
            StorageError: A part can't be read.
        """
        places = [self._root.below(folder) for folder in folders_of(found).values()]
        is_alone = ray_calls.this_connection() is None
        reports = [verify(place) for place in places] if is_alone else verify_all(places)
        unread = [str(one) for report in reports for one in report.unread]
        if unread:
            # Why not damage: an earlier step would be taken, and the newer ones be lost.
            raise StorageError(
                f"step {found.step} of {self.path} can't be verified, as its storage does "
                f"not read {'; '.join(unread[:3])}. Call latest again once it does, or "
                f"with verifies=False",
                checkpoint_id=self.path,
                step=found.step,
            )
        damaged = [
            (place.url, one)
            for place, report in zip(places, reports, strict=True)
            for one in report.problems
        ]
        if damaged:
            place, first = damaged[0]
            raise DamagedCheckpointError(
                "; ".join(str(one) for _, one in damaged[:3]),
                checkpoint_id=place,
                step=found.step,
                key=first.file,
            )


def _end(lease: ReaderLease | None) -> None:
    if lease is not None:
        lease.__exit__()

"""`follow`: the committed steps of a run, one by one, for evaluations beside the training.

A step is leased while it is evaluated, so that it is not deleted. `FollowedStep.record` stores the
result as metrics of the step. Like a tag, a metric is written first, and then fences the deletions
that are announced: whoever deletes has either seen the metric or does not delete.

With `metric`, the steps that have it already are skipped. An evaluator that was killed leaves its
step without the metric, and the next one evaluates it again.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError
from ray_dcp.format.names import StepNames
from ray_dcp.format.recorded_metrics import RecordedMetric, metrics_of, recorded_in
from ray_dcp.job.part import check_run
from ray_dcp.manager.catalogue import Catalogue, Root, StepFound, look, look_at_step
from ray_dcp.manager.metrics import check_metrics
from ray_dcp.manager.reader_leases import ReaderLease
from ray_dcp.manager.retention import Trust, TrustRule
from ray_dcp.options import check_above_0
from ray_dcp.rank.rank_load import StepRange
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import absolute_target
from ray_dcp.view.checkpoint_view import CheckpointView, read_view
from ray_dcp.view.run_listing import step_of


@dataclass(frozen=True, kw_only=True)
class FollowedStep:
    """A committed step of a run."""

    step: int
    checkpoint_id: str
    """Path or URL of its folder."""
    attempt: str
    """Id of the attempt that committed it; "" for a checkpoint of stock DCP."""
    metrics: Mapping[str, float]
    """As given when it was saved, and recorded since."""
    place: Target
    """Its folder with the storage options of the run, for `load` and others."""
    _name: str = field(repr=False)
    _root: Root = field(repr=False)
    _last: str | None = field(default=None, repr=False)
    """Metric that is written last, as it says that the step was evaluated."""

    @property
    def view(self) -> CheckpointView:
        """The checkpoint.

        Raises:
            CheckpointError: As for `ray_dcp.open`.
        """
        return read_view(self.place)

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to the step, durably; those of the same names are replaced.

        `BestN` ranks by them, `best_step`, `ray-dcp ls` and `RUN@best:NAME` show and use them.

        Args:
            metrics: Numbers by name. NaN is never the best.

        Raises:
            InvalidRequestError: A metric is not a number, or its name is too long.
            CheckpointNotFoundError: The step was deleted or saved again meanwhile.
            StorageError: The storage failed. Some metrics may be recorded.
        """
        numbers = check_metrics(metrics, None)
        if not numbers:
            raise InvalidRequestError("metrics must have at least one name", key="metrics")
        shared = self._root.shared
        before = _read_metrics(self._root, self.step, self.attempt)
        count = max((one.number for one in before), default=0) + 1
        new = [
            RecordedMetric(self.step, self.attempt, count, name, value).key
            # Why last: a process that dies in between leaves a step that is evaluated again.
            for name, value in sorted(numbers.items(), key=lambda pair: pair[0] == self._last)
        ]
        for key in new:
            shared.write(key, b"")
        # Why all: another deletion may have been decided because this step was trusted.
        is_against = any(math.isnan(value) or not value for value in numbers.values())
        fenced = None if is_against else self.step
        unsure = self._root.fence(f"step {self.step} was given metrics", fenced)
        found = look_at_step(self._root, self._name, self.step)
        if found is None or found.attempt != self.attempt:
            shared.delete(new)
            raise CheckpointNotFoundError(
                f"expected step {self.step} in {self._root.url} as it was evaluated, but it was "
                f"{'deleted' if found is None else 'saved again'} before it had the metrics",
                step=self.step,
            )
        shared.delete([one.key for one in before if one.name in numbers])
        if unsure:
            warnings.warn(unsure, UserWarning, stacklevel=2)


def follow(
    run: AnyPlace,
    *,
    metric: str | None = None,
    newer_than: int | None = None,
    timeout_s: float | None = None,
    poll_s: float = 10.0,
    trust: TrustRule | None = None,
) -> Iterator[FollowedStep]:
    """Yields each committed step of a run once, and waits for new ones.

    Any process may follow a run, beside its job or after it. While the body of the loop runs, the
    step is not deleted by a `CheckpointManager` or `ray-dcp rm`; a process that may only read the
    run is warned that it has no such protection.

    Args:
        run: Path or URL of a run: a directory of folders whose names end in the number of a step.
        metric: Yield only the steps that do not have this metric yet, and expect the body to
            record it. A step that was not recorded is yielded again by the next `follow`.
        newer_than: Yield only later steps than this.
        timeout_s: The iterator ends when no new step comes for so long, in seconds; never if None.
        poll_s: How often to look for new steps, in seconds.
        trust: Yield only the steps that are trusted: the name of a metric or a tag, or a function
            of `StepFacts`, as for `CheckpointManager`. A step is yielded once it has the verdict.

    Yields:
        Steps in ascending order as far as they are committed. A step that is saved again is
        yielded again.

    Raises:
        InvalidRequestError: An argument has a wrong value.
        StorageError: The storage can't be read, or failed to write the lease.

    Examples:
        >>> import ray_dcp, torch
        >>> for step in (1, 2):
        ...     _ = ray_dcp.save(
        ...         {"w": torch.full((2,), float(step))}, checkpoint_id=f"memory://doc-follow/{step}"
        ...     )
        >>> for found in ray_dcp.follow("memory://doc-follow", metric="norm", timeout_s=0.01):
        ...     found.record({"norm": float(found.view["w"][...].sum())})
        >>> ray_dcp.open("memory://doc-follow").best("norm", "max").step
        2
    """
    poll_s = check_above_0(poll_s, "poll_s")
    if timeout_s is not None:
        timeout_s = check_above_0(timeout_s, "timeout_s", or_0=True)
    if metric is not None and (not isinstance(metric, str) or not metric):
        raise InvalidRequestError(
            f"metric must be the name of a metric, but is {metric!r}", key="metric"
        )
    check_run(run)
    wanted, given = StepRange(newer_than=newer_than), None if trust is None else Trust(trust)
    return _follow(Root(absolute_target(run)), metric, wanted, timeout_s, poll_s, given)


class AnyNames(StepNames):
    """Names of step folders of any program: those that end in a number."""

    def step_of(self, name: str) -> int | None:
        """Returns the number at the end of a name."""
        return step_of(name)


def _follow(
    root: Root,
    metric: str | None,
    wanted: StepRange,
    timeout_s: float | None,
    poll_s: float,
    trust: Trust | None = None,
) -> Generator[FollowedStep, None, None]:
    seen = set[tuple[int, str]]()
    catalogue: Catalogue | None = None
    since_s, wait = time.monotonic(), threading.Event().wait
    while True:
        catalogue = look(root, AnyNames(), catalogue)
        todo = [
            one
            for one in sorted(catalogue.folders.values(), key=lambda one: (one.step, one.name))
            if one.step in wanted
            and (one.attempt or not one.is_ours)
            and (one.step, one.attempt) not in seen
            and metric not in catalogue.metrics_of(one)
            and (trust is None or catalogue.is_trusted(one, trust))
        ]
        for one in todo:
            with ReaderLease(root, one.step, lease_s=bounds.LEASE_S) as lease:
                found = look_at_step(root, one.name, one.step)
                if found is None or (found.step, found.attempt) in seen:
                    continue  # deleted since it was listed
                step = _followed(root, found, metric)
                if metric in step.metrics:
                    continue  # another process evaluated it meanwhile
                if lease.unsure:
                    warnings.warn(lease.unsure, UserWarning, stacklevel=2)
                seen.add((found.step, found.attempt))
                yield step
            since_s = time.monotonic()
        if todo:
            continue
        if timeout_s is not None and time.monotonic() - since_s >= timeout_s:
            return
        wait(poll_s if timeout_s is None else min(poll_s, timeout_s))


def _followed(root: Root, found: StepFound, metric: str | None) -> FollowedStep:
    own = {} if found.info is None else found.info.metrics
    recorded = _read_metrics(root, found.step, found.attempt)
    place = root.below(found.name)
    return FollowedStep(
        step=found.step,
        checkpoint_id=place.url,
        attempt=found.attempt,
        metrics={**own, **{one.name: one.value for one in recorded}},
        place=place,
        _name=found.name,
        _root=root,
        _last=metric,
    )


def _read_metrics(root: Root, step: int, attempt: str) -> list[RecordedMetric]:
    return recorded_in(entry.key for entry in root.shared.list(metrics_of(step, attempt)))


def recorded_metrics(run: AnyPlace, step: int, attempt: str) -> dict[str, float]:
    """Returns the metrics of a step that were recorded after its save.

    Args:
        run: As for `follow`.
        step: Number of the step.
        attempt: Attempt that committed it; "" for a checkpoint of stock DCP.

    Raises:
        StorageError: The storage can't be read.
    """
    found = _read_metrics(Root(absolute_target(run)), step, attempt)
    return {one.name: one.value for one in found}


def record_metrics(run: AnyPlace, step: int, metrics: Mapping[str, Any]) -> None:
    """Adds metrics to a committed step of a run; see `FollowedStep.record`.

    Args:
        run: As for `follow`.
        step: Number of the step.
        metrics: Numbers by name.

    Raises:
        CheckpointNotFoundError: The step is not committed.
        InvalidRequestError: The step is no integer from 0.
        CheckpointError: As for `FollowedStep.record`.
    """
    check_run(run)
    StepNames().name_of(step)  # It raises for an invalid step.
    root = Root(absolute_target(run))
    found = look(root, AnyNames()).steps.get(step)
    if found is None:
        raise CheckpointNotFoundError(f"expected step {step} in {root.url}, found none", step=step)
    _followed(root, found, None).record(metrics)

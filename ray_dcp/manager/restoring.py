"""Restores a step on all ranks: a requested one, or the newest one that can be loaded.

Rank 0 decides which steps are tried, and in which order. `RestoreReport` names the restored one.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ray_dcp import events
from ray_dcp.commit_protocol.messages import Reply, Request, Target
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.loading import run_load
from ray_dcp.manager.catalogue import Catalogue, StepFound, look_at_step
from ray_dcp.manager.collective_actions import CollectiveActions
from ray_dcp.manager.leases import ReaderLease
from ray_dcp.manager.retention import Mode, RetentionPolicy, best_of, rankings
from ray_dcp.manager.settings import Item, Settings
from ray_dcp.options import LoadOptions
from ray_dcp.runtime.rank_load import drive, first_that_loads, with_time_to_join
from ray_dcp.saving import check_options
from ray_dcp.store.opening import place_below
from ray_dcp.torch_adapter.dispatch import decide_load
from ray_dcp.torch_adapter.results import LoadReport, OperationLog
from ray_dcp.view.progress import ShowProgress
from ray_dcp.view.wording import seconds_text, size_text

Wanted = int | Literal["latest", "best", "auto"]
MOST_TRIED = 100
"""Maximum number of steps that `auto` tries."""
_SHOWN = 8


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


def saved_step(found: StepFound, root_url: str, tags: frozenset[str]) -> SavedStep:
    """Returns a committed step with what the catalogue knows of it."""
    info = found.info
    return SavedStep(
        step=found.step,
        checkpoint_id=f"{root_url.rstrip('/')}/{found.name}",
        created_s=found.created_s,
        metrics={} if info is None else dict(info.metrics),
        metadata={} if info is None else dict(info.metadata),
        tags=tags,
        items=() if info is None else tuple(sorted(info.items)),
    )


def best_step_of(
    catalogue: Catalogue,
    retention: RetentionPolicy | None,
    metric: str | None = None,
    mode: Mode | None = None,
) -> int | None:
    """Returns the committed step with the best value of a metric; None if no step has it.

    Args:
        catalogue: The committed steps.
        retention: Policy whose `BestN` gives the metric and the mode by default.
        metric: Name of the metric.
        mode: Whether the lowest or the highest value is the best; "min" if nothing gives it.

    Raises:
        InvalidRequestError: No metric is given, and the policy does not have exactly one `BestN`.
    """
    ranked = {(one.metric, one.mode) for one in rankings(retention)}
    if metric is None:
        if len(ranked) != 1:
            known = sorted({name for facts in catalogue.facts() for name in facts.metrics})
            raise InvalidRequestError(
                f"the best step by which metric? Give best_step(metric, mode), or a retention with "
                f"one BestN. The steps have the metrics {', '.join(known) or 'none'}",
                key="metric",
            )
        ((metric, own_mode),) = ranked
    else:
        own_mode = dict(ranked).get(metric, "min")
    best = best_of(catalogue.facts(), metric, mode or own_mode)
    return best[0].step if best else None


def candidates(
    wanted: Wanted, catalogue: Catalogue, retention: RetentionPolicy | None, url: str
) -> list[StepFound]:
    """Returns the steps to try, in order.

    Args:
        wanted: The requested step.
        catalogue: The committed steps.
        retention: Policy of the manager, which defines the best step.
        url: Path or URL of the root.

    Raises:
        CheckpointNotFoundError: There is no such step.
        InvalidRequestError: The best step is not defined.
    """
    steps = catalogue.steps
    if wanted == "auto":
        chosen = list(reversed(steps.values()))[:MOST_TRIED]
    elif wanted == "latest":
        chosen = list(steps.values())[-1:]
    elif wanted == "best":
        best = best_step_of(catalogue, retention)
        chosen = [] if best is None else [steps[best]]
    else:
        chosen = [steps[wanted]] if wanted in steps else []
    if chosen:
        return chosen
    there = [str(step) for step in steps]
    more = f" (and {len(there) - _SHOWN} earlier ones)" if len(there) > _SHOWN else ""
    found = f"steps {', '.join(there[-_SHOWN:])}{more}"
    if not there:
        found = "no committed step: check the path, or begin anew where latest_step() is None"
    what = {"auto": "a step", "latest": "a step", "best": "a step with the metric"}
    step = wanted if isinstance(wanted, int) else None
    raise CheckpointNotFoundError(
        f"expected {what.get(str(wanted), f'step {wanted}')} in {url}, found {found}",
        checkpoint_id=url,
        step=step,
    )


def targets_of(
    folder: Target, saved: Mapping[str, str], settings: Settings, state_dict: Any, step: int
) -> list[tuple[str, Item, Target, Any]]:
    """Returns the loads of a step: name and settings of the item, source and state dict.

    Args:
        folder: Folder of the step.
        saved: Folder of each item of the step; empty for a step of one state.
        settings: Settings of the manager.
        state_dict: As given to `restore`.
        step: Number of the step.

    Raises:
        InvalidRequestError: The step does not consist of the items that the manager expects.
    """
    items = settings.named
    if not items and not saved:
        return [("", settings.items[""], folder, state_dict)]
    if not items or not saved:
        there = f"the items {', '.join(sorted(saved))}" if saved else "one state without items"
        named = ", ".join(f"{name!r}: Item()" for name in sorted(saved))
        way_out = f"make the manager with{f' items={{{named}}}' if saved else 'out items='}"
        raise InvalidRequestError(f"step {step} consists of {there}; {way_out}", step=step)
    unknown = sorted(map(str, state_dict.keys() - saved.keys()))
    if unknown or not state_dict:
        raise InvalidRequestError(
            f"step {step} has the items {', '.join(sorted(saved))}, but state_dict asks for "
            f"{', '.join(unknown) or 'none'}; ask for any of those that it has",
            step=step,
        )
    return [
        (name, items.get(name, Item()), place_below(folder, saved[name]), state_dict[name])
        for name in sorted(saved)
        if name in state_dict
    ]


MOST_LOOKS = 20
"""How often a step is chosen again because it was deleted before it was protected."""

logger = logging.getLogger(__name__)


def restore(
    actions: CollectiveActions,
    wanted: Wanted,
    state_dict: Mapping[str, Any],
    options: LoadOptions | None,
    progress: ShowProgress = False,
) -> RestoreReport:
    """Loads a step into a state dict, in place; see `CheckpointManager.restore`.

    Args:
        actions: Collective actions of this rank.
        wanted: The requested step.
        state_dict: Values to fill.
        options: Options of the load; those of the item if None.
        progress: As for `load`.
    """
    is_number = isinstance(wanted, int) and not isinstance(wanted, bool)
    if not is_number and wanted not in ("latest", "best", "auto"):
        raise InvalidRequestError(
            f"expected a step, 'latest', 'best' or 'auto', but found {wanted!r}", key="step"
        )
    with ExitStack() as leases:

        def decide(_: Sequence[Any]) -> list[tuple[int, str, dict[str, str]]]:
            return [
                (one.step, one.name, {} if one.info is None else dict(one.info.items))
                for one in _chosen(actions, wanted, leases)
            ]

        told = actions.agree(f"which step is {wanted!r}", decide)
        tries = {step: (name, saved) for step, name, saved in told}
        return _restored(actions, wanted, tries, state_dict, options, progress)


def _chosen(actions: CollectiveActions, wanted: Wanted, leases: ExitStack) -> list[StepFound]:
    """Returns the steps to try, after protecting the first one from deletion. Runs on rank 0."""
    root, settings = actions.root, actions.settings
    left = threading.Event()
    leases.callback(left.set)
    for _ in range(MOST_LOOKS):
        found = candidates(wanted, actions.writer.look(), settings.kept, root.url)
        first = found[0]
        lease = ReaderLease(root, first.step, lease_s=settings.lease_s)
        try:
            leases.enter_context(lease)
            if left.is_set():  # The caller has stopped waiting.
                leases.close()
            if lease.unsure:
                logger.warning("%s", lease.unsure)
        except StorageError as error:
            # Why not raised: a process with read-only access can load, without protection.
            logger.info("Step %d is read without a lease: %s", first.step, error)
            return found
        # Why again: the step may have been deleted before the lease was written.
        if look_at_step(root, first.name, first.step) is not None:
            return found
        lease.__exit__()
    raise StorageError(
        f"{root.url} was deleted from {MOST_LOOKS} times while a step was looked for: "
        f"who deletes there all the time? Try again when that is over",
        checkpoint_id=root.url,
    )


def _restored(
    actions: CollectiveActions,
    wanted: Wanted,
    tries: Mapping[int, Sequence[Any]],
    state_dict: Mapping[str, Any],
    options: LoadOptions | None,
    progress: ShowProgress,
) -> RestoreReport:
    """Loads the first step that can be loaded.

    Args:
        actions: As for `restore`.
        wanted: As for `restore`.
        tries: Steps to try, in order, each with its folder and the folders of its items.
        state_dict: As for `restore`.
        options: As for `restore`.
        progress: As for `restore`.
    """
    root = actions.root
    overwritten: defaultdict[str, set[str]] = defaultdict(set)
    check_options(options, LoadOptions)

    def load_one(step: int, is_late: bool = False) -> dict[str, LoadReport]:
        name, saved = tries[step]
        parts = targets_of(root.below(name), saved, actions.settings, state_dict, step)
        reports = {}
        try:
            for part, item, path, state in parts:
                chosen, planner = options or item.load_options, item.planner_for_load()
                with OperationLog("load", checkpoint_id=path, planner=planner) as log:
                    reports[part] = run_load(
                        decide_load(planner, None, path),
                        actions.session(),
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

    def steps_of(step: int, is_late: bool) -> Generator[Request, Reply, dict[str, LoadReport]]:
        yield from ()  # `load_one` makes its own requests.
        return load_one(step, is_late)

    skipped: list[tuple[int, CheckpointError]] = []
    if wanted == "auto":
        found, skipped = drive(first_that_loads(tries, steps_of), actions.session().call)
        if found is None:
            told = "; ".join(f"step {step}: {error.message}" for step, error in skipped)
            raise DamagedCheckpointError(
                f"expected a step that can be loaded, but none of {len(skipped)} step(s) in "
                f"{root.url} can be loaded: {told}. The state dict may hold parts of what was "
                f"tried. `ray-dcp verify` lists all the damage",
                checkpoint_id=root.url,
            )
        step, reports = found
    else:
        (step,) = tries
        reports = load_one(step)
    if skipped and actions.session().rank == 0:
        with actions.writer.lock:
            actions.writer.damaged.update(number for number, _ in skipped)
        for number, error in skipped:
            events.warn(
                f"Restored step {step} of {root.url} instead of the newer step {number}, "
                f"which can't be loaded: {error}. It neither counts for retention nor is it "
                f"deleted, and may be saved again; look at it with `ray-dcp verify`",
                stacklevel=4,
            )
    paths = tuple((root.below(tries[number][0]).url, error) for number, error in skipped)
    return RestoreReport(
        step=step,
        checkpoint_id=root.below(tries[step][0]).url,
        reports={
            part: replace(report, step=step, skipped=paths) for part, report in reports.items()
        },
        skipped=tuple(skipped),
    )

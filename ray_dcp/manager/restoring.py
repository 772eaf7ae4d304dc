"""Restores a step on all ranks: the one that is asked for, or the newest that can be loaded.

Rank 0 decides which steps are candidates; the `RestoreReport` has the one that was restored.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from ray_dcp.manager.settings import Item
from ray_dcp.options import LoadOptions
from ray_dcp.runtime.rank_load import drive, first_that_loads, with_time_to_join
from ray_dcp.saving import check_options
from ray_dcp.store.opening import place_below
from ray_dcp.torch_adapter.dispatch import decide_load
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.operation_log import OperationLog

Wanted = int | Literal["latest", "best", "auto"]
MOST_TRIED = 100
"""Steps that `auto` falls back over at most."""
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A step that is committed."""

    step: int
    checkpoint_id: str
    """Path or URL of its folder."""
    created_s: float
    """Seconds since 1970 by the clock of the rank that saved it; 0 for stock checkpoints."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's."""
    tags: frozenset[str] = frozenset()
    items: tuple[str, ...] = ()
    """Its named items; empty for a step of one state."""


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What `CheckpointManager.restore` did on this rank."""

    step: int
    """That was restored."""
    checkpoint_id: str
    """Path or URL of its folder."""
    reports: Mapping[str, LoadReport]
    """By item; under "" that of a step of one state."""
    skipped: tuple[tuple[int, CheckpointError], ...] = ()
    """Newer steps that `auto` could not load, newest first, each with why; equal on all ranks."""

    @property
    def report(self) -> LoadReport:
        """The report of a step of one state, or of the first item."""
        return next(iter(self.reports.values()))


def saved_step(found: StepFound, root_url: str, tags: frozenset[str]) -> SavedStep:
    """Returns what is known of a step."""
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
    """Returns the committed step with the best value of a metric; None where none has it.

    Args:
        catalogue: What is committed.
        retention: Whose `BestN` has the metric, when it is not given.
        metric: Name.
        mode: Which values are best; that of the retention's `BestN`, else "min".

    Raises:
        InvalidRequestError: It is not clear which metric is meant.
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
    """Returns the steps to try, the first choice first.

    Args:
        wanted: Which step.
        catalogue: What is committed.
        retention: Of the manager, for the best.
        url: Of the root.

    Raises:
        CheckpointNotFoundError: There is no such step.
        InvalidRequestError: It is not clear what is the best.
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
    folder: Target,
    saved: Mapping[str, str],
    items: Mapping[str, Item],
    unnamed: Item,
    state_dict: Mapping[str, Any],
    step: int,
) -> list[tuple[str, Item, Target, Any]]:
    """Returns what to load of a step: item, how, from where, into what.

    Args:
        folder: Of the step.
        saved: Folder of each item that the step has; empty for a step of one state.
        items: Of the manager.
        unnamed: How a step of one state is loaded.
        state_dict: As given to `restore`.
        step: Number of the step.

    Raises:
        InvalidRequestError: The step does not consist of what the manager expects.
    """
    if not items and not saved:
        return [("", unnamed, folder, state_dict)]
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
        (name, items.get(name, unnamed), place_below(folder, saved[name]), state_dict[name])
        for name in sorted(saved)
        if name in state_dict
    ]


MOST_LOOKS = 20

logger = logging.getLogger(__name__)


def restore(
    actions: CollectiveActions,
    wanted: Wanted,
    state_dict: Mapping[str, Any],
    options: LoadOptions | None,
) -> RestoreReport:
    """Loads a step into a state dict, in place; see `CheckpointManager.restore`.

    Args:
        actions: Of this rank.
        wanted: Which step.
        state_dict: What to fill.
        options: How; those of the item if None.
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
        return _restored(actions, wanted, tries, state_dict, options)


def _chosen(actions: CollectiveActions, wanted: Wanted, leases: ExitStack) -> list[StepFound]:
    """Returns the steps to try, on rank 0, after making sure that the first stays."""
    root, settings = actions.root, actions.settings
    left = threading.Event()
    leases.callback(left.set)
    for _ in range(MOST_LOOKS):
        found = candidates(wanted, actions.writer.look(), settings.kept, root.url)
        first = found[0]
        lease = ReaderLease(root, first.step, lease_s=settings.lease_s)
        try:
            leases.enter_context(lease)
            if left.is_set():  # nobody waits for the answer any more
                leases.close()
            if lease.unsure:
                logger.warning("%s", lease.unsure)
        except StorageError as error:
            # Why not raised: who may only read can still load; nothing keeps the step then.
            logger.info("Step %d is read without a lease: %s", first.step, error)
            return found
        # Why again: it may have been deleted before the lease was there.
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
) -> RestoreReport:
    """Loads the first of the steps, each with its folder and those of its items, that can be."""
    root, settings = actions.root, actions.settings
    overwritten: defaultdict[str, set[str]] = defaultdict(set)
    check_options(options, LoadOptions)

    def load_one(step: int, is_late: bool = False) -> dict[str, LoadReport]:
        name, saved = tries[step]
        folder = root.below(name)
        parts = targets_of(folder, saved, settings.named, settings.unnamed, state_dict, step)
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
                    )
        except CheckpointError as error:
            for part, report in reports.items():
                overwritten[part].update(report.loaded)
            error.step = step if error.step is None else error.step
            raise
        return reports

    def steps_of(step: int, is_late: bool) -> Generator[Request, Reply, dict[str, LoadReport]]:
        yield from ()  # each load makes its own requests
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
    _tell(actions, step, skipped)
    return RestoreReport(
        step=step,
        checkpoint_id=root.below(tries[step][0]).url,
        reports=reports,
        skipped=tuple(skipped),
    )


def _tell(
    actions: CollectiveActions, step: int, skipped: Sequence[tuple[int, CheckpointError]]
) -> None:
    """Warns of what was passed over, and lets it be saved again."""
    if not skipped or actions.session().rank != 0:
        return
    with actions.writer.lock:
        actions.writer.damaged.update(number for number, _ in skipped)
    for number, error in skipped:
        events.warn(
            f"Restored step {step} of {actions.root.url} instead of the newer step {number}, "
            f"which can't be loaded: {error}. It neither counts for retention nor is it "
            f"deleted, and may be saved again; look at it with `ray-dcp verify`",
            stacklevel=5,
        )

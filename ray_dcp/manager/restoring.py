"""Restores a step on all ranks: the one that is asked for, or the newest that can be loaded.

Rank 0 decides which steps are candidates; the `RestoreReport` says which one was restored.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist

from ray_dcp.entrypoints import load
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    MissingKeyError,
    StorageError,
)
from ray_dcp.manager.catalogue import Catalogue, Root, StepFound, look_at_step
from ray_dcp.manager.collective_actions import CollectiveActions
from ray_dcp.manager.leases import Lease
from ray_dcp.manager.retention import Mode, RetentionPolicy, best_of, rankings
from ray_dcp.manager.settings import Item, Settings
from ray_dcp.manager.writer import Writer
from ray_dcp.options import LoadOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.rank_load import falls_back
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.torch_adapter.load_report import LoadReport

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


def check_wanted(step: object) -> Wanted:
    """Returns which step is wanted.

    Raises:
        InvalidRequestError: It is no step and none of the words.
    """
    is_number = isinstance(step, int) and not isinstance(step, bool)
    if not is_number and step not in ("latest", "best", "auto"):
        raise InvalidRequestError(
            f"expected a step, 'latest', 'best' or 'auto', but found {step!r}", key="step"
        )
    return step  # type: ignore[return-value]


def best_step_of(
    catalogue: Catalogue,
    retention: RetentionPolicy | None,
    metric: str | None = None,
    mode: Mode | None = None,
) -> int | None:
    """Returns the committed step with the best value of a metric; None where none has it.

    Args:
        catalogue: What is committed.
        retention: Whose `BestN` says which metric is meant, when it is not given.
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
    found = f"steps {', '.join(there[-_SHOWN:])}{more}" if there else "no committed step"
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


def unread(skipped: Sequence[tuple[int, CheckpointError]], url: str) -> str:
    """Returns in words which steps could not be loaded."""
    told = "; ".join(f"step {step}: {error.message}" for step, error in skipped)
    return f"none of {len(skipped)} step(s) in {url} can be loaded: {told}"


MOST_LOOKS = 20

logger = logging.getLogger(__name__)


class Restoring:
    """One rank's part in a restore.

    Args:
        root: Where.
        settings: Of the manager.
        writer: What rank 0 looks with.
        together: What the ranks agree with.
        process_group: The ranks; the default group if None.
        no_dist: This process is alone.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        writer: Writer,
        together: CollectiveActions,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> None:
        self._root = root
        self._settings = settings
        self._writer = writer
        self._together = together
        self._group = process_group
        self._no_dist = no_dist

    def restore(
        self, wanted: Wanted, state_dict: Mapping[str, Any], options: LoadOptions | None
    ) -> RestoreReport:
        """Loads a step into a state dict, in place; see `CheckpointManager.restore`."""
        wanted = check_wanted(wanted)
        with ExitStack() as leases:

            def decide(_: Sequence[Any]) -> list[tuple[int, str, dict[str, str]]]:
                return [_told(one) for one in self._chosen(wanted, leases)]

            tries = self._together.agree(f"which step is {wanted!r}", decide)
            return self._first_that_loads(wanted, tries, state_dict, options)

    def _chosen(self, wanted: Wanted, leases: ExitStack) -> list[StepFound]:
        """Returns the steps to try, on rank 0, after making sure that the first stays."""
        left = threading.Event()
        leases.callback(left.set)
        for _ in range(MOST_LOOKS):
            catalogue = self._writer.look()
            found = candidates(wanted, catalogue, self._settings.retention, self._root.url)
            first = found[0]
            lease = Lease(self._root, first.step, open_storage, lease_s=self._settings.lease_s)
            try:
                leases.enter_context(lease)
                if left.is_set():  # nobody waits for the answer any more
                    leases.close()
            except StorageError as error:
                # Why not raised: who may only read can still load; nothing keeps the step then.
                logger.info("Step %d is read without a lease: %s", first.step, error)
                return found
            # Why again: it may have been deleted before the lease was there.
            if look_at_step(self._root, first.name, first.step, open_storage) is not None:
                return found
            lease.__exit__()
        raise StorageError(
            f"{self._root.url} was deleted from {MOST_LOOKS} times while a step was looked for: "
            f"who deletes there all the time? Try again when that is over",
            checkpoint_id=self._root.url,
        )

    def _first_that_loads(
        self,
        wanted: Wanted,
        tries: Sequence[tuple[int, str, Mapping[str, str]]],
        state_dict: Mapping[str, Any],
        options: LoadOptions | None,
    ) -> RestoreReport:
        skipped: list[tuple[int, CheckpointError]] = []
        for step, name, saved in tries:
            folder = self._root.below(name)
            try:
                reports = self._load(step, folder, saved, state_dict, options, bool(skipped))
            except CheckpointError as error:
                error.step = step if error.step is None else error.step
                if wanted != "auto" or not falls_back(error):
                    raise
                # Why once more: one read that failed is no proof of damage.
                try:
                    reports = self._load(step, folder, saved, state_dict, options, True)
                except CheckpointError as again:
                    again.step = step if again.step is None else again.step
                    if not falls_back(again):
                        raise
                    skipped.append((step, again))
                    continue
            self._check_replaced(reports, skipped)
            self._tell(step, skipped)
            return RestoreReport(
                step=step, checkpoint_id=folder.url, reports=reports, skipped=tuple(skipped)
            )
        raise DamagedCheckpointError(
            f"expected a step that can be loaded, but {unread(skipped, self._root.url)}. The state "
            f"dict may hold parts of what was tried. `ray-dcp verify` lists all the damage",
            checkpoint_id=self._root.url,
        )

    def _load(
        self,
        step: int,
        folder: Target,
        saved: Mapping[str, str],
        state_dict: Mapping[str, Any],
        options: LoadOptions | None,
        is_late: bool,
    ) -> dict[str, LoadReport]:
        settings = self._settings
        parts = targets_of(folder, saved, settings.items, settings.unnamed, state_dict, step)
        return {
            name: load(
                state,
                checkpoint_id=path,
                planner=item.planner_for_load(),
                process_group=self._group,
                no_dist=self._no_dist,
                options=_options(options, item, is_late),
            )
            for name, item, path, state in parts
        }

    def _check_replaced(
        self, reports: Mapping[str, LoadReport], skipped: Sequence[tuple[int, CheckpointError]]
    ) -> None:
        """Raises `MissingKeyError` when values may hold what a damaged step has put there."""
        left = [key for report in reports.values() for key in report.missing]
        if skipped and left:
            raise MissingKeyError(
                f"a newer step failed after it may have overwritten values that this one lacks, so "
                f"that strict=False can't leave them as they were: "
                f"{', '.join(map(repr, left))}. Make the state dict anew and restore the older "
                f"step into it",
                key=left[0],
            )

    def _tell(self, step: int, skipped: Sequence[tuple[int, CheckpointError]]) -> None:
        """Warns of what was passed over, and lets it be saved again."""
        if not skipped or self._together.session().rank != 0:
            return
        with self._writer.lock:
            self._writer.steps.damaged.update(number for number, _ in skipped)
        for number, error in skipped:
            warnings.warn(
                f"Restored step {step} of {self._root.url} instead of the newer step {number}, "
                f"which can't be loaded: {error}. It neither counts for retention nor is it "
                f"deleted, and may be saved again; look at it with `ray-dcp verify`",
                UserWarning,
                stacklevel=5,
            )


def _told(found: StepFound) -> tuple[int, str, dict[str, str]]:
    info = found.info
    return found.step, found.name, {} if info is None else dict(info.items)


def _options(options: LoadOptions | None, item: Item, is_late: bool) -> LoadOptions:
    chosen = options or item.load_options
    if not is_late:
        return chosen
    # Why: a rank that still reads what another found damaged joins the next one late.
    return replace(chosen, plan_timeout_s=chosen.plan_timeout_s + chosen.read_timeout_s)

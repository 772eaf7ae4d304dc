"""Which step is restored, decided on rank 0; and the report of a restore.

The loads themselves are in `manager`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.manager.catalogue import Catalogue, StepFound
from ray_dcp.manager.settings import Item
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.retention import Mode, RetentionPolicy, best_of, rankings
from ray_dcp.seam.report import LoadReport
from ray_dcp.store.opening import place_below

__all__ = [
    "RestoreReport",
    "SavedStep",
    "Wanted",
    "best_step_of",
    "candidates",
    "check_wanted",
    "saved_step",
    "targets_of",
]

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
    info = found.row.info
    return SavedStep(
        step=found.step,
        checkpoint_id=f"{root_url.rstrip('/')}/{found.name}",
        created_s=found.row.created_s,
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

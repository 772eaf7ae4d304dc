"""Which steps a restore tries, in which order, decided by rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import (
    CheckpointNotFoundError,
    InvalidRequestError,
)
from ray_dcp.job.part import check_no_part
from ray_dcp.manager.catalogue import Catalogue, StepFound
from ray_dcp.manager.retention import (
    Mode,
    Order,
    RetentionPolicy,
    StepFacts,
    Trust,
    age_in,
    best_of,
    rankings,
)
from ray_dcp.manager.settings import Item, Settings
from ray_dcp.store.opening import place_below

Wanted = int | Literal["latest", "best", "auto"]
MOST_TRIED = 100
"""Maximum number of steps that `auto` tries."""
_SHOWN = 8


def best_step_of(
    catalogue: Catalogue,
    retention: RetentionPolicy | None,
    metric: str | None = None,
    mode: Mode | None = None,
    order: Order = "increasing",
    facts: Sequence[StepFacts] | None = None,
) -> int | None:
    """Returns the committed step with the best value of a metric; None if no step has it.

    Args:
        catalogue: The committed steps.
        retention: Policy whose `BestN` gives the metric and the mode by default.
        metric: Name of the metric.
        mode: Whether the lowest or the highest value is the best; "min" if nothing gives it.
        order: What makes a step newer than others of the same value; see `age_in`.
        facts: The steps among which the best is found; all if None.

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
    some = catalogue.facts() if facts is None else facts
    best = best_of(sorted(some, key=age_in(order)), metric, mode or own_mode)
    return best[0].step if best else None


def candidates(
    wanted: Wanted, catalogue: Catalogue, settings: Settings, url: str, trust: Trust | None = None
) -> list[StepFound]:
    """Returns the steps to try, in order.

    Args:
        wanted: The requested step.
        catalogue: The committed steps.
        settings: Settings of the manager, which define the best and the newest step.
        url: Path or URL of the root.
        trust: Which steps are trusted; others are not chosen then.

    Raises:
        CheckpointNotFoundError: There is no such step.
        InvalidRequestError: The best step is not defined.
    """
    steps = catalogue.steps
    in_order = catalogue.oldest_first(settings.order)
    if trust is not None:
        in_order = catalogue.trusted(trust, settings.order)
    if wanted == "auto":
        chosen = in_order[: -MOST_TRIED - 1 : -1]
    elif wanted == "latest":
        chosen = in_order[-1:]
    elif wanted == "best":
        numbers = {one.step for one in in_order}
        facts = [one for one in catalogue.facts() if one.step in numbers]
        best = best_step_of(catalogue, settings.kept, order=settings.order, facts=facts)
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
    trusted = ""
    if trust is not None and there:
        trusted = f" that is trusted by {trust.rule!r}"
        found += ", without such a verdict: give one, or restore without trust="
    raise CheckpointNotFoundError(
        f"expected {what.get(str(wanted), f'step {wanted}')}{trusted} in {url}, found {found}",
        checkpoint_id=url,
        step=step,
        # Why: who restores may tell that there are steps, and none has the verdict.
        key="trust" if trusted else None,
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
        InvalidRequestError: The step does not consist of the items that the manager expects, or
            `state_dict` is no mapping of items.
    """
    items = settings.named
    if not items and (not saved or settings.parts_beside):
        return [("", settings.items[""], folder, state_dict)]
    if not items or not saved:
        there = f"the items {', '.join(sorted(saved))}" if saved else "one state without items"
        named = ", ".join(f"{name!r}: Item()" for name in sorted(saved))
        way_out = f"make the manager with{f' items={{{named}}}' if saved else 'out items='}"
        raise InvalidRequestError(f"step {step} consists of {there}; {way_out}", step=step)
    if not isinstance(state_dict, Mapping):
        raise InvalidRequestError(
            f"state_dict must be a dict with a state for each item to load, but is "
            f"{type(state_dict).__name__}",
            key="state_dict",
        )
    unknown = sorted(map(str, state_dict.keys() - saved.keys()))
    if unknown or not state_dict:
        raise InvalidRequestError(
            f"step {step} has the items {', '.join(sorted(saved))}, but state_dict asks for "
            f"{', '.join(unknown) or 'none'}; ask for any of those that it has",
            step=step,
        )
    for name, state in state_dict.items():
        way_out = "give the part in the place of the step: restore(part, state)"
        check_no_part(state, f"a state dict to fill as item {name!r}", way_out)
    return [
        (name, items.get(name, Item()), place_below(folder, saved[name]), state_dict[name])
        for name in sorted(saved)
        if name in state_dict
    ]


MOST_LOOKS = 20
"""How often a step is chosen again because it was deleted before it was protected."""

"""The settings of a `CheckpointManager`, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ray_dcp.core.checks import check_above_0, check_whole
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.format.names import STEP_NAME, StepNames
from ray_dcp.manager.leases import LEASE_S
from ray_dcp.manager.retention import LatestN, RetentionPolicy, check_retention
from ray_dcp.manager.save_policy import (
    AnyOf,
    EverySteps,
    OnPreemption,
    SavePolicy,
    check_save_policy,
    listens_for_preemption,
)
from ray_dcp.manager.steps import Order, check_item_name
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.torch_adapter.dispatch import check_plug_in


@dataclass(frozen=True, kw_only=True)
class Item:
    """How one named part of a step is saved and loaded.

    Raises:
        InvalidRequestError: A field has a value that it can't have.

    Examples:
        >>> Item(save_options=SaveOptions(num_threads=4)).load_options.verify
        'always'
    """

    save_options: SaveOptions = field(default_factory=SaveOptions)
    load_options: LoadOptions = field(default_factory=LoadOptions)
    save_planner: Callable[[], SavePlanner] | None = None
    """Makes the planner of each save, e.g. its class; DCP's default planner if None."""
    load_planner: Callable[[], LoadPlanner] | None = None
    """Makes the planner of each load."""

    def __post_init__(self) -> None:
        for name, kind in (("save_options", SaveOptions), ("load_options", LoadOptions)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidRequestError(
                    f"Item.{name} must be {kind.__name__}, but is {getattr(self, name)!r}", key=name
                )
        for name, planner in (("save_planner", SavePlanner), ("load_planner", LoadPlanner)):
            made = getattr(self, name)
            if isinstance(made, planner) or (made is not None and not callable(made)):
                raise InvalidRequestError(
                    f"Item.{name} must make a planner for each call, as the class "
                    f"{planner.__name__} or a function does, but is {made!r}",
                    key=name,
                )

    def planner_for_save(self) -> SavePlanner | None:
        """Returns a planner for one save."""
        planner = None if self.save_planner is None else self.save_planner()
        check_plug_in(planner, "planner", SavePlanner, LoadPlanner)
        return planner

    def planner_for_load(self) -> LoadPlanner | None:
        """Returns a planner for one load."""
        planner = None if self.load_planner is None else self.load_planner()
        check_plug_in(planner, "planner", LoadPlanner, SavePlanner)
        return planner


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a manager's constructor; see there.

    Attributes:
        policy: When to save; None: nothing is due by itself.
        kept: What to keep; None for all steps.
        names: Of step folders.
        named: Items by name; empty for a step of one unnamed state.
        unnamed: How a step of one unnamed state is saved and loaded.
        listens: SIGTERM counts as a preemption.

    Raises:
        InvalidRequestError: A field has a value that it can't have, or two contradict each other.
    """

    save_interval: int | None = None
    max_to_keep: int = 0
    max_pending_async: int = 1
    num_of_threads: int = 1
    chkpt_on_preemption: bool = True
    save_policy: SavePolicy | None = None
    retention: RetentionPolicy | None = None
    item: Item | None = None
    items: Mapping[str, Item] | None = None
    step_name: str = STEP_NAME
    also_read: tuple[str, ...] = ()
    order: Order = "increasing"
    read_only: bool = False
    takeover: bool = False
    sync_every: int = 1
    lease_s: float = LEASE_S
    on_failure: Callable[[int, CheckpointError], object] | None = None
    policy: SavePolicy | None = field(init=False)
    kept: RetentionPolicy | None = field(init=False)
    names: StepNames = field(init=False)
    named: Mapping[str, Item] = field(init=False)
    unnamed: Item = field(init=False)
    listens: bool = field(init=False)

    def __post_init__(self) -> None:
        for name, least in (
            ("max_to_keep", 0),
            ("max_pending_async", 1),
            ("num_of_threads", 1),
            ("sync_every", 1),
        ):
            check_whole(getattr(self, name), name, least)
        check_above_0(self.lease_s, "lease_s")
        if self.order not in get_args(Order):
            raise InvalidRequestError(
                f"order must be one of {', '.join(map(repr, get_args(Order)))}, but is "
                f"{self.order!r}",
                key="order",
            )
        named = _items(self.items, self.item)
        for name, found in (
            (
                "policy",
                _policy(
                    self.save_interval, self.save_policy, self.chkpt_on_preemption, self.read_only
                ),
            ),
            ("kept", _retention(self.max_to_keep, self.retention)),
            ("names", StepNames(self.step_name, self.also_read)),
            ("named", {name: self._tuned(one, len(named)) for name, one in named.items()}),
            ("unnamed", self._tuned(self.item or Item(), len(named))),
            ("listens", self.chkpt_on_preemption and not self.read_only),
        ):
            object.__setattr__(self, name, found)

    def _tuned(self, item: Item, num_items: int) -> Item:
        options = replace(item.save_options, max_pending=self.max_pending_async * max(1, num_items))
        if self.num_of_threads > 1:
            options = replace(options, num_threads=self.num_of_threads)
        return replace(item, save_options=options)


def _policy(
    interval: int | None, policy: SavePolicy | None, preemption: bool, read_only: bool
) -> SavePolicy | None:
    if read_only:
        if interval is not None or policy is not None:
            raise InvalidRequestError(
                "read_only managers save nothing; leave save_interval and save_policy out",
                key="read_only",
            )
        return None
    if interval is not None and policy is not None:
        raise InvalidRequestError(
            "expected save_interval, as CheckpointManager(path, 1000), or save_policy=, found "
            "both; EverySteps(n) is the policy of an interval of n",
            key="save_interval",
        )
    if policy is not None and not preemption and listens_for_preemption(policy):
        raise InvalidRequestError(
            "save_policy waits for a preemption, but chkpt_on_preemption is False: it would never "
            "hear of one. Leave chkpt_on_preemption at True",
            key="chkpt_on_preemption",
        )
    if interval is not None:
        check_whole(interval, "save_interval", 1)
    chosen = EverySteps(interval or 1) if policy is None else check_save_policy(policy)
    return AnyOf(chosen, OnPreemption()) if preemption else chosen


def _retention(max_to_keep: int, retention: RetentionPolicy | None) -> RetentionPolicy | None:
    if max_to_keep and retention is not None:
        raise InvalidRequestError(
            f"max_to_keep={max_to_keep} and retention= both decide what to keep; write "
            f"retention=LatestN({max_to_keep}) | … instead",
            key="max_to_keep",
        )
    if retention is not None:
        return check_retention(retention)
    return LatestN(max_to_keep) if max_to_keep else None


def _items(items: Mapping[str, Item] | None, item: Item | None) -> dict[str, Item]:
    if items is None:
        if item is not None and not isinstance(item, Item):
            raise InvalidRequestError(f"item must be an Item, but is {item!r}", key="item")
        return {}
    if item is not None:
        raise InvalidRequestError(
            "give item= for steps of one state, or items= for steps of several, not both",
            key="items",
        )
    if not isinstance(items, Mapping) or not items:
        raise InvalidRequestError(
            f"items must name at least one part, as {{'model': Item(), 'data': Item()}}, but is "
            f"{items!r}",
            key="items",
        )
    for name, one in items.items():
        check_item_name(name)
        if not isinstance(one, Item):
            raise InvalidRequestError(f"items[{name!r}] must be an Item, but is {one!r}", key=name)
    return dict(sorted(items.items()))


def states_of(items: Mapping[str, Item], state_dict: Any) -> dict[str, Any]:
    """Returns the states of a step by item; under "" the one of a step without named items.

    Args:
        items: Of the manager.
        state_dict: As given to `save`.

    Raises:
        InvalidRequestError: It is not a dict of all items.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidRequestError(
            f"state_dict must be a dict of what to save, but is {type(state_dict).__name__}",
            key="state_dict",
        )
    if not items:
        return {"": state_dict}
    missing, unknown = items.keys() - state_dict.keys(), state_dict.keys() - items.keys()
    if missing or unknown:
        raise InvalidRequestError(
            f"this manager saves the items {', '.join(items)}: state_dict must have a state for "
            f"each of them, but lacks {sorted(missing)} and has also {sorted(map(str, unknown))}",
            key="state_dict",
        )
    return {name: state_dict[name] for name in items}

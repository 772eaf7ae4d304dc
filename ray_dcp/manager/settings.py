"""The settings of a `CheckpointManager`, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.format.names import StepNames
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

    Example:
        >>> Item(save_options=SaveOptions(container="safetensors")).load_options.verify
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
    """All that a manager is told when it is made."""

    policy: SavePolicy | None
    """None: nothing is due by itself."""
    retention: RetentionPolicy | None
    names: StepNames
    order: Order
    items: Mapping[str, Item]
    """Empty for a step of one unnamed state, which is saved as `unnamed` says."""
    unnamed: Item
    preemption: bool
    read_only: bool
    takeover: bool
    sync_every: int
    lease_s: float
    on_failure: Callable[[int, CheckpointError], object] | None


def make_settings(
    *,
    save_interval: int | None,
    max_to_keep: int,
    max_pending_async: int,
    num_of_threads: int,
    chkpt_on_preemption: bool,
    save_policy: SavePolicy | None,
    retention: RetentionPolicy | None,
    items: Mapping[str, Item] | None,
    item: Item | None,
    step_name: str,
    also_read: tuple[str, ...],
    order: Order,
    read_only: bool,
    takeover: bool,
    sync_every: int,
    lease_s: float,
    on_failure: Callable[[int, CheckpointError], object] | None,
) -> Settings:
    """Returns what a manager is made of.

    Raises:
        InvalidRequestError: An argument has a value that it can't have, or two contradict each
            other.
    """
    for name, number, least in (
        ("max_to_keep", max_to_keep, 0),
        ("max_pending_async", max_pending_async, 1),
        ("num_of_threads", num_of_threads, 1),
        ("sync_every", sync_every, 1),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InvalidRequestError(
                f"{name} must be a whole number from {least}, but is {number!r}", key=name
            )
    if isinstance(lease_s, bool) or not isinstance(lease_s, (int, float)) or not lease_s > 0:
        raise InvalidRequestError(
            f"lease_s must be a number of seconds above 0, but is {lease_s!r}", key="lease_s"
        )
    if order not in get_args(Order):
        raise InvalidRequestError(
            f"order must be one of {', '.join(map(repr, get_args(Order)))}, but is {order!r}",
            key="order",
        )
    named = _items(items, item)
    pending = max_pending_async * max(1, len(named))
    tune = _tuned(pending, num_of_threads)
    return Settings(
        policy=_policy(save_interval, save_policy, chkpt_on_preemption, read_only),
        retention=_retention(max_to_keep, retention),
        names=StepNames(step_name, also_read),
        order=order,
        items={name: tune(one) for name, one in named.items()},
        unnamed=tune(item or Item()),
        preemption=chkpt_on_preemption and not read_only,
        read_only=read_only,
        takeover=takeover,
        sync_every=sync_every,
        lease_s=float(lease_s),
        on_failure=on_failure,
    )


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
    if (interval is None) == (policy is None):
        found = "neither" if interval is None else "both"
        raise InvalidRequestError(
            f"expected save_interval, as CheckpointManager(path, 1000), or save_policy=, found "
            f"{found}; EverySteps(n) is the policy of an interval of n",
            key="save_interval",
        )
    if policy is not None and not preemption and listens_for_preemption(policy):
        raise InvalidRequestError(
            "save_policy waits for a preemption, but chkpt_on_preemption is False: it would never "
            "hear of one. Leave chkpt_on_preemption at True",
            key="chkpt_on_preemption",
        )
    if interval is not None and (
        isinstance(interval, bool) or not isinstance(interval, int) or interval < 1
    ):
        raise InvalidRequestError(
            f"save_interval must be a whole number of steps above 0, but is {interval!r}",
            key="save_interval",
        )
    chosen = EverySteps(interval) if interval is not None else check_save_policy(policy)
    return AnyOf(chosen, OnPreemption()) if preemption else chosen


def _retention(max_to_keep: int, retention: RetentionPolicy | None) -> RetentionPolicy | None:
    if max_to_keep and retention is not None:
        raise InvalidRequestError(
            f"max_to_keep={max_to_keep} and retention= both say what to keep; write "
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


def _tuned(max_pending: int, num_threads: int) -> Callable[[Item], Item]:
    def tune(item: Item) -> Item:
        options = replace(item.save_options, max_pending=max_pending)
        if num_threads > 1:
            options = replace(options, num_threads=num_threads)
        return replace(item, save_options=options)

    return tune


def state_of(items: Mapping[str, Item], state_dict: Any) -> dict[str, Any]:
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

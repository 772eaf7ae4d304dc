"""The settings of a `CheckpointManager`, checked when it is created."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ray_dcp.core import bounds
from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.names import StepNames
from ray_dcp.job.part import check_no_part
from ray_dcp.manager.retention import (
    LatestN,
    Order,
    RetentionPolicy,
    Trust,
    TrustRule,
    check_retention,
)
from ray_dcp.manager.save_policies import (
    AnyOf,
    EverySteps,
    OnPreemption,
    SavePolicy,
    check_save_policy,
    listens_for_preemption,
)
from ray_dcp.options import LoadOptions, SaveOptions, check_above_0, check_whole, set_checked
from ray_dcp.place.step_items import ITEM
from ray_dcp.torch_adapter.dispatch import check_plug_in

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Item:
    """How one item of a step is saved and loaded.

    Raises:
        InvalidRequestError: A field has an invalid value.

    Examples:
        >>> Item(save_options=SaveOptions(num_threads=4)).load_options.verify
        'always'
    """

    save_options: SaveOptions = field(default_factory=SaveOptions)
    load_options: LoadOptions = field(default_factory=LoadOptions)
    save_planner: Callable[[], SavePlanner] | None = None
    """Creates the planner of each save, e.g. its class; DCP's default planner if None."""
    load_planner: Callable[[], LoadPlanner] | None = None
    """Creates the planner of each load."""

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
        return _make_planner(self.save_planner, SavePlanner, LoadPlanner)

    def planner_for_load(self) -> LoadPlanner | None:
        """Returns a planner for one load."""
        return _make_planner(self.load_planner, LoadPlanner, SavePlanner)


def _make_planner(make: Callable[[], T] | None, expected: type, other: type) -> T | None:
    planner = None if make is None else make()
    check_plug_in(planner, "planner", expected, other)
    return planner


@dataclass(frozen=True, kw_only=True)
class WaysOut:
    """What errors of a run's writer name as ways out: those that its user has.

    `{run}`, `{step}` and `{before}` stand for the run, a step, and the step before.
    """

    save_over: str = "give replace=True to save over it, atomically; or delete({step}) first"
    """How a step that is committed is saved again."""
    go_back: str = "rewind({before}) deletes those after it"
    """How the run goes on from an earlier step."""
    await_save: str = "join()"
    """What waits for a step that is being saved."""
    maker: str = "CheckpointManager"
    """What has `takeover`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings by which a manager acts; see `CheckpointManager` for their meaning.

    Raises:
        InvalidRequestError: A field has an invalid value.
    """

    policy: SavePolicy | None = None
    """When a step is due; with None, no step is."""
    kept: RetentionPolicy | None = None
    """Which steps are kept; None keeps all."""
    names: StepNames = field(default_factory=StepNames)
    """Names of step folders."""
    items: Mapping[str, Item] = field(default_factory=lambda: {"": Item()})
    """The items of a step by name; "" is the only item of a step of one state."""
    order: Order = "increasing"
    takeover: bool = False
    sync_every: int = 1
    lease_s: float = bounds.LEASE_S
    trust: Trust | None = None
    """Which steps are trusted; None if nothing is known of that."""
    parts_beside: bool = False
    """Whether the items of a step are parts beside a state of its own, and no states themselves."""
    ways_out: WaysOut = WaysOut()

    def __post_init__(self) -> None:
        set_checked(
            self,
            sync_every=check_whole(self.sync_every, "sync_every", 1),
            lease_s=check_above_0(self.lease_s, "lease_s"),
        )
        if self.order not in get_args(Order):
            raise InvalidRequestError(
                f"order must be one of {', '.join(map(repr, get_args(Order)))}, but is "
                f"{self.order!r}",
                key="order",
            )

    @property
    def named(self) -> Mapping[str, Item]:
        """The items if a step has named ones; otherwise empty."""
        return {} if "" in self.items else self.items

    @property
    def options(self) -> SaveOptions:
        """Options of the first item; their timeouts apply to what the ranks decide together."""
        return next(iter(self.items.values())).save_options


def save_policy_of(
    interval: int | None, policy: SavePolicy | None, *, preemption: bool, read_only: bool
) -> SavePolicy | None:
    """Returns the save policy of a manager; None if it is read-only.

    Args:
        interval: `CheckpointManager(save_interval=...)`.
        policy: `CheckpointManager(save_policy=...)`.
        preemption: Whether a preemption makes a step due.
        read_only: Whether the manager saves nothing.

    Raises:
        InvalidRequestError: An argument is invalid, or two contradict each other.
    """
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
        interval = check_whole(interval, "save_interval", 1)
    chosen = EverySteps(interval or 1) if policy is None else check_save_policy(policy)
    return AnyOf(chosen, OnPreemption()) if preemption else chosen


def retention_of(max_to_keep: int, retention: RetentionPolicy | None) -> RetentionPolicy | None:
    """Returns the retention policy of a manager; None if it keeps all steps.

    Args:
        max_to_keep: Number of newest steps to keep; 0 keeps all.
        retention: A policy instead of that.

    Raises:
        InvalidRequestError: An argument is invalid, or both are given.
    """
    max_to_keep = check_whole(max_to_keep, "max_to_keep")
    if max_to_keep and retention is not None:
        raise InvalidRequestError(
            f"max_to_keep={max_to_keep} and retention= both decide what to keep; write "
            f"retention=LatestN({max_to_keep}) | … instead",
            key="max_to_keep",
        )
    if retention is not None:
        return check_retention(retention)
    return LatestN(max_to_keep) if max_to_keep else None


def trust_of(trust: TrustRule | None, hold_s: float | None) -> Trust | None:
    """Returns which steps a manager trusts; None if that is not given.

    Args:
        trust: `CheckpointManager(trust=...)`.
        hold_s: `CheckpointManager(hold_s=...)`.

    Raises:
        InvalidRequestError: An argument is invalid, or there is no verdict to wait for.
    """
    if trust is not None:
        return Trust(trust, hold_s)
    if hold_s is not None:
        raise InvalidRequestError(
            "hold_s keeps a step until it has a verdict, so that it needs trust=, as 'eval_ok'",
            key="hold_s",
        )
    return None


def items_of(
    items: Mapping[str, Item] | None, item: Item | None, max_pending: int, num_threads: int
) -> dict[str, Item]:
    """Returns the items of a step by name, in order; "" is the only one of a step of one state.

    Args:
        items: `CheckpointManager(items=...)`.
        item: `CheckpointManager(item=...)`.
        max_pending: Maximum number of steps that are being saved.
        num_threads: Number of threads that write; 1 leaves it to the options of the item.

    Raises:
        InvalidRequestError: An argument is invalid, or both `items` and `item` are given.
    """
    max_pending = check_whole(max_pending, "max_pending_async", 1)
    num_threads = check_whole(num_threads, "num_of_threads", 1)
    if items is not None and item is not None:
        raise InvalidRequestError(
            "give item= for steps of one state, or items= for steps of several, not both",
            key="items",
        )
    named: Any = {"": Item() if item is None else item} if items is None else items
    if not isinstance(named, Mapping) or not named:
        raise InvalidRequestError(
            f"items must name at least one part, as {{'model': Item(), 'data': Item()}}, but is "
            f"{items!r}",
            key="items",
        )
    for name, one in named.items():
        what = "item" if items is None else f"items[{check_item_name(name)!r}]"
        if not isinstance(one, Item):
            raise InvalidRequestError(f"{what} must be an Item, but is {one!r}", key=name or what)
    tuned: dict[str, Any] = {"max_pending": max_pending * len(named)}
    if num_threads > 1:
        tuned["num_threads"] = num_threads
    return {
        name: replace(one, save_options=replace(one.save_options, **tuned))
        for name, one in sorted(named.items())
    }


def check_item_name(name: object) -> str:
    """Returns the name of an item after checking that it can name a folder.

    Raises:
        InvalidRequestError: The name is invalid.
    """
    if not isinstance(name, str) or ITEM.fullmatch(name) is None:
        raise InvalidRequestError(
            f"the name of an item must be 1 to 64 letters, digits, '_' or '-', as 'model', but is "
            f"{name!r}",
            key="items",
        )
    return name


def states_of(items: Mapping[str, Item], state_dict: Any) -> dict[str, Any]:
    """Returns the states of a step by item, after checking that there is one for each item.

    Args:
        items: The items of the manager; see `Settings.items`.
        state_dict: As given to `save`.

    Raises:
        InvalidRequestError: `state_dict` is not a mapping, or its keys are not those of the items.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidRequestError(
            f"state_dict must be a dict of what to save, but is {type(state_dict).__name__}",
            key="state_dict",
        )
    if "" in items:
        return {"": state_dict}
    for name, state in state_dict.items():
        way_out = "parts that other processes save are committed by JobCheckpoints"
        check_no_part(state, f"a state dict as item {name!r}", way_out)
    missing, unknown = items.keys() - state_dict.keys(), state_dict.keys() - items.keys()
    if missing or unknown:
        raise InvalidRequestError(
            f"this manager saves the items {', '.join(items)}: state_dict must have a state for "
            f"each of them, but lacks {sorted(missing)} and has also {sorted(map(str, unknown))}",
            key="state_dict",
        )
    return {name: state_dict[name] for name in items}

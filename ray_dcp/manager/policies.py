"""Policies: when a `CheckpointManager` saves, and which steps it keeps.

Policies of one kind combine by `|`, `&` and `~`. A policy is a pure function of facts: save
policies of `SaveFacts`, which rank 0 collects for all ranks, and retention policies of the
`StepFacts` of all committed steps. None reads a clock or the storage.

`superfluous` returns the steps that may be deleted. Whatever the policy decides, these never
include the newest step, a tagged step, or a step that the caller protects.

**Unreadable metrics.** A step whose info can't be read is kept, whatever the policy. It must not
cause other steps to be deleted either: `superfluous` keeps every other step that the policy keeps
without the unreadable one, with it as the best, or with it as the worst.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.options import check_above_0, check_whole, set_checked

MOST_PROBED = 1_000_000
"""Largest number of steps that are tried to find out whether a policy is ever due."""


class _Combination:
    """A policy that consists of other policies, its parts.

    Args:
        *policies: The parts; at least one.

    Raises:
        InvalidRequestError: There are no parts, or a part is not a policy of this kind.
    """

    def __init__(self, *policies: Any) -> None:
        if not policies:
            raise InvalidRequestError(f"{type(self).__name__} needs at least one policy")
        self.policies = tuple(self._checked(policy) for policy in policies)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"

    @staticmethod
    def _checked(policy: object) -> Any:
        """Returns a part after checking that it is a policy of this kind."""
        raise NotImplementedError


def parts_of(policy: Any) -> list[Any]:
    """Returns a policy and all policies that it consists of, at any depth.

    Args:
        policy: Built-in, or a user's.
    """
    return [policy, *(p for part in getattr(policy, "policies", ()) for p in parts_of(part))]


# --- when to save -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SaveFacts:
    """The facts by which a save policy decides; the same on all ranks."""

    step: int
    """The step that has just been trained."""
    last_step: int | None = None
    """Newest step that is committed or in progress; None if there is none."""
    since_save_s: float = 0.0
    """Seconds since the last save was started, or since the manager was created, by the monotonic
    clock of rank 0."""
    preempted: bool = False
    """Whether a rank was notified that its machine is being taken away, and no save was started
    since."""
    saving: bool = False
    """Whether a save is in progress, or its cost is still being measured."""
    cost_s: float | None = None
    """Seconds of training that a save costs (see `SaveCosts`); None before the first."""
    durable_s: float = 0.0
    """Seconds from the start of the last save to its commit."""
    failures: int = 0
    """Number of writers of this run that ended without closing their manager."""
    ran_s: float = 0.0
    """Seconds that the writers of this run trained: the current writer until now, each earlier one
    until the last step that it committed."""


@runtime_checkable
class SavePolicy(Protocol):
    """Decides whether a step is saved. Must be a pure function of the facts.

    A policy whose attribute `only_steps` is True uses `SaveFacts.step` alone. Ranks then need no
    communication for steps that are not due.

    Examples:
        >>> class Primes:
        ...     only_steps = True
        ...
        ...     def due(self, facts):
        ...         return facts.step in (2, 3, 5, 7)
        >>> isinstance(Primes(), SavePolicy)
        True
    """

    def due(self, facts: SaveFacts) -> bool:
        """Returns whether the step is due."""
        ...


class _SavePolicy:
    """Base of the built-in save policies."""

    def __or__(self, other: object) -> AnyOf:
        return AnyOf(self, other)

    def __and__(self, other: object) -> AllOf:
        return AllOf(self, other)

    def __invert__(self) -> Not:
        return Not(self)


@dataclass(frozen=True)
class EverySteps(_SavePolicy):
    """Is due at every multiple of `interval`, including step 0, as in torch_xla.

    Raises:
        InvalidRequestError: The interval is not a positive integer.

    Examples:
        >>> EverySteps(100).due(SaveFacts(step=300))
        True
    """

    interval: int

    only_steps = True

    def __post_init__(self) -> None:
        set_checked(self, interval=check_whole(self.interval, "EverySteps.interval", 1))

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return facts.step % self.interval == 0


@dataclass(frozen=True)
class EveryMinutes(_SavePolicy):
    """Is due when this many minutes have passed since the last save was started.

    Raises:
        InvalidRequestError: `minutes` is not a positive number.

    Examples:
        >>> EveryMinutes(10).due(SaveFacts(step=7, since_save_s=601.0))
        True
    """

    minutes: float

    only_steps = False

    def __post_init__(self) -> None:
        set_checked(self, minutes=check_above_0(self.minutes, "EveryMinutes.minutes"))

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return facts.since_save_s >= 60.0 * self.minutes


PRIOR_MTBF_S = 6 * 3600.0
"""Mean time between failures that is assumed for a run without failures; has the weight of one.

*Why this value*: Llama 3 had 419 failures in 54 days on 16,384 devices, one every 3 hours (The
Llama 3 Herd of Models, 2024, section 3.3.4). Fewer devices fail less often, and an interval that is
too short costs less than one that is too long.
"""


@dataclass(frozen=True)
class EveryOptimal(_SavePolicy):
    """Is due at the interval that loses the least training time to saves and failures.

    The interval balances the measured cost of a save (the call, and slower steps until the commit)
    against the work since the last save, which a failure loses. The first save is made at once, to
    measure its cost. No save is due while another one is in progress.

    Args:
        mtbf_hours: Mean time between failures of the job. If None, it is estimated from the run:
            training time divided by the number of failures, with a prior of one failure in 6
            hours. A process that ends without `CheckpointManager.close` counts as a failure.
        least_s: Shortest interval, in seconds.
        most_s: Longest interval, in seconds.

    Raises:
        InvalidRequestError: An argument is not a positive number, or `least_s` exceeds `most_s`.

    Examples:
        >>> policy = EveryOptimal(mtbf_hours=4)
        >>> facts = SaveFacts(step=7, since_save_s=300.0, cost_s=2.0, durable_s=20.0)
        >>> policy.due(facts), round(policy.interval_s(facts))
        (True, 241)
        >>> policy.describe(facts)
        'a save each 241 s, which costs 2 s, and a failure each 4 h: 1.8 % of training time is lost'

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974;
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006,
    equation 37.
    """

    mtbf_hours: float | None = None
    least_s: float | None = None
    most_s: float | None = None

    only_steps = False

    def __post_init__(self) -> None:
        for name in ("mtbf_hours", "least_s", "most_s"):
            if (value := getattr(self, name)) is not None:
                set_checked(self, **{name: check_above_0(value, f"EveryOptimal.{name}")})
        if (self.least_s or 0.0) > (self.most_s or math.inf):
            raise InvalidRequestError(
                f"EveryOptimal.least_s must be at most most_s, {self.most_s:g}, but is "
                f"{self.least_s:g}; leave one of them out",
                key="least_s",
            )

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return not facts.saving and 0.0 < facts.since_save_s >= self.interval_s(facts)

    def mtbf_s(self, facts: SaveFacts) -> float:
        """Returns the mean time between failures, given or estimated, in seconds."""
        if self.mtbf_hours is not None:
            return 3600.0 * self.mtbf_hours
        return (PRIOR_MTBF_S + facts.ran_s) / (1 + facts.failures)

    def interval_s(self, facts: SaveFacts) -> float:
        """Returns the interval between the starts of two saves, in seconds."""
        best_s = 0.0
        if facts.cost_s is not None:
            mtbf_s = self.mtbf_s(facts)
            ratio = math.sqrt(facts.cost_s / (2.0 * mtbf_s))
            # Daly's interval excludes the save itself.
            best_s = 2.0 * mtbf_s * ratio * (1.0 + ratio / 3.0 + ratio**2 / 9.0)
            if ratio >= 1.0:
                best_s = mtbf_s + facts.cost_s
        return min(max(best_s, self.least_s or 0.0), self.most_s or math.inf)

    def expected_loss(self, facts: SaveFacts) -> float:
        """Returns the share of training time that saves and repeated work cost.

        A first-order estimate without the duration of restarts; 0 before the first measurement.
        """
        if facts.cost_s is None:
            return 0.0
        interval_s = max(self.interval_s(facts), facts.cost_s)
        again_s = interval_s / 2.0 + facts.durable_s
        return min(1.0, facts.cost_s / interval_s + again_s / self.mtbf_s(facts))

    def describe(self, facts: SaveFacts) -> str:
        """Returns a sentence with the interval, its inputs and the expected loss.

        Args:
            facts: From `CheckpointManager.save_facts`.
        """
        if facts.cost_s is None:
            return "no save was measured yet"
        return (
            f"a save each {self.interval_s(facts):.3g} s, which costs {facts.cost_s:.3g} s, and a "
            f"failure each {self.mtbf_s(facts) / 3600.0:.3g} h: "
            f"{100.0 * self.expected_loss(facts):.2g} % of training time is lost"
        )


class SaveCosts:
    """Measures the cost of saves by the times at which steps are reported.

    The cost of a save is the additional duration of the steps during which it was started, in
    progress or committed, compared with the same number of other steps: the stall of the call and
    the slowdown together.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, float] | None = None
        self._is_saving = False
        self._step_s: deque[float] = deque(maxlen=64)
        self._during = 0, 0.0
        self._costs_s: deque[float] = deque(maxlen=5)

    @property
    def is_measuring(self) -> bool:
        """Whether no step without a save has passed since the last save."""
        return self._during[0] > 0

    @property
    def cost_s(self) -> float | None:
        """Seconds of training that a save costs: median of the last 5; None before the first.

        At least 1 % of a step, because steps vary by that much.
        """
        if not self._costs_s:
            return None
        return max(median(self._costs_s), median(self._step_s) / 100.0)

    def asked(self, step: int, now_s: float, *, saving: bool) -> None:
        """Records that a step was trained. Further calls for the same step have no effect.

        Args:
            step: Number of the step.
            now_s: Monotonic time, in seconds.
            saving: Whether a save is in progress.
        """
        last, last_s = self._asked or (step, now_s)
        if step == last and self._asked is not None:
            return
        if step > last:
            num_steps, during_s = self._during
            if self._is_saving:
                self._during = num_steps + step - last, during_s + now_s - last_s
            else:
                self._step_s.append((now_s - last_s) / (step - last))
                if num_steps:
                    self._costs_s.append(during_s - num_steps * median(self._step_s))
                    self._during = 0, 0.0
        self._asked, self._is_saving = (step, now_s), saving

    def began(self) -> None:
        """Records the start of a save."""
        self._is_saving = True


class AtSteps(_SavePolicy):
    """Is due at the given steps.

    Args:
        *steps: At least one step.

    Raises:
        InvalidRequestError: There is no step, or a step is not an integer.

    Examples:
        >>> policy = AtSteps(1, 10) | EverySteps(100)
        >>> [step for step in range(201) if policy.due(SaveFacts(step=step))]
        [0, 1, 10, 100, 200]
    """

    only_steps = True

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise InvalidRequestError("AtSteps needs at least one step, as AtSteps(1, 10, 100)")
        self.steps = frozenset(check_whole(step, "AtSteps.steps") for step in steps)

    def __repr__(self) -> str:
        return f"AtSteps({', '.join(map(str, sorted(self.steps)))})"

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return facts.step in self.steps


@dataclass(frozen=True)
class OnPreemption(_SavePolicy):
    """Is due once after a rank was notified that its machine is being taken away.

    Examples:
        >>> (EverySteps(100) | OnPreemption()).due(SaveFacts(step=7, preempted=True))
        True
    """

    only_steps = False

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return facts.preempted


class _SaveCombination(_Combination, _SavePolicy):
    """A save policy that consists of others; see `_Combination`."""

    @property
    def only_steps(self) -> bool:
        """Whether every part uses the step alone."""
        return all(asks_only_the_step(policy) for policy in self.policies)

    @staticmethod
    def _checked(policy: object) -> SavePolicy:
        if not isinstance(policy, SavePolicy):
            raise InvalidRequestError(
                f"a save policy must have a method due(facts), as EverySteps(100) | OnPreemption() "
                f"has, but is {policy!r}; retention policies go to retention=",
                key="save_policy",
            )
        return policy


class AnyOf(_SaveCombination):
    """Is due when at least one of the policies is; `a | b`."""

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return any(policy.due(facts) for policy in self.policies)


class AllOf(_SaveCombination):
    """Is due when all of the policies are; `a & b`.

    Examples:
        >>> (EverySteps(10) & EveryMinutes(5)).due(SaveFacts(step=10, since_save_s=1.0))
        False
    """

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return all(policy.due(facts) for policy in self.policies)


class Not(_SaveCombination):
    """Is due when none of the policies is; `~a`.

    Examples:
        >>> (EverySteps(10) & ~AtSteps(0)).due(SaveFacts(step=0))
        False
    """

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return not any(policy.due(facts) for policy in self.policies)


def asks_only_the_step(policy: SavePolicy) -> bool:
    """Returns whether a policy, built-in or a user's, uses the step alone."""
    return bool(getattr(policy, "only_steps", False))


def listens_for_preemption(policy: SavePolicy) -> bool:
    """Returns whether a policy is or contains `OnPreemption`."""
    return any(isinstance(part, OnPreemption) for part in parts_of(policy))


def check_save_policy(policy: object) -> SavePolicy:
    """Returns a policy after checking that it is one, and that its parts can be due together.

    Args:
        policy: Built-in, or a user's.

    Raises:
        InvalidRequestError: It is not a save policy, or its parts are never due at the same step.

    Complexity:
        O(least common multiple of the intervals), at most `MOST_PROBED`.

    Examples:
        >>> check_save_policy(EverySteps(10) & AtSteps(15))
        Traceback (most recent call last):
        ...
        ray_dcp.errors.InvalidRequestError: no step is ever due by \
AllOf(EverySteps(interval=10), AtSteps(15)): its parts contradict each other. Combine \
alternatives with | instead of & [key save_policy]
    """
    checked = _SaveCombination._checked(policy)
    if not _is_ever_due(checked):
        raise InvalidRequestError(
            f"no step is ever due by {policy!r}: its parts contradict each other. Combine "
            f"alternatives with | instead of &",
            key="save_policy",
        )
    return checked


def _is_ever_due(policy: SavePolicy) -> bool:
    """Returns False if a policy of built-in parts that use the step alone is never due.

    Steps are tried in order: beyond the last named step, the intervals repeat.
    """
    parts = parts_of(policy)
    if not all(isinstance(part, EverySteps | AtSteps | _SaveCombination) for part in parts):
        return True
    period = math.lcm(*(part.interval for part in parts if isinstance(part, EverySteps)))
    last = max((max(part.steps) for part in parts if isinstance(part, AtSteps)), default=0)
    if last + period > MOST_PROBED:
        return True  # There are too many steps to try.
    return any(policy.due(SaveFacts(step=step)) for step in range(last + period + 1))


# --- what to keep --------------------------------------------------------------------------------


Mode = Literal["min", "max"]
Order = Literal["increasing", "any"]
"""Whether the steps of a run are saved in the order of their numbers, or in any order."""


def age_in(order: Order) -> Callable[[Any], tuple[float, int]]:
    """Returns the key that sorts steps, or facts of steps, oldest first.

    That is the number where steps are saved in increasing order, and otherwise when they were
    saved: of a run that began anew beside higher steps, the lower ones are the newer ones.

    Examples:
        >>> steps = [StepFacts(step=1, order_s=2.0), StepFacts(step=9, order_s=1.0)]
        >>> [facts.step for facts in sorted(steps, key=age_in("any"))]
        [9, 1]
    """

    def age(one: Any) -> tuple[float, int]:
        return (one.order_s if order == "any" else 0.0, one.step)

    return age


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The facts of one committed step by which a retention policy decides."""

    step: int
    created_s: float = 0.0
    """Time of the save by the clock of rank 0, in seconds since the epoch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    order_s: float = 0.0
    """Place of the save among those of the run: `created_s`, but where a clock was set back."""


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides which steps are kept. Must be a pure function of the facts.

    If the metrics of a step can't be read, the policy is also called with each of its metrics as
    -inf, and as inf.

    Examples:
        >>> class FirstTen:
        ...     def keeps(self, steps):
        ...         return [facts.step <= 10 for facts in steps]
        >>> isinstance(FirstTen(), RetentionPolicy)
        True
    """

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """Returns for each step whether it is kept; the oldest step comes first.

        Oldest is the lowest, or of a manager with `order="any"`, what was saved first.
        """
        ...


class _RetentionPolicy:
    """Base of the built-in retention policies."""

    def __or__(self, other: object) -> KeepAnyOf:
        return KeepAnyOf(self, other)

    def __and__(self, other: object) -> KeepAllOf:
        return KeepAllOf(self, other)

    def __invert__(self) -> KeepNot:
        return KeepNot(self)


@dataclass(frozen=True)
class LatestN(_RetentionPolicy):
    """Keeps the `n` newest steps.

    Raises:
        InvalidRequestError: `n` is not a positive integer.

    Examples:
        >>> LatestN(1).keeps([StepFacts(step=1), StepFacts(step=2)])
        [False, True]
    """

    n: int

    def __post_init__(self) -> None:
        set_checked(self, n=check_whole(self.n, "LatestN.n", 1))

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [index >= len(steps) - self.n for index in range(len(steps))]


@dataclass(frozen=True)
class BestN(_RetentionPolicy):
    """Keeps the `n` steps with the best values of a metric; of equal values, the newer steps.

    Steps without the metric, or with NaN, are not kept by this policy. A manager with this policy
    requires the metric at every save; `metrics={"loss": None}` states that a step has none.

    Raises:
        InvalidRequestError: `n` is not a positive integer, or the mode is invalid.

    Examples:
        >>> steps = [StepFacts(step=s, metrics={"loss": x}) for s, x in ((1, 0.5), (2, 0.9))]
        >>> BestN(1, "loss").keeps(steps), BestN(1, "loss", mode="max").keeps(steps)
        ([True, False], [False, True])
    """

    n: int
    metric: str
    mode: Mode = "min"
    """Whether the lowest or the highest values are the best."""
    later: bool = field(default=False, repr=False)
    """Whether the metric is recorded after the save, as with `ray_dcp.follow`, so that `save` need
    not give it. Steps are kept until they have it."""

    def __post_init__(self) -> None:
        set_checked(self, n=check_whole(self.n, "BestN.n", 1))
        if not isinstance(self.metric, str) or not self.metric:
            raise InvalidRequestError(
                f"BestN.metric must be the name of a metric, but is {self.metric!r}", key="metric"
            )
        if self.mode not in get_args(Mode):
            raise InvalidRequestError(
                f"BestN.mode must be 'min' or 'max', but is {self.mode!r}", key="mode"
            )

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        kept = {facts.step for facts in best_of(steps, self.metric, self.mode)[: self.n]}
        return [facts.step in kept for facts in steps]


@dataclass(frozen=True)
class KeepEverySteps(_RetentionPolicy):
    """Keeps every multiple of `interval`.

    Raises:
        InvalidRequestError: The interval is not a positive integer.

    Examples:
        >>> policy = LatestN(1) | KeepEverySteps(1000)
        >>> policy.keeps([StepFacts(step=step) for step in (900, 1000, 1100, 1200)])
        [False, True, False, True]
    """

    interval: int

    def __post_init__(self) -> None:
        set_checked(self, interval=check_whole(self.interval, "KeepEverySteps.interval", 1))

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [facts.step % self.interval == 0 for facts in steps]


@dataclass(frozen=True)
class KeepEveryHours(_RetentionPolicy):
    """Keeps the first step, and each step saved at least `hours` after the last one kept.

    Raises:
        InvalidRequestError: `hours` is not a positive number.

    Examples:
        >>> times = [StepFacts(step=s, created_s=1800.0 * s) for s in range(5)]
        >>> KeepEveryHours(1).keeps(times)
        [True, False, True, False, True]
    """

    hours: float

    def __post_init__(self) -> None:
        set_checked(self, hours=check_above_0(self.hours, "KeepEveryHours.hours"))

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        kept: list[bool] = []
        last_s = -math.inf
        for facts in steps:
            # Why abs: after a clock was set back, later steps must still be kept.
            kept.append(abs(facts.created_s - last_s) >= 3600.0 * self.hours)
            if kept[-1]:
                last_s = facts.created_s
        return kept


class _RetentionCombination(_Combination, _RetentionPolicy):
    """A retention policy that consists of others; see `_Combination`."""

    @staticmethod
    def _checked(policy: object) -> RetentionPolicy:
        return check_retention(policy)

    def _answers_of_parts(self, steps: Sequence[StepFacts]) -> Iterator[tuple[bool, ...]]:
        """Yields the answers of all parts, step by step."""
        return zip(*(answers_of(policy, steps) for policy in self.policies), strict=True)


class KeepAnyOf(_RetentionCombination):
    """Keeps the steps that at least one of the policies keeps; `a | b`."""

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [any(each) for each in self._answers_of_parts(steps)]


class KeepAllOf(_RetentionCombination):
    """Keeps the steps that all of the policies keep; `a & b`."""

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [all(each) for each in self._answers_of_parts(steps)]


class KeepNot(_RetentionCombination):
    """Keeps the steps that none of the policies keeps; `~a`."""

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [not any(each) for each in self._answers_of_parts(steps)]


def superfluous(
    steps: Iterable[StepFacts],
    policy: RetentionPolicy | None,
    *,
    protected: Collection[int] = (),
    unknown: Sequence[StepFacts] = (),
    order: Order = "increasing",
) -> tuple[int, ...]:
    """Returns the steps that may be deleted, oldest first.

    The newest step, tagged steps and protected steps are never included.

    Args:
        steps: All committed steps that can be loaded, in any order.
        policy: Which steps are kept; None keeps all.
        protected: Steps that are needed for another reason.
        unknown: Committed steps whose metrics can't be read.
        order: What makes a step the newest; see `age_in`.

    Raises:
        InvalidRequestError: The policy does not return one answer for each step.
        CheckpointError: The policy raised an error.

    Examples:
        >>> steps = [StepFacts(step=s, metrics={"loss": float(s)}) for s in (1, 2, 3)]
        >>> superfluous(steps, BestN(1, "loss"))
        (2,)
    """
    age = age_in(order)
    known = sorted(steps, key=age)
    waits = {ranking.metric for ranking in rankings(policy) if ranking.later}
    # Why unknown: a step that is not evaluated yet must neither go nor make others go.
    unknown = [*unknown, *(facts for facts in known if waits - facts.metrics.keys())]
    known = [facts for facts in known if waits <= facts.metrics.keys()]
    if policy is None or not known:
        return ()
    kept = {known[-1].step, *protected, *_kept_steps(policy, known)}
    for value in (-math.inf, math.inf) if unknown else ():
        guess = {name: value for facts in known for name in facts.metrics}
        guesses = [replace(one, metrics=guess) for one in unknown]
        kept |= _kept_steps(policy, sorted([*known, *guesses], key=age))
    return tuple(facts.step for facts in known if facts.step not in kept and not facts.tags)


def newest_whole(steps: Sequence[tuple[int, str]], whole: Mapping[int, str]) -> int | None:
    """Returns the newest step that is known to be whole; None if there is none.

    Args:
        steps: The committed steps that were not found damaged, with their attempts, oldest first.
        whole: Attempts of the steps whose bytes this process knows: it loaded or saved them.

    Examples:
        >>> newest_whole([(1, "a"), (2, "b"), (3, "c")], {1: "a", 2: "b", 3: "other", 4: "d"})
        2
    """
    known = [step for step, attempt in steps if whole.get(step) == attempt]
    return known[-1] if known else None


def best_of(steps: Iterable[StepFacts], metric: str, mode: Mode) -> list[StepFacts]:
    """Returns the steps that have a metric, best first; of equal values, the newer steps first.

    Args:
        steps: Oldest first.
        metric: Name of the metric.
        mode: Whether the lowest or the highest values are the best.
    """
    sign = 1.0 if mode == "min" else -1.0
    # Why without NaN: it compares with nothing, so that a NaN could end up at any place.
    having = [s for s in steps if metric in s.metrics and not math.isnan(s.metrics[metric])]
    having.reverse()  # Sorting keeps the order of equal values.
    return sorted(having, key=lambda facts: sign * facts.metrics[metric])


def rankings(policy: RetentionPolicy | None) -> tuple[BestN, ...]:
    """Returns the `BestN` policies that a policy, built-in or a user's, is or contains."""
    return tuple(part for part in parts_of(policy) if isinstance(part, BestN))


def check_retention(policy: object) -> RetentionPolicy:
    """Returns a policy, built-in or a user's, after checking that it is a retention policy.

    Raises:
        InvalidRequestError: It is not.
    """
    if not isinstance(policy, RetentionPolicy):
        raise InvalidRequestError(
            f"retention must have a method keeps(steps), as LatestN(3) | BestN(1, 'loss') has, but "
            f"is {policy!r}; save policies go to save_policy=",
            key="retention",
        )
    return policy


def beyond_floats(name: str) -> InvalidRequestError:
    """Returns the error of a metric that no float can hold."""
    return InvalidRequestError(
        f"the metric {name!r} must be a number that a float can hold, but is beyond "
        f"{sys.float_info.max:.3g}; give its logarithm",
        key=name,
    )


def check_metrics(
    metrics: Mapping[str, Any] | None, policy: RetentionPolicy | None
) -> dict[str, float]:
    """Returns the metrics of a step as numbers.

    Args:
        metrics: Numbers by name, or values that `float` accepts, such as a tensor of one element.
            None states that the step has no such metric; it is left out.
        policy: Policy whose `BestN` metrics are required.

    Raises:
        InvalidRequestError: `metrics` is no mapping; a metric is not a number; or one that the
            policy ranks by is missing. NaN ranks below every number: a training that diverged goes
            on saving.

    Examples:
        >>> check_metrics({"loss": 1}, BestN(2, "loss"))
        {'loss': 1.0}
        >>> check_metrics({"loss": None}, BestN(2, "loss"))
        {}
        >>> check_metrics({}, BestN(2, "loss"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ray_dcp.errors.InvalidRequestError: BestN(n=2, metric='loss', mode='min') ranks by ...
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise InvalidRequestError(
            f"metrics must be a dict of names to numbers, but is {metrics!r}", key="metrics"
        )
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(
                f"metrics must have texts as names, but one is {name!r}", key="metrics"
            )
        if value is None:
            continue
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"the metric {name!r} must be a number, but is {value!r}", key=name
            ) from error
        except OverflowError as error:
            raise beyond_floats(name) from error
    for ranking in (one for one in rankings(policy) if not one.later):
        if ranking.metric not in (metrics or {}):
            raise InvalidRequestError(
                f"{ranking!r} ranks by {ranking.metric!r}, which is missing (there are: "
                f"{', '.join(sorted(found)) or 'none'}). Give "
                f"save(..., metrics={{{ranking.metric!r}: value}}), or use a retention without it",
                key=ranking.metric,
            )
    return found


def answers_of(policy: RetentionPolicy, steps: Sequence[StepFacts]) -> list[bool]:
    """Returns the answers of a policy, one for each step.

    Raises:
        InvalidRequestError: The policy does not return one answer for each step.
        CheckpointError: The policy raised an error.
    """
    try:
        answers = [bool(kept) for kept in policy.keeps(steps)]
    except CheckpointError:
        raise
    except Exception as error:
        # Why: the save is committed by now, and a policy that failed must not delete anything.
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise CheckpointError(
            f"expected {policy!r} to decide which of {len(steps)} steps to keep, but it raised "
            f"{type(error).__name__}: {error} ({where.filename}:{where.lineno}). No step is "
            f"removed until it answers; mend its keeps()"
        ) from error
    if len(answers) != len(steps):
        raise InvalidRequestError(
            f"{policy!r} must decide of each of {len(steps)} steps whether to keep it, but gave "
            f"{len(answers)} answers",
            key="retention",
        )
    return answers


def _kept_steps(policy: RetentionPolicy, steps: Sequence[StepFacts]) -> set[int]:
    answers = zip(steps, answers_of(policy, steps), strict=True)
    return {facts.step for facts, is_kept in answers if is_kept}

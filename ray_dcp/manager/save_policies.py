"""Save policies: when a `CheckpointManager` saves.

They combine by `|`, `&` and `~`. A policy is a pure function of `SaveFacts`, which rank 0 collects
for all ranks. None reads a clock or the storage.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Protocol, runtime_checkable

from ray_dcp.errors import InvalidRequestError
from ray_dcp.manager.policies import Combination, parts_of
from ray_dcp.options import check_above_0, check_whole, plain_integer, set_checked

End = float | datetime
"""Seconds since the epoch, or a datetime with a time zone."""
MOST_PROBED = 1_000_000
"""Largest number of steps that are tried to find out whether a policy is ever due."""


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
    left_s: float | None = None
    """Seconds until the end of the allocation, by the clock of rank 0; None if no `BeforeEnd` knows
    it. Below 0 after it."""
    unsaved_s: float = 0.0
    """Seconds since the last save was started that has not failed, or since the manager was
    created."""
    step_s: float = 0.0
    """Duration of the longest of the last steps without a save, in seconds; 0 if unknown."""


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
    def step_s(self) -> float:
        """Duration of the longest of the last steps without a save, in seconds; 0 if unknown."""
        return max(self._step_s, default=0.0)

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


SAVE_MARGIN = 1.25
"""A save is expected to take at most this many times as long as the last one."""


@dataclass(frozen=True)
class BeforeEnd(_SavePolicy):
    """Is due before the allocation of the job ends: while two saves still fit, and while one does.

        left_s   |------ 2 saves ------|------ 1 save ------|  end
                 ^ due                 ^ due again

    So much is lost at the end as is trained within one save; the first one is there if the second
    one fails, or takes longer than was measured. A save that was started in between counts. Rank
    0's clock decides, at each step or, with `sync_every`, at its multiples.

    Args:
        end: When the allocation ends: seconds since the epoch, or a datetime with a time zone; or a
            function that returns one of them or None, which rank 0 calls at each decision. By
            default the environment's `SLURM_JOB_END_TIME`, as rank 0 has it, and the deadline of a
            node of a rank that Ray drains. Of several ends, the earliest counts.
        least_s: How long a save takes at least, in seconds; also the length before one was
            measured.

    Raises:
        InvalidRequestError: `end` is not such a time, or `least_s` is not a positive number.

    Examples:
        >>> policy = EveryMinutes(30) | BeforeEnd(least_s=60)
        >>> [policy.due(SaveFacts(step=7, left_s=left, unsaved_s=600)) for left in (150, 119)]
        [False, True]
        >>> policy.due(SaveFacts(step=8, left_s=100, unsaved_s=19))
        False
        >>> policy.due(SaveFacts(step=9, left_s=59, unsaved_s=60))
        True
    """

    end: End | Callable[[], End | None] | None = None
    least_s: float = 60.0

    only_steps = False

    def __post_init__(self) -> None:
        set_checked(self, least_s=check_above_0(self.least_s, "BeforeEnd.least_s"))
        if self.end is not None and not callable(self.end):
            seconds_of(self.end)

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        if facts.left_s is None:
            return False
        save_s = self.save_s(facts)
        # Why the step: the next decision is after it.
        points = (2 * save_s + facts.step_s, save_s + facts.step_s)
        return any(0.0 <= point - facts.left_s < facts.unsaved_s for point in points)

    def save_s(self, facts: SaveFacts) -> float:
        """Returns how long a save is expected to take, in seconds."""
        return max(self.least_s, SAVE_MARGIN * max(facts.durable_s, facts.cost_s or 0.0))


def seconds_of(end: object) -> float:
    """Returns a time in seconds since the epoch.

    Args:
        end: Seconds since the epoch, or a datetime with a time zone.

    Raises:
        InvalidRequestError: It is neither.
    """
    if isinstance(end, datetime) and end.tzinfo is not None:
        return end.timestamp()
    end = plain_integer(end)
    if isinstance(end, datetime | bool) or not isinstance(end, int | float):
        raise InvalidRequestError(
            f"BeforeEnd.end must be seconds since the epoch, a datetime with a time zone, or a "
            f"function that returns one of them, but is {end!r}",
            key="end",
        )
    if not math.isfinite(end):
        raise InvalidRequestError(f"BeforeEnd.end must be finite, but is {end!r}", key="end")
    return float(end)


def ends_of(policy: SavePolicy | None) -> tuple[BeforeEnd, ...]:
    """Returns the `BeforeEnd` policies that a policy, built-in or a user's, is or contains."""
    return tuple(part for part in parts_of(policy) if isinstance(part, BeforeEnd))


class _SaveCombination(Combination, _SavePolicy):
    """A save policy that consists of others; see `Combination`."""

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

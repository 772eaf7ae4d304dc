"""When a `CheckpointManager` saves: small policies over plain facts, combined with `|`, `&`, `~`.

A policy looks at no clock and at no signal: what it may know is in `SaveFacts`, which one rank
collects for all. `retention` has the policies for what is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Protocol, runtime_checkable

from ray_dcp.core.checks import check_above_0, check_whole
from ray_dcp.errors import InvalidRequestError

MOST_PROBED = 1_000_000
"""Steps that are tried to find out whether a policy is ever due."""


@dataclass(frozen=True, kw_only=True)
class SaveFacts:
    """What a save policy may look at; the same on all ranks."""

    step: int
    """The step that has just been trained."""
    last_step: int | None = None
    """Newest step of which a save was begun or is committed; None for none."""
    since_save_s: float = 0.0
    """Seconds since the last save was begun, or since the manager was made, by rank 0's
    monotonic clock."""
    preempted: bool = False
    """Some rank was notified that its machine is taken away, and no save was begun since."""
    saving: bool = False
    """A save is under way, or what it cost is still being measured."""
    cost_s: float | None = None
    """Seconds of training that a save costs, see `SaveCosts`; None before one was measured."""
    durable_s: float = 0.0
    """Seconds from the begin of the last save to its commit."""
    failures: int = 0
    """How often the writer of this run ended without closing its manager."""
    ran_s: float = 0.0
    """Seconds that the writers of this run trained: this one, and each before it until the last
    step that it committed."""


@runtime_checkable
class SavePolicy(Protocol):
    """Tells whether a step is to be saved. Must be a pure function of the facts.

    One that has an attribute `only_steps`, and it is True, looks at the step alone: then ranks
    need not ask each other before every step that is not due.

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
        """Tells whether to save now."""
        ...


class _Combines:
    """Gives policies `|`, `&` and `~`."""

    def __or__(self, other: SavePolicy) -> AnyOf:
        return AnyOf(self, other)  # type: ignore[arg-type]

    def __and__(self, other: SavePolicy) -> AllOf:
        return AllOf(self, other)  # type: ignore[arg-type]

    def __invert__(self) -> Not:
        return Not(self)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EverySteps(_Combines):
    """Due at every step that `interval` divides; step 0 counts, as in torch_xla.

    Raises:
        InvalidRequestError: The interval is no whole number above 0.

    Examples:
        >>> EverySteps(100).due(SaveFacts(step=300))
        True
    """

    interval: int

    only_steps = True

    def __post_init__(self) -> None:
        check_whole(self.interval, "EverySteps.interval", 1)

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return facts.step % self.interval == 0


@dataclass(frozen=True)
class EveryMinutes(_Combines):
    """Due when as many minutes have passed since the last save was begun.

    Raises:
        InvalidRequestError: The minutes are no number above 0.

    Examples:
        >>> EveryMinutes(10).due(SaveFacts(step=7, since_save_s=601.0))
        True
    """

    minutes: float

    only_steps = False

    def __post_init__(self) -> None:
        check_above_0(self.minutes, "EveryMinutes.minutes")

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return facts.since_save_s >= 60.0 * self.minutes


PRIOR_MTBF_S = 6 * 3600.0
"""Mean time between failures before a run has had any: it counts as one failure in that time.

Llama 3 (The Llama 3 Herd of Models, 2024, section 3.3.4) had 419 in 54 days on 16,384 devices, one
in 3 hours; on fewer devices there are fewer, and too short an interval costs less than too long.
"""


@dataclass(frozen=True)
class EveryOptimal(_Combines):
    """Due at the interval that loses least training time to saves and to failures.

    The interval balances what a save costs (measured: the call, and slower steps while it is under
    way) against the work since the last save, which a failure loses. A first save is made at once,
    to measure it. No save begins while another one is under way.

    Args:
        mtbf_hours: Mean time between failures of the job. If None it is learned: the time that the
            run was trained over its failures, beside one failure in 6 hours. A process that ends
            without `CheckpointManager.close` has failed.
        least_s: Shortest interval, in seconds.
        most_s: Longest interval, in seconds.

    Raises:
        InvalidRequestError: One is no number above 0, or `least_s` is above `most_s`.

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
            if getattr(self, name) is not None:
                check_above_0(getattr(self, name), f"EveryOptimal.{name}")
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
        """Returns the mean time between failures, given or learned, in seconds."""
        if self.mtbf_hours is not None:
            return 3600.0 * self.mtbf_hours
        return (PRIOR_MTBF_S + facts.ran_s) / (1 + facts.failures)

    def interval_s(self, facts: SaveFacts) -> float:
        """Returns the interval from the begin of a save to that of the next one, in seconds."""
        best_s = 0.0
        if facts.cost_s is not None:
            mtbf_s = self.mtbf_s(facts)
            ratio = math.sqrt(facts.cost_s / (2.0 * mtbf_s))
            # Daly's interval is that between saves, without the save itself.
            best_s = 2.0 * mtbf_s * ratio * (1.0 + ratio / 3.0 + ratio**2 / 9.0)
            if ratio >= 1.0:
                best_s = mtbf_s + facts.cost_s
        return min(max(best_s, self.least_s or 0.0), self.most_s or math.inf)

    def expected_loss(self, facts: SaveFacts) -> float:
        """Returns the share of training time that is lost to saves and to work done again.

        To first order, and without the time that a restart takes; 0 before a save was measured.
        """
        if facts.cost_s is None:
            return 0.0
        interval_s = max(self.interval_s(facts), facts.cost_s)
        again_s = interval_s / 2.0 + facts.durable_s
        return min(1.0, facts.cost_s / interval_s + again_s / self.mtbf_s(facts))

    def describe(self, facts: SaveFacts) -> str:
        """Returns the interval, why it is that, and what is lost, in words.

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
    """Measures what saves cost training, by when a policy is asked about steps.

    The cost of a save is how much longer the steps took in which it was begun, under way or
    committed than as many others: the call's stall and the slowdown together.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, float] | None = None
        self._is_saving = False
        self._step_s: deque[float] = deque(maxlen=64)
        self._during = 0, 0.0
        self._costs_s: deque[float] = deque(maxlen=5)

    @property
    def is_measuring(self) -> bool:
        """Whether no step without a save has passed since one."""
        return self._during[0] > 0

    @property
    def cost_s(self) -> float | None:
        """Seconds of training that a save costs: the median of 5; None before the first.

        At least a hundredth of a step, as less can't be distinguished from the noise of steps.
        """
        if not self._costs_s:
            return None
        return max(median(self._costs_s), median(self._step_s) / 100.0)

    def asked(self, step: int, now_s: float, *, saving: bool) -> None:
        """Notes that a step was trained.

        Args:
            step: Whose number counts once, however often it is asked about.
            now_s: Seconds that only go forward.
            saving: A save is under way.
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
        """Notes that a save begins."""
        self._is_saving = True


class AtSteps(_Combines):
    """Due at these steps.

    Args:
        *steps: At least one.

    Raises:
        InvalidRequestError: There is none, or one is no whole number.

    Examples:
        >>> policy = AtSteps(1, 10) | EverySteps(100)
        >>> [step for step in range(201) if policy.due(SaveFacts(step=step))]
        [0, 1, 10, 100, 200]
    """

    only_steps = True

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise InvalidRequestError("AtSteps needs at least one step, as AtSteps(1, 10, 100)")
        for step in steps:
            check_whole(step, "AtSteps.steps")
        self.steps = frozenset(steps)

    def __repr__(self) -> str:
        return f"AtSteps({', '.join(map(str, sorted(self.steps)))})"

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return facts.step in self.steps


@dataclass(frozen=True)
class OnPreemption(_Combines):
    """Due once after some rank was notified that its machine is taken away.

    Examples:
        >>> (EverySteps(100) | OnPreemption()).due(SaveFacts(step=7, preempted=True))
        True
    """

    only_steps = False

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return facts.preempted


class _Composed(_Combines):
    """A policy made of others."""

    def __init__(self, *policies: SavePolicy) -> None:
        if not policies:
            raise InvalidRequestError(f"{type(self).__name__} needs at least one policy")
        for policy in policies:
            if not isinstance(policy, SavePolicy):
                raise InvalidRequestError(
                    f"{type(self).__name__} takes save policies, objects with a method "
                    f"due(facts), but found {policy!r}; retention policies go to retention=",
                    key="save_policy",
                )
        self.policies = policies

    @property
    def only_steps(self) -> bool:
        """Whether all of them look at the step alone."""
        return all(asks_only_the_step(policy) for policy in self.policies)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"


class AnyOf(_Composed):
    """Due when one of the policies is; `a | b`.

    Args:
        *policies: At least one.

    Raises:
        InvalidRequestError: There is none, or one is no save policy.
    """

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return any(policy.due(facts) for policy in self.policies)


class AllOf(_Composed):
    """Due when all of the policies are; `a & b`.

    Args:
        *policies: At least one.

    Raises:
        InvalidRequestError: There is none, or one is no save policy.

    Examples:
        >>> (EverySteps(10) & EveryMinutes(5)).due(SaveFacts(step=10, since_save_s=1.0))
        False
    """

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return all(policy.due(facts) for policy in self.policies)


class Not(_Composed):
    """Due when the policy is not; `~a`.

    Args:
        policy: Of which the contrary is meant.

    Raises:
        InvalidRequestError: It is no save policy.

    Examples:
        >>> (EverySteps(10) & ~AtSteps(0)).due(SaveFacts(step=0))
        False
    """

    def __init__(self, policy: SavePolicy) -> None:
        super().__init__(policy)

    def due(self, facts: SaveFacts) -> bool:
        """See `SavePolicy`."""
        return not self.policies[0].due(facts)


def asks_only_the_step(policy: SavePolicy) -> bool:
    """Tells whether a policy looks at the step alone.

    Args:
        policy: Also one of the user's.
    """
    return bool(getattr(policy, "only_steps", False))


def listens_for_preemption(policy: SavePolicy) -> bool:
    """Tells whether a policy is, or is made of, one that waits for a preemption.

    Args:
        policy: Also one of the user's.
    """
    return any(isinstance(part, OnPreemption) for part in _parts(policy))


def check_save_policy(policy: object) -> SavePolicy:
    """Returns a policy after checking that it is one, and that its parts don't rule each other out.

    Args:
        policy: Built in or the user's.

    Raises:
        InvalidRequestError: It is none; or made of parts of which no step is ever due.

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
    if not isinstance(policy, SavePolicy):
        raise InvalidRequestError(
            f"save_policy must have a method due(facts), as EverySteps(100) | OnPreemption() has, "
            f"but is {policy!r}",
            key="save_policy",
        )
    if asks_only_the_step(policy) and _is_known(policy) and not _is_ever_due(policy):
        raise InvalidRequestError(
            f"no step is ever due by {policy!r}: its parts contradict each other. Combine "
            f"alternatives with | instead of &",
            key="save_policy",
        )
    return policy


def _parts(policy: SavePolicy) -> Iterator[SavePolicy]:
    yield policy
    for part in getattr(policy, "policies", ()):
        yield from _parts(part)


def _is_known(policy: SavePolicy) -> bool:
    kinds = (EverySteps, AtSteps, AnyOf, AllOf, Not)
    return all(isinstance(part, kinds) for part in _parts(policy))


def _is_ever_due(policy: SavePolicy) -> bool:
    """Tells it by trying: beyond the last named step, the intervals repeat themselves."""
    named = [step for part in _parts(policy) if isinstance(part, AtSteps) for step in part.steps]
    period = math.lcm(*(p.interval for p in _parts(policy) if isinstance(p, EverySteps)))
    last = max(named, default=0)
    if last + period > MOST_PROBED:
        return True  # too many to try: not refused
    return any(policy.due(SaveFacts(step=step)) for step in range(last + period + 1))

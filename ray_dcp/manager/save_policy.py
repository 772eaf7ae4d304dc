"""When a `CheckpointManager` saves: small policies over plain facts, combined with `|`, `&`, `~`.

A policy looks at no clock and at no signal: what it may know is in `SaveFacts`, which one rank
collects for all. `retention` has the policies for what is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
    """Some rank was told that its machine is taken away, and no save was begun since."""


@runtime_checkable
class SavePolicy(Protocol):
    """Tells whether a step is to be saved. Must be a pure function of the facts.

    One that has an attribute `only_steps`, and it is True, looks at the step alone: then ranks
    need not ask each other before every step that is not due.

    Example:
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

    Example:
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

    Example:
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


class AtSteps(_Combines):
    """Due at these steps.

    Args:
        *steps: At least one.

    Raises:
        InvalidRequestError: There is none, or one is no whole number.

    Example:
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
    """Due once after some rank was told that its machine is taken away.

    Example:
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

    Example:
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

    Example:
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

    Example:
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

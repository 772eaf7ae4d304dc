"""What a `CheckpointManager` keeps: small policies over the committed steps, with `|`, `&`, `~`.

A policy reads no clock and no storage. Whatever it decides, `superfluous` never includes the
newest step, one that carries a tag, or one that a caller protects.

**What is not known.** Where what was told of a step can't be read, no policy decides about it: it
stays. Nor may it make others go: those stay that the policy keeps without it, or with it as the
best, or with it as the worst. `superfluous` alone decides that, for every policy.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from ray_dcp.core.checks import check_above_0, check_whole
from ray_dcp.errors import CheckpointError, InvalidRequestError

Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What a retention policy may look at of one committed step."""

    step: int
    created_s: float = 0.0
    """Seconds since 1970 by the clock of the rank that saved it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()


@runtime_checkable
class RetentionPolicy(Protocol):
    """Tells which steps to keep. Must be a pure function of the facts.

    While the metrics of a step can't be read, it is also asked with each of them as -inf and inf.

    Examples:
        >>> class FirstTen:
        ...     def keeps(self, steps):
        ...         return [facts.step <= 10 for facts in steps]
        >>> isinstance(FirstTen(), RetentionPolicy)
        True
    """

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """Tells for each step whether to keep it; `steps` go up."""
        ...


class _Combines:
    """Gives policies `|`, `&` and `~`."""

    def __or__(self, other: RetentionPolicy) -> KeepAnyOf:
        return KeepAnyOf(self, other)  # type: ignore[arg-type]

    def __and__(self, other: RetentionPolicy) -> KeepAllOf:
        return KeepAllOf(self, other)  # type: ignore[arg-type]

    def __invert__(self) -> KeepNot:
        return KeepNot(self)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LatestN(_Combines):
    """Keeps the `n` newest steps.

    Raises:
        InvalidRequestError: `n` is no whole number above 0.

    Examples:
        >>> LatestN(1).keeps([StepFacts(step=1), StepFacts(step=2)])
        [False, True]
    """

    n: int

    def __post_init__(self) -> None:
        check_whole(self.n, "LatestN.n", 1)

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [index >= len(steps) - self.n for index in range(len(steps))]


@dataclass(frozen=True)
class BestN(_Combines):
    """Keeps the `n` steps with the best value of a metric; of equal ones the newer.

    A step without that metric is not kept by it. Every save must then give the metric.

    Raises:
        InvalidRequestError: `n` is no whole number above 0, or the mode is none.

    Examples:
        >>> steps = [StepFacts(step=s, metrics={"loss": x}) for s, x in ((1, 0.5), (2, 0.9))]
        >>> BestN(1, "loss").keeps(steps), BestN(1, "loss", mode="max").keeps(steps)
        ([True, False], [False, True])
    """

    n: int
    metric: str
    mode: Mode = "min"
    """Which values are the best: the lowest or the highest."""

    def __post_init__(self) -> None:
        check_whole(self.n, "BestN.n", 1)
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
class KeepEverySteps(_Combines):
    """Keeps every step that `interval` divides.

    Raises:
        InvalidRequestError: The interval is no whole number above 0.

    Examples:
        >>> policy = LatestN(1) | KeepEverySteps(1000)
        >>> policy.keeps([StepFacts(step=step) for step in (900, 1000, 1100, 1200)])
        [False, True, False, True]
    """

    interval: int

    def __post_init__(self) -> None:
        check_whole(self.interval, "KeepEverySteps.interval", 1)

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [facts.step % self.interval == 0 for facts in steps]


@dataclass(frozen=True)
class KeepEveryHours(_Combines):
    """Keeps the first step, and each that was saved `hours` after the last one that it keeps.

    Raises:
        InvalidRequestError: The hours are no number above 0.

    Examples:
        >>> times = [StepFacts(step=s, created_s=1800.0 * s) for s in range(5)]
        >>> KeepEveryHours(1).keeps(times)
        [True, False, True, False, True]
    """

    hours: float

    def __post_init__(self) -> None:
        check_above_0(self.hours, "KeepEveryHours.hours")

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        kept: list[bool] = []
        last_s = -math.inf
        for facts in steps:
            # Why abs: a clock that was set back must not make everything after it superfluous.
            kept.append(abs(facts.created_s - last_s) >= 3600.0 * self.hours)
            if kept[-1]:
                last_s = facts.created_s
        return kept


class _Composed(_Combines):
    """A policy made of others."""

    def __init__(self, *policies: RetentionPolicy) -> None:
        if not policies:
            raise InvalidRequestError(f"{type(self).__name__} needs at least one policy")
        self.policies = tuple(check_retention(policy) for policy in policies)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"

    def _each(self, steps: Sequence[StepFacts]) -> Iterator[tuple[bool, ...]]:
        said = [_said(policy, steps) for policy in self.policies]
        return zip(*said, strict=True)


class KeepAnyOf(_Composed):
    """Keeps what one of the policies keeps; `a | b`.

    Args:
        *policies: At least one.

    Raises:
        InvalidRequestError: There is none, or one is no retention policy.
    """

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [any(each) for each in self._each(steps)]


class KeepAllOf(_Composed):
    """Keeps what all of the policies keep; `a & b`.

    Args:
        *policies: At least one.

    Raises:
        InvalidRequestError: There is none, or one is no retention policy.
    """

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [all(each) for each in self._each(steps)]


class KeepNot(_Composed):
    """Keeps what the policy does not keep; `~a`.

    Args:
        policy: Of which the contrary is meant.

    Raises:
        InvalidRequestError: It is no retention policy.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        super().__init__(policy)

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [not each for (each,) in self._each(steps)]


def superfluous(
    steps: Iterable[StepFacts],
    policy: RetentionPolicy | None,
    *,
    protected: Collection[int] = (),
    unknown: Sequence[StepFacts] = (),
) -> tuple[int, ...]:
    """Returns the steps that may go, oldest first.

    The newest step, those with a tag and those that are protected never go.

    Args:
        steps: All that are committed and good, in any order.
        policy: What to keep; None for everything.
        protected: Steps that are needed for another reason.
        unknown: Steps that are committed and of which the metrics can't be read.

    Raises:
        InvalidRequestError: The policy does not give one answer a step.
        CheckpointError: The policy raised.

    Examples:
        >>> steps = [StepFacts(step=s, metrics={"loss": float(s)}) for s in (1, 2, 3)]
        >>> superfluous(steps, BestN(1, "loss"))
        (2,)
    """
    known = sorted(steps, key=lambda facts: facts.step)
    if policy is None or not known:
        return ()
    kept = {facts.step for facts, is_kept in _answers(policy, known) if is_kept}
    for value in (-math.inf, math.inf) if unknown else ():
        guess = {name: value for facts in known for name in facts.metrics}
        guesses = [replace(one, metrics=guess) for one in unknown]
        answers = _answers(policy, sorted([*known, *guesses], key=lambda facts: facts.step))
        kept |= {facts.step for facts, is_kept in answers if is_kept}
    kept |= {known[-1].step, *protected}
    return tuple(facts.step for facts in known if facts.step not in kept and not facts.tags)


def best_of(steps: Iterable[StepFacts], metric: str, mode: Mode) -> list[StepFacts]:
    """Returns the steps that have a metric, best first; of equal ones the newer first.

    Args:
        steps: In any order.
        metric: Its name.
        mode: Which values are best.
    """
    sign = 1.0 if mode == "min" else -1.0
    # Why nan is out: nothing is better or worse than it, so it would end up anywhere.
    having = [s for s in steps if metric in s.metrics and not math.isnan(s.metrics[metric])]
    return sorted(having, key=lambda facts: (sign * facts.metrics[metric], -facts.step))


def rankings(policy: RetentionPolicy | None) -> tuple[BestN, ...]:
    """Returns the policies by metric that a policy is made of.

    Args:
        policy: Also one of the user's.
    """
    if policy is None:
        return ()
    own = (policy,) if isinstance(policy, BestN) else ()
    return own + tuple(
        found for part in getattr(policy, "policies", ()) for found in rankings(part)
    )


def check_retention(policy: object) -> RetentionPolicy:
    """Returns a policy after checking that it is one.

    Args:
        policy: Built in or the user's.

    Raises:
        InvalidRequestError: It is none.
    """
    if not isinstance(policy, RetentionPolicy):
        raise InvalidRequestError(
            f"retention must have a method keeps(steps), as LatestN(3) | BestN(1, 'loss') has, but "
            f"is {policy!r}; save policies go to save_policy=",
            key="retention",
        )
    return policy


def check_metrics(
    metrics: Mapping[str, Any] | None, policy: RetentionPolicy | None
) -> dict[str, float]:
    """Returns the metrics of a step as numbers.

    Args:
        metrics: By name: numbers, or what `float` takes, as a tensor of one element.
        policy: Every metric by which it ranks must be there.

    Raises:
        InvalidRequestError: One is no number, is NaN although the policy ranks by it, or is
            missing.

    Examples:
        >>> check_metrics({"loss": 1}, BestN(2, "loss"))
        {'loss': 1.0}
        >>> check_metrics({}, BestN(2, "loss"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ray_dcp.errors.InvalidRequestError: BestN(n=2, metric='loss', mode='min') ranks by ...
    """
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(
                f"metrics must have texts as names, but one is {name!r}", key="metrics"
            )
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"the metric {name!r} must be a number, but is {value!r}", key=name
            ) from error
    for ranking in rankings(policy):
        value = found.get(ranking.metric)
        if value is None or math.isnan(value):
            said = "is NaN" if value is not None else "is missing"
            raise InvalidRequestError(
                f"{ranking!r} ranks by {ranking.metric!r}, which {said} (there are: "
                f"{', '.join(sorted(found)) or 'none'}). Give "
                f"save(..., metrics={{{ranking.metric!r}: value}}), or use a retention without it",
                key=ranking.metric,
            )
    return found


def _answers(
    policy: RetentionPolicy, steps: Sequence[StepFacts]
) -> Iterator[tuple[StepFacts, bool]]:
    return zip(steps, _said(policy, steps), strict=True)


def _said(policy: RetentionPolicy, steps: Sequence[StepFacts]) -> list[bool]:
    try:
        said = [bool(kept) for kept in policy.keeps(steps)]
    except CheckpointError:
        raise
    except Exception as error:
        # Why: a save is committed by now, and nothing may go on the word of a policy that failed.
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise CheckpointError(
            f"expected {policy!r} to decide which of {len(steps)} steps to keep, but it raised "
            f"{type(error).__name__}: {error} ({where.filename}:{where.lineno}). No step is "
            f"removed until it answers; mend its keeps()"
        ) from error
    if len(said) != len(steps):
        raise InvalidRequestError(
            f"{policy!r} must decide of each of {len(steps)} steps whether to keep it, but gave "
            f"{len(said)} answers",
            key="retention",
        )
    return said

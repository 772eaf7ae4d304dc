"""Policies that decide which steps a `CheckpointManager` keeps. They combine by `|`, `&` and `~`.

A policy is a pure function of the committed steps; it reads no clock and no storage. `superfluous`
returns the steps that may be deleted. Whatever the policy decides, these never include the newest
step, a tagged step, or a step that the caller protects.

**Unreadable metrics.** A step whose info can't be read is kept, whatever the policy. It must not
cause other steps to be deleted either: `superfluous` keeps every other step that the policy keeps
without the unreadable one, with it as the best, or with it as the worst.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from ray_dcp.core.checks import check_above_0, check_whole
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.manager.combining import Combinable, Combination, parts_of

Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The facts of one committed step by which a retention policy decides."""

    step: int
    created_s: float = 0.0
    """Time of the save by the clock of rank 0, in seconds since the epoch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()


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
        """Returns for each step whether it is kept; `steps` are in ascending order."""
        ...


class _RetentionPolicy(Combinable["KeepAnyOf", "KeepAllOf", "KeepNot"]):
    """Base of the built-in retention policies."""


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
        check_whole(self.n, "LatestN.n", 1)

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [index >= len(steps) - self.n for index in range(len(steps))]


@dataclass(frozen=True)
class BestN(_RetentionPolicy):
    """Keeps the `n` steps with the best values of a metric; of equal values, the newer steps.

    Steps without the metric are not kept by this policy. A manager with this policy requires the
    metric at every save.

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
        check_whole(self.interval, "KeepEverySteps.interval", 1)

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
        check_above_0(self.hours, "KeepEveryHours.hours")

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


class _RetentionCombination(Combination, _RetentionPolicy):
    """A retention policy that consists of others; see `Combination`."""

    @staticmethod
    def _checked(policy: object) -> RetentionPolicy:
        return check_retention(policy)

    def _each(self, steps: Sequence[StepFacts]) -> Iterator[tuple[bool, ...]]:
        """Yields the answers of all parts, step by step."""
        return zip(*(answers_of(policy, steps) for policy in self.policies), strict=True)


class KeepAnyOf(_RetentionCombination):
    """Keeps the steps that at least one of the policies keeps; `a | b`. See `Combination`."""

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [any(each) for each in self._each(steps)]


class KeepAllOf(_RetentionCombination):
    """Keeps the steps that all of the policies keep; `a & b`. See `Combination`."""

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [all(each) for each in self._each(steps)]


class KeepNot(_RetentionCombination):
    """Keeps the steps that none of the policies keeps; `~a`. See `Combination`."""

    def keeps(self, steps: Sequence[StepFacts]) -> Sequence[bool]:
        """See `RetentionPolicy`."""
        return [not any(each) for each in self._each(steps)]


_RetentionPolicy.combinations = (KeepAnyOf, KeepAllOf, KeepNot)


def superfluous(
    steps: Iterable[StepFacts],
    policy: RetentionPolicy | None,
    *,
    protected: Collection[int] = (),
    unknown: Sequence[StepFacts] = (),
) -> tuple[int, ...]:
    """Returns the steps that may be deleted, oldest first.

    The newest step, tagged steps and protected steps are never included.

    Args:
        steps: All committed steps that can be loaded, in any order.
        policy: Which steps are kept; None keeps all.
        protected: Steps that are needed for another reason.
        unknown: Committed steps whose metrics can't be read.

    Raises:
        InvalidRequestError: The policy does not return one answer for each step.
        CheckpointError: The policy raised an error.

    Examples:
        >>> steps = [StepFacts(step=s, metrics={"loss": float(s)}) for s in (1, 2, 3)]
        >>> superfluous(steps, BestN(1, "loss"))
        (2,)
    """
    known = sorted(steps, key=_step_of)
    waits = {ranking.metric for ranking in rankings(policy) if ranking.later}
    # Why unknown: a step that is not evaluated yet must neither go nor make others go.
    unknown = [*unknown, *(facts for facts in known if waits - facts.metrics.keys())]
    known = [facts for facts in known if waits <= facts.metrics.keys()]
    if policy is None or not known:
        return ()
    kept = {known[-1].step, *protected, *_kept(policy, known)}
    for value in (-math.inf, math.inf) if unknown else ():
        guess = {name: value for facts in known for name in facts.metrics}
        guesses = [replace(one, metrics=guess) for one in unknown]
        kept |= _kept(policy, sorted([*known, *guesses], key=_step_of))
    return tuple(facts.step for facts in known if facts.step not in kept and not facts.tags)


def best_of(steps: Iterable[StepFacts], metric: str, mode: Mode) -> list[StepFacts]:
    """Returns the steps that have a metric, best first; of equal values, the newer steps first.

    Args:
        steps: In any order.
        metric: Name of the metric.
        mode: Whether the lowest or the highest values are the best.
    """
    sign = 1.0 if mode == "min" else -1.0
    # Why without NaN: it compares with nothing, so that a NaN could end up at any place.
    having = [s for s in steps if metric in s.metrics and not math.isnan(s.metrics[metric])]
    return sorted(having, key=lambda facts: (sign * facts.metrics[metric], -facts.step))


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


def check_metrics(
    metrics: Mapping[str, Any] | None, policy: RetentionPolicy | None
) -> dict[str, float]:
    """Returns the metrics of a step as numbers.

    Args:
        metrics: Numbers by name, or values that `float` accepts, such as a tensor of one element.
        policy: Policy whose `BestN` metrics are required.

    Raises:
        InvalidRequestError: A metric is not a number; or one that the policy ranks by is missing
            or NaN.

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
    for ranking in (one for one in rankings(policy) if not one.later):
        value = found.get(ranking.metric)
        if value is None or math.isnan(value):
            raise InvalidRequestError(
                f"{ranking!r} ranks by {ranking.metric!r}, which is "
                f"{'missing' if value is None else 'NaN'} (there are: "
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


def _kept(policy: RetentionPolicy, steps: Sequence[StepFacts]) -> set[int]:
    answers = zip(steps, answers_of(policy, steps), strict=True)
    return {facts.step for facts, is_kept in answers if is_kept}


def _step_of(facts: StepFacts) -> int:
    return facts.step

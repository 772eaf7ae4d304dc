"""Retention policies: which steps a `CheckpointManager` keeps.

They combine by `|`, `&` and `~`. A policy is a pure function of the `StepFacts` of all committed
steps. None reads a clock or the storage.

`superfluous` returns the steps that may be deleted. Whatever the policy decides, these never
include the newest step, a tagged step, or a step that the caller protects.

Nor do they include `anchors`: the newest step that is trusted (`Trust`), and one without a metric
that is NaN, so that a training that diverged does not displace what it could go back to.

**Unreadable metrics.** A step whose info can't be read is kept, whatever the policy. It must not
cause other steps to be deleted either: `superfluous` keeps every other step that the policy may
keep, whatever the unreadable one holds.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.format.verdicts import trust_key, verdict_in
from ray_dcp.manager.policies import Combination, parts_of
from ray_dcp.options import check_above_0, check_whole, set_checked

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


class _RetentionCombination(Combination, _RetentionPolicy):
    """A retention policy that consists of others; see `Combination`."""

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


TrustRule = str | Callable[[StepFacts], bool | None]
"""Name of a metric or a tag; or a function of a step's facts: True, False, or None without a
verdict yet."""


@dataclass(frozen=True)
class Trust:
    """Which steps are trusted, and how long retention waits for a verdict.

    Args:
        rule: Name of a metric or a tag, or a function. See `verdict_in` for names.
        hold_s: Retention keeps a step without a verdict for so long after its save, in seconds.

    Raises:
        InvalidRequestError: The rule is neither a name nor a function, or the time is no positive
            number.

    Examples:
        >>> trust = Trust("eval_ok")
        >>> [trust.verdict(StepFacts(step=1, metrics=m)) for m in ({"eval_ok": 1.0}, {})]
        [True, None]
    """

    rule: TrustRule
    hold_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rule, str) and self.rule:
            trust_key(self.rule)
        elif not callable(self.rule):
            raise InvalidRequestError(
                f"trust must be the name of a metric or a tag, as 'eval_ok', or a function of "
                f"StepFacts, but is {self.rule!r}",
                key="trust",
            )
        if self.hold_s is not None:
            set_checked(self, hold_s=check_above_0(self.hold_s, "hold_s"))

    @property
    def name(self) -> str:
        """The name that the rule is; "" for a function."""
        return self.rule if isinstance(self.rule, str) else ""

    def verdict(self, facts: StepFacts) -> bool | None:
        """Returns whether a step is trusted; None if it has no verdict.

        Raises:
            CheckpointError: The function raised an error.
        """
        if isinstance(self.rule, str):
            return verdict_in(self.rule, facts.metrics, facts.tags)
        try:
            found = self.rule(facts)
            return None if found is None else bool(found)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"expected trust={self.rule!r} to decide whether step {facts.step} is trusted, but "
                f"{_raised(error)}. No step is removed until it answers"
            ) from error

    def held(self, facts: StepFacts, now_s: float) -> bool:
        """Returns whether retention keeps a step because it waits for the verdict.

        Args:
            facts: Facts of the step.
            now_s: Current time by the clock of rank 0, in seconds since the epoch.
        """
        if self.hold_s is None or now_s - facts.created_s >= self.hold_s:
            return False
        return self.verdict(facts) is None


def anchors(
    steps: Sequence[StepFacts], trust: Trust | None = None, kept: Collection[int] = ()
) -> set[int]:
    """Returns the steps that retention keeps, whatever the policy decides, to go back to.

    These are the newest step that is trusted and, unless a step without a metric that is NaN is
    kept anyway, the newest one of those. If every step has a NaN, it is the oldest step, the
    nearest to the time before.

    Args:
        steps: Committed steps that can be loaded, oldest first.
        trust: Which steps are trusted.
        kept: Steps that are kept for another reason.

    Raises:
        CheckpointError: The function of `trust` raised an error.

    Examples:
        >>> losses = (0.4, 0.5, math.nan, math.nan)
        >>> steps = [StepFacts(step=s, metrics={"loss": x}) for s, x in enumerate(losses)]
        >>> anchors(steps), anchors(steps, kept={0, 3})
        ({1}, set())
    """
    sound = [one.step for one in steps if not any(map(math.isnan, one.metrics.values()))]
    found = set[int]()
    if steps and not set(sound) & {*kept}:
        found.add(sound[-1] if sound else steps[0].step)
    if trust is not None:
        newest = next((one.step for one in reversed(steps) if trust.verdict(one)), None)
        found |= set() if newest is None else {newest}
    return found


def superfluous(
    steps: Iterable[StepFacts],
    policy: RetentionPolicy | None,
    *,
    protected: Collection[int] = (),
    unknown: Sequence[StepFacts] = (),
    order: Order = "increasing",
    trust: Trust | None = None,
    now_s: float = 0.0,
) -> tuple[int, ...]:
    """Returns the steps that may be deleted, oldest first.

    The newest step, tagged steps, protected steps, `anchors`, and steps that are held until their
    verdict are never included.

    Args:
        steps: All committed steps that can be loaded, in any order.
        policy: Which steps are kept; None keeps all.
        protected: Steps that are needed for another reason.
        unknown: Committed steps whose metrics can't be read.
        order: What makes a step the newest; see `age_in`.
        trust: Which steps are trusted.
        now_s: Current time by the clock of rank 0, in seconds since the epoch.

    Raises:
        InvalidRequestError: The policy does not return one answer for each step.
        CheckpointError: The policy or the function of `trust` raised an error.

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
    guessed = [known]
    for value in (-math.inf, math.inf) if unknown else ():
        guess = {name: value for facts in known for name in facts.metrics}
        guesses = [replace(one, metrics=guess) for one in unknown]
        guessed.append(sorted([*known, *guesses], key=age))
    _, maybe_kept = _bounds(policy, guessed)
    kept = {known[-1].step, *protected, *maybe_kept}
    kept |= {one.step for one in known if one.tags or (trust and trust.held(one, now_s))}
    # Why not with unknown steps: what the policy keeps then depends on guesses.
    kept |= anchors(known, trust, () if unknown else kept)
    return tuple(facts.step for facts in known if facts.step not in kept)


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
        raise CheckpointError(
            f"expected {policy!r} to decide which of {len(steps)} steps to keep, but "
            f"{_raised(error)}. No step is removed until it answers; mend its keeps()"
        ) from error
    if len(answers) != len(steps):
        raise InvalidRequestError(
            f"{policy!r} must decide of each of {len(steps)} steps whether to keep it, but gave "
            f"{len(answers)} answers",
            key="retention",
        )
    return answers


def _bounds(
    policy: RetentionPolicy, guessed: Sequence[Sequence[StepFacts]]
) -> tuple[set[int], set[int]]:
    """Returns the steps that a policy keeps by every guess, and those that it keeps by some.

    *Why by parts*: what is not read may lie between the best and the worst. Of the losses 1, 1, ?
    and 2, `~BestN(1, "loss") & ~BestN(2, "loss", "max")` keeps the first step if ? is 1, and by
    neither guess. A `BestN` alone keeps the most other steps if the step is not there, and the
    fewest if it is the best one; a negation swaps the two bounds.
    """
    if isinstance(policy, KeepAnyOf | KeepAllOf | KeepNot):
        sure, maybe = zip(*(_bounds(part, guessed) for part in policy.policies), strict=True)
        if isinstance(policy, KeepAllOf):
            return set.intersection(*sure), set.intersection(*maybe)
        if isinstance(policy, KeepAnyOf):
            return set().union(*sure), set().union(*maybe)
        every = {facts.step for steps in guessed for facts in steps}
        return every.difference(*maybe), every.difference(*sure)
    kept = [_kept_steps(policy, steps) for steps in guessed]
    return set.intersection(*kept), set().union(*kept)


def _raised(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"it raised {type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def _kept_steps(policy: RetentionPolicy, steps: Sequence[StepFacts]) -> set[int]:
    answers = zip(steps, answers_of(policy, steps), strict=True)
    return {facts.step for facts, is_kept in answers if is_kept}

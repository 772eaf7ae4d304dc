"""How one step of a run is named: `latest`, `best`, `best:loss:min`, a number, a tag, a folder.

Pure: from what was listed and a text to one listed checkpoint, or an error with the nearest names.
`RUN@STEP` is taken apart here too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal, TypeVar

from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.view.run_listing import ListedCheckpoint

Mode = Literal["min", "max"]
Listed = TypeVar("Listed", bound=ListedCheckpoint)

_SMALL = re.compile(r"loss|err|perplexity|ppl|wer|cer|mae|mse|nll", re.IGNORECASE)
_LARGE = re.compile(
    r"acc|score|reward|return|f1|auc|bleu|rouge|precision|recall|map", re.IGNORECASE
)
_SHOWN = 8


def split_address(text: str) -> tuple[str, str | None]:
    """Returns run and step of `RUN@STEP`; no step where there is none.

    Args:
        text: As a user writes it. An `@` before the last `/` belongs to the path.

    Examples:
        >>> split_address("s3://user@host/run@best:loss"), split_address("run/step-5")
        (('s3://user@host/run', 'best:loss'), ('run/step-5', None))
    """
    run, at, step = text.rpartition("@")
    if not at or not run or not step or "/" in step:
        return text, None
    return run, step


def nearest(name: str, known: Sequence[str]) -> str:
    """Returns a hint at similar names, for the end of a message; empty when there are none.

    Args:
        name: That was asked for.
        known: That there are.

    Examples:
        >>> nearest("model.wieght", ["model.weight", "optimizer.step"])
        "; did you mean 'model.weight'?"
    """
    close = get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def choose(
    listed: Sequence[Listed], key: int | str, *, url: str = "", damaged: bool = False
) -> Listed:
    """Returns the checkpoint of a run that a key names.

    `latest` and `best` are steps of the run itself, not of folders below it.

    Args:
        listed: The run.
        key: A step number; `latest`; `best`, `best:METRIC` or `best:METRIC:min|max`; a tag; or
            the name of a folder.
        url: Of the run, for messages.
        damaged: `latest` and `best` may also be a damaged step.

    Raises:
        CheckpointNotFoundError: None has it; the message offers the nearest.
        InvalidRequestError: It is not clear which is meant.
    """
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise InvalidRequestError(
            f"a step is named by a number, 'latest', 'best', a tag or a folder, but got "
            f"{type(key).__name__} {key!r}"
        )
    text = str(key)
    by_name = [one for one in listed if one.name == text]
    if by_name:
        return by_name[0]
    if text.lstrip("+").isdecimal():
        return _by_number(listed, int(text), url)
    if text == "latest":
        return _latest(listed, url, damaged)
    if text == "best" or text.startswith("best:"):
        _, _, rest = text.partition(":")
        metric, _, mode = rest.partition(":")
        return best_of_run(listed, metric or None, mode or None, url=url, damaged=damaged)
    tagged = [one for one in listed if text in one.tags]
    if len(tagged) == 1:
        return tagged[0]
    if tagged:
        raise InvalidRequestError(
            f"the tag {text!r} is on steps {', '.join(_steps(tagged))} of {url}; name one of them"
        )
    tags = sorted({tag for one in listed for tag in one.tags})
    known = [*tags, *(one.name for one in listed), "latest", "best"]
    raise CheckpointNotFoundError(
        f"expected a tag or a folder {text!r} in {url}, found "
        f"{f'the tags {few(tags)}' if tags else 'no tags'} and {_found(listed)}"
        + nearest(text, known)
    )


def passed_over(listed: Sequence[Listed], key: int | str, chosen: Listed) -> Listed | None:
    """Returns the damaged step that `latest` or `best` would be if it were whole; None for none.

    Args:
        listed: The run.
        key: As for `choose`.
        chosen: What that returned.
    """
    try:
        found = choose(listed, key, damaged=True)
    except CheckpointError:
        return None  # of the damaged steps it is not clear which one it would be
    return None if found is chosen else found


def passed_over_text(over: ListedCheckpoint, chosen: ListedCheckpoint, key: int | str) -> str:
    """Returns what tells a user that an older or a worse step is taken."""
    return (
        f"{chosen.name} is taken as {key!r}: {over.name} would be it, but is damaged "
        f"({over.detail})"
    )


def best_of_run(
    listed: Sequence[Listed],
    metric: str | None = None,
    mode: str | None = None,
    *,
    url: str = "",
    damaged: bool = False,
) -> Listed:
    """Returns the readable checkpoint with the best value of a metric; of equal ones the newest.

    Args:
        listed: The run.
        metric: Name; the only one that there is if None.
        mode: `min` or `max`; by the name of the metric if None: a loss is small, an accuracy large.
        url: Of the run, for messages.
        damaged: It may also be a damaged one.

    Raises:
        CheckpointNotFoundError: No step has the metric.
        InvalidRequestError: It is not clear which metric is meant, or which values are best.
    """
    listed = [one for one in listed if _is_own(one) and _may_be(one, damaged)]
    names = sorted({name for one in listed for name in one.metrics})
    if not names:
        raise CheckpointNotFoundError(
            f"expected steps with metrics in {url}, found none: a CheckpointManager keeps them, as "
            f"save(step, state, metrics={{'loss': 0.5}})"
        )
    if metric is None:
        if len(names) > 1:
            raise InvalidRequestError(
                f"the best step by which metric? Write best:NAME, with one of {', '.join(names)}"
            )
        metric = names[0]
    if metric not in names:
        raise CheckpointNotFoundError(
            f"expected a metric {metric!r} in {url}, found {', '.join(names)}"
            + nearest(metric, names)
        )
    if mode is None:
        is_small, is_large = bool(_SMALL.search(metric)), bool(_LARGE.search(metric))
        if is_small == is_large:
            raise InvalidRequestError(
                f"is a small or a large {metric!r} better? Write best:{metric}:min or "
                f"best:{metric}:max"
            )
        mode = "min" if is_small else "max"
    if mode not in ("min", "max"):
        raise InvalidRequestError(f"the best is 'min' or 'max', but got {mode!r}", key="mode")
    # Why `==` to itself: NaN is never the best.
    ranked = [one for one in listed if (v := one.metrics.get(metric)) is not None and v == v]
    if not ranked:
        raise CheckpointNotFoundError(f"every {metric!r} in {url} is NaN: no step is the best")
    sign = 1 if mode == "min" else -1
    return min(ranked, key=lambda one: (sign * one.metrics[metric], -(one.step or 0)))


def _by_number(listed: Sequence[Listed], step: int, url: str) -> Listed:
    found = [one for one in listed if one.step == step]
    direct = [one for one in found if "/" not in one.name]
    chosen = direct or found
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        readable = [one for one in chosen if one.is_readable]
        if len(readable) == 1:
            return readable[0]
        raise InvalidRequestError(
            f"step {step} of {url} is in {', '.join(one.name for one in chosen)}; name the folder",
            step=step,
        )
    numbers = sorted({one.step for one in listed if one.step is not None})
    close = sorted(numbers, key=lambda number: abs(number - step))[:3]
    hint = f"; nearest: {', '.join(map(str, sorted(close)))}" if close else ""
    raise CheckpointNotFoundError(
        f"expected step {step} in {url}, found {_found(listed)}{hint}", step=step
    )


def _is_own(one: ListedCheckpoint) -> bool:
    """Whether it lies directly in the run that was listed, or is all of it."""
    return "/" not in one.name


def _may_be(one: ListedCheckpoint, damaged: bool) -> bool:
    return one.is_readable or (damaged and one.state == "damaged")


def _latest(listed: Sequence[Listed], url: str, damaged: bool) -> Listed:
    own = [one for one in listed if _is_own(one)]
    found = [one for one in own if _may_be(one, damaged)]
    numbered = [one for one in found if one.step is not None]
    if numbered:
        latest = max(numbered, key=lambda one: (one.step or 0, one.name))
        unread = [one for one in own if one.state == "unreadable" and one.step is not None]
        if unread and (unread[-1].step or 0) > (latest.step or 0):
            raise StorageError(
                f"{unread[-1].name} in {url} may be the latest step, but can't be read: "
                f"{unread[-1].detail}"
            )
        return latest
    if found:
        return max(found, key=lambda one: (one.created_s or 0.0, one.name))
    raise CheckpointNotFoundError(f"expected a committed step in {url}, found {_found(listed)}")


def _found(listed: Sequence[ListedCheckpoint]) -> str:
    if not listed:
        return "no checkpoint"
    return f"the steps {few(_steps(listed))}"


def _steps(listed: Sequence[ListedCheckpoint]) -> list[str]:
    return [
        (one.name if one.step is None else str(one.step))
        + ("" if one.is_readable else f" ({one.state})")
        for one in listed
    ]


def few(names: Sequence[str]) -> str:
    """Returns names, of many the first and last ones and how many they are."""
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:3])}, … {', '.join(names[-3:])} ({len(names)} in all)"

"""`choose`: the step that a key names: a number, `latest`, `trusted`, `best`, a tag or a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.verdicts import verdict_in
from ray_dcp.options import plain_integer
from ray_dcp.view.run_listing import (
    ListedCheckpoint,
)
from ray_dcp.view.wording import few, nearest

Listed = TypeVar("Listed", bound=ListedCheckpoint)


def is_number(key: str) -> bool:
    """Returns whether a key is the number of a step."""
    return key.lstrip("+").isdecimal()


def choose(
    listed: Sequence[Listed], key: int | str, *, url: str = "", damaged: bool = False
) -> Listed:
    """Returns the checkpoint of a run that a key names.

    `latest`, `trusted` and `best` are directly in the run, not in folders below its folders.

    Args:
        listed: Checkpoints of the run.
        key: A step number; `latest`; `trusted:NAME`, the newest step that is trusted by a metric or
            a tag, or `trusted` by the name that the run has; `best`, `best:METRIC` or
            `best:METRIC:min|max`; a tag; or the name of a folder.
        url: Path or URL of the run, for messages.
        damaged: `latest`, `trusted` and `best` include damaged steps.

    Raises:
        CheckpointNotFoundError: There is none; the message suggests similar keys.
        InvalidRequestError: The key is ambiguous.
    """
    key = plain_integer(key)
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise InvalidRequestError(
            f"a step is named by a number, 'latest', 'trusted', 'best', a tag or a folder, but got "
            f"{type(key).__name__} {key!r}"
        )
    text = str(key)
    by_name = [one for one in listed if one.name == text]
    if by_name:
        return by_name[0]
    if is_number(text):
        return _by_number(listed, int(text), url)
    if text == "latest":
        return _latest(listed, url, damaged)
    trust = next((one.trust for one in listed if one.trust and _is_own(one)), "")
    if text.startswith("trusted:") or (text == "trusted" and trust):
        name = text.partition(":")[2] or trust
        return _latest_trusted(listed, name, url, damaged)
    if text == "best" or text.startswith("best:"):
        _, _, rest = text.partition(":")
        metric, _, mode = rest.partition(":")
        return best_of_run(listed, metric or None, mode or None, url=url, damaged=damaged)
    tagged = [one for one in listed if text in one.tags]
    tagged = [one for one in tagged if _is_own(one)] or tagged
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
        f"{f'the tags {few(tags)}' if tags else 'no tags'} and {steps_text(listed)}"
        + nearest(text, known)
    )


def _latest_trusted(listed: Sequence[Listed], name: str, url: str, damaged: bool) -> Listed:
    found = [
        one
        for one in listed
        if _is_own(one) and _may_be(one, damaged) and verdict_in(name, one.metrics, one.tags)
    ]
    if found:
        return max(found, key=lambda one: (one.step or 0, one.name))
    metrics = {metric for one in listed for metric in one.metrics}
    names = sorted(metrics | {tag for one in listed for tag in one.tags})
    raise CheckpointNotFoundError(
        f"expected a step with the tag {name!r}, or a metric of that name that is not 0 or NaN, in "
        f"{url}, found {steps_text(listed)} with "
        f"{few(names) if names else 'no metrics and no tags'}" + nearest(name, names)
    )


def passed_over(listed: Sequence[Listed], key: int | str, chosen: Listed) -> Listed | None:
    """Returns the damaged step that `latest`, `trusted` or `best` skipped; None if it skipped none.

    Args:
        listed: Checkpoints of the run.
        key: Key as for `choose`.
        chosen: Result of `choose`.
    """
    try:
        found = choose(listed, key, damaged=True)
    except CheckpointError:
        return None  # with the damaged steps, the key is ambiguous
    return None if found is chosen else found


def passed_over_text(over: ListedCheckpoint, chosen: ListedCheckpoint, key: int | str) -> str:
    """Returns a message that a damaged step was skipped."""
    return f"{chosen.name} is used as {key!r} because {over.name} is damaged ({over.detail})"


_SMALL = re.compile(r"loss|err|perplexity|ppl|wer|cer|mae|mse|nll", re.IGNORECASE)
_LARGE = re.compile(
    r"acc|score|reward|return|f1|auc|bleu|rouge|precision|recall|map", re.IGNORECASE
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
        listed: Checkpoints of the run.
        metric: Name of the metric; by default the only one.
        mode: `min` or `max`; by default derived from the name: losses are minimised, accuracies
            maximised.
        url: Path or URL of the run, for messages.
        damaged: Include damaged checkpoints.

    Raises:
        CheckpointNotFoundError: No step has the metric.
        InvalidRequestError: There are several metrics, or the mode can't be derived.
    """
    listed = [one for one in listed if _is_own(one) and _may_be(one, damaged)]
    names = sorted({name for one in listed for name in one.metrics})
    if not names:
        raise CheckpointNotFoundError(
            f"expected steps with metrics in {url}, found none: pass them to a "
            f"CheckpointManager, as save(step, state, metrics={{'loss': 0.5}})"
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
    # Why compared with itself: NaN is never the best.
    ranked = [one for one in listed if (v := one.metrics.get(metric)) is not None and v == v]
    if not ranked:
        raise CheckpointNotFoundError(f"every {metric!r} in {url} is NaN: no step is the best")
    sign = 1 if mode == "min" else -1
    return min(ranked, key=lambda one: (sign * one.metrics[metric], -(one.step or 0)))


def _by_number(listed: Sequence[Listed], step: int, url: str) -> Listed:
    found = [one for one in listed if one.step == step]
    chosen = [one for one in found if _is_own(one)] or found
    readable = [one for one in chosen if one.is_readable]
    for some in (chosen, readable):
        if len(some) == 1:
            return some[0]
    if chosen:
        raise InvalidRequestError(
            f"step {step} of {url} is in {', '.join(one.name for one in chosen)}; name the folder",
            step=step,
        )
    numbers = sorted({one.step for one in listed if one.step is not None})
    close = sorted(numbers, key=lambda number: abs(number - step))[:3]
    hint = f"; nearest: {', '.join(map(str, sorted(close)))}" if close else ""
    raise CheckpointNotFoundError(
        f"expected step {step} in {url}, found {steps_text(listed)}{hint}", step=step
    )


def _is_own(one: ListedCheckpoint) -> bool:
    """Returns whether a checkpoint is directly in the run that was listed, or is the run itself."""
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
    runs = sorted({one.run for one in listed} - {""})
    if runs and not own:
        raise CheckpointNotFoundError(
            f"expected a committed step in {url}, found {len(runs)} runs below it: {few(runs)}; "
            f"name one of them, as {url.rstrip('/')}/{runs[-1]}@latest"
        )
    raise CheckpointNotFoundError(f"expected a committed step in {url}, found {steps_text(listed)}")


def steps_text(listed: Sequence[ListedCheckpoint]) -> str:
    """Returns the steps of a run for a message."""
    return f"the steps {few(_steps(listed))}" if listed else "no checkpoint"


def _steps(listed: Sequence[ListedCheckpoint]) -> list[str]:
    return [
        (one.name if one.step is None else str(one.step))
        + ("" if one.is_readable else f" ({one.state})")
        for one in listed
    ]

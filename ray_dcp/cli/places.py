"""From what a user types to what is meant: `PATH`, `RUN`, `RUN@STEP`."""

from __future__ import annotations

import os
from functools import cache

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.object_stores import PROVIDERS
from ray_dcp.store.opening import absolute_target, open_storage
from ray_dcp.store.storage import read_if_there
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.checkpoint_view import open as open_checkpoint
from ray_dcp.view.naming import split_address
from ray_dcp.view.run_view import RunView, StepView, nearest_paths, open_run

ANSWER_S = 10.0
"""How long an object store may take to answer for the first time."""


def checkpoint_at(text: str) -> CheckpointView:
    """Returns the checkpoint at `PATH` or `RUN@STEP`.

    Raises:
        CheckpointError: As `ray_dcp.open`.
    """
    try:
        return open_checkpoint(place_of(text))
    except CheckpointNotFoundError as error:
        error.message += hint_at(text)
        raise


def place_of(text: str) -> AnyPlace:
    """Returns where the checkpoint at `PATH` or `RUN@STEP` lies, without opening it.

    Raises:
        CheckpointNotFoundError: The run has no such step; the message offers the nearest.
    """
    run, step = _split(text)
    check_answers(run)
    return run if step is None else run_at(run).step(step).path


def checkpoints_of(text: str) -> list[tuple[str, AnyPlace]]:
    """Returns name and place of the checkpoint at `PATH` or `RUN@STEP`, or of each of a run.

    Of a run those that were committed, also damaged ones; items of a step go with it.

    Raises:
        CheckpointError: As `ray_dcp.open`.
    """
    place = place_of(text)
    try:
        open_checkpoint(place)
    except CheckpointNotFoundError as error:
        found = [step for step in steps_of_run(text) if step.name != "."]
        if not found:
            error.message += hint_at(text)
            raise
        return [(f"{text.rstrip('/')}/{step.name}", step.path) for step in found]
    except CheckpointError:
        pass  # the caller opens it, and reports what is wrong
    return [(text, place)]


def steps_of_run(text: str) -> list[StepView]:
    """Returns what was committed in a run, or can't be read; without the items of steps."""
    try:
        run = open_run(Target(text))
    except CheckpointError:
        return []
    shown = [one for one in run if one.is_readable or one.state in ("damaged", "unreadable")]
    names = {one.name for one in shown}
    return [one for one in shown if one.name.rpartition("/")[0] not in names]


def step_at(text: str) -> StepView:
    """Returns the step of `RUN@STEP`, or what is at a path, which is a run of its own then.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    run, step = _split(text)
    if step is not None:
        return run_at(run).step(step)
    found = run_at(run)
    if found.steps[0].name != "." and all(one.name != "." for one in found):
        raise CheckpointNotFoundError(
            f"expected one checkpoint in {found.url}, found {len(found)} below it; name one, as "
            f"{run}@{found.steps[-1].step or found.steps[-1].name}"
        )
    return found.step(".")


def step_in_run(text: str) -> tuple[RunView, StepView]:
    """Returns run and step of `RUN@STEP`, or of the path of a step, whose run is the folder above.

    Raises:
        CheckpointNotFoundError: There is no such step.
        InvalidRequestError: The text names no step.
    """
    run, step = _split(text)
    if step is None and (hint := _steps_of(run)):
        raise InvalidRequestError(f"expected one step, but {text} is a run{hint}")
    if step is None:
        parent, slash, name = absolute_target(run).url.rstrip("/").rpartition("/")
        if not slash or not name:
            raise InvalidRequestError(f"expected RUN@STEP, found {text!r}")
        run, step = parent, name
    found = run_at(run)
    return found, found.step(step)


def run_at(text: str) -> RunView:
    """Returns the run at a path.

    Raises:
        CheckpointNotFoundError: There is nothing that looks like a checkpoint.
    """
    check_answers(text)
    run = open_run(Target(text))
    if not len(run):
        raise CheckpointNotFoundError(
            f"expected checkpoints at or below {run.url}, found none{nearest_paths(text)}"
        )
    return run


def hint_at(text: str) -> str:
    """Returns what may have been meant where no checkpoint was found.

    Args:
        text: `PATH` or `RUN@STEP`.
    """
    run, step = _split(text)
    return nearest_paths(run) if step is not None else _steps_of(run) or nearest_paths(text)


@cache
def check_answers(url: str) -> None:
    """Checks that an object store can be reached, by one small request in each process.

    Why: it is asked again and again for minutes otherwise, which is right for a save at night, and
    a riddle for whoever has typed the wrong endpoint.

    Args:
        url: Path or URL; only that of an object store is looked at.

    Raises:
        StorageError: It does not answer in `ANSWER_S`, or refuses.
    """
    if url.partition("://")[0] not in PROVIDERS or "://" not in url:
        return
    read_if_there(open_storage(Target(url, {"retry_timeout_s": ANSWER_S})), ".metadata", 1)


def _steps_of(text: str) -> str:
    """Returns how to name a step where a run was named; nothing where it is none."""
    found = [one for one in steps_of_run(text) if one.name != "." and one.is_readable]
    if not found:
        return ""
    last = found[-1].name if found[-1].step is None else found[-1].step
    count = "its step" if len(found) == 1 else f"one of its {len(found)} steps"
    return f"; name {count}, as {text}@latest or {text}@{last}"


def _split(text: str) -> tuple[str, str | None]:
    # Why: an @ may be part of a name.
    return (text, None) if os.path.exists(text) else split_address(text)


def written(path: str, text: str) -> None:
    """Writes a file of this machine so that it is there whole or not at all.

    Raises:
        InvalidRequestError: There is no such directory.
        StorageError: It can't be written.
    """
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise InvalidRequestError(f"{path} can't be written: there is no directory {folder}")
    LocalStorage(folder).write(name, text.encode())

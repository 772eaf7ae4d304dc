"""From what a user types to what is meant: `PATH`, `RUN`, `RUN@STEP`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import click

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.names import SHARED_FOLDER
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.object_stores import PROVIDERS
from ray_dcp.store.opening import absolute_target, open_storage, place_below
from ray_dcp.store.storage import read_if_there
from ray_dcp.view.checkpoint_view import CheckpointView, open_checkpoint
from ray_dcp.view.naming import choose, passed_over, passed_over_text, split_address
from ray_dcp.view.run_listing import step_of
from ray_dcp.view.run_view import RunView, StepView, nearest_paths, open_run

ANSWER_S = 10.0
"""How long an object store may take to answer for the first time."""


class Address(NamedTuple):
    """What a user named."""

    name: str
    """`PATH`, or the path of the step that `RUN@STEP` is."""
    place: AnyPlace
    step: StepView | None = None
    """As it was listed, where it is one of a run."""

    def open(self, text: str = "") -> CheckpointView:
        """Returns the checkpoint.

        Args:
            text: As the user typed it, for a hint at what else may have been meant.

        Raises:
            CheckpointError: As `ray_dcp.open`.
        """
        try:
            return open_checkpoint(self.place)
        except CheckpointNotFoundError as error:
            error.message += hint_at(text) if text else ""
            raise


def checkpoint_at(text: str) -> CheckpointView:
    """Returns the checkpoint at `PATH` or `RUN@STEP`.

    Raises:
        CheckpointError: As `ray_dcp.open`.
    """
    return address_of(text).open(text)


def address_of(text: str, *, damaged: bool = False) -> Address:
    """Returns which checkpoint `PATH` or `RUN@STEP` is, without opening it.

    Where `latest` or `best` passes over a damaged step, standard error has it.

    Args:
        text: As the user typed it.
        damaged: `latest` and `best` may also be a damaged step.

    Raises:
        CheckpointNotFoundError: The run has no such step; the message offers the nearest.
    """
    run, key = _split(text)
    check_answers(run)
    if key is None:
        return Address(text, run)
    steps = run_at(run)
    found = choose(steps.steps, key, url=steps.url, damaged=damaged)
    say_passed_over(steps, key, found)
    name = run if found.name == "." else f"{run.rstrip('/')}/{found.name}"
    return Address(name, found.path, found)


def say_passed_over(run: RunView, key: str, chosen: StepView) -> None:
    """Prints to standard error which damaged step `latest` or `best` would be, if there is one."""
    over = passed_over(run.steps, key, chosen)
    if over is not None:
        click.echo(f"warning: {passed_over_text(over, chosen, key)}", err=True)


def addresses_of(text: str, *, damaged: bool = False) -> tuple[bool, list[Address]]:
    """Returns whether a run is named, and its checkpoints or the one that is named.

    Of a run those that were committed, also damaged ones, and those that can't be read; items of
    a step go with it.

    Args:
        text: `PATH` or `RUN@STEP`.
        damaged: As for `address_of`.

    Raises:
        CheckpointError: As `ray_dcp.open`.
    """
    address = address_of(text, damaged=damaged)
    if address.step is not None:
        return False, [address]
    try:
        open_checkpoint(address.place)
    # Why StorageError: one folder of a run that can't be listed keeps nobody from the others.
    except (CheckpointNotFoundError, StorageError) as error:
        found = [step for step in steps_of_run(text) if step.name != "."]
        if not found:
            error.message += hint_at(text) if isinstance(error, CheckpointNotFoundError) else ""
            raise
        return True, [Address(f"{text.rstrip('/')}/{one.name}", one.path, one) for one in found]
    except CheckpointError:
        pass  # the caller opens it, and reports what is wrong
    return False, [address]


@contextmanager
def kept(place: AnyPlace) -> Iterator[None]:
    """Keeps a step from being deleted by its job while it is read for long, where that can be.

    Look whether the step is there after that.

    Args:
        place: Of the step. One whose run has no `CheckpointManager` is not kept.
    """
    target = absolute_target(place)
    url, _, name = target.url.rstrip("/").rpartition("/")
    # Why none: what is a bucket, or lies at the root of a disk, is in no run.
    step = step_of(name) if url and not url.endswith("/") else None
    with ExitStack() as stack:
        # Why suppressed: who may only read can still read; nothing keeps the step then.
        with suppress(StorageError):
            run = replace(target, url=url)
            if step is not None and open_storage(place_below(run, SHARED_FOLDER)).list("writer-"):
                from ray_dcp.manager.catalogue import Root
                from ray_dcp.manager.leases import LEASE_S, ReaderLease

                stack.enter_context(ReaderLease(Root(run), step, lease_s=LEASE_S))
        yield


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
        InvalidRequestError: `latest` or `best` would be another step, which is damaged.
    """
    run, step = _split(text)
    if step is not None:
        steps = run_at(run)
        chosen = steps.step(step)
        over = passed_over(steps.steps, step, chosen)
        if over is not None:
            # Why: what goes is gone, and it is not clear which of the two is meant.
            raise InvalidRequestError(
                f"which step of {run}? {passed_over_text(over, chosen, step)}; name one by its "
                f"number, as {run}@{over.step}"
            )
        return chosen
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
    chosen = found.step(step)
    say_passed_over(found, step, chosen)
    return found, chosen


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
    # Why half: after what failed at the last moment one more request is begun.
    half_s = ANSWER_S / 2
    options = {"retry_timeout_s": half_s, "timeout": timedelta(seconds=half_s)}
    read_if_there(open_storage(Target(url, options)), ".metadata", 1)


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

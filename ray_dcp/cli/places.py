"""Resolves the arguments of the commands: `PATH`, `RUN`, `RUN@STEP`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import click

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.names import SHARED_FOLDER
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.object_clients import PROVIDERS
from ray_dcp.store.opening import absolute_target, open_storage, place_below
from ray_dcp.store.storage import read_if_there
from ray_dcp.view.checkpoint_view import CheckpointView, read_view
from ray_dcp.view.run_listing import committed_steps, step_of
from ray_dcp.view.run_view import RunView, StepView, nearest_paths, read_run, split_address
from ray_dcp.view.step_choice import choose, passed_over, passed_over_text, steps_text
from ray_dcp.view.wording import few

PLACE = click.Path(readable=False)
"""Type of arguments that name a checkpoint or a run, so that shells complete them as paths."""


class Address(NamedTuple):
    """A checkpoint named by the user."""

    name: str
    """`PATH`, or the path of the step for `RUN@STEP`."""
    place: AnyPlace
    step: StepView | None = None
    """The listed step, if the checkpoint was found in a run."""

    def open(self, text: str = "") -> CheckpointView:
        """Opens the checkpoint.

        Args:
            text: Text that the user typed, for a hint in the error message.

        Raises:
            CheckpointError: As for `ray_dcp.open`.
        """
        try:
            return read_view(self.place)
        except CheckpointNotFoundError as error:
            error.message += hint_at(text) if text else ""
            raise


def address_of(text: str, *, damaged: bool = False) -> Address:
    """Resolves `PATH` or `RUN@STEP` to a checkpoint, without opening it.

    Prints a warning to standard error if `latest` or `best` skips a damaged step.

    Args:
        text: Text that the user typed.
        damaged: `latest` and `best` include damaged steps.

    Raises:
        CheckpointNotFoundError: The run has no such step; the message suggests similar ones.
    """
    run, key = _split(text)
    if key is None:
        check_answers(run)
        return Address(text, run)
    found = _choose_step(run_at(run), key, damaged=damaged)
    name = run if found.name == "." else f"{run.rstrip('/')}/{found.name}"
    return Address(name, found.path, found)


def _choose_step(run: RunView, key: str, *, damaged: bool = False) -> StepView:
    """Returns the step that a key names; warns if `latest` or `best` skips a damaged step."""
    found = choose(run.steps, key, url=run.url, damaged=damaged)
    over = passed_over(run.steps, key, found)
    if over is not None:
        click.echo(f"warning: {passed_over_text(over, found, key)}", err=True)
    return found


def part_of(address: Address, part: str | None) -> Address:
    """Returns the address of a part of a step; the given one if there is no name.

    Raises:
        InvalidRequestError: The step has no such part.
        CheckpointError: As for `ray_dcp.open`.
    """
    if part is None:
        return address
    parts = address.open(address.name).parts
    if part not in parts:
        found = few(list(parts)) if parts else "it is a checkpoint of one state"
        raise InvalidRequestError(
            f"expected the part {part!r} in {address.name}, found {found}", key="part"
        )
    folder = parts[part].folder
    return Address(f"{address.name}/{folder}", place_below(address.place, folder), address.step)


def steps_between(text: str) -> list[Address] | None:
    """Returns the readable steps of `RUN@FIRST..LAST`, oldest first; None for another text.

    Raises:
        CheckpointNotFoundError: There are none.
    """
    run, key = _split(text)
    bounds = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", key or "")
    if bounds is None:
        return None
    found = run_at(run)
    inside = [
        Address(f"{run.rstrip('/')}/{one.name}", one.path, one)
        for one in found
        if one.is_readable and not one.is_item and "/" not in one.name and one.step is not None
        if int(bounds[1]) <= one.step <= int(bounds[2])
    ]
    if not inside:
        raise CheckpointNotFoundError(
            f"expected steps from {bounds[1]} to {bounds[2]} in {run} that can be read, found "
            f"{steps_text(found.steps)}"
        )
    return inside


def addresses_of(text: str, *, damaged: bool = False) -> tuple[bool, list[Address]]:
    """Returns whether the text names a run, and the run's checkpoints or the named checkpoint.

    The checkpoints of a run are those that were committed, including damaged ones, and those that
    can't be read. Items of a step are not listed separately.

    Args:
        text: `PATH` or `RUN@STEP`.
        damaged: As for `address_of`.

    Raises:
        CheckpointError: As for `ray_dcp.open`.
    """
    address = address_of(text, damaged=damaged)
    if address.step is not None:
        return False, [address]
    try:
        read_view(address.place)
    # Why StorageError: an unreadable folder of a run must not hide the others.
    except (CheckpointNotFoundError, StorageError) as error:
        found = [step for step in steps_of_run(text) if step.name != "."]
        if not found:
            error.message += hint_at(text) if isinstance(error, CheckpointNotFoundError) else ""
            raise
        return True, [Address(f"{text.rstrip('/')}/{one.name}", one.path, one) for one in found]
    except CheckpointError:
        pass  # the caller opens it and gets the error
    return False, [address]


@contextmanager
def kept(place: AnyPlace) -> Iterator[None]:
    """Holds a reader lease on a step in the block, so that its job does not delete the step.

    Callers must check inside of the block that the step still exists.

    Prints a warning to standard error, once a run, if the step may be deleted nevertheless.

    Args:
        place: Location of the step. Without a `CheckpointManager` in its run, there is no lease.
    """
    with ExitStack() as stack:
        # Suppressed: without a lease the step can be read, too.
        with suppress(StorageError):
            found = _managed(absolute_target(place))
            if found is not None:
                from ray_dcp.manager.catalogue import Root
                from ray_dcp.manager.reader_leases import ReaderLease

                run, step = found
                lease = stack.enter_context(ReaderLease(Root(run), step, lease_s=bounds.LEASE_S))
                context = click.get_current_context(silent=True)
                told = context.meta.setdefault("ray_dcp.unsure", set()) if context else set()
                if lease.unsure and lease.unsure not in told:
                    told.add(lease.unsure)
                    click.echo(f"warning: {lease.unsure}", err=True)
        yield


def _managed(target: Target) -> tuple[Target, int] | None:
    """Returns run and number of a step, or of the step of an item, whose run has had a writer."""
    url = target.url
    # Why twice: an item is a folder in its step.
    for _ in range(2):
        url, _, name = url.rstrip("/").rpartition("/")
        # Why the check: a bucket, or a folder at the root of a disk, is not in a run.
        if not url or url.endswith("/"):
            return None
        step, run = step_of(name), replace(target, url=url)
        if step is not None and open_storage(place_below(run, SHARED_FOLDER)).list("writer-"):
            return run, step
    return None


def steps_of_run(text: str) -> list[StepView]:
    """Returns the committed and the unreadable steps of a run, without the items of steps."""
    try:
        run = read_run(Target(text))
    except CheckpointError:
        return []
    return committed_steps(run)


def step_at(text: str) -> StepView:
    """Returns the step of `RUN@STEP`, or the checkpoint at a path as a step.

    Raises:
        CheckpointNotFoundError: There is no such step.
        InvalidRequestError: `latest` or `best` would skip a damaged step.
    """
    run, step = _split(text)
    if step is not None:
        steps = run_at(run)
        chosen = steps.step(step)
        over = passed_over(steps.steps, step, chosen)
        if over is not None:
            # Why: a deletion can't be undone, and either of the two may be meant.
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
    """Returns run and step of `RUN@STEP`, or of the path of a step in its run.

    Raises:
        CheckpointNotFoundError: There is no such step.
        InvalidRequestError: The text does not name a step.
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
    return found, _choose_step(found, step)


def run_at(text: str) -> RunView:
    """Returns the run at a path.

    Raises:
        CheckpointNotFoundError: The path contains no checkpoints.
    """
    check_answers(text)
    run = read_run(Target(text))
    if not len(run):
        raise CheckpointNotFoundError(
            f"expected checkpoints at or below {run.url}, found none{nearest_paths(text)}"
        )
    return run


def hint_at(text: str) -> str:
    """Returns a suggestion for a text that names no checkpoint.

    Args:
        text: `PATH` or `RUN@STEP`.
    """
    run, step = _split(text)
    if step is not None:
        return nearest_paths(run)
    return _steps_of(run) or _pickles_in(text) or nearest_paths(text)


def _pickles_in(text: str) -> str:
    """Returns a hint if a local directory has files that `torch.save` may have written."""
    names = sorted(os.listdir(text)) if os.path.isdir(text) else []
    found = [name for name in names if name.endswith((".pt", ".pth", ".bin", ".ckpt"))]
    if not found:
        return ""
    return f"; if torch.save wrote {found[0]}: ray-dcp import {os.path.join(text, found[0])} TARGET"


@cache
def check_answers(url: str) -> None:
    """Checks that an object store can be reached, by one small request per process.

    *Why*: storage calls retry for minutes, which is right for an unattended save, but not for a
    user who has mistyped an endpoint.

    Args:
        url: Path or URL; does nothing unless it is the URL of an object store.

    Raises:
        StorageError: The store does not answer within `core.bounds.FIRST_ANSWER_S`, or refuses.
    """
    if url.partition("://")[0] not in PROVIDERS or "://" not in url:
        return
    # Why half: one more request may start just before the retry deadline.
    half_s = bounds.FIRST_ANSWER_S / 2
    options = {"retry_timeout_s": half_s, "timeout": timedelta(seconds=half_s)}
    read_if_there(open_storage(Target(url, options)), ".metadata", 1)


def _steps_of(text: str) -> str:
    """Returns a hint how to name a step of a run; "" if the text is not a run."""
    found = [one for one in steps_of_run(text) if one.name != "." and one.is_readable]
    if not found:
        return ""
    runs = dict.fromkeys(one.run for one in found)
    if "" not in runs:
        return (
            f"; name a step of one of the runs {few(list(runs))}, as {text}/{list(runs)[-1]}@latest"
        )
    found = [one for one in found if not one.run]
    last = found[-1].name if found[-1].step is None else found[-1].step
    count = "its step" if len(found) == 1 else f"one of its {len(found)} steps"
    return f"; name {count}, as {text}@latest or {text}@{last}"


def _split(text: str) -> tuple[str, str | None]:
    # Why check for a file: "@" may be part of its name.
    return (text, None) if os.path.exists(text) else split_address(text)


def written(path: str, text: str) -> None:
    """Writes a local file atomically.

    Raises:
        InvalidRequestError: The directory does not exist.
        StorageError: The file can't be written.
    """
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise InvalidRequestError(f"{path} can't be written: there is no directory {folder}")
    LocalStorage(folder).write(name, text.encode())

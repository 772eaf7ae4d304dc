"""Damage marks: records, beside the steps of a run, that a process found a step damaged.

A mark is an empty file in the folder `.manager`, bound to the attempt that committed the step
(`format.names.damage_key`). Managers neither count a marked step for retention nor delete it, saves
link to none of its files, and listings show it. It makes no step unreadable: a load verifies for
itself, and `ray-dcp verify --mark` removes marks of steps that are whole.

Whoever marks a step may make an older one the newest that is whole. So announced deletions are
aborted after the mark is written (`io.records.fence`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError
from ray_dcp.format.names import DAMAGED, SHARED_FOLDER, damage_key, marked_damaged
from ray_dcp.io.announced_deletions import fence
from ray_dcp.io.checkpoint import newest_record
from ray_dcp.store.location import url_below
from ray_dcp.store.storage import Entry, Storage
from ray_dcp.view.run_listing import step_of

Opener = Callable[[Target], Storage]

logger = logging.getLogger(__name__)


def below(run: Target, name: str) -> Target:
    """Returns the target of a folder of a run."""
    return replace(run, url=url_below(run.url, name))


def read_marks(run: Target, opener: Opener) -> frozenset[tuple[int, str]]:
    """Returns step and attempt of each damage mark of a run.

    Raises:
        StorageError: The storage can't be listed.
    """
    return marked_damaged(one.key for one in opener(below(run, SHARED_FOLDER)).list(DAMAGED))


def mark_damaged(run: Target, steps: Mapping[int, str], reason: str, opener: Opener) -> None:
    """Marks steps as damaged, and aborts announced deletions of all steps.

    Args:
        run: The run.
        steps: Attempt of each step.
        reason: Reason for the abort records.
        opener: Opens a storage.

    Raises:
        StorageError: The storage failed.
    """
    shared = opener(below(run, SHARED_FOLDER))
    for step, attempt in steps.items():
        shared.write(damage_key(step, attempt), b"")
    if steps:
        fence(shared, lambda name: opener(below(run, name)), reason, None)


def mark_found(
    run: Target, what: str, find: Callable[[], Mapping[int, str]], then: str, opener: Opener
) -> None:
    """Marks the steps that have something damaged, and warns of it, also where that fails.

    Args:
        run: The run.
        what: What is damaged, and how, for the warning.
        find: Finds the steps, with the attempt of each.
        then: What follows from it, for the warning.
        opener: Opens a storage.
    """
    steps: Mapping[int, str] = {}
    try:
        steps = find()
        mark_damaged(run, steps, "steps were found damaged", opener)
    except CheckpointError as error:
        then = f"They could not be marked: {error}. {then}"
    names = ", ".join(map(str, sorted(steps))) or "none"
    logger.warning(
        "%s. The steps that have it: %s. %s. Look at them with `ray-dcp verify %s`, and at the "
        "disk",
        what, names, then, run.url,
    )  # fmt: skip


def remove_marks(run: Target, steps: Iterable[int], opener: Opener, keep: str = "") -> None:
    """Removes the damage marks of steps.

    Args:
        run: The run.
        steps: Numbers of the steps.
        opener: Opens a storage.
        keep: Attempt whose marks stay.

    Raises:
        StorageError: The storage failed.
    """
    shared, chosen = opener(below(run, SHARED_FOLDER)), {*steps}
    marks = marked_damaged(one.key for one in shared.list(DAMAGED)) if chosen else ()
    gone = [damage_key(*one) for one in marks if one[0] in chosen and one[1] != keep]
    if gone:
        shared.delete(gone)


def committed_steps_with(
    run: Target, key: str, opener: Opener, is_damaged: Callable[[Entry], bool]
) -> dict[int, str]:
    """Returns the committed steps that have a damaged file, by number, with their attempts.

    A file that shares its bytes on the disk with the damaged one is damaged, too. Each other file
    of the same length is looked at, as it may be a copy.

    Args:
        run: The run.
        key: Key of a damaged file, relative to the run.
        opener: Opens a storage.
        is_damaged: Looks at another file of the same length.

    Raises:
        StorageError: The storage can't be read.
    """
    storage = opener(run)
    entries = [one for one in storage.list() if one.key.endswith(".distcp")]
    found: dict[int, str] = {}
    damaged = next((one for one in entries if one.key == key), None)
    if damaged is None:
        return found
    for one in entries:
        if one.num_bytes != damaged.num_bytes:
            continue
        is_same = one == damaged or (one.shares is not None and one.shares == damaged.shares)
        if is_same or is_damaged(one):
            # Suppressed: what is committed there can't be read; a load finds that, too.
            with suppress(CheckpointError):
                found |= _committed_with(run, one.key, opener)
    return found


def _committed_with(run: Target, key: str, opener: Opener) -> dict[int, str]:
    """Returns the step to whose commit a file belongs, with its attempt; empty if there is none."""
    folder, _, name = key.rpartition("/")
    top = folder.partition("/")[0]
    step = step_of(top)
    record = newest_record(opener(below(run, folder))) if step is not None else None
    if step is None or record is None or all(one.key != name for one in record.manifest.files):
        return {}
    of_step = record if folder == top else newest_record(opener(below(run, top)))
    return {} if of_step is None else {step: of_step.manifest.attempt}

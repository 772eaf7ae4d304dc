"""Reads and keeps plans beside the checkpoints; thin code over `format.plan_template`.

Nothing here can fail a save. A template that can't be read, is damaged, or is of another version
counts as none; one that can't be written is not there for the next job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from ray_dcp.collector import collector_paused
from ray_dcp.errors import CheckpointError
from ray_dcp.format.plan_template import (
    INDEX_KEY,
    MOST_BYTES,
    MOST_INDEX_BYTES,
    decode_index,
    decode_plan,
    encode_index,
    encode_plan,
    is_template,
    template_key,
)
from ray_dcp.plan.joint import may_share
from ray_dcp.plan.structural_plan import StructuralPlan
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.template_tasks import KeepTemplate, ReadTemplate, TemplateRead
from ray_dcp.store.storage import Entry, KeyMissingError, Storage

__all__ = ["MOST_TEMPLATES", "keep_template", "read_template"]

MOST_TEMPLATES = 4
"""How many a place keeps: those that were used last. A job that saves two layouts in turn, at two
world sizes, uses four."""

logger = logging.getLogger(__name__)


def read_template(task: ReadTemplate, opener: Callable[[Target], Storage]) -> TemplateRead:
    """Returns what is kept of these ranks.

    Args:
        task: Which, and where.
        opener: What opens the storage.

    Complexity:
        One read of one key; nothing is listed.
    """
    name = template_key(task.key)
    try:
        data = opener(task.place).read(name, 0, MOST_BYTES + 1)
        with collector_paused():
            plan = decode_plan(data, task.key)
    except KeyMissingError:
        return TemplateRead(None)
    except CheckpointError as error:
        logger.debug("%s/%s is not used, a new plan is made: %s", task.place.url, name, error)
        return TemplateRead(None)
    if plan.world_size != task.world_size:
        logger.debug("%s/%s is not used: it is of another world", task.place.url, name)
        return TemplateRead(None)
    # Why not of a regular layout: there each file is of one rank.
    if not isinstance(plan, StructuralPlan) and not may_share(plan, task.nodes):
        logger.debug(
            "%s/%s is not used: ranks that may not do so share files", task.place.url, name
        )
        return TemplateRead(None)
    return TemplateRead(plan)


def keep_template(task: KeepTemplate, opener: Callable[[Target], Storage]) -> None:
    """Writes a plan where it is new, notes that it was used last, and removes what is too many.

    A crash in between leaves a template that is not noted, which counts all the same until another
    one is written.

    Args:
        task: Which, and where.
        opener: What opens the storage.
    """
    try:
        _keep(task, opener(task.place))
    except CheckpointError as error:
        logger.debug("The plan of a save is not kept in %s: %s", task.place.url, error)


def _keep(task: KeepTemplate, storage: Storage) -> None:
    name = template_key(task.key)
    if not task.is_there:
        with collector_paused():
            data = encode_plan(task.plan, task.key)
        if data is None:
            logger.debug("The plan of a save is too large to be kept in %s", storage.url)
            return
        _write(storage, name, data)
    used = _used(storage)
    order = list(dict.fromkeys([name, *used]))
    keep, drop = order[:MOST_TEMPLATES], order[MOST_TEMPLATES:]
    if keep != used:
        _write(storage, INDEX_KEY, encode_index(keep))
    if not task.is_there:
        # Why only then: a listing costs, and nothing is too many before something is added.
        drop = _unused(storage, keep)
    if drop:
        storage.delete(drop)


def _write(storage: Storage, key: str, data: bytes) -> None:
    """Writes a file, in a second try if need be.

    Why: another job that tidies up here just then takes our temporary file for that of a process
    that crashed. No clock tells them apart.
    """
    try:
        storage.write(key, data)
    except CheckpointError:
        storage.write(key, data)


def _unused(storage: Storage, keep: Collection[str]) -> list[str]:
    """Returns templates that nobody noted among the last, and what crashed processes began."""
    tell: Callable[[], Sequence[Entry]] = getattr(storage, "unpublished", tuple)
    found = [entry.key for entry in storage.list() if entry.key not in keep]
    templates = [key for key in found if is_template(key)]
    begun = [entry.key for entry in tell() if entry.key.endswith((".plan", INDEX_KEY))]
    # Why not in folders below: another run's place may lie in one.
    return templates + [key for key in begun if "/" not in key]


def _used(storage: Storage) -> list[str]:
    try:
        return decode_index(storage.read(INDEX_KEY, 0, MOST_INDEX_BYTES))
    except KeyMissingError:
        return []

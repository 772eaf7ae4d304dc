"""Which asynchronous save of a session may begin: the queue of `SaveOptions.max_pending`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from ray_dcp.errors import CheckpointError, CheckpointExistsError, SaveSkippedError
from ray_dcp.protocol.operation import Commands
from ray_dcp.protocol.staged_save import StagedSaveMachine

__all__ = ["admit", "let_in"]


def admit(
    queued: StagedSaveMachine, under_way: Sequence[StagedSaveMachine]
) -> StagedSaveMachine | CheckpointError | Literal["begin", "wait"]:
    """Returns what becomes of the first save of a session's queue.

    Args:
        queued: That save.
        under_way: The session's saves that were let in and have not ended, oldest first.

    Returns:
        `"begin"`, `"wait"`, the save that is to be cancelled first, or why it is refused.
    """
    for other in under_way:
        if other.url == queued.url and queued.options.max_pending > 1:
            return CheckpointExistsError(
                f"Expected one save at a time of an id, but operation {other.key.seq} of this "
                f"session is saving to {queued.url}. Wait for its handle, or save under another "
                f"id",
                checkpoint_id=queued.url,
            )
    if len(under_way) < queued.options.max_pending:
        return "begin"
    if queued.options.when_full == "skip":
        return SaveSkippedError(
            f"The save was skipped, as {len(under_way)} are under way "
            f"(SaveOptions.max_pending={queued.options.max_pending}, when_full='skip')",
            checkpoint_id=queued.url,
        )
    if queued.options.when_full == "replace":
        for other in reversed(under_way):
            if other.is_replaceable:
                return other
    return "wait"


def let_in(saves: Iterable[StagedSaveMachine]) -> tuple[StagedSaveMachine, Commands] | None:
    """Moves the queue on by one; returns the save that it concerns, and what to do.

    Args:
        saves: Those of a session that have not ended, oldest first.

    Returns:
        None when nothing can be done now.
    """
    staged = list(saves)
    under_way = [machine for machine in staged if machine.is_under_way]
    first = next((machine for machine in staged if machine.is_queued), None)
    if first is None or any(machine.may_be_over for machine in under_way):
        return None
    match admit(first, under_way):
        case "begin":
            return first, first.let_in()
        case StagedSaveMachine() as replaced:
            why = f"operation {first.key.seq} replaced it (when_full='replace')"
            return replaced, replaced.cancel(why)
        case CheckpointError() as error:
            return first, first.refuse(error)
    return None

"""The errors of requests that no operation can take, in words. Decides nothing else."""

from __future__ import annotations

from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    InvalidRequestError,
    ParticipantError,
)
from ray_dcp.protocol.messages import (
    OpKey,
    PartsHeld,
    PartsWritten,
    Request,
    SaveReceipt,
    SaveStaged,
)
from ray_dcp.protocol.verdict import Opening

__all__ = ["check_world", "unknown", "unknown_operation", "went_ahead"]


def check_world(request: Opening) -> None:
    """Checks that a rank is one of its world.

    Raises:
        InvalidRequestError: It is not.
    """
    if request.world_size < 1 or not 0 <= request.rank < request.world_size:
        raise InvalidRequestError(
            f"Expected a rank from 0 to world size - 1, but found rank {request.rank} of "
            f"{request.world_size}. Give each rank its number in the group",
            rank=request.rank,
        )


def went_ahead(key: OpKey, rank: int) -> ParticipantError:
    """Returns the error of an operation that a rank began with an earlier coordinator.

    Args:
        key: Which operation.
        rank: Who goes on with it.
    """
    return ParticipantError(
        f"The coordinator was restarted during operation {key.seq} of session {key.session!r}: "
        f"rank {rank} had begun it before, and will not join again. Call again",
        rank=rank,
    )


def unknown_operation(key: OpKey) -> ParticipantError:
    """Returns the error of an operation that is not known, for who only asks about it.

    Args:
        key: Which.
    """
    return ParticipantError(
        f"Operation {key.seq} of session {key.session!r} is not known here: this coordinator was "
        f"restarted since it began. Call again"
    )


def unknown(request: Request, why: str) -> CheckpointError:
    """Returns the error of a request for an operation that is not known.

    Args:
        request: Which.
        why: In words.
    """
    message = (
        f"Operation {request.key.seq} of session {request.key.session!r}, to which rank "
        f"{request.rank} sent {type(request).__name__}, is not known here: {why}"
    )
    if isinstance(request, SaveReceipt | SaveStaged | PartsHeld | PartsWritten):
        return CommitUnknownError(
            f"{message}. The storage tells whether attempt {request.attempt} was committed: ask "
            f"ray_dcp.outcome(path, {request.attempt!r})",
            attempt=request.attempt,
            rank=request.rank,
        )
    return ParticipantError(f"{message}. Call again", rank=request.rank)

"""Errors of user code (planners, storage plug-ins, `Stateful` values) as one `CheckpointError`.

A failure is DCP's pair of an exception and its `StackSummary`, made safe to pickle.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from ray_dcp.errors import (
    CheckpointError,
    InternalError,
    MissingKeyError,
    ShapeMismatchError,
    StorageError,
)

__all__ = ["Failure", "as_checkpoint_error", "call_user_code", "combined_error", "failure_of"]

T = TypeVar("T")

Failure = tuple[BaseException, traceback.StackSummary]
"""What `CheckpointError.failures` holds for each rank that failed."""


def failure_of(error: BaseException) -> Failure:
    """Returns an error and where it was raised, as a pair that survives pickling.

    An exception that can't be pickled and read back is replaced by a `CheckpointError` that has
    its class and message: a rank whose error can't travel must not make the others wait.

    Args:
        error: What was raised on this rank.
    """
    # Why rebuilt: frames keep their code object since Python 3.13, which does not pickle.
    stack = traceback.StackSummary.from_list(
        [
            (frame.filename, frame.lineno or 0, frame.name, frame.line or "")
            for frame in traceback.extract_tb(error.__traceback__)
        ]
    )
    return (error if _survives_pickling(error) else _stand_in(error)), stack


def as_checkpoint_error(error: BaseException, doing: str, *, rank: int) -> CheckpointError:
    """Returns an error of user code as a `CheckpointError` with `.failures`.

    Args:
        error: What was raised; a `CheckpointError` of ray_dcp itself is returned as it is.
        doing: What ran, for the message, such as `"MyPlanner.create_local_plan"`.
        rank: This rank.
    """
    if isinstance(error, CheckpointError):
        return error
    wrapped = _class_for(error)(f"{doing} raised {_line(error)}", rank=rank)
    wrapped.__cause__ = error
    return wrapped.with_failures({rank: failure_of(error)})


def call_user_code(doing: str, code: Callable[[], T], *, rank: int) -> T:
    """Returns what `code` returns; what it raises comes as a `CheckpointError`.

    Args:
        doing: What runs, for the message, such as `"MyPlanner.create_local_plan"`.
        code: Calls a hook of the user's.
        rank: This rank.

    Raises:
        CheckpointError: It raised an exception. `KeyboardInterrupt` and the like pass.
    """
    try:
        return code()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - that is the point
        wrapped = as_checkpoint_error(error, doing, rank=rank)
        raise wrapped from wrapped.__cause__


def combined_error(
    doing: str, failures: Mapping[int, Failure], *, world_size: int, checkpoint_id: str | None
) -> CheckpointError:
    """Returns the one error that every rank raises when some ranks failed.

    It has the class of the single failures where they agree (`DeadlineError`, say), and their
    tracebacks as notes.

    Args:
        doing: The step that failed, such as `"save: write"`.
        failures: At least one, by rank.
        world_size: Number of ranks.
        checkpoint_id: For the message.

    Raises:
        InternalError: `failures` is empty.
    """
    if not failures:
        raise InternalError(f"{doing} was reported as failed, but no rank failed")
    ranks = sorted(failures)
    classes = {_class_for(failures[rank][0]) for rank in ranks}
    made = classes.pop() if len(classes) == 1 else CheckpointError
    told = "; ".join(f"rank {rank}: {_line(failures[rank][0])}" for rank in ranks[:_MOST_TOLD])
    more = f"; and {len(ranks) - _MOST_TOLD} more" if len(ranks) > _MOST_TOLD else ""
    error = made(
        f"{doing} failed on {len(ranks)} of {world_size} ranks: {told}{more}",
        checkpoint_id=checkpoint_id,
        rank=ranks[0] if len(ranks) == 1 else None,
    )
    # Why not add_note: it is new in Python 3.11. The attribute is what travels through Ray.
    error.__notes__ = [_note(rank, failures[rank]) for rank in ranks[:_MOST_TOLD]]
    return error.with_failures({rank: failures[rank] for rank in ranks})


_MOST_TOLD = 8
"""Ranks whose failure the message spells out; `.failures` has all."""


def _class_for(error: BaseException) -> type[CheckpointError]:
    if isinstance(error, CheckpointError):
        return type(error)
    # The texts of torch's default planner (default_planner.py, create_default_local_load_plan).
    # Where a later torch words them otherwise the class is less exact, nothing else.
    if isinstance(error, RuntimeError) and "Missing key in checkpoint" in str(error):
        return MissingKeyError
    if isinstance(error, ValueError) and "Size mismatch between saved" in str(error):
        return ShapeMismatchError
    if isinstance(error, OSError):
        return StorageError
    return CheckpointError


def _line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _note(rank: int, failure: Failure) -> str:
    error, stack = failure
    return f"rank {rank}, most recent call last:\n{''.join(stack.format())}{_line(error)}"


def _survives_pickling(error: BaseException) -> bool:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever user classes raise in __reduce__ or __init__
        return False
    return type(copy) is type(error)


def _stand_in(error: BaseException) -> CheckpointError:
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return CheckpointError(f"{kind} (which can't be pickled): {error}")

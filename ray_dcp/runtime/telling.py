"""How a rank tells its errors to the others: a step that fails must not just end its process."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ray_dcp.errors import CheckpointError, InternalError, RankDisagreementError
from ray_dcp.protocol.messages import Refused, Reply
from ray_dcp.protocol.verdict import located

__all__ = ["attempt", "naming", "refusal", "reported"]

T = TypeVar("T")


@contextmanager
def naming(checkpoint_id: str) -> Iterator[None]:
    """Lets errors of ours through, each with the checkpoint that it is about.

    Args:
        checkpoint_id: Of the operation.
    """
    try:
        yield
    except CheckpointError as error:
        placed = located(error, checkpoint_id)
        # Ranks that disagree may do so about the checkpoint; that error names all of theirs.
        if placed is error or isinstance(error, RankDisagreementError):
            raise
        raise placed from error.__cause__


def refusal(reply: Reply, rank: int) -> CheckpointError:
    """Returns the error that a reply stands for.

    Args:
        reply: Not the next step.
        rank: Who got it.
    """
    if isinstance(reply, Refused):
        return copy.copy(reply.error)
    return InternalError(
        f"Expected the next step or a refusal, but rank {rank} was told "
        f"{type(reply).__name__}. Please report this",
        rank=rank,
    )


def attempt(
    work: Callable[[], T], doing: str, rank: int
) -> tuple[T, None] | tuple[None, CheckpointError]:
    """Returns what a step gives, or its error: a rank must tell the others, not just die.

    Args:
        work: The step.
        doing: What it does, in words.
        rank: Who does it.
    """
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - told to every rank, which raises it
        return None, reported(error, doing, rank)


def reported(error: Exception, doing: str, rank: int) -> CheckpointError:
    """Returns an error as it can be told: with its rank, its traceback, and fit to be pickled.

    Args:
        error: What was raised.
        doing: During what, in words.
        rank: Where.
    """
    if isinstance(error, CheckpointError):
        told = copy.copy(error)
        if told.rank is None:
            told.rank = rank
    else:
        told = CheckpointError(f"{doing} failed: {type(error).__name__}: {error}", rank=rank)
        told.__cause__ = error
    known = {} if told._failures is None else told.failures
    if rank not in known:
        stack = _plain(traceback.extract_tb(error.__traceback__))
        known = {**known, rank: (_portable(error), stack)}
    # Why a note: the traceback is lost when the error is pickled to another process.
    lines = "".join(traceback.format_exception(error)[-4:])
    told.__notes__ = [*getattr(told, "__notes__", ()), f"On rank {rank}, {doing}:\n{lines}"]
    return told.with_failures(known)


def _plain(stack: traceback.StackSummary) -> traceback.StackSummary:
    # Why: a frame keeps its code object since Python 3.13, which can't be pickled.
    return traceback.StackSummary.from_list(
        [(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in stack]
    )


def _portable(error: Exception) -> BaseException:
    """Returns the error if it survives a pickle, or one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - user classes can raise anything here
        return CheckpointError(f"{type(error).__name__}: {error}")
    return error

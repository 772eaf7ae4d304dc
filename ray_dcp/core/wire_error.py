"""The wire form of an error: a `CheckpointError` that any process of a job can raise.

A rank, a stager or the coordinator makes it by `to_wire` where an exception ends its work, and a
message or an actor's answer carries it; who receives it raises what `from_wire` returns.

    rank, stager, coordinator           message            ranks
    exception  --- to_wire --->  CheckpointError  --- from_wire --->  raised

The class of our own errors stays; of others the class is in the message. `__traceback__` and
`__cause__` do not cross a process, so the innermost frames are a note.
"""

from __future__ import annotations

import copy
import pickle
import traceback

from ray_dcp.errors import CheckpointError, InternalError

MOST_FRAMES = 3
"""Innermost frames of the traceback that an error's note has."""

Failure = tuple[BaseException, traceback.StackSummary]
"""Value of `CheckpointError.failures` for each rank that failed."""


def to_wire(
    error: BaseException,
    doing: str,
    *,
    rank: int | None = None,
    key: str | None = None,
    kind: type[CheckpointError] = CheckpointError,
) -> CheckpointError:
    """Returns an error in the form in which it is sent.

    Its class and message are those of a `CheckpointError` that can be pickled; of any other
    exception they are in the message. The traceback is a note.

    Args:
        error: The exception; not modified.
        doing: What raised it: a step of the rank, or a participant with its step.
        rank: The rank that raised it, which may raise it itself: its `failures` and `__cause__`
            hold the exception. None for stagers and coordinators, whose reports outlive what they
            did: they hold no frame of it.
        key: The storage key at fault, for an exception that is not ours.
        kind: Class for an exception that is not ours. `InternalError` where only code of ray_dcp
            runs.

    Examples:
        >>> to_wire(ValueError("no such layer"), "capturing the state dict", rank=3)
        CheckpointError('capturing the state dict failed: ValueError: no such layer')
        >>> to_wire(KeyError(7), "The coordinator", kind=InternalError).message
        'The coordinator failed: KeyError: 7. Please report this'
    """
    failure = failure_of(error)
    is_ours = failure[0] is error and isinstance(error, CheckpointError)
    if is_ours:
        sent: CheckpointError = copy.copy(error)  # type: ignore[assignment]
        sent.rank = rank if sent.rank is None else sent.rank
    else:
        way_out = ". Please report this" if issubclass(kind, InternalError) else ""
        sent = kind(f"{doing} failed: {text_of(error)}{way_out}", rank=rank, key=key)
    _note_frames(sent, error, doing if rank is None else f"On rank {rank}, {doing}")
    if rank is None:
        return sent
    if not is_ours:
        sent.__cause__ = error
    return sent.with_failures({rank: failure, **({} if sent._failures is None else sent.failures)})


def from_wire(received: object, who: str, rank: int | None = None) -> CheckpointError:
    """Returns the error to raise for what was received instead of an answer.

    Args:
        received: The wire form of an error; or Ray's error of a call, which has it as `cause`.
            Anything else is a fault of who sent it.
        who: Who sent it, for messages.
        rank: The rank that received it, if a rank did.

    Examples:
        >>> from_wire(InternalError("no such operation"), "the coordinator", 3)
        InternalError('no such operation')
        >>> from_wire(ValueError("no such layer"), "the stager", 3).message
        'the stager failed: ValueError: no such layer. Please report this'
    """
    cause = cause_of(received)
    if isinstance(cause, CheckpointError):
        # Why a copy: one error object may be the answer to several ranks of one process.
        return copy.copy(cause)
    if isinstance(received, BaseException):
        raised = cause if isinstance(cause, BaseException) else received
        error = InternalError(f"{who} failed: {text_of(raised)}. Please report this", rank=rank)
        if raised is not received:
            add_note(error, message_of(received))  # which has the traceback
        return error
    return InternalError(
        f"Expected the next step or an error report from {who}, but "
        f"{'a process' if rank is None else f'rank {rank}'} got {type(received).__name__}. Please "
        f"report this",
        rank=rank,
    )


def cause_of(received: object) -> object:
    """Returns the exception that a process raised, of what its caller received.

    Args:
        received: Ray's error of a call, whose `cause` it is; or the exception itself.
    """
    # Why not by Ray's class: a process without Ray must not import it.
    cause = getattr(received, "cause", None)
    return cause if isinstance(cause, Exception) else received


def failure_of(error: BaseException) -> Failure:
    """Returns an error and its stack, as a pair that can be pickled.

    An exception that can't be pickled and unpickled, or shown, is replaced by a `CheckpointError`
    with its class and message. *Why*: other ranks must not wait for an error that can't be sent.

    Args:
        error: The exception that this rank raised.
    """
    # Why rebuilt: since Python 3.13 frame summaries keep the code object, which can't be pickled.
    stack = traceback.StackSummary.from_list(
        [
            (frame.filename, frame.lineno or 0, frame.name, frame.line or "")
            for frame in traceback.extract_tb(error.__traceback__)
        ]
    )
    try:
        str(error)
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error, stack
    except Exception:  # noqa: BLE001, S110 - whatever user classes raise in __reduce__ or __init__
        pass
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return CheckpointError(f"{kind} (which can't be pickled or shown): {message_of(error)}"), stack


def text_of(error: BaseException) -> str:
    """Returns class and message of an exception, for messages that have room for a text only.

    Examples:
        >>> text_of(ValueError("no such layer"))
        'ValueError: no such layer'
    """
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Returns the message of an exception, also if its class can't give it.

    Examples:
        >>> message_of(ValueError("no such layer"))
        'no such layer'
    """
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever user classes raise in __str__
        return "<exception str() failed>"  # as `traceback` writes it


def add_note(error: BaseException, note: str) -> None:
    """Adds a note, which crosses processes as the error does.

    *Why* not `error.add_note`: Python 3.10 has none.
    """
    error.__notes__ = [*getattr(error, "__notes__", ()), note]


def _note_frames(sent: CheckpointError, error: BaseException, title: str) -> None:
    lines = traceback.format_tb(error.__traceback__)[-MOST_FRAMES:]
    if not isinstance(error, CheckpointError):  # whose own message is not repeated
        lines += traceback.format_exception_only(error)
    if lines:
        add_note(sent, f"{title}:\n{''.join(lines)}")

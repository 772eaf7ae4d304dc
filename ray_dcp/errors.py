"""Every error that ray_dcp raises on purpose, as one tree grouped by what the catcher does.

Nothing here imports torch: `torch_adapter` makes `CheckpointError` a
`torch.distributed.checkpoint.api.CheckpointException` as well when it is first imported.

| catch | and then |
|---|---|
| `InvalidRequestError` | fix the call: an argument or the state dict is wrong |
| `CheckpointNotFoundError` | look elsewhere: there is no checkpoint at this place |
| `CheckpointExistsError` | pick another id, or load what is there |
| `DamagedCheckpointError` | fall back a step: these bytes can't be trusted |
| `StorageError` | retry, or call the owner of the storage |
| `ParticipantError` | restart the rank, stager or coordinator that is named |
| `LimitError` | raise the limit that is named |
| `CommitUnknownError` | ask `ray_dcp.outcome(path, attempt)` later |
| `InternalError` | report a bug |
| `CheckpointError` itself | upgrade: a newer ray_dcp or torch wrote the checkpoint |
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CommitUnknownError",
    "CoverageError",
    "DamagedCheckpointError",
    "DeadlineError",
    "InternalError",
    "InvalidRequestError",
    "LimitError",
    "MissingKeyError",
    "NonFiniteError",
    "ParticipantError",
    "PlanConflictError",
    "RankDisagreementError",
    "SaveCancelledError",
    "SaveSkippedError",
    "ShapeMismatchError",
    "StateDictError",
    "StorageError",
    "StorageRefusedError",
    "UncommittedCheckpointError",
    "UnsafeCheckpointError",
    "UnsupportedValueError",
]


class CheckpointError(Exception):
    """A save, a load or a look at a checkpoint did not do what was asked.

    Args:
        message: What was expected, what was found, and the way out.
        checkpoint_id: Path or URL of the checkpoint, if one is concerned.
        step: Training step, if known.
        rank: The rank at which it happened, if it happened at one.
        key: Storage key, FQN or option that is at fault, if one is.

    Attributes:
        failures: `{rank: (exception, traceback.StackSummary)}`, the form in which
            `torch.distributed.checkpoint.CheckpointException` reports ranks. Holds this error
            itself under its rank (0 when no rank is known) unless other ranks' errors were set.
    """

    def __init__(
        self,
        message: str,
        *,
        checkpoint_id: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        key: str | None = None,
    ) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.checkpoint_id = checkpoint_id
        self.step = step
        self.rank = rank
        self.key = key
        self._failures: dict[int, tuple[BaseException, traceback.StackSummary]] | None = None

    @property
    def failures(self) -> dict[int, tuple[BaseException, traceback.StackSummary]]:
        """`{rank: (exception, StackSummary)}`, never empty."""
        if self._failures is None:
            return {self.rank or 0: (self, traceback.extract_tb(self.__traceback__))}
        return dict(self._failures)

    def with_failures(
        self, failures: Mapping[int, tuple[BaseException, traceback.StackSummary]]
    ) -> CheckpointError:
        """Returns this error after recording which rank failed with what."""
        self._failures = dict(failures)
        return self

    def __str__(self) -> str:
        fields = {
            "checkpoint": self.checkpoint_id,
            "step": self.step,
            "rank": self.rank,
            "key": self.key,
        }
        where = [f"{name} {value}" for name, value in fields.items() if value is not None]
        text = f"{self.message} [{', '.join(where)}]" if where else self.message
        # Why: a name in a checkpoint, or of a file, may hold what no terminal and no log takes.
        return text if text.isascii() else text.encode(errors="backslashreplace").decode()

    def __reduce__(self) -> tuple[Any, ...]:
        # Why: Exception.__reduce__ would call the class with `args` only, and Ray pickles errors.
        return (
            _rebuild,
            (type(self), self.message, self._fields(), getattr(self, "__notes__", None)),
            {"_failures": self._failures},
        )

    def _fields(self) -> dict[str, Any]:
        return {
            "checkpoint_id": self.checkpoint_id,
            "step": self.step,
            "rank": self.rank,
            "key": self.key,
        }


def _rebuild(
    cls: type[CheckpointError], message: str, fields: dict[str, Any], notes: list[str] | None
) -> CheckpointError:
    error = cls(message, **fields)
    if notes:
        error.__notes__ = list(notes)
    return error


class InvalidRequestError(CheckpointError, ValueError, RuntimeError):
    """The call is wrong: fix an argument, an option or the state dict."""


class StateDictError(InvalidRequestError):
    """The state dict can't be saved as it is, or does not fit the checkpoint."""


class MissingKeyError(StateDictError):
    """Keys that the caller asked for are not in the checkpoint; the message has a line for each."""


class ShapeMismatchError(StateDictError):
    """A target has another global shape, or a narrower dtype, than the checkpoint."""


class UnsupportedValueError(StateDictError):
    """A value can't be checkpointed: a quantised or `Partial` tensor, an unpicklable object."""


class NonFiniteError(StateDictError):
    """A tensor holds NaN or infinities, and they are refused: go back to an earlier step."""


class PlanConflictError(StateDictError):
    """The ranks' plans do not make one checkpoint: overlap, gap, other shape or dtype."""


class CoverageError(PlanConflictError):
    """Some region of a tensor is held by no rank, or stored in no chunk."""


class RankDisagreementError(InvalidRequestError):
    """Ranks called save or load with different arguments, or one rank appears twice."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this place."""


class UncommittedCheckpointError(CheckpointNotFoundError):
    """There are files of a save here, but none was ever committed."""


class CheckpointExistsError(CheckpointError, FileExistsError, RuntimeError):
    """A committed checkpoint has this id already, or another attempt won the race for it."""


class DamagedCheckpointError(CheckpointError):
    """Stored bytes do not match what was committed: fall back a step."""


class UnsafeCheckpointError(DamagedCheckpointError):
    """The checkpoint asks for code to run, or for a file outside its own directory."""


class StorageError(CheckpointError, OSError):
    """The storage refused, failed or did not answer."""


class StorageRefusedError(StorageError):
    """The storage answered that it does not do this: to ask again changes nothing."""


class ParticipantError(CheckpointError):
    """A rank, stager or coordinator died, froze or never came."""


class DeadlineError(ParticipantError, TimeoutError):
    """A phase did not end in time; the message names who was missing."""


class SaveCancelledError(CheckpointError):
    """The save was cancelled before it was committed."""


class SaveSkippedError(SaveCancelledError):
    """The save was not begun, because enough others were under way (`when_full="skip"`)."""


class LimitError(CheckpointError):
    """A limit, of the options or of the machine, is too small for this: raise it."""


class InternalError(CheckpointError):
    """ray_dcp contradicts itself: please report it."""


class CommitUnknownError(CheckpointError):
    """Neither storage nor coordinator reported whether the commit happened.

    The only error after which the checkpoint may still appear.
    `ray_dcp.outcome(path, attempt)` answers later.

    Args:
        message: As for `CheckpointError`.
        attempt: The attempt whose outcome is open.
        checkpoint_id: As for `CheckpointError`.
        step: As for `CheckpointError`.
        rank: As for `CheckpointError`.
        key: As for `CheckpointError`.
    """

    def __init__(
        self,
        message: str,
        *,
        attempt: str = "",
        checkpoint_id: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message, checkpoint_id=checkpoint_id, step=step, rank=rank, key=key)
        self.attempt = attempt

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "attempt": self.attempt}

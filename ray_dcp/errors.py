"""The exceptions of ray_dcp: one hierarchy, grouped by what the caller does about an error.

This module does not import torch. When `torch_adapter` is first imported, it makes
`CheckpointError` a subclass of `torch.distributed.checkpoint.api.CheckpointException` as well.

| catch | and then |
|---|---|
| `InvalidRequestError` | fix the call: an argument or the state dict is wrong |
| `CheckpointNotFoundError` | look elsewhere: there is no checkpoint at this place |
| `CheckpointExistsError` | choose another id, or load the existing checkpoint |
| `DamagedCheckpointError` | fall back to an earlier step: these bytes can't be trusted |
| `StorageError` | retry, or contact the owner of the storage |
| `ParticipantError` | restart the rank, stager or coordinator that the message names |
| `LimitError` | raise the limit that the message names |
| `CommitUnknownError` | call `ray_dcp.outcome(path, attempt)` later |
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
    """Base class: a save, a load or another operation on a checkpoint failed.

    Args:
        message: What was expected, what was found, and the way out.
        checkpoint_id: Path or URL of the checkpoint, if the error concerns one.
        step: Training step, if known.
        rank: The rank that failed, if it was a single one.
        key: The storage key, FQN or option at fault, if there is one.

    Attributes:
        failures: `{rank: (exception, traceback.StackSummary)}`, the form in which
            `torch.distributed.checkpoint.CheckpointException` reports ranks. Holds this error
            under its own rank (0 if unknown) unless `with_failures` set the errors of ranks.
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
        """Sets `failures` and returns this error."""
        self._failures = dict(failures)
        return self

    def __str__(self) -> str:
        fields = CheckpointError._fields(self).items()
        where = [f"{n.removesuffix('_id')} {value}" for n, value in fields if value is not None]
        text = f"{self.message} [{', '.join(where)}]" if where else self.message
        # Why: names of tensors and files may have characters that terminals and logs can't encode.
        return text if text.isascii() else text.encode(errors="backslashreplace").decode()

    def __reduce__(self) -> tuple[Any, ...]:
        # Why: Ray pickles errors, and Exception.__reduce__ would drop the keyword-only fields.
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
    """The state dict can't be saved, or does not match the checkpoint."""


class MissingKeyError(StateDictError):
    """Keys that the caller asked for are not in the checkpoint; the message has a line for each."""


class ShapeMismatchError(StateDictError):
    """A target has another global shape than the checkpoint, or a narrower dtype."""


class UnsupportedValueError(StateDictError):
    """A value can't be checkpointed: a quantised or `Partial` tensor, or an unpicklable object."""


class NonFiniteError(StateDictError):
    """A tensor holds NaN or infinities, which the options refuse: go back to an earlier step."""


class PlanConflictError(StateDictError):
    """The ranks' plans conflict: they overlap, leave gaps, or differ in shape or dtype."""


class CoverageError(PlanConflictError):
    """No rank holds, or no chunk stores, some region of a tensor."""


class RankDisagreementError(InvalidRequestError):
    """Ranks called save or load with different arguments, or two processes use the same rank."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this place."""


class UncommittedCheckpointError(CheckpointNotFoundError):
    """This place has files of saves, but none of these saves was committed."""


class CheckpointExistsError(CheckpointError, FileExistsError, RuntimeError):
    """A committed checkpoint already has this id, or another save committed under it first."""


class DamagedCheckpointError(CheckpointError):
    """Stored bytes do not match those that were committed: fall back to an earlier step."""


class UnsafeCheckpointError(DamagedCheckpointError):
    """The checkpoint would run code, or refers to a file outside its own directory."""


class StorageError(CheckpointError, OSError):
    """The storage refused a request, failed or did not answer."""


class StorageRefusedError(StorageError):
    """The storage does not support or allow this request: a retry gets the same answer."""


class ParticipantError(CheckpointError):
    """A rank, stager or coordinator died, froze or never joined."""


class DeadlineError(ParticipantError, TimeoutError):
    """A phase missed its deadline; the message names the ranks that were missing."""


class SaveCancelledError(CheckpointError):
    """The save was cancelled before it was committed."""


class SaveSkippedError(SaveCancelledError):
    """The save was not started: `max_pending` saves were in progress (`when_full="skip"`)."""


class LimitError(CheckpointError):
    """A limit of the options or of the machine is too low: raise it."""


class InternalError(CheckpointError):
    """An invariant of ray_dcp does not hold: please report this."""


class CommitUnknownError(CheckpointError):
    """Neither the storage nor the coordinator reported whether the checkpoint was committed.

    This is the only error after which the checkpoint may still appear. Call
    `ray_dcp.outcome(path, attempt)` later to learn how the save ended.

    Args:
        message: As for `CheckpointError`.
        attempt: Id of the attempt whose outcome is unknown.
        fields: As for `CheckpointError`.
    """

    def __init__(self, message: str, *, attempt: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.attempt = attempt

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "attempt": self.attempt}

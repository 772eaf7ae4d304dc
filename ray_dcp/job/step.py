"""`JobStep`: a step of a job while it is saved, as the driver holds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ray_dcp.commit_protocol.job_step import Phase
from ray_dcp.commit_protocol.vote import Fenced, Lost, Open, Won
from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
    SaveCancelledError,
)
from ray_dcp.job.coordinator import Opened, PartStatus, Status
from ray_dcp.job.part import Part, check_no_part, tell_coordinator
from ray_dcp.job.part_value import PartValue
from ray_dcp.manager.catalogue import Root
from ray_dcp.options import check_wait, plain_integer
from ray_dcp.place.outcome import settle
from ray_dcp.session import ray_calls

_SLICE_S = 10.0
"""How long the coordinator holds back an answer, in seconds."""


@dataclass(frozen=True)
class Line:
    """The driver's line to the coordinator of its run."""

    coordinator: str
    """Actor name."""
    namespace: str
    nonce: str
    root: Root

    def call(
        self, send: Callable[[Any], Any], *, step: int, timeout_s: float = bounds.JOB_ANSWER_S
    ) -> Any:
        """Returns the coordinator's answer; see `tell_coordinator`."""
        return tell_coordinator(
            self.coordinator, self.namespace, send, step=step, timeout_s=timeout_s
        )


@dataclass(frozen=True, kw_only=True)
class JobStepReport:
    """How far a step of a job is."""

    step: int
    phase: Phase
    """"opened", "staged" (all parts are), "committing", "committed", "given up", or "unknown"
    (the storage did not say whether it was committed)."""
    parts: Mapping[str, PartStatus]
    """How far each part is."""


class JobStep:
    """A step that is being saved. `JobCheckpoints.step` opens it; use it as a context manager.

    Leaving the block without an error waits until every part is staged: from then on the step is
    committed whatever becomes of the processes that gave the parts. An error in the block gives the
    step up.

    Args:
        line: The driver's line to the coordinator.
        step: Number of the step.
        opened: What the coordinator opened.

    Attributes:
        step: Number of the step.
        checkpoint_id: Path or URL of its folder.
    """

    def __init__(self, line: Line, step: int, opened: Opened) -> None:
        self.step = step
        self.checkpoint_id = line.root.below(opened.name).url
        self._line, self._opened = line, opened
        self._is_left = False

    def part(self, name: str, *, version: int | None = None) -> Part:
        """Returns the token of a part, which its ranks give to `save` or `async_save`.

        Args:
            name: Name of the part.
            version: Version of what is saved, such as the number of updates of the policy. Where
                parts have versions, all have to be equal, or the step is not committed.

        Raises:
            InvalidRequestError: The step has no such part, or the version is no integer.
        """
        target = self._line.root.below(f"{self._opened.name}/{self._folder(name)}")
        version = _checked(version)
        return Part(
            target.url,
            target.storage_options,
            target.filesystem,
            name=name,
            step=self.step,
            version=version,
            attempt=self._opened.attempt,
            coordinator=self._line.coordinator,
            namespace=self._line.namespace,
        )

    def put(self, name: str, value: Any, *, version: int | None = None) -> None:
        """Makes a value a part: an `ObjectRef`, or any value. Returns at once.

        A writer on a node that has the object maps and writes it; no byte of an `ObjectRef` passes
        through this process. Tensors are tensors of the checkpoint, all else objects that load
        under the rules of `torch.load(weights_only=True)`.

        Args:
            name: Name of the part.
            value: The value, or the reference of one, such as that of an actor's answer. An actor
                that returns `PartValue(value)` spares Ray the pickling of its tensors.
            version: See `part`.

        Raises:
            InvalidRequestError: The step has no such part, or it is saved already.
        """
        self._folder(name)
        version = _checked(version)
        check_no_part(
            value,
            f"a value or a reference of one as the part {name!r}",
            "keep(name) takes the part of the last committed step",
        )
        if not ray_calls.is_ref(value):
            value = ray_calls.put(value if isinstance(value, PartValue) else PartValue(value), 0)
        line, attempt = self._line, self._opened.attempt
        line.call(
            lambda actor: actor.put.remote(line.nonce, attempt, name, [value], version),
            step=self.step,
        )

    def keep(self, name: str, *, timeout_s: float = 3600.0) -> None:
        """Takes a part from the last committed step that has it. No rank reads or writes a byte.

        Files are linked, or copied by the object store; either step can be deleted. Waits for
        earlier steps that are being saved, as one of them may have the part.

        Args:
            name: Name of the part.
            timeout_s: How long to wait for them, in seconds.

        Raises:
            CheckpointNotFoundError: No committed step has the part.
            InvalidRequestError: The step has no such part, or it is saved already.
        """
        self._folder(name)
        line, attempt = self._line, self._opened.attempt
        line.call(
            lambda actor: actor.keep.remote(line.nonce, attempt, name),
            step=self.step,
            timeout_s=timeout_s,
        )

    def staged(self, timeout_s: float | None = None) -> None:
        """Waits until all parts are staged.

        Args:
            timeout_s: How long to wait, in seconds; without a limit if None.

        Raises:
            DeadlineError: The timeout expired.
            CheckpointError: The step was given up.
        """
        status = self._wait("staged", timeout_s, "be staged")
        if status.error is not None:
            raise status.error

    def result(self, timeout_s: float | None = None) -> str:
        """Waits until the step is committed, and returns its path or URL.

        Args:
            timeout_s: How long to wait, in seconds; without a limit if None.

        Raises:
            DeadlineError: The timeout expired; the step is still being saved.
            CheckpointError: The step was given up, and its parts are deleted.
            CommitUnknownError: It is unknown whether it was committed.
        """
        try:
            status = self._wait("over", timeout_s, "be committed")
        except ParticipantError as error:
            self._settle(error)
            return self.checkpoint_id
        if status.error is not None:
            raise status.error
        return self.checkpoint_id

    def cancel(self) -> bool:
        """Gives the step up; returns False if its commit has begun."""
        error = SaveCancelledError(
            f"step {self.step} was cancelled by JobStep.cancel", step=self.step
        )
        given_up: bool = self._line.call(
            lambda actor: actor.cancel.remote(self._opened.attempt, error), step=self.step
        )
        return given_up

    def report(self) -> JobStepReport:
        """Returns how far the step and its parts are."""
        status = self._ask("", 0.0)
        return JobStepReport(step=self.step, phase=status.phase, parts=status.parts)

    def __enter__(self) -> JobStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._leave(None)
            self.staged()
            return
        told = CheckpointError(
            f"the block of step {self.step} raised {type(error).__name__}: {error}. The step is "
            f"not committed, and the one before stands",
            step=self.step,
        )
        try:
            self._leave(told)
            self._wait("over", bounds.JOB_ANSWER_S, "be given up")
        except CheckpointError as failed:
            error.add_note(f"When step {self.step} was given up: {failed}")

    def __repr__(self) -> str:
        return f"<JobStep {self.checkpoint_id!r}>"

    def _leave(self, error: CheckpointError | None) -> None:
        if self._is_left:
            return
        line, attempt = self._line, self._opened.attempt
        line.call(lambda actor: actor.leave.remote(line.nonce, attempt, error), step=self.step)
        self._is_left = True

    def _folder(self, name: str) -> str:
        if name not in self._opened.folders:
            raise InvalidRequestError(
                f"step {self.step} has the parts {', '.join(self._opened.folders)}, but was asked "
                f"for {name!r}; name it in JobCheckpoints(parts=...)",
                step=self.step,
                key=str(name),
            )
        return self._opened.folders[name]

    def _ask(self, until: str, wait_s: float) -> Status:
        status: Status | None = self._line.call(
            lambda actor: actor.wait.remote(self._opened.attempt, until, wait_s),
            step=self.step,
            timeout_s=wait_s + bounds.JOB_ANSWER_S,
        )
        if status is None:
            raise ParticipantError(
                f"expected the coordinator of step {self.step} to know it, but it ended long ago, "
                f"or another coordinator has taken the run; ask JobStep.result() how it ended",
                step=self.step,
            )
        return status

    def _wait(self, until: str, timeout_s: float | None, what: str) -> Status:
        timeout_s = check_wait(timeout_s, "timeout_s")
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _SLICE_S if end_s is None else end_s - time.monotonic()
            status = self._ask(until, min(_SLICE_S, max(0.0, left_s)))
            if status.is_over or (until == "staged" and status.phase != "opened"):
                if status.error is None or status.is_over:
                    return status
            elif left_s <= 0:
                raise DeadlineError(
                    f"expected step {self.step} to {what} within {timeout_s:g} s, but it was not. "
                    f"It goes on: wait longer, or look at JobStep.report()",
                    step=self.step,
                )

    def _settle(self, error: ParticipantError) -> None:
        """Returns if the step is committed although its coordinator ended; else makes it fail.

        Raises:
            ParticipantError: The step is not committed, and never will be.
            CommitUnknownError: The storage did not say.
        """
        root, opened = self._line.root, self._opened
        match settle(root.below(opened.name), opened.attempt, reason=error.message, rank=None):
            case Won() | Lost():
                return
            case Fenced():
                raise error
            case Open(why):
                raise CommitUnknownError(
                    f"the coordinator of step {self.step} ended, and the storage did not say "
                    f"whether the step is committed: {why}. Ask ray_dcp.outcome later",
                    attempt=opened.attempt,
                    step=self.step,
                ) from error
        raise InternalError("a vote ended in no known way. Please report this")


def _checked(version: Any) -> int | None:
    """Returns a version that is an integer, or None.

    Raises:
        InvalidRequestError: It is anything else.
    """
    found = plain_integer(version)
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    raise InvalidRequestError(
        f"expected an integer as version of a part, such as a number of updates, or None; found "
        f"{version!r}",
        key="version",
    )

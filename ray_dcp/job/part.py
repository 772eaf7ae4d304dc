"""`Part`: the token of one part of a job's step, given to `save` or `load` as the checkpoint's id.

`PartSave` is a rank's line to the coordinator of the step while it saves a part.

*Careful*: importing this module does not import ray; a process that is alone never needs it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.commit_protocol.job_step import Begun, Event, Failed, Staged
from ray_dcp.core import bounds
from ray_dcp.core.wire_error import to_wire
from ray_dcp.errors import InternalError, InvalidRequestError, ParticipantError
from ray_dcp.session.call_bound import CallBound
from ray_dcp.store.location import Location, url_below


@dataclass(frozen=True)
class Part(Location):
    """One part of a step of a job: small, picklable, and taken wherever a `checkpoint_id` is.

    `JobStep.part` returns parts to save, `CommittedStep.part` parts to load.
    """

    name: str = field(default="", kw_only=True)
    step: int = field(default=0, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    """The version that all parts of the step that give one must have."""
    attempt: str = field(default="", kw_only=True)
    """Attempt of the step that is being saved; "" for a part of a committed step."""
    coordinator: str = field(default="", kw_only=True, repr=False)
    """Actor name of the job's coordinator."""
    namespace: str = field(default="", kw_only=True, repr=False)
    """Ray namespace of that actor."""

    def __truediv__(self, name: str) -> Location:
        """Returns a location below the part, which is no part itself."""
        return Location(url_below(self.url, name), self.storage_options, self.filesystem)

    def check_loadable(self) -> None:
        """Checks that the part is one of a committed step.

        Raises:
            InvalidRequestError: Its step is being saved.
        """
        if self.attempt:
            raise InvalidRequestError(
                f"expected a part of a committed step, but {self.name!r} is one of step "
                f"{self.step} while that is saved, which may never be committed; load "
                f"JobCheckpoints.latest().part({self.name!r})",
                step=self.step,
                key=self.name,
            )


def check_loadable(checkpoint_id: object) -> None:
    """Checks that a `checkpoint_id` of a load is not a part of a step that is being saved.

    Raises:
        InvalidRequestError: It is one.
    """
    if isinstance(checkpoint_id, Part):
        checkpoint_id.check_loadable()


def check_run(run: object) -> None:
    """Checks that what should be a run is not a part of a step.

    Raises:
        InvalidRequestError: It is one.
    """
    if isinstance(run, Part):
        raise InvalidRequestError(
            f"expected a run, the directory of its steps, but {run.name!r} is a part of step "
            f"{run.step}, one checkpoint, below which nothing is saved; give the run, "
            f"{run.url.rsplit('/', 2)[0]}",
            step=run.step,
            key=run.name,
        )


def check_no_part(value: object, expected: str, way_out: str) -> None:
    """Checks that a value is not a part where none can be.

    Args:
        value: The value.
        expected: What should be there, as "the number of a step".
        way_out: What to do instead.

    Raises:
        InvalidRequestError: It is one.
    """
    if isinstance(value, Part):
        raise InvalidRequestError(
            f"expected {expected}, found the part {value.name!r} of step {value.step}; {way_out}",
            step=value.step,
            key=value.name,
        )


def tell_coordinator(
    name: str,
    namespace: str,
    send: Callable[[Any], Any],
    *,
    step: int,
    timeout_s: float = bounds.JOB_ANSWER_S,
) -> Any:
    """Returns the answer of a job's coordinator that must still live.

    Args:
        name: Its actor name.
        namespace: Its Ray namespace.
        send: Starts the call on its handle.
        step: The step that is asked about, for errors.
        timeout_s: Deadline, in seconds.

    Raises:
        ParticipantError: The coordinator has ended.
        CheckpointError: It raised the error, or did not answer in time.
    """
    from ray_dcp.session import ray_calls

    who = f"the coordinator of the job's step {step}"

    def handle(is_fresh: bool) -> Any:
        # Why not made again: it alone knows the step, which nobody else can commit.
        if not is_fresh:
            with suppress(ValueError):
                return ray_calls.get_actor(name, namespace)
        raise ParticipantError(
            f"expected {who} to live, but its actor has ended. The step is not committed unless "
            f"its record exists already, and the one before stands; open another step",
            step=step,
        )

    return ray_calls.call_actor(who, handle, send, CallBound(timeout_s))


class PartSave:
    """What one rank tells the coordinator of a step about its save of a part.

    Args:
        part: The part.
        rank: This rank.
        world_size: Number of ranks that save the part.

    Raises:
        InvalidRequestError: The part is one of a committed step, or this process has no Ray.
    """

    def __init__(self, part: Part, rank: int, world_size: int) -> None:
        if not part.attempt:
            raise InvalidRequestError(
                f"the part {part.name!r} is one of step {part.step}, which is committed and never "
                f"changes; save to a part of JobCheckpoints.step",
                step=part.step,
                key=part.name,
            )
        self._part, self._rank, self._world_size = part, rank, world_size
        self._call_id = secrets.token_hex(8)
        self._is_begun = self._is_staged = self._is_durable = False

    @classmethod
    def of(cls, checkpoint_id: object, rank: int, world_size: int) -> PartSave | None:
        """Returns the line of a rank that saves to a part; None for any other `checkpoint_id`."""
        if not isinstance(checkpoint_id, Part):
            return None
        return cls(checkpoint_id, rank, world_size)

    def begin(self) -> None:
        """Announces that this rank saves the part.

        Raises:
            InvalidRequestError: The step was given up, committed or replaced by another one; or
                the part was saved already.
            ParticipantError: The coordinator has ended.
        """
        from ray_dcp.session import ray_calls

        part = self._part
        if ray_calls.this_connection() is None:
            raise InvalidRequestError(
                f"expected the part {part.name!r} to be saved in a process of the job's Ray, but "
                f"this one is not connected; call ray.init first",
                step=part.step,
                key=part.name,
            )
        process = ray_calls.this_caller(os.getpid())
        self._is_begun = True
        try:
            self._tell(Begun(part.name, self._rank, process, part.version, self._call_id))
        except InvalidRequestError:
            # Why: who is refused must not give up the step of those who save the part.
            self._is_begun = False
            raise

    def staged(self, attempt: str | None, *, outlives: bool, is_durable: bool = False) -> None:
        """Reports that this rank's bytes are copied, or durable.

        Args:
            attempt: Attempt of the part's save.
            outlives: Whether the save goes on if this process dies.
            is_durable: Whether the part is committed, so that its end is not reported again.

        Raises:
            CheckpointError: The step was given up.
        """
        if self._is_staged:
            return
        if not attempt:
            raise InternalError(
                f"the save of the part {self._part.name!r} has no attempt. Please report this",
                step=self._part.step,
            )
        told = Staged(self._part.name, self._rank, self._world_size, attempt, outlives, is_durable)
        self._tell(told)
        self._is_staged, self._is_durable = outlives, is_durable

    def ended(self, error: BaseException | None) -> None:
        """Reports that the save ended: with an error the step is given up. Never raises."""
        if not self._is_begun or (error is None and self._is_durable):
            return
        # Suppressed: the coordinator finds out by the part's records, or at its deadline.
        with suppress(Exception):
            if error is None:
                self._call(lambda actor: actor.look.remote(self._part.attempt, self._part.name))
                return
            self._tell(Failed(self._part.name, to_wire(error, "its save")))

    def _tell(self, event: Event[Any]) -> None:
        self._call(lambda actor: actor.tell.remote(self._part.attempt, event))

    def _call(self, send: Callable[[Any], Any]) -> None:
        part = self._part
        tell_coordinator(part.coordinator, part.namespace, send, step=part.step)

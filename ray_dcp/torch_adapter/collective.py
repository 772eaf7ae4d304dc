"""Collective steps that run user code with the semantics of DCP: run, gather, decide, scatter.

The collectives of DCP's `_DistWrapper` are generators over `protocol.messages.Exchange` here,
without a process group; the coordinator rank decides. An exception of user code (planners, storage
plug-ins, `Stateful` values) on any rank is raised on every rank as the same `CheckpointError`. A
failure is DCP's pair of an exception and its `StackSummary`, made safe to pickle.

    every rank        coordinator rank                   every rank
    local()  ------>  combine([value of each rank])  ------>  its part

*Trust*: plans, results and metadata of third-party planners and storages have no schema, so they
are sent as pickles, as in DCP. Only ranks of the same job read them, which run the same user code
as the sender; they never come from storage.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from ray_dcp.commit_protocol.error_aggregation import exchanged
from ray_dcp.commit_protocol.messages import Exchange, OpKey, Reply
from ray_dcp.core import bounds
from ray_dcp.core.wire_error import Failure, add_note, failure_of, from_wire, text_of
from ray_dcp.errors import (
    CheckpointError,
    MissingKeyError,
    ParticipantError,
    ShapeMismatchError,
    StorageError,
)
from ray_dcp.torch_adapter.flatten import MOST_LISTED, listed

T = TypeVar("T")


def call_user_code(doing: str, code: Callable[[], T], *, rank: int) -> T:
    """Returns the result of `code`; converts its exceptions to `CheckpointError`.

    Args:
        doing: Name of the code for the message, such as `"MyPlanner.create_local_plan"`.
        code: Calls a user's hook.
        rank: This rank.

    Raises:
        CheckpointError: `code` raised an `Exception`. `KeyboardInterrupt` and the like are not
            converted.
    """
    try:
        return code()
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        wrapped = _class_for(error)(f"{doing} raised {_line(error)}", rank=rank)
        raise wrapped.with_failures({rank: failure_of(error)}) from error


def _class_for(error: BaseException) -> type[CheckpointError]:
    if isinstance(error, CheckpointError):
        return type(error)
    # The texts of torch's default planner (default_planner.py, create_default_local_load_plan).
    # If a later torch words them differently, the class is less exact, nothing else.
    if isinstance(error, RuntimeError) and "Missing key in checkpoint" in str(error):
        return MissingKeyError
    if isinstance(error, ValueError) and "Size mismatch between saved" in str(error):
        return ShapeMismatchError
    if isinstance(error, OSError):
        return StorageError
    return CheckpointError


def _line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _describe_failure(rank: int, failure: Failure) -> str:
    error, stack = failure
    return f"rank {rank}, most recent call last:\n{''.join(stack.format())}{_line(error)}"


Steps = Generator[Exchange, Reply, T]
"""A step: yields this rank's message to the coordinator, is sent the reply, and returns a T."""

Lost = Callable[[ParticipantError], CheckpointError]
"""Returns the error of a rank that never received the coordinator rank's answer."""

Part = Callable[[], Any]
"""Returns this rank's part of a result. It unpickles when called, so that a failure to unpickle
belongs to the step that needs the value, and reaches the other ranks from there."""

NUM_KEYS = 6
"""Most exchanges that the steps of one call need: two for each step."""


class RankCall(Protocol):
    """What a step of a save or load needs of the call of which it is a part: a `Call`."""

    @property
    def rank(self) -> int:
        """Rank in the session."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks of the session."""
        ...

    def next_key(self) -> OpKey:
        """Returns the key of the next operation."""
        ...

    def ask(self, request: Any) -> Reply:
        """Returns the coordinator's reply."""
        ...


class Group:
    """The ranks of one save or load, seen from one of them.

    Every exchange is an operation of its session, and all ranks must use the same key for it. The
    keys are taken together, in the calling thread: so they stay aligned while other threads make
    calls, and if a rank leaves early. A single rank exchanges nothing.

    Args:
        call: The call of which they are a part.
        timeout_s: Deadline of each step, in seconds.
        doing: `"save"` or `"load"`, for messages.
        checkpoint_id: For messages.
        coordinator_rank: The rank that decides.
    """

    def __init__(
        self,
        call: RankCall,
        timeout_s: float,
        doing: str,
        checkpoint_id: str | None = None,
        coordinator_rank: int = 0,
    ) -> None:
        self.rank = call.rank
        self.world_size = call.world_size
        self.timeout_s = timeout_s
        self.doing = doing
        self.checkpoint_id = checkpoint_id
        self.coordinator_rank = coordinator_rank
        num_keys = NUM_KEYS if call.world_size > 1 else 0
        self._keys = iter([call.next_key() for _ in range(num_keys)])

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator rank."""
        return self.rank == self.coordinator_rank

    @property
    def others(self) -> list[int]:
        """All ranks except this one."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def next_key(self) -> OpKey:
        """Returns the key of the next exchange."""
        return next(self._keys)

    def failed(self, step: str, failures: Mapping[int, Failure]) -> CheckpointError:
        """Returns the one error that every rank raises if some ranks failed.

        Its class is that of the failures if they agree (such as `DeadlineError`); its notes are
        their tracebacks.

        Args:
            step: The step that failed, such as `"write"`.
            failures: Failures by rank; at least one.
        """
        ranks = sorted(failures)
        classes = {_class_for(failures[rank][0]) for rank in ranks}
        told = listed([f"rank {rank}: {_line(failures[rank][0])}" for rank in ranks], "; ")
        error = (classes.pop() if len(classes) == 1 else CheckpointError)(
            f"{self.doing}: {step} failed on {len(ranks)} of {self.world_size} ranks: {told}",
            checkpoint_id=self.checkpoint_id,
            rank=ranks[0] if len(ranks) == 1 else None,
        )
        for rank in ranks[:MOST_LISTED]:
            add_note(error, _describe_failure(rank, failures[rank]))
        return error.with_failures({rank: failures[rank] for rank in ranks})


@dataclass(frozen=True)
class Sealed:
    """A result that `combine` has already pickled."""

    value: Any
    """The value for the coordinator rank."""
    data: bytes
    """The pickle that the other ranks read."""


def reduce_scatter(
    group: Group,
    step: str,
    local: Callable[[], Any],
    combine: Callable[[list[Any]], Sequence[Any]],
    *,
    lost: Lost | None = None,
) -> Steps[Part]:
    """Runs `local` on every rank and `combine` on the coordinator rank; returns this rank's part.

    With one rank, nothing is exchanged or pickled. The coordinator rank's own values are never
    pickled.

    Args:
        group: The ranks.
        step: Name of the step, unique within the operation.
        local: Runs on each rank.
        combine: Runs on the coordinator rank with all values, by rank; returns one for each rank.
        lost: Given for a `combine` that can't be undone. Once that has run, the coordinator rank
            returns its part even if the others can't be reached; a rank that receives no answer
            raises the error that `lost` returns.

    Raises:
        CheckpointError: `local` failed on some rank, or `combine` failed; the same error on every
            rank.
        KeyboardInterrupt: This rank was interrupted; the others raise `CheckpointError` at once.

    Source: `torch/distributed/checkpoint/utils.py`, `_DistWrapper.reduce_scatter`.
    """
    result = _run(local)
    yield from _leave_if_stopped(group, step, f"{step}/gather", result)
    if group.is_coordinator:
        return (yield from _coordinate(group, step, result, combine, lost))
    return (yield from _follow(group, step, result, lost))


def all_reduce(
    group: Group,
    step: str,
    local: Callable[[], Any],
    combine: Callable[[list[Any]], Any],
    *,
    lost: Lost | None = None,
) -> Steps[Part]:
    """Like `reduce_scatter`, with one result for all ranks.

    Args:
        group: The ranks.
        step: Name of the step, unique within the operation.
        local: Runs on each rank.
        combine: Runs on the coordinator rank with all values, by rank.
        lost: See `reduce_scatter`.

    Raises:
        CheckpointError: See `reduce_scatter`.
        KeyboardInterrupt: See `reduce_scatter`.

    Source: `torch/distributed/checkpoint/utils.py`, `_DistWrapper.all_reduce`.
    """

    def for_each(values: list[Any]) -> Sequence[Any]:
        return [combine(values)] * group.world_size

    return (yield from reduce_scatter(group, step, local, for_each, lost=lost))


@dataclass(frozen=True)
class _Result:
    """The result or the failure of a step on one rank."""

    value: Any = None
    failure: Failure | None = None
    original: BaseException | None = None
    """The exception that was raised, on its own rank."""


def _run(code: Callable[[], Any]) -> _Result:
    try:
        return _Result(code())
    except BaseException as error:  # noqa: BLE001 - DCP's own CheckpointException is one
        return _Result(None, failure_of(error), error)


def _leave_if_stopped(group: Group, step: str, tag: str, result: _Result) -> Steps[None]:
    """Reports to the others at once and raises, if the user or the system stops this process."""
    stopped = (KeyboardInterrupt, SystemExit, GeneratorExit)
    if result.failure is None or not isinstance(result.original, stopped):
        return
    if group.world_size > 1:
        error = group.failed(step, {group.rank: result.failure})
        try:
            yield _exchange(group, tag, {}, error=error)
        except CheckpointError as refused:
            # Why dropped: it repeats the error just reported, and what stops this process has
            # priority.
            del refused
    raise result.original


def _follow(group: Group, step: str, result: _Result, lost: Lost | None) -> Steps[Part]:
    yield from _send(group, f"{step}/gather", {group.coordinator_rank: _dump_result(result)})
    try:
        inbox = yield from _send(group, f"{step}/scatter", {})
    except ParticipantError as error:
        raise (error if lost is None else lost(error)) from None
    answer = bytes(inbox[group.coordinator_rank])
    if answer[:1] == _OK:
        return lambda: pickle.loads(answer[1:])
    raise _load_error(group, step, answer[1:]) from result.original


def _coordinate(
    group: Group,
    step: str,
    result: _Result,
    combine: Callable[[list[Any]], Sequence[Any]],
    lost: Lost | None,
) -> Steps[Part]:
    inbox = yield from _send(group, f"{step}/gather", {})
    results = {rank: _load_result(bytes(inbox[rank]), rank) for rank in group.others}
    results[group.rank] = result
    failures = {rank: r.failure for rank, r in results.items() if r.failure is not None}
    if not failures:
        values = [r.value for _, r in sorted(results.items())]
        result = _run(lambda: _parts(group, combine(values)))
        yield from _leave_if_stopped(group, step, f"{step}/scatter", result)
        if result.failure is not None:
            failures = {group.rank: result.failure}
    if failures:
        error = group.failed(step, failures)
        failure = _FAILED + pickle.dumps(error)
        yield from _send(group, f"{step}/scatter", dict.fromkeys(group.others, failure))
        raise error from result.original
    own, outbox = result.value
    try:
        yield from _send(group, f"{step}/scatter", outbox)
    except ParticipantError:
        if lost is None:
            raise
    return lambda: own


def _parts(group: Group, parts: Sequence[Any]) -> tuple[Any, dict[int, bytes]]:
    """Returns the coordinator rank's own part and the messages with the parts of the others."""
    if len(parts) != group.world_size:
        raise CheckpointError(
            f"global planning must return one plan for each of the {group.world_size} ranks, "
            f"but returned {len(parts)}"
        )
    # A result that all ranks share is pickled once.
    pickled: dict[int, bytes] = {}
    for rank in group.others:
        part = parts[rank]
        if id(part) not in pickled:
            pickled[id(part)] = _OK + (part.data if isinstance(part, Sealed) else _dump(part))
    own = parts[group.rank]
    return (
        own.value if isinstance(own, Sealed) else own,
        {rank: pickled[id(parts[rank])] for rank in group.others},
    )


_OK = b"+"
_FAILED = b"-"


def _dump(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _dump_result(result: _Result) -> bytes:
    try:
        return _dump(_Result(result.value, result.failure))
    except Exception as error:  # noqa: BLE001 - whatever user classes raise in __reduce__
        return _dump(_Result(None, failure_of(error)))


def _load_result(message: bytes, rank: int) -> _Result:
    try:
        result: _Result = pickle.loads(message)
    except Exception as error:  # noqa: BLE001 - whatever user classes raise when unpickled
        reason = f"what rank {rank} sent can't be unpickled: {text_of(error)}"
        return _Result(None, failure_of(CheckpointError(reason, rank=rank)))
    return result


def _load_error(group: Group, step: str, data: bytes) -> CheckpointError:
    try:
        error = pickle.loads(data)
    except Exception as reason:  # noqa: BLE001 - whatever user classes raise when unpickled
        return CheckpointError(
            f"{group.doing}: {step} failed, with an error that can't be unpickled on rank "
            f"{group.rank} ({text_of(reason)}); see rank {group.coordinator_rank}",
            checkpoint_id=group.checkpoint_id,
        )
    return from_wire(error, f"rank {group.coordinator_rank}", group.rank)


def _exchange(
    group: Group,
    tag: str,
    outbox: Mapping[int, bytes],
    *,
    error: CheckpointError | None = None,
) -> Exchange:
    return Exchange(
        key=group.next_key(),
        rank=group.rank,
        world_size=group.world_size,
        tag=tag,
        outbox=dict(outbox),
        timeout_s=group.timeout_s + bounds.STEP_GRACE_S,
        error=error,
    )


def _send(group: Group, tag: str, outbox: Mapping[int, bytes]) -> Steps[Mapping[int, bytes]]:
    if group.world_size == 1:
        return {}
    return (yield from exchanged(_exchange(group, tag, outbox)))

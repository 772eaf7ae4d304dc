"""Values of a job that are parts of a step: `ValueWriter` writes them, `read_value` reads one.

A value is an object of Ray's store. Its writer is an actor on a node that has the object: it maps
the object, which the store then keeps whatever becomes of its owner, and writes it as a checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import bounds
from ray_dcp.core.wire_error import from_wire, text_of
from ray_dcp.errors import CheckpointError, DeadlineError, ParticipantError
from ray_dcp.job.part_value import PartValue
from ray_dcp.options import SaveOptions
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.saving import run_save
from ray_dcp.session import ray_calls
from ray_dcp.session.inline_transport import inline_session
from ray_dcp.store.environment import StorageVariables
from ray_dcp.store.location import AnyPlace
from ray_dcp.torch_adapter.dispatch import decide_save
from ray_dcp.transform.conversion import read_state_dict
from ray_dcp.view.verify import VerifyReport, verify

MOST_VALUES = 4
"""Most values that a writer maps or writes at once."""

WRAPPED = "value"
"""Name of a value that is no state dict itself."""


def is_state_dict(value: object) -> bool:
    """Returns whether a value is saved under its own names, and not under `WRAPPED`.

    Examples:
        >>> is_state_dict({"next": 5}), is_state_dict({}), is_state_dict([5])
        (True, False, False)
        >>> is_state_dict({"value": 5})  # so that what has this name alone is wrapped
        False
    """
    if not isinstance(value, dict) or not value or [*value] == [WRAPPED]:
        return False
    return all(isinstance(key, str) for key in value)


class ValueWriter:
    """An actor that holds values, and writes them."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def hold(self, name: str, step: int, attempt: str, refs: Sequence[Any]) -> bool:
        """Maps a value; returns whether it is wrapped.

        Args:
            name: Name of the part.
            step: Number of the step.
            attempt: Attempt that will commit the part.
            refs: The reference of the value.

        Raises:
            ParticipantError: The task that makes the value failed, or the value is lost.
        """
        value = self._values[attempt] = _given(name, step, refs)
        return not is_state_dict(value)

    def write(
        self, target: Target, attempt: str, options: SaveOptions, variables: StorageVariables
    ) -> None:
        """Writes a value that it holds, and returns when its checkpoint is committed.

        Args:
            target: Place of the part.
            attempt: Attempt that commits it.
            options: As for `save`.
            variables: What the storage reads in the environment.

        Raises:
            CheckpointError: As `save`.
        """
        variables.become()
        _write(self._values[attempt], target, attempt, options)

    def drop(self, attempt: str) -> None:
        """Lets a value go."""
        self._values.pop(attempt, None)


def _given(name: str, step: int, refs: Sequence[Any]) -> Any:
    """Returns the value of a reference.

    Raises:
        ParticipantError: The task that makes the value failed, or the value is lost.
    """
    try:
        found = ray_calls.get(refs[0])
        return found.value if isinstance(found, PartValue) else found
    except RayTaskError as error:
        raise _not_given(
            name, step, f"the task that makes it raised {text_of(error.cause)}"
        ) from None
    except Exception as error:  # noqa: BLE001 - Ray's errors and those of unpickling alike
        raise _not_given(name, step, text_of(error)) from None


def _write(value: Any, target: Target, attempt: str, options: SaveOptions) -> None:
    """Writes a value as a checkpoint; returns when it is committed."""
    run_save(
        decide_save(None, None, target),
        inline_session("value"),
        value if is_state_dict(value) else {WRAPPED: value},
        options,
        target,
        stateful=False,
        attempt=attempt,
    )


def _not_given(name: str, step: int, why: str) -> ParticipantError:
    return ParticipantError(
        f"expected the value of the part {name!r}, but {why}. Look at the actor or task that gives "
        f"it",
        step=step,
        key=name,
    )


class ValueWriters:
    """The writers of a coordinator, one a node, which end with it."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        """Handle of the writer of each node; that of "" is on any."""

    @asynccontextmanager
    async def holding(self, ref: Any, attempt: str) -> AsyncIterator[Any]:
        """Lends the writer of a node that has an object, and lets it drop the value afterwards.

        Args:
            ref: Reference of an object that is there.
            attempt: Attempt for which the writer holds the value.
        """
        nodes = await asyncio.to_thread(ray_calls.nodes_with, ref)
        node = next((one for one in nodes if one in self._made), nodes[0] if nodes else "")
        actor = self._made.get(node) or self._make(node)
        try:
            yield actor
        except RayActorError:
            self._made.pop(node, None)  # It is dead; the next value gets another one.
            raise
        finally:
            with suppress(RayError):
                actor.drop.remote(attempt)

    def _make(self, node: str) -> Any:
        # Why soft: the node may be gone by now, and another one fetches the object then.
        place: Any = NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT"
        made = ray.remote(ValueWriter).options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=MOST_VALUES,
            scheduling_strategy=place,
        )
        self._made[node] = made.remote()
        return self._made[node]


def save_values(
    values: Mapping[str, Any], step: int, place_of: Callable[[str], Target], options: SaveOptions
) -> None:
    """Writes values by tasks on nodes that have them; returns when all are committed.

    Args:
        values: A reference or a value of each part, by name.
        step: Number of the step.
        place_of: Returns the place of a part.
        options: As for `save`; its `write_timeout_s` bounds all of it.

    Raises:
        DeadlineError: A value was not there, or not written, in time.
        ParticipantError: A task that makes or writes a value failed.
        CheckpointError: As `save`.
    """
    task: Any = ray.remote(_with_variables)
    variables, writes = ray_calls.storage_variables(), dict[str, Any]()
    end_s = time.monotonic() + options.write_timeout_s

    def wait_for(name: str, ref: Any, what: str) -> None:
        left_s = max(0.0, end_s - time.monotonic())
        if not ray_calls.wait([ref], num_returns=1, timeout=left_s)[0]:
            raise DeadlineError(
                f"expected the part {name!r} of step {step} to {what} within "
                f"{options.write_timeout_s:g} s (write_timeout_s), but it was not. The step is not "
                f"committed; look at the actor or task that gives it, and at the storage",
                step=step,
                key=name,
            )

    try:
        for name, value in values.items():
            ref = value if ray_calls.is_ref(value) else ray_calls.put(value, 0)
            # Why now: where an object lies is known when it is there.
            wait_for(name, ref, "be given")
            work = partial(_save_value, name, step, place_of(name), options, [ref])
            # Why no retries: the step fails by name instead, and the first writer may still live.
            run = task.options(num_cpus=0, max_retries=0, scheduling_strategy=_beside(ref)).remote
            writes[name] = run(variables, work)
        for name, ref in writes.items():
            wait_for(name, ref, "be written")
    except BaseException:
        # Why: what is being written would be there again after it was deleted.
        for ref in writes.values():
            ray_calls.cancel(ref)
        if writes:
            ray_calls.wait([*writes.values()], num_returns=len(writes), timeout=bounds.VALUES_END_S)
        raise
    failed = [error for name, ref in writes.items() if (error := _error_of(name, step, ref))]
    if failed:
        raise failed[0]


def _error_of(name: str, step: int, written: Any) -> CheckpointError | None:
    """Returns why a value was not written; None if it was."""
    try:
        ray_calls.get(written)
    except RayTaskError as error:
        return from_wire(error, f"the writer of the part {name!r}")
    except RayError as error:
        return _not_given(name, step, f"its writer died: {error}")
    return None


def _save_value(
    name: str, step: int, target: Target, options: SaveOptions, refs: Sequence[Any]
) -> None:
    _write(_given(name, step, refs), target, new_attempt(), options)


def _beside(ref: Any) -> Any:
    """Returns a node that has an object; the default if none is known."""
    nodes = ray_calls.nodes_with(ref)
    # Why soft: the node may be gone by now, and another one fetches the object then.
    return NodeAffinitySchedulingStrategy(nodes[0], soft=True) if nodes else "DEFAULT"


def read_value(place: AnyPlace, *, is_wrapped: bool | None = None) -> Any:
    """Returns the value of a part: tensors are tensors, as they were saved.

    Args:
        place: Place of the part.
        is_wrapped: Whether it was wrapped when it was saved; None if its names say so.

    Raises:
        CheckpointError: As `read_state_dict`.
    """
    found = read_state_dict(place)
    if is_wrapped is None:
        is_wrapped = {*found} == {WRAPPED}
    return found[WRAPPED] if is_wrapped else found


def value_ref(place: AnyPlace, node: str, *, is_wrapped: bool | None = None) -> Any:
    """Returns the reference of a task that reads a value.

    Args:
        place: Place of the part.
        node: Hex id of the node that should read it; "" for any.
        is_wrapped: As for `read_value`.
    """
    where: Any = NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT"
    task: Any = ray.remote(_with_variables)
    run = task.options(num_cpus=0, scheduling_strategy=where).remote
    read = partial(read_value, place, is_wrapped=is_wrapped)
    return run(ray_calls.storage_variables(), read)


def _with_variables(variables: StorageVariables, work: Callable[[], Any]) -> Any:
    """Works in a task with the keys of the process that asks: Ray passes on only those it knows."""
    with variables.applied():
        return work()


def verify_all(places: Sequence[AnyPlace]) -> list[VerifyReport]:
    """Returns what `verify` finds at each place, by tasks on the nodes of the cluster.

    Raises:
        CheckpointError: As `verify`.
    """
    task: Any = ray.remote(_with_variables)
    run = task.options(num_cpus=0, scheduling_strategy="SPREAD").remote
    variables = ray_calls.storage_variables()
    try:
        refs = [run(variables, partial(verify, place)) for place in places]
        found: list[VerifyReport] = ray_calls.get(refs)
    except RayTaskError as error:
        raise from_wire(error, "the task that verifies a part") from None
    return found

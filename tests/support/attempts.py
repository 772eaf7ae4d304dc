"""What ranks do when a call is expected to fail: the error, how long it took, and the warnings.

Importable on the ranks. `sound_state` is what stands before and after each failure.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ray_dcp
from ray_dcp.errors import CheckpointError

SECONDS = 100.0
"""What ranks are told of each other within: far below every deadline, on a slow machine too."""


@dataclass(frozen=True)
class Attempt:
    """What came of a call on one rank."""

    error: CheckpointError | None
    seconds: float
    warnings: tuple[str, ...]
    value: Any = None


def attempt(call: Callable[[], Any]) -> Attempt:
    """Returns what a call raised or returned; what is no error of ray_dcp is not caught."""
    start_s = time.monotonic()
    error, value = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = call()
        except CheckpointError as raised:
            error = raised
    told = tuple(str(warning.message) for warning in caught)
    return Attempt(error, time.monotonic() - start_s, told, value)


def try_save(path: str, make_state: Callable[[int], Any], **kwargs: Any) -> Attempt:
    """Saves the state that is made for this rank."""

    def save() -> None:
        ray_dcp.save(make_state(dist.get_rank()), checkpoint_id=path, **kwargs)

    return attempt(save)


def try_load(path: str, make_state: Callable[[int], Any], **kwargs: Any) -> Attempt:
    """Loads into the state that is made for this rank; the value is that state, as loaded."""

    def load() -> Any:
        state = make_state(dist.get_rank())
        ray_dcp.load(state, checkpoint_id=path, **kwargs)
        return state

    return attempt(load)


def one_error(attempts: list[Attempt], kind: type[CheckpointError], *told: str) -> CheckpointError:
    """Returns the one error that all ranks raised, in seconds, and checks what it says."""
    errors = [attempt.error for attempt in attempts]
    assert {type(error) for error in errors} == {kind}, errors
    assert {str(error) for error in errors} == {str(errors[0])}
    assert max(attempt.seconds for attempt in attempts) < SECONDS
    for text in told:
        assert text in str(errors[0]), str(errors[0])
    return errors[0]


def sound_state(step: int, fill: bool = True) -> dict[str, Any]:
    """Returns a sharded tensor, a plain one and objects; garbage when they are to be loaded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(600.0).reshape(60, 10) + step
    return {
        "sharded": distribute_tensor(whole if fill else whole * 0, mesh, [Shard(0)]),
        "plain": torch.full((7,), step if fill else -1),
        "step": step if fill else -1,
        "note": {"text": f"step {step}" if fill else ""},
    }


def save_sound(path: str, step: int, **kwargs: Any) -> None:
    """Saves `sound_state`."""
    ray_dcp.save(sound_state(step), checkpoint_id=path, **kwargs)


def step_that_loads(path: str) -> int:
    """Returns the step of the `sound_state` that stands at a path, whole.

    Raises:
        AssertionError: It is a mixture of steps.
    """
    found = sound_state(0, fill=False)
    ray_dcp.load(found, checkpoint_id=path)
    step: int = found["step"]
    check_sound(found, step)
    return step


def check_sound(found: dict[str, Any], step: int) -> None:
    """Checks that what was loaded is the whole `sound_state` of a step."""
    expected = sound_state(step)
    assert torch.equal(found["sharded"].to_local(), expected["sharded"].to_local())
    assert torch.equal(found["plain"], expected["plain"])
    assert (found["step"], found["note"]) == (step, expected["note"])


def names_at(path: Path) -> set[str]:
    """Returns the names of all files below a path."""
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def files_at(path: Path) -> dict[str, bytes]:
    """Returns every file below a path with its content."""
    return {name: (path / name).read_bytes() for name in names_at(path)}

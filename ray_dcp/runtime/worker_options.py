"""What a `WorkerGroup` can be told about its ranks, as a frozen value that checks itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.errors import InvalidRequestError

__all__ = ["WorkerOptions", "worker_options"]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What each rank of a `WorkerGroup` gets.

    Raises:
        InvalidRequestError: A field has a value that it can't have.
    """

    num_cpus: float = 0.0
    """CPUs that Ray sets aside for a rank. 0: any number of ranks fits on any node."""
    num_gpus: float = 0.0
    """GPUs that Ray sets aside for a rank."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other resources that Ray sets aside for a rank."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
    start_timeout_s: float = 180.0
    """How long the ranks may take to start and to find each other, in seconds."""
    collective_timeout_s: float = 300.0
    """How long a collective operation of the ranks may take, in seconds."""
    run_timeout_s: float | None = None
    """How long one `run`, `save` or `load` may take, in seconds; None: as long as it wants."""
    release_s: float = 5.0
    """How long the other ranks may take to notice by themselves that one died, in seconds;
    those that still wait are ended."""

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            _check_number(name, getattr(self, name), lowest=0.0)
        for name in ("start_timeout_s", "collective_timeout_s", "release_s"):
            _check_number(name, getattr(self, name), above=0.0)
        if self.run_timeout_s is not None:
            _check_number("run_timeout_s", self.run_timeout_s, above=0.0)
        for name in ("resources", "env_vars"):
            if not isinstance(getattr(self, name), Mapping):
                raise InvalidRequestError(
                    f"WorkerGroup's {name} must be a mapping, but is {getattr(self, name)!r}",
                    key=name,
                )


def worker_options(given: dict[str, Any]) -> WorkerOptions:
    """Returns the options that keyword arguments say.

    Raises:
        InvalidRequestError: One has no such name, or a value that it can't have.
    """
    known = WorkerOptions.__dataclass_fields__
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InvalidRequestError(
            f"WorkerGroup has no option {', '.join(unknown)}. It has {', '.join(known)}",
            key=unknown[0],
        )
    return WorkerOptions(**given)


def _check_number(
    name: str, value: Any, *, lowest: float | None = None, above: float = 0.0
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (value < lowest if lowest is not None else value <= above):
        bound = f"at least {lowest:g}" if lowest is not None else f"above {above:g}"
        raise InvalidRequestError(
            f"WorkerGroup's {name} must be a number {bound}, but is {value!r}", key=name
        )

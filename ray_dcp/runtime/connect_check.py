"""Checks the arguments of `connect`."""

from __future__ import annotations

from typing import Any

from ray_dcp.errors import InvalidRequestError
from ray_dcp.runtime import registry

__all__ = ["check_connect"]


def check_connect(rank: Any, world_size: Any, name: Any, timeout_s: Any) -> None:
    """Raises `InvalidRequestError` for arguments that `connect` can't use, or a second connect."""
    numbers = (rank, world_size)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers) or not (
        0 <= rank < world_size
    ):
        raise InvalidRequestError(
            f"Expected a rank from 0 to world_size - 1, but found rank={rank!r}, "
            f"world_size={world_size!r}. Give each process its own number",
            key="rank",
        )
    if name is None and world_size > 1:
        raise InvalidRequestError(
            f"Expected a name that the {world_size} ranks share, but found none. Give "
            f"connect(name=...), the same on every rank",
            key="name",
        )
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidRequestError(
            f"Expected name to be a string of at least one character, but found {name!r}",
            key="name",
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidRequestError(
            f"Expected timeout_s to be a number of seconds above 0, but found {timeout_s!r}",
            key="timeout_s",
        )
    open_session = registry.explicit()
    if open_session is not None:
        raise InvalidRequestError(
            f"Expected one connect at a time, but {open_session!r} is open. Close it first",
            rank=rank,
        )

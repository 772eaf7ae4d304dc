"""The only place below the entrypoints that looks at, or changes, environment variables.

Ray takes its settings from the environment of each process: which cluster was named
(`RAY_ADDRESS`), and how to prove to a Ray of our own that a rank belongs to this job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["named_address", "own_ray_environment", "pinned_to_loopback", "token_environment"]

_NOT_INHERITED = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR")


def named_address() -> str | None:
    """Returns the cluster that the user named with `RAY_ADDRESS`, if any."""
    return os.environ.get("RAY_ADDRESS") or None


def token_environment(token_path: str) -> dict[str, str]:
    """Returns the variables that make a process use the token in a file.

    Empty when the user decided about authentication with `RAY_AUTH_MODE`.
    """
    if os.environ.get("RAY_AUTH_MODE"):
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}


def own_ray_environment(token_path: str) -> dict[str, str]:
    """Returns the whole environment for a Ray of our own.

    Args:
        token_path: File with the token that its users must show.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    paths = [str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    settings = {
        # Why: without it Ray replaces 127.0.0.1 by an address that other machines can reach.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Why: training fills the memory on purpose; Ray would kill the coordinator first.
        "RAY_memory_monitor_refresh_ms": kept.get("RAY_memory_monitor_refresh_ms", "0"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **token_environment(token_path), **settings}


@contextmanager
def pinned_to_loopback(token_path: str) -> Iterator[dict[str, str]]:
    """Sets what `ray.init` needs to reach a Ray of our own; yields the token's variables.

    The token's variables stay set (Ray's processes of this rank read them again), the rest does
    not.
    """
    token = token_environment(token_path)
    os.environ.update(token)
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield token
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def prefer_loopback_for_gloo() -> None:
    """Makes process groups of this process use the loopback interface, unless one was chosen."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

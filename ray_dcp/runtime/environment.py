"""The only module below the entrypoints that reads or changes environment variables.

Ray takes its settings from the environment of each process: which cluster was named
(`RAY_ADDRESS`), and how a rank proves to a private Ray that it belongs to this job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOT_INHERITED = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR")

_INLINE_BYTES = 256 << 20
_INLINE = {
    # Why: a process that is at the object store of a raylet when that dies is ended by Ray. So
    # messages travel without it; Ray's own limit for that is 100 KB.
    "RAY_max_direct_call_object_size": str(_INLINE_BYTES),
    "RAY_task_rpc_inlined_bytes_limit": str(_INLINE_BYTES),
}

_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""After how many seconds without control store Ray ends a process that asks it; 60 by default."""
_YEAR_S = 365 * 24 * 3600

_token_paths: set[str] = set()
"""Tokens of our own that this process has used."""


def named_address() -> str | None:
    """Returns the cluster that the user named with `RAY_ADDRESS`, if any."""
    return os.environ.get("RAY_ADDRESS") or None


def token_environment(token_path: str) -> dict[str, str]:
    """Returns the variables that make a process use the token in a file.

    Empty when the user decided about authentication with `RAY_AUTH_MODE`.
    """
    is_ours = os.environ.get("RAY_AUTH_TOKEN_PATH") in _token_paths
    if os.environ.get("RAY_AUTH_MODE") and not is_ours:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}


def private_ray_environment(token_path: str) -> dict[str, str]:
    """Returns the whole environment for the supervisor of a private Ray.

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
        **_INLINE,
        # Why: Ray would end the supervisor while that ends Ray.
        _LIMIT: str(_YEAR_S),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **token_environment(token_path), **settings}


def daemons_environment() -> dict[str, str]:
    """Returns the whole environment for the daemons that this process, the supervisor, starts."""
    return {name: value for name, value in os.environ.items() if name != _LIMIT}


@contextmanager
def pinned_to_loopback(token_path: str) -> Iterator[dict[str, str]]:
    """Sets what `ray.init` needs to reach a private Ray; yields the token's variables.

    The token's variables stay set (Ray's processes of this rank read them again), the rest does
    not.
    """
    token = token_environment(token_path)
    os.environ.update(token)
    _token_paths.update({token_path} if token else ())
    settings = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Why: Ray ends a driver whose control store is gone for so many seconds (60), and one
        # whose raylet is gone if the process that it takes for the raylet is not there: here its
        # parent, without this. A rank must not end with a Ray that it never asked for.
        _LIMIT: str(_YEAR_S),
        "RAY_RAYLET_PID": str(os.getpid()),
        **_INLINE,
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield token
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def prefer_loopback_for_gloo() -> None:
    """Makes process groups of this process use the loopback interface, unless one was chosen."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

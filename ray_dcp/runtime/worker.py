"""The actor that wraps one rank of a `WorkerGroup`: a process with a place in a gloo group.

It runs what it is handed; it knows nothing of the other ranks but where their store is.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import ray

from ray_dcp.runtime import registry

__all__ = ["Rank", "this_rank"]

_this: list[Rank] = []


def this_rank() -> Rank | None:
    """Returns the rank that runs in this process: what a function given to `run` may ask."""
    return _this[0] if _this else None


class Rank:
    """One rank: its number, its process group, and the state that it keeps between runs.

    Attributes:
        rank: Number in the group, from 0.
        world_size: Number of ranks.
        state: Whatever a run left here; what `save` takes when it is given no `make_state`.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.state: Any = None
        self._store: Any = None
        _this[:] = [self]

    def where(self) -> dict[str, Any]:
        """Returns `pid`, `node_id` and `node_ip` of this process."""
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "node_id": context.get_node_id(),
            "node_ip": ray.util.get_node_ip_address(),
        }

    def host(self, address: str, timeout_s: float) -> int:
        """Starts the store in which the ranks of a new group meet; returns its port."""
        dist: Any = importlib.import_module("torch.distributed")
        self._store = dist.TCPStore(
            address, 0, None, True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        port: int = self._store.port
        return port

    def join(
        self, rank: int, world_size: int, address: str, port: int, timeout_s: float, local: bool
    ) -> None:
        """Takes a place in a new group; returns when all ranks have.

        Args:
            rank: Its number from now on.
            world_size: How many there are.
            address: Where rank 0 hosts the store.
            port: The same.
            timeout_s: For every collective operation of the group, in seconds.
            local: All ranks are on this node: only the loopback interface is used.
        """
        dist: Any = importlib.import_module("torch.distributed")
        timeout = timedelta(seconds=timeout_s)
        if rank != 0:
            self._store = dist.TCPStore(address, port, None, False, timeout=timeout)
        if local:
            _use_loopback()
        dist.init_process_group(
            "gloo", store=self._store, rank=rank, world_size=world_size, timeout=timeout
        )
        self.rank, self.world_size = rank, world_size

    def part(self) -> None:
        """Gives up its place: closes the sessions and destroys the process group."""
        import torch.distributed as dist

        registry.close_all()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Returns what a function returns on this rank."""
        return function(*arguments, **named)

    def keep(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Keeps what a function returns as this rank's state."""
        self.state = function(*arguments, **named)

    def save(
        self, path: str, make_state: Callable[[], Any] | None, named: Mapping[str, Any]
    ) -> Any:
        """Saves the state that is made, or kept; rank 0 returns the checkpoint's metadata."""
        state = self.state if make_state is None else make_state()
        metadata = _facade().save(state, checkpoint_id=path, **named)
        return metadata if self.rank == 0 else None

    def load(
        self, path: str, make_state: Callable[[], Any] | None, named: Mapping[str, Any]
    ) -> Any:
        """Loads into the state that is made, or kept, keeps it, and returns the report."""
        state = self.state if make_state is None else make_state()
        report = _facade().load(state, checkpoint_id=path, **named)
        self.state = state
        return report


def _facade() -> Any:
    # Why by name: a rank is a user of the package, as any training script; nothing below
    # depends on it.
    return importlib.import_module("ray_dcp")


def _use_loopback() -> None:
    from ray_dcp.runtime import environment

    environment.prefer_loopback_for_gloo()

"""Where the cells are played: a Ray cluster on the loopback interface that loses nodes and ranks.

Everything that it starts it ends, by handle or by the pids that it started.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

# Before ray is imported: see tests/conftest.py.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.coordinator.actor import Coordinator
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError
from ray_dcp.session import ray_calls
from ray_dcp.session.names import NAMESPACE, coordinator_name
from ray_dcp.store.environment import StorageVariables
from ray_dcp.worker_group import WorkerGroup
from tests.chaos.traps import loopback_addresses
from tests.support.daemons import NODE as SMALL
from tests.support.daemons import Daemons
from tests.support.processes import born, descendants, eventually, lives

REPOSITORY = Path(__file__).parents[2]
NUM_RANKS = 3
RUN_S = 120.0
"""How long one run of the ranks may take at all, in seconds: the watchdog of a cell."""
RELEASE_S = 60.0
"""How long ranks may take after one of them died before the group ends them; longer than every
ceiling, so that the ranks themselves are measured."""

HEALTH_MS = 1000
"""How often Ray looks whether a node lives, in milliseconds; 3000 by default. It is lost after five
looks without an answer."""

NODE = {"object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
"""Of the nodes, beside what all tests have."""

DROPS = ("req", "resp", "in_flight")


class Arena:
    """A head node, at most one more node, and one group of ranks at a time."""

    def __init__(self) -> None:
        config = {"_system_config": {"health_check_period_ms": HEALTH_MS}}
        self._daemons = Daemons(**NODE, num_cpus=2, resources={"head": 100, "seat": 1}, **config)
        with ray_calls.signal_handlers_kept(), ExitStack() as begun:
            begun.enter_context(loopback_addresses())
            begun.callback(self._daemons.close)
            ray.init(
                self._daemons.address(), log_to_driver=False, configure_logging=False,
                namespace="chaos",
            )  # fmt: skip
            begun.callback(ray.shutdown)
            self._begun = begun.pop_all()
        self.cluster = self._daemons.cluster
        self.directory = Path(self._daemons.directory)
        self.head_id = ray.get_runtime_context().get_node_id()
        self._node: Any = None
        self._ranks: WorkerGroup | None = None
        self._kind = ""
        self._seen: dict[int, int] = {}
        self._num_places = 0
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def address(self) -> str:
        return self.cluster.address

    # Places

    def new_place(self) -> tuple[Path, Path]:
        """Returns the path of a new checkpoint, and a directory for marks."""
        self._num_places += 1
        path = self.directory / f"c{self._num_places}"
        marks = self.directory / f"m{self._num_places}"
        marks.mkdir()
        return path, marks

    # Ranks

    def ranks(self, kind: str) -> WorkerGroup:
        """Returns a group of three ranks that all live, after mending or making it.

        Args:
            kind: `head`: all on the head node. `nodes`: one there, two on another.
                One of `DROPS`: on the head node, and some of their calls get lost so.
        """
        if self._kind != kind:
            self.end_ranks()
        if kind == "nodes":
            self.node()
        if self._ranks is None:
            self._ranks = WorkerGroup(NUM_RANKS, **_options(kind))
            self._kind = kind
        else:
            self.mend()
        self.note(self._ranks.pids)
        return self._ranks

    def mend(self) -> WorkerGroup:
        """Replaces ranks that died."""
        assert self._ranks is not None
        if self._ranks.world_size != NUM_RANKS or not self._all_live():
            if self._kind == "nodes":
                self.node()
            self._ranks.resize(NUM_RANKS)
        self.note(self._ranks.pids)
        return self._ranks

    def shrink(self) -> WorkerGroup:
        """Goes on with the one rank that is not on the second node."""
        assert self._ranks is not None
        self._ranks.resize(1)
        self.note(self._ranks.pids)
        return self._ranks

    def _all_live(self) -> bool:
        try:
            self._ranks.run(os.getpid)
        except CheckpointError:
            return False
        return True

    def end_ranks(self) -> None:
        """Ends the group."""
        if self._ranks is not None:
            self._ranks.shutdown()
            self._ranks = None
        self._kind = ""

    # Nodes

    def node(self) -> Any:
        """Returns the second node, after making it if there is none."""
        if self._node is None:
            with ray_calls.signal_handlers_kept():
                node = {**SMALL, **NODE, "num_cpus": 1, "resources": {"seat": 2}}
                self._node = self.cluster.add_node(**node)
        return self._node

    def node_pids(self) -> tuple[int, ...]:
        """Returns all processes of the second node, its raylet first."""
        roots = [info.process.pid for each in self.node().all_processes.values() for info in each]
        found = [*roots, *(pid for root in roots for pid in descendants(root))]
        self.note(found)
        return tuple(found)

    def end_node(self) -> None:
        """Ends the second node and everything of it, without asking."""
        if self._node is not None:
            pids = self.node_pids()
            node, self._node = self._node, None
            self.cluster.remove_node(node, allow_graceful=False)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # Actors

    def coordinator_on(self, node_id: str) -> str:
        """Returns a session's name after making its coordinator, as a rank would, on a node."""
        while True:
            session = f"placed-{secrets.token_hex(4)}"
            name = coordinator_name(session)
            actor = ray.remote(Coordinator).options(
                name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
                max_restarts=-1, max_task_retries=0, num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True),
            ).remote(
                name, bounds.ACTOR_LEASE_S, NAMESPACE, StorageVariables.of_this_process()
            )  # fmt: skip
            # Why asked: Ray takes it for a wish, and another node while it does not know this one.
            if ray.get(actor.info.remote())["node_id"] == node_id:
                return session
            ray.kill(actor)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts a program of this interpreter; its standard output is a pipe."""
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            text=True, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        self._processes.append(process)
        return process

    def note(self, pids: Iterable[int]) -> None:
        """Notes processes that must be gone when the arena is closed."""
        self._seen.update((pid, began) for pid in pids if (began := born(pid)) >= 0)

    def leaks(self, *, within_s: float = 120.0) -> list[str]:
        """Returns what is left of actors and processes some time after the ranks were ended."""
        self.end_ranks()
        self._end_stagers()
        # Why first: an actor whose node is lost is only gone when Ray has noticed that.
        eventually(lambda: not _actors(), within_s)
        self.end_node()
        eventually(lambda: not self._living(), within_s)
        actors = [f"actor {name}" for name in _actors()]
        return actors + [f"process {pid}" for pid in self._living()]

    def _end_stagers(self) -> None:
        """Ends the stagers, which stay without ranks for as long as their lease lasts."""
        for name in _actors():
            if ":stager:" in name:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))

    def _living(self) -> list[int]:
        """Returns the noted processes that live; another process may have got such a number."""
        return [pid for pid, began in self._seen.items() if born(pid) == began and lives(pid)]

    # Life

    def kill(self) -> None:
        """Ends all nodes at once: for a watchdog, from any thread."""
        for process in self._processes:
            process.kill()
        for node in self.cluster.list_all_nodes():
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        for pid in self._living():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        with suppress(CheckpointError):
            self.end_ranks()
        self.end_node()
        with ray_calls.signal_handlers_kept():
            self._begun.close()


def _options(kind: str) -> dict[str, Any]:
    resources = {"seat" if kind == "nodes" else "head": 1}
    env_vars = {"GLOO_SOCKET_IFNAME": "lo"}
    if kind in DROPS:
        lost = f'{{"CoreWorkerService.grpc_client.PushTask":{_chances(kind)}}}'
        env_vars["RAY_testing_rpc_failure"] = lost
        env_vars["RAY_testing_rpc_failure_avoid_intra_node_failures"] = "0"
    return {
        "resources": resources, "env_vars": env_vars, "run_timeout_s": RUN_S,
        "release_s": RELEASE_S,
    }  # fmt: skip


def _chances(kind: str) -> str:
    chances = ",".join(f'"{drop}_failure_prob":{50 * (drop == kind)}' for drop in DROPS)
    return f'{{"num_failures":-1,{chances}}}'


def _actors() -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in named]

"""Ray's daemons for tests: as small and as quiet as they can be, in a directory of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import end_all, marked
from tests.support.programs import forked_workers

NODE = {
    "num_cpus": 8, "object_store_memory": 256 << 20, "include_dashboard": False,
    "include_log_monitor": False, "no_monitor": True,
    # Ray binds the port of a number on trial, and loses the socket where another Ray has it.
    "dashboard_port": None,
    "setup_worker_path": forked_workers.__file__,
}  # fmt: skip
"""A node of Ray with nothing that tests do not need, and workers that start soon."""


class Daemons:
    """Ray's daemons, in a directory of their own; none before they are asked for.

    Args:
        node: What their node has other than `NODE`.
    """

    def __init__(self, **node: Any) -> None:
        self._node = {**NODE, **node}
        self.directory = ""
        self.cluster: Any = None

    def address(self) -> str:
        """Returns where they are, after starting them again if one of them has ended."""
        if self.cluster is not None and not self.cluster.head_node.remaining_processes_alive():
            self.close()
        while self.cluster is None:
            self._start()
        return self.cluster.address

    def _start(self) -> None:
        """Starts them; does nothing where the machine is so busy that Ray gives up after 30 s."""
        from ray.cluster_utils import Cluster

        self.directory = tempfile.mkdtemp(prefix="rd", dir="/tmp")
        (Path(self.directory) / "ray").mkdir()
        with self._named_here():
            head = {**self._node, "temp_dir": f"{self.directory}/ray"}
            try:
                self.cluster = Cluster(initialize_head=True, head_node_args=head)
            except Exception as error:
                mark = f"RAY_TMPDIR={self.directory}"
                end_all(marked(mark), mark)
                shutil.rmtree(self.directory, ignore_errors=True)
                if "timed out during startup" not in str(error):
                    raise

    def close(self) -> None:
        """Ends them, and removes all that they have on disk."""
        if self.cluster is not None:
            with self._named_here():
                self.cluster.shutdown()
            self.cluster = None
            shutil.rmtree(self.directory, ignore_errors=True)

    @contextmanager
    def _named_here(self) -> Iterator[None]:
        """Why: Ray writes the address of the newest cluster there, and everybody reads it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", self.directory)
            yield


def driven(daemons: Daemons) -> Iterator[str]:
    """Makes this process a driver of daemons; yields their address, and ends every actor then."""
    import ray

    address = daemons.address()
    ray.init(address, log_to_driver=False, configure_logging=False, namespace="tests")
    yield ray.get_runtime_context().gcs_address
    # Also those that live on by themselves, and what they have in memory.
    for actor in ray.util.list_named_actors(all_namespaces=True):
        # Suppressed: it has ended meanwhile.
        with suppress(ValueError):
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
    ray.shutdown()

"""A rank as a program of its own, a Ray driver, that gets a Ctrl-C while it writes its part.

Arguments: address of the cluster, name of the session, rank, world size, path to save to. Prints
"ready" when its place is known, begins at a line of input, and prints what became of the save.
"""

from __future__ import annotations

import os
import signal
import sys

import ray

from ray_dcp.session.ray_transport import RayTransport
from tests.integration.test_heartbeats import try_save
from tests.support.storages import Gate


def main(address: str, name: str, rank: str, world_size: str, path: str) -> None:
    """Saves until the interrupt."""
    ray.init(address, log_to_driver=False, configure_logging=False, namespace="interrupted")
    session = RayTransport(name, int(rank), int(world_size)).join()
    print("ready", flush=True)
    sys.stdin.readline()
    # A shell that starts us in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gate = Gate(on_arrival=lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        print(try_save(session, path, gate.opener))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    gate.open()


if __name__ == "__main__":
    main(*sys.argv[1:])

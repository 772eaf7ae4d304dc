"""Ray's `setup_worker_path` in tests: workers are forked from a process that has torch already.

Ray starts two interpreters for each worker, and each of them imports ray; a rank imports torch
then: 3 s of CPU. The first worker that a raylet starts imports all that once, and becomes each
worker of that raylet by a fork. A worker whose environment needs more than variables, or settings
of Ray itself, which are read when ray is imported, is started as Ray does it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import runpy
import signal
import socket
import sys
from typing import Any

PRELOADED = (
    "ray", "ray._private.workers.default_worker", "torch._dynamo",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "pytest", "ray_dcp.saving",
    "ray_dcp.worker_group", "ray_dcp.coordinator.actor", "ray_dcp.stage.stager",
    "ray_dcp.coordinator.gatherer",
)  # fmt: skip
OF_RAY_TRAIN = ("ray.train.torch", "ray.tune", "ray.util.state", "ray_dcp.train")
"""What the actors of a Ray Train run import besides: another second of CPU in each of ten."""
RAYS_OWN_SETTING = re.compile("RAY_[a-z]")
LOOK_S = 0.5
"""How soon the process that forks ends after its raylet, in seconds."""


def main(argv: list[str]) -> None:
    """Starts the worker of a command line of Ray's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, worker = parser.parse_known_args(argv)
    variables = variables_alone(options.serialized_runtime_env_context)
    if variables is not None:
        order = {"argv": worker, "env": {**os.environ, **variables}, "cwd": os.getcwd()}
        listener = socket.socket(socket.AF_UNIX)
        # An abstract name: it is gone with the process.
        name = f"\0ray-dcp-tests-{os.getppid()}"
        try:
            listener.bind(name)
        except OSError:
            if forked(name, order):
                return
        else:
            listener.listen(64)
            fork_for_ever(listener, order)
            return
    setup = os.path.join(os.path.dirname(worker[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, setup, *argv])


def variables_alone(context: str) -> dict[str, str] | None:
    """Returns the variables of a runtime environment; None if it has more than those."""
    found = json.loads(context)
    variables = found.pop("env_vars", {})
    executable = found.pop("py_executable", sys.executable)
    plain = all("${" not in value for value in variables.values())
    if any(found.values()) or executable != sys.executable or not plain:
        return None
    return None if any(map(RAYS_OWN_SETTING.match, variables)) else variables


def forked(name: str, order: dict[str, Any]) -> bool:
    """Returns whether the process that listens there has forked a worker."""
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(name)
            socket.send_fds(end, [b"."], [0, 1, 2])
            end.sendall(json.dumps(order).encode())
            end.shutdown(socket.SHUT_WR)
            return bool(end.recv(1))
    except OSError:
        return False


def fork_for_ever(listener: socket.socket, order: dict[str, Any]) -> None:
    """Forks a first worker and then those that are asked for; returns in a worker, or at the end.

    Args:
        listener: Where workers are asked for.
        order: Of the first one.
    """
    raylet = os.getppid()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if not os.fork():
        # Else the name would outlive the process that forks, and whoever connects would wait.
        listener.close()
        become(order)
        return
    listener.settimeout(LOOK_S)
    # If it ended while this one began, this is a child of process 1 already.
    while os.getppid() == raylet != 1:
        try:
            end, _ = listener.accept()
        except TimeoutError:
            continue
        with end:
            end.settimeout(None)
            _, streams, _, _ = socket.recv_fds(end, 1, 3)
            with end.makefile("rb") as file:
                text = file.read()
            if not os.fork():
                listener.close()
                end.send(b".")
                end.close()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                become(json.loads(text))
                return
            for stream in streams:
                os.close(stream)


def preload() -> None:
    """Imports what workers need; that of Ray Train where somebody has set it to look often."""
    import ray.actor

    class Drawn(ray.ActorClassID):
        """Why: ids that Ray draws for actor classes would be the first of its own generator.

        It would be seeded before the fork, and every worker would draw the same ids from then on.
        """

        @staticmethod
        def from_random() -> ray.ActorClassID:
            return ray.ActorClassID(os.urandom(ray.ActorClassID.size()))

    with_train = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S" in os.environ
    original, ray.actor.ActorClassID = ray.actor.ActorClassID, Drawn
    for name in (*PRELOADED, *(OF_RAY_TRAIN if with_train else ())):
        __import__(name)
    ray.actor.ActorClassID = original
    # Else each fork looks through all that when it collects garbage, and copies its pages.
    gc.freeze()


def become(order: dict[str, Any]) -> None:
    """Runs a worker in this process, until it ends."""
    import numpy
    import torch

    # A raylet kills the whole process group of a worker that has ended.
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    # What these would have drawn in a process of their own.
    numpy.random.seed()
    torch.seed()
    sys.argv = order["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # This folder is no place for modules.
    del sys.path[0]
    main(sys.argv[1:])

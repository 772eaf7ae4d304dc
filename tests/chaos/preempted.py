"""A node of a Ray Train run is drained and killed; what saves do before, and in the grace after.

The grace is that of `FailureConfig(preemption_grace_s=...)`. Two nodes have a worker each, a third
one is free. Of each run: it ends without an error, all steps that were committed are of both
workers and hold their values, saves in the grace fail by the name of the rank that is gone, and
both workers go on from the newest step.

By hand: `python -m tests.chaos.preempted --relax --grace 30`; with `--callback` under
`SaveBeforeResize`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

import ray_dcp
from ray_dcp.integrations.ray_train import registered
from tests.integration.test_memory_tier_nodes import drain
from tests.support.daemons import NODE, Daemons
from tests.support.processes import eventually
from tests.support.programs.train import note, notes

DRAIN_S = 5.0
"""Seconds from the notice to the end of the node."""
PAUSE_S = 0.3
"""Seconds that a step takes."""


def train(config: dict[str, Any]) -> None:
    """Saves each step, until it is ended; once restored, three more."""
    folder, rank = config["folder"], ray.train.get_context().get_world_rank()
    state = {"w": torch.zeros(1000)}
    node_id = ray.get_runtime_context().get_node_id()
    with (
        warnings.catch_warnings(record=True) as warned,
        ray_dcp.train.checkpointer(save_interval=1, on_error="warn") as ckpt,
    ):
        warnings.simplefilter("always")
        done = ckpt.restore(state)
        note(folder, rank, began=done, node=node_id, registered=registered())
        step, end = (0, None) if done is None else (done + 1, done + 4)
        while step != end:
            state["w"] += 1
            note(folder, rank, begins=step)
            ckpt.save(step, state)
            note(folder, rank, step=step, warned=[str(one.message) for one in warned])
            warned.clear()
            step += 1
            threading.Event().wait(PAUSE_S)


def interrupt(folder: Path, nodes: dict[str, Any], cluster: Any) -> None:
    """Drains the node of rank 1 once four steps were saved, and kills it when that time is over."""
    assert eventually(lambda: sum(one["step"] == 3 for one in notes(folder, "step")) == 2)
    (node_id,) = [one["node"] for one in notes(folder, "began") if one["rank"] == 1]
    drain(node_id, DRAIN_S)
    note(str(folder), 2, drained=True)
    threading.Event().wait(DRAIN_S)
    cluster.remove_node(nodes[node_id], allow_graceful=False)
    note(str(folder), 2, gone=True)


def judge(folder: Path, error: object) -> None:
    """Prints what came of the run; raises if it is wrong."""
    assert error is None, error
    told = [*notes(folder)]
    times = {key: one["time"] for one in told for key in ("drained", "gone") if key in one}
    began = [one for one in told if "began" in one]
    assert [one["began"] for one in began[:2]] == [None, None]
    steps = {
        one.step: one
        for one in ray_dcp.open(folder / "runs" / "run" / "checkpoints")
        if one.state == "committed"
    }
    for step, view in steps.items():
        state = {"w": torch.zeros(1000)}
        ray_dcp.load(state, checkpoint_id=view.path.url, no_dist=True)
        assert state["w"].unique().tolist() == [step + 1.0], step
        assert view.view.world_size == 2, step
    last = began[-1]["began"]
    assert [one["began"] for one in began[2:]] == [last, last], began
    assert sorted(steps) == [*range(last + 4)], steps
    first = [one for one in told if one["pid"] in {one["pid"] for one in began[:2]}]
    assert max(one["begins"] for one in first if "begins" in one) >= last
    since = {one["begins"]: one["time"] for one in first if "begins" in one and one["rank"] == 0}
    lost = [one for one in first if one["rank"] == 0 and one.get("warned")]
    assert all("rank 1" in one["warned"][0] for one in lost), lost
    print(f"went on from step {last}; Ray Train had {began[-1]['registered']}")
    for name, time_s in (
        ("the last step that was committed begins", since[last]),
        *(("a save fails", one["time"]) for one in lost[:2]),
        ("the workers begin again", began[-1]["time"]),
    ):
        print(f"{time_s - times['gone']:6.1f} s after the node has gone: {name}")
    for one in lost[:1]:
        took_s = one["time"] - since[one["step"]]
        print(f"the first took {took_s:.1f} s, and {len(lost)} failed: {one['warned'][0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--relax", action="store_true", help="relax_collectives_on_preemption")
    parser.add_argument("--grace", type=float, default=0.0, help="preemption_grace_s")
    parser.add_argument("--callback", action="store_true", help="with SaveBeforeResize")
    told = parser.parse_args()
    from ray.train.torch import TorchConfig, TorchTrainer

    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    folder = Path(tempfile.mkdtemp(prefix="preempted-"))
    with closing(Daemons()) as daemons, ThreadPoolExecutor(1) as beside:
        ray.init(daemons.address(), namespace="tests", log_to_driver=False)
        added = [daemons.cluster.add_node(**{**NODE, "resources": {"seat": 1}}) for _ in range(3)]
        nodes = {one.node_id: one for one in added}
        interrupted = beside.submit(interrupt, folder, nodes, daemons.cluster)
        result = TorchTrainer(
            train,
            train_loop_config={"folder": str(folder)},
            scaling_config=ray.train.ScalingConfig(
                num_workers=2, resources_per_worker={"CPU": 0.5, "seat": 1}
            ),
            torch_config=TorchConfig(backend="gloo"),
            run_config=ray.train.RunConfig(
                name="run",
                storage_path=str(folder / "runs"),
                callbacks=[ray_dcp.train.SaveBeforeResize()] if told.callback else [],
                failure_config=ray.train.FailureConfig(
                    relax_collectives_on_preemption=told.relax, preemption_grace_s=told.grace
                ),
            ),
        ).fit()
        interrupted.result()
        judge(folder, result.error)
        ray.shutdown()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

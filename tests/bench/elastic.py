"""A Ray Train run whose nodes come and go: 2, 3, 1 and 2 workers, and then a rank that is killed.

Real nodes of a `ray.cluster_utils.Cluster` are added, drained with a notice and taken away, while a
Transformer trains under FSDP2 on gloo. Told are committed steps that were lost, steps that were
made again, and how far the losses are from those of a training that nothing disturbed.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

NOTICE_S = 20
STEPS_A_STAGE = 15
INTERVAL = 50
"""Of saves that nobody asks for."""
PAUSE_S = 0.2
"""What a step takes at least: a resize is only looked for every other second."""
LIMIT = 1e-4
"""Most that a loss may differ: sums over ranks come in another order."""
WITHIN_S = 400.0

SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_memory_monitor_refresh_ms": "0",
}


def elastic(directory: str | None) -> int:
    """Plays it and prints what became of each step; returns 1 when a promise was not kept."""
    os.environ.update(SETTINGS)
    import ray
    from ray.cluster_utils import Cluster

    root = Path(tempfile.mkdtemp(prefix="rt", dir=directory))
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    small = {"object_store_memory": 100 << 20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0, "temp_dir": str(root / "ray"), "include_dashboard": False, **small
        },
    )  # fmt: skip
    nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(_fit(root)))
    thread.start()
    try:
        _until(root, 2)
        nodes.append(cluster.add_node(num_cpus=1, **small))
        _until(root, 3)
        _drain(cluster, nodes[:2])
        threading.Event().wait(NOTICE_S)
        for node in nodes[:2]:
            cluster.remove_node(node, allow_graceful=False)
        _until(root, 1)
        cluster.add_node(num_cpus=1, **small)
        _until(root, 2)
        _kill(root)
        _until(root, 2)
        _stop(root)
        thread.join(WITHIN_S)
        return _judge(root, results)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(root, ignore_errors=True)


def train_fn(config: dict[str, str]) -> None:
    """Runs in each worker."""
    import torch.distributed as dist

    import ray_dcp.train
    from tests.train_programs import made, note, train_one_step

    folder, rank, world_size = config["folder"], dist.get_rank(), dist.get_world_size()
    state = made("fsdp2")
    with ray_dcp.train.checkpointer(save_interval=INTERVAL) as ckpt:
        done = ckpt.restore(state)
        note(folder, rank, restored=done, world_size=world_size)
        step = 0 if done is None else done + 1
        while not (end := _end(folder)) or step <= end:
            time.sleep(PAUSE_S)
            loss = train_one_step(state, step, rank, world_size)
            note(folder, rank, step=step, loss=loss, world_size=world_size)
            ckpt.save(step, state, metrics={"loss": loss})
            step += 1
        ckpt.save(step, state, metrics={"loss": loss}, force=True)


def _fit(root: Path) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    import ray_dcp.train

    scaling = ScalingConfig(
        num_workers=(1, 3), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=2
    )
    return TorchTrainer(
        train_fn,
        train_loop_config={"folder": str(root)},
        scaling_config=scaling,
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="elastic", storage_path=str(root / "runs"),
            failure_config=FailureConfig(max_failures=2, max_preemption_failures=5),
            callbacks=[ray_dcp.train.SaveBeforeResize()],
        ),
    ).fit()  # fmt: skip


def _steps(root: Path) -> list[dict[str, Any]]:
    from tests.train_programs import notes

    return [one for one in notes(root, "step") if one["rank"] == 0]


def _until(root: Path, world_size: int) -> None:
    """Returns when so many workers have made some steps more."""
    begin_s = time.time()
    known = {one["pid"] for one in _steps(root)}
    while time.time() < begin_s + WITHIN_S:
        made = [
            one
            for one in _steps(root)
            if one["world_size"] == world_size and one["pid"] not in known
        ]
        if len(made) >= STEPS_A_STAGE:
            print(f"{world_size} worker(s): {time.time() - begin_s:.0f} s until step "
                  f"{made[-1]['step']}", flush=True)  # fmt: skip
            return
        threading.Event().wait(0.3)
    raise TimeoutError(f"{world_size} workers did not make {STEPS_A_STAGE} steps")


def _drain(cluster: Any, nodes: list[Any]) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + NOTICE_S) * 1000)
    for node in nodes:
        GcsClient(address=cluster.address).drain_node(node.node_id, reason, "bench", deadline_ms)
    print(f"{len(nodes)} nodes drained with {NOTICE_S} s notice", flush=True)


def _kill(root: Path) -> None:
    from tests.train_programs import notes

    victim = [one for one in notes(root, "step") if one["rank"] == 1][-1]["pid"]
    os.kill(victim, signal.SIGKILL)
    print("rank 1 killed", flush=True)


def _stop(root: Path) -> None:
    """Ends the training at a step that no rank has come to."""
    end = _steps(root)[-1]["step"] + 20
    (root / "end.tmp").write_text(str(end))
    (root / "end.tmp").rename(root / "end")


def _end(folder: str) -> int:
    path = Path(folder, "end")
    return int(path.read_text()) if path.exists() else 0


def _judge(root: Path, results: list[Any]) -> int:
    from tests.train_programs import mean_losses, notes, uninterrupted

    saved = _committed(root / "runs" / "elastic" / "checkpoints")
    wrong = 0 if results and results[0].error is None else 1
    print(f"{'workers':>14} {'restored':>9} {'lost commits':>13} {'made again':>11}")
    before, last = None, -1
    for one in (line for line in notes(root) if line["rank"] == 0):
        if "step" in one:
            last = max(last, one["step"])
        elif "restored" in one:
            if one["restored"] is not None:
                newer = [s for s, at in saved if s > one["restored"] and at < one["time"] - 0.5]
                again = last - one["restored"]
                lost = len({step for step in newer if step <= last})
                wrong |= int(lost > 0)
                print(f"{before:>6} -> {one['world_size']:<4} {one['restored']:>9} {lost:>13} "
                      f"{again:>11}")  # fmt: skip
            before = one["world_size"]
    losses = mean_losses(root)
    expected = uninterrupted(max(losses) + 1)
    differ = max(abs(losses[step] - expected[step]) for step in losses)
    print(f"{len(losses)} of {len(expected)} steps, losses differ by at most {differ:.1e} "
          f"(limit {LIMIT:.0e})")  # fmt: skip
    whole = sorted(losses) == list(range(len(expected)))
    return int(wrong or differ > LIMIT or not whole)


def _committed(folder: Path) -> list[tuple[int, float]]:
    """Returns step and time of each commit."""
    from ray_dcp.format.manifest import Manifest
    from ray_dcp.integrations.train.names import parse
    from ray_dcp.store.opening import open_storage
    from ray_dcp.transfer.slots import read_slots

    found = []
    for path in folder.iterdir():
        named = parse(path.name)
        decides = read_slots(open_storage(path)).decides if named else None
        if named and decides is not None and isinstance(decides.record, Manifest):
            found.append((named.step, decides.record.created_s))
    return found

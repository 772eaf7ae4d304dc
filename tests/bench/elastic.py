"""A Ray Train run whose nodes come and go: 2, 3, 1 and 2 workers, and then a rank that is killed.

Real nodes of a `ray.cluster_utils.Cluster` are added, drained with a notice and taken away, while a
Transformer trains under FSDP2 on gloo. Told are committed steps that were lost, steps that were
made again, and how far the losses are from those of a training that nothing disturbed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
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
WITHIN_S = 300.0
"""For each stage."""

SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def elastic(directory: str | None) -> int:
    """Plays it and prints what became of each step; returns 1 when a promise was not kept."""
    os.environ.update(SETTINGS)
    import ray
    from ray.cluster_utils import Cluster

    root = Path(tempfile.mkdtemp(prefix="rt", dir=directory))
    # Why: Ray writes the address of the newest cluster there, and everybody reads it.
    os.environ["RAY_TMPDIR"] = str(root)
    (root / "ray").mkdir()
    small = {"object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "temp_dir": str(root / "ray"), **small},
    )
    thread: threading.Thread | None = None
    try:
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        results: list[Any] = []
        thread = threading.Thread(target=_fit, args=(root, results))
        thread.start()
        _play(cluster, nodes, small, root, results)
        thread.join(WITHIN_S)
        return _judge(root, results)
    finally:
        ray.shutdown()
        cluster.shutdown()
        if thread is not None:
            thread.join(60)
        shutil.rmtree(root, ignore_errors=True)


def _play(
    cluster: Any, nodes: list[Any], small: dict[str, Any], root: Path, results: list[Any]
) -> None:
    """Lets nodes come and go, and ends the training."""
    _until(root, 2, results)
    _event(root, "a node is added")
    nodes.append(cluster.add_node(num_cpus=1, **small))
    _until(root, 3, results)
    _drain(cluster, nodes[:2])
    _event(root, f"{NOTICE_S} s notice for two")
    threading.Event().wait(NOTICE_S)
    for node in nodes[:2]:
        cluster.remove_node(node, allow_graceful=False)
    _until(root, 1, results)
    _event(root, "a node is added")
    cluster.add_node(num_cpus=1, **small)
    _until(root, 2, results)
    _event(root, "SIGKILL of a rank")
    _kill(root)
    _until(root, 2, results)
    _stop(root)


def train_fn(config: dict[str, str]) -> None:
    """Runs in each worker."""
    import torch.distributed as dist

    import ray_dcp.train
    from tests.support.programs.train import made, note, train_one_step

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


def _fit(root: Path, results: list[Any]) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    import ray_dcp.train

    scaling = ScalingConfig(
        num_workers=(1, 3), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=2
    )
    trainer = TorchTrainer(
        train_fn,
        train_loop_config={"folder": str(root)},
        scaling_config=scaling,
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="elastic", storage_path=str(root / "runs"),
            failure_config=FailureConfig(max_failures=2, max_preemption_failures=5),
            callbacks=[ray_dcp.train.SaveBeforeResize()],
        ),
    )  # fmt: skip
    try:
        results.append(trainer.fit())
    except Exception as error:
        results.append(error)


def _steps(root: Path) -> list[dict[str, Any]]:
    from tests.support.programs.train import notes

    return [one for one in notes(root, "step") if one["rank"] == 0]


def _until(root: Path, world_size: int, results: list[Any]) -> None:
    """Returns when so many workers have made some steps more; raises when the run has ended."""
    begin_s = time.time()
    known = {one["pid"] for one in _steps(root)}
    while time.time() < begin_s + WITHIN_S:
        made = [
            one
            for one in _steps(root)
            if one["world_size"] == world_size and one["pid"] not in known
        ]
        if len(made) >= STEPS_A_STAGE:
            print(f"{time.time() - begin_s:5.0f} s: {world_size} worker(s) are at step "
                  f"{made[-1]['step']}", flush=True)  # fmt: skip
            return
        if results:
            raise RuntimeError(f"the run has ended before that: {results[0]}")
        threading.Event().wait(0.3)
    raise TimeoutError(f"{world_size} workers did not make {STEPS_A_STAGE} steps")


def _event(root: Path, what: str) -> None:
    from tests.support.programs.train import note

    note(str(root), -1, event=what)
    print(f"         {what}", flush=True)


def _drain(cluster: Any, nodes: list[Any]) -> None:
    """Has nodes drained as machines of a cloud do it, by the script of `cluster_configs`."""
    script = Path(__file__).parents[2] / "cluster_configs" / "drain_on_notice.py"
    command = [
        sys.executable, str(script), "--source", "now", "--deadline", str(NOTICE_S),
        "--address", cluster.address,
    ]  # fmt: skip
    draining = [
        subprocess.Popen([*command, "--node-id", node.node_id], stdout=subprocess.DEVNULL)
        for node in nodes
    ]
    if any(one.wait(WITHIN_S) for one in draining):
        raise RuntimeError("a node was not drained")


def _kill(root: Path) -> None:
    from tests.support.programs.train import notes

    victim = [one for one in notes(root, "step") if one["rank"] == 1][-1]["pid"]
    os.kill(victim, signal.SIGKILL)


def _stop(root: Path) -> None:
    """Ends the training at a step that no rank has come to."""
    end = _steps(root)[-1]["step"] + 20
    (root / "end.tmp").write_text(str(end))
    (root / "end.tmp").rename(root / "end")


def _end(folder: str) -> int:
    path = Path(folder, "end")
    return int(path.read_text()) if path.exists() else 0


def _judge(root: Path, results: list[Any]) -> int:
    from tests.support.programs.train import mean_losses, notes, uninterrupted

    wrong = int(not results or getattr(results[0], "error", results[0]) is not None)
    saved = _committed(root / "runs" / "elastic" / "checkpoints")
    print(f"{'what happened':24} {'workers':>8} {'saved':>9} {'restored':>9} {'lost':>5} "
          f"{'again':>6} {'stood still':>12}")  # fmt: skip
    event: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    workers = 0
    for one in notes(root):
        if "event" in one:
            event = one
        elif one["rank"] == 0 and "step" in one:
            steps.append(one)
        elif one["rank"] == 0 and "restored" in one:
            if steps:
                wrong |= _judge_start(one, event, steps, saved, workers)
            workers = one["world_size"]
    losses = mean_losses(root)
    expected = uninterrupted(max(losses) + 1)
    differ = max(abs(losses[step] - expected[step]) for step in losses)
    print(f"{len(losses)} of {len(expected)} steps, losses differ by at most {differ:.1e} "
          f"(limit {LIMIT:.0e})")  # fmt: skip
    whole = sorted(losses) == list(range(len(expected)))
    return int(wrong or differ > LIMIT or not whole)


def _judge_start(
    start: dict[str, Any], event: dict[str, Any], steps: list[dict[str, Any]],
    saved: list[tuple[int, float]], workers: int,
) -> int:  # fmt: skip
    """Prints what a worker group began with; returns 1 when it should have been something else."""
    restored, last = start["restored"], max(one["step"] for one in steps)
    before = [at for step, at in saved if at < start["time"]]
    lost = [step for step, at in saved if at < start["time"] and step > (restored or -1)]
    again = last if restored is None else last - restored
    in_time = [at - event["time"] for at in before if at > event["time"]]
    told = f"{in_time[-1]:+.1f} s" if in_time else "before"
    still_s = start["time"] - steps[-1]["time"]
    print(f"{event['event']:24} {workers:>3} -> {start['world_size']} {told:>9} {restored!s:>9} "
          f"{len(lost):>5} {again:>6} {still_s:>10.0f} s")  # fmt: skip
    is_asked = not event["event"].startswith("SIGKILL")
    in_vain = is_asked and (again > 1 or not in_time)
    late = "notice" in event["event"] and not any(at < NOTICE_S for at in in_time)
    return int(bool(lost) or restored is None or in_vain or late)


def _committed(folder: Path) -> list[tuple[int, float]]:
    """Returns the step of each commit, and when it was made, in the order of these times."""
    from ray_dcp.format.manifest import Manifest, record_key
    from ray_dcp.integrations.ray_train import parse
    from ray_dcp.io.records import read_slots
    from ray_dcp.store.opening import open_storage

    found = []
    for path in folder.iterdir():
        named = parse(path.name)
        decides = read_slots(open_storage(path)).decides if named else None
        if named and decides is not None and isinstance(decides.record, Manifest):
            # By the file, as the time in it is that of its plan.
            found.append((named.step, (path / record_key(decides.slot)).stat().st_mtime))
    return sorted(found, key=lambda one: one[1])

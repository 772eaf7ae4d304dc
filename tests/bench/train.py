"""What a save costs a Ray Train step, against Ray's own uploads of the same state in the same run.

Two workers hold a model replicated. Ray's way is DCP into a local folder, then `report`, which
uploads it (SYNC) or has a thread do that (ASYNC). Each blocked time is that of the slower rank.
What the two training processes pass to `write` calls is counted as well, over a whole round: a
copy on the trainer's own disk is among that. With ray_dcp stagers write, straight to the run.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

REPORT_LIMIT_S = 0.030
WRITTEN_LIMIT_MB = 1.0
"""Of what a training process may write itself: messages go out by other calls."""
NOT_DUE_CALLS = 1000
WAYS = ("Ray SYNC", "Ray ASYNC", "ray_dcp")


def train(rounds: int, directory: str | None, megabytes: int) -> int:
    """Measures, prints each limit beside what was measured; returns 1 when one is not held."""
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    root = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    ray.init(
        num_cpus=4, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False,
        _temp_dir=str(root / "ray"),
    )  # fmt: skip
    try:
        TorchTrainer(
            measure,
            train_loop_config={"folder": str(root), "rounds": rounds, "megabytes": megabytes},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(name="bench", storage_path=str(root / "runs")),
        ).fit()
        told = [json.loads((root / f"told-{rank}.json").read_text()) for rank in range(2)]
    finally:
        ray.shutdown()
        shutil.rmtree(root, ignore_errors=True)
    return _print(told, megabytes)


def _print(told: list[dict[str, Any]], megabytes: int) -> int:
    def slower(name: str) -> float:
        return statistics.median(map(max, zip(*(one[name] for one in told), strict=True)))

    print(f"state of {megabytes} MiB on 2 ranks, medians of {len(told[0]['ray_dcp'])} rounds")
    for name in WAYS:
        written_mb = statistics.median(
            map(sum, zip(*(one[_written(name)] for one in told), strict=True))
        )
        print(f"  {name:10} training waits {slower(name) * 1e3:8.1f} ms a save, and writes "
              f"{written_mb:8.2f} MB by itself")  # fmt: skip
    report_s = slower("report")
    print(f"  report     {report_s * 1e3:8.1f} ms a save (limit {REPORT_LIMIT_S * 1e3:.0f} ms), "
          f"of {len(told[0]['report'])}")  # fmt: skip
    print(f"  not due    {slower('not due') * 1e6:8.1f} us a step")
    left = sorted({path for one in told for path in one["left"]})
    print(f"  left in the trainers' own folders by ray_dcp: {left or 'nothing'}")
    too_much = any(mb > WRITTEN_LIMIT_MB for one in told for mb in one[_written("ray_dcp")])
    return int(report_s > REPORT_LIMIT_S or too_much or bool(left))


def _written(name: str) -> str:
    return f"{name} MB"


def _written_mb() -> float:
    """Returns how much this process has passed to `write` so far, in MB."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:")) / 1e6


def _below(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def measure(config: dict[str, Any]) -> None:
    """Runs in each worker."""
    import ray.train
    import torch
    from ray.train.collective import barrier

    import ray_dcp.train
    from ray_dcp.events import Event, subscribe
    from ray_dcp.integrations import ray_train as telling

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    rows = config["megabytes"] << 20 >> 12
    state = {f"w{number}": torch.randn(rows // 8, 1024) for number in range(8)}
    reports: list[float] = []
    telling.report = _timed(telling.report, reports)
    found: dict[str, list[Any]] = {name: [] for name in (*WAYS, *map(_written, WAYS))}
    own = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp()
    events: SimpleQueue[Event] = SimpleQueue()
    subscribe(events.put)
    with ray_dcp.train.checkpointer(save_interval=2) as ckpt:
        ckpt.restore(dict(state))
        begin = time.perf_counter()
        for _ in range(NOT_DUE_CALLS):
            ckpt.save(1, state)
        found["not due"] = [(time.perf_counter() - begin) / NOT_DUE_CALLS]
        for number in range(config["rounds"] + 1):
            for name, save in (
                ("Ray SYNC", lambda: _by_ray(state, "SYNC")),
                ("Ray ASYNC", lambda: _by_ray(state, "ASYNC")),
                ("ray_dcp", lambda number=number: ckpt.save(2 * number + 2, state)),
            ):
                barrier()
                written_mb, begin = _written_mb(), time.perf_counter()
                save()
                seconds = time.perf_counter() - begin
                if name == "ray_dcp":
                    while not (event := events.get(timeout=600)).is_end:
                        pass
                    assert event.name == "save.committed", event
                _wait_for_controller()
                if number:
                    found[name].append(seconds)
                    found[_written(name)].append(_written_mb() - written_mb)
    found["report"] = reports[1:]
    found["left"] = [str(path) for folder in (own, os.getcwd()) for path in _below(folder)]
    shutil.rmtree(own)
    Path(config["folder"], f"told-{rank}.json").write_text(json.dumps(found))


def _by_ray(state: dict[str, Any], mode: str) -> None:
    """Saves as Ray's own templates do."""
    import ray.train
    from torch.distributed import checkpoint as dcp

    folder = tempfile.mkdtemp()
    dcp.save(state, checkpoint_id=folder)
    ray.train.report(
        {}, checkpoint=ray.train.Checkpoint.from_directory(folder),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode[mode],
        delete_local_checkpoint_after_upload=True,
    )  # fmt: skip


def _wait_for_controller() -> None:
    """Returns when the controller has seen all checkpoints that were reported."""
    import ray.train

    ray.train.get_all_reported_checkpoints(
        consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED, timeout_s=60
    )


def _timed(report: Callable[..., None], into: list[float]) -> Callable[..., None]:
    def timed(*arguments: Any) -> None:
        begin = time.perf_counter()
        report(*arguments)
        into.append(time.perf_counter() - begin)

    return timed

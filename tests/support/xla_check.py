"""`python -m tests.support.xla_check [DIR]`: `ray_dcp.xla` on four XLA CPU devices, with torch_xla
itself.

Too heavy for `.ci/run`: it makes (or takes) the environment of `tests.support.xla_env`, starts
itself in there, and runs every check of this file. Prints a line for each; ends with 1 when one
fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ray_dcp
from ray_dcp.xla import CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner
from tests.support.xla_env import DEFAULT_PLACE, build

INSIDE = "RAY_DCP_XLA_CHECK"
REPOSITORY = Path(__file__).parents[2]


def state(step: int = 0, *, fill: bool = True):
    """Returns tensors in every sharding that a 2x2 mesh of 4 devices has, and other values."""
    import torch_xla.distributed.spmd as xs

    line = xs.Mesh(np.arange(4), (4,), ("x",))
    square = xs.Mesh(np.arange(4), (2, 2), ("x", "y"))

    def on_xla(*shape):
        count = int(np.prod(shape))
        values = torch.arange(count, dtype=torch.float32).reshape(shape) + 100 * step
        return (values if fill else torch.full(shape, -1.0)).to("xla")

    def sharded(shape, mesh, spec):
        return xs.mark_sharding(on_xla(*shape), mesh, spec)

    return {
        "rows": sharded((8, 6), line, ("x", None)),
        "uneven_7": sharded((7, 3), line, ("x", None)),
        "uneven_9": sharded((9, 3), line, ("x", None)),
        "both": sharded((8, 4), square, ("x", "y")),
        "partial": sharded((8, 4), square, ("x", None)),
        "partial_y": sharded((4, 6), square, (None, "y")),
        "replicated": sharded((3, 5), line, (None, None)),
        "plain": on_xla(5),
        "scalar": on_xla(),
        "cpu": torch.full((4,), float(step if fill else -1)),
        "nested": {"list": [{"lr": 0.1 * step if fill else -1.0, "betas": (0.9, 0.99)}]},
        "step": step if fill else -1,
    }


def check(found, step: int, leave_out=()) -> None:
    expected = state(step)
    for name, value in expected.items():
        if name in leave_out:
            continue
        if hasattr(value, "cpu"):
            assert found[name].shape == value.shape, name
            assert bool((found[name].cpu() == value.cpu()).all()), (name, found[name], value)
        else:
            assert found[name] == value, (name, found[name], value)


def sharding_of(tensor) -> str:
    import torch_xla

    plain = getattr(tensor, "global_tensor", tensor)
    return str(torch_xla._XLAC._get_xla_sharding_spec(plain))


def check_round_trip(root: Path) -> None:
    """Every sharding comes back, with its sharding, also where torch_xla loses it."""
    given = state(1)
    metadata = ray_dcp.save(given, checkpoint_id=root, planner=SPMDSavePlanner())
    tensors = {n: m for n, m in metadata.state_dict_metadata.items() if hasattr(m, "chunks")}
    chunks = {name: len(found.chunks) for name, found in tensors.items()}
    assert (chunks["both"], chunks["partial"], chunks["uneven_9"]) == (4, 2, 3), chunks
    found = state(1, fill=False)
    before = {name: sharding_of(found[name]) for name in ("rows", "partial", "both", "replicated")}
    report = ray_dcp.load(found, checkpoint_id=root, planner=SPMDLoadPlanner())
    check(found, 1)
    assert before == {name: sharding_of(found[name]) for name in before}
    assert report.path == "planner hooks"
    assert ray_dcp.verify(root).ok


LOST = ("partial", "partial_y")
"""Tensors that torch_xla's own save planner does not save."""


def check_theirs_to_ours(root: Path) -> None:
    """What torch_xla's planner saved through stock DCP loads with ours."""
    import torch_xla.experimental.distributed_checkpoint as theirs

    given = {name: value for name, value in state(3).items() if name not in LOST}
    dcp.save(given, checkpoint_id=root, planner=theirs.SPMDSavePlanner())
    found = {name: value for name, value in state(3, fill=False).items() if name not in LOST}
    ray_dcp.load(found, checkpoint_id=root, planner=SPMDLoadPlanner())
    check(found, 3, LOST)


def check_ours_to_theirs(root: Path) -> None:
    """What ours saved, through ray_dcp and through stock DCP, loads with torch_xla's planner.

    So it does with the default planner, into plain tensors.
    """
    import torch_xla.experimental.distributed_checkpoint as theirs

    ray_dcp.save(state(4), checkpoint_id=root / "ours", planner=SPMDSavePlanner())
    dcp.save(state(4), checkpoint_id=root / "stock", planner=SPMDSavePlanner())
    for name in ("ours", "stock"):
        found = state(4, fill=False)
        dcp.load(found, checkpoint_id=root / name, planner=theirs.SPMDLoadPlanner())
        check(found, 4)
        found = {one: torch.zeros(state(4)[one].shape) for one in (*LOST, "both", "uneven_7")}
        dcp.load(found, checkpoint_id=root / name)
        for one, value in found.items():
            assert bool((value == state(4)[one].cpu()).all()), one
        found = state(4, fill=False)
        dcp.load(found, checkpoint_id=root / name, planner=SPMDLoadPlanner())
        check(found, 4)


def check_cpu_shards(root: Path) -> None:
    """What torch_xla brought to the CPU to save it is saved as tensors, and loaded into."""
    from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict

    given = _sharded_cpu_state_dict({**state(6), "deep": {"list": [state(6)["partial"]]}})
    metadata = ray_dcp.save(given, checkpoint_id=root, planner=SPMDSavePlanner())
    chunks = {name: len(getattr(metadata.state_dict_metadata[name], "chunks", ()))
              for name in ("both", "partial", "uneven_9", "deep.list.0")}  # fmt: skip
    assert chunks == {"both": 4, "partial": 2, "uneven_9": 3, "deep.list.0": 2}, chunks
    found = state(6, fill=False)
    ray_dcp.load(found, checkpoint_id=root, planner=SPMDLoadPlanner())
    check(found, 6)
    on_cpu = _sharded_cpu_state_dict(state(6, fill=False))
    ray_dcp.load(on_cpu, checkpoint_id=root, planner=SPMDLoadPlanner())
    for name in ("rows", "uneven_9", "both", "partial", "partial_y"):
        for found_shard, shard in zip(on_cpu[name].shards, given[name].shards, strict=True):
            assert torch.equal(found_shard.unpadded_data, shard.unpadded_data), name
    plain = {"partial": torch.zeros(8, 4)}
    ray_dcp.load(plain, checkpoint_id=root)
    assert torch.equal(plain["partial"], state(6)["partial"].cpu())


def check_their_manager(root: Path) -> None:
    """Steps of torch_xla's manager are read, and stay when ours saves after them."""
    import torch_xla.experimental.distributed_checkpoint as theirs

    old = theirs.CheckpointManager(str(root), 10, chkpt_on_preemption=False)
    given = {name: value for name, value in state(10).items() if name not in LOST}
    assert old.save(10, given)
    manager = CheckpointManager(str(root), 10, max_to_keep=1, chkpt_on_preemption=False)
    assert manager.all_steps() == [10]
    found = {name: value for name, value in state(fill=False).items() if name not in LOST}
    manager.restore("latest", found)
    check(found, 10, LOST)
    for step in (20, 30):
        manager.save(step, state(step))
    manager.join()
    assert manager.all_steps() == [10, 30], manager.all_steps()
    manager.close()


CHECKS = (
    check_round_trip, check_theirs_to_ours, check_ours_to_theirs, check_cpu_shards,
    check_their_manager,
)  # fmt: skip


def inside(names: Sequence[str] = ()) -> int:
    """Runs checks in this interpreter, all by default; returns how many failed."""
    import torch_xla
    import torch_xla.runtime as xr

    xr.use_spmd()
    print(f"torch {torch.__version__}, torch_xla {torch_xla.__version__}, "
          f"{xr.global_runtime_device_count()} devices")  # fmt: skip
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory, "store")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        checks = [one for one in CHECKS if not names or one.__name__ in names]
        for check_one in checks:
            place = Path(directory, check_one.__name__)
            about = (check_one.__doc__ or "").partition("\n")[0]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    check_one(place)
            except Exception:
                failed += 1
                traceback.print_exc()
                print(f"FAILED  {check_one.__name__}: {about}")
            else:
                print(f"passed  {check_one.__name__}: {about}")
        dist.destroy_process_group()
    print(f"{len(checks) - failed} passed, {failed} failed")
    return failed


def main() -> int:
    """Starts this file in the environment of torch_xla."""
    python = build(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PLACE)
    return start(python).returncode


def start(python: Path, *names: str, **how: Any) -> subprocess.CompletedProcess[Any]:
    """Runs checks by another interpreter; `how` goes to `subprocess.run`."""
    told = {INSIDE: "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    told["PYTHONPATH"] = str(REPOSITORY)
    return subprocess.run(
        [str(python), "-m", "tests.support.xla_check", *names],
        cwd=REPOSITORY,
        env=os.environ | told,
        check=False,
        **how,
    )


if __name__ == "__main__":
    sys.exit(min(1, inside(sys.argv[1:])) if os.environ.get(INSIDE) else main())

"""`python -m tests.support.xla_check [DIR]`: `ray_dcp.xla` on four XLA CPU devices, with torch_xla
itself.

Too heavy for `.ci/run`: it makes (or takes) the environment of `tests.support.xla_env`, starts
itself in there, and runs every check of this file. Prints a line for each; ends with 1 when one
fails.

    python -m tests.support.xla_check [DIR] --upstream FILE

runs torch_xla's own tests instead, with the names of `ray_dcp.xla` in place of its own, and prints
how many passed. FILE is `test/spmd/test_xla_distributed_checkpoint.py` of torch_xla's repository at
v2.9.0, beside its `test_xla_sharding_base.py`. With `--stock` too, torch_xla is left as it is.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
import unittest.mock
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ray_dcp
import ray_dcp.xla
from ray_dcp.errors import MissingKeyError, ShapeMismatchError
from ray_dcp.xla import CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer
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


def check_async(root: Path) -> None:
    """What changes after `async_save` returned is not saved."""
    given = state(2)
    handle = ray_dcp.async_save(given, checkpoint_id=root, planner=SPMDSavePlanner())
    given["plain"].add_(1000)
    handle.result()
    found = state(2, fill=False)
    ray_dcp.load(found, checkpoint_id=root, planner=SPMDLoadPlanner())
    check(found, 2)


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


def check_resharding(root: Path) -> None:
    """A tensor loads into another sharding."""
    import torch_xla.distributed.spmd as xs

    ray_dcp.save(state(5), checkpoint_id=root, planner=SPMDSavePlanner())
    mesh = xs.Mesh(np.arange(4), (4,), ("x",))
    found = {"partial": xs.mark_sharding(torch.zeros(8, 4).to("xla"), mesh, (None, "x")),
             "rows": torch.zeros(8, 6)}  # fmt: skip
    ray_dcp.load(found, checkpoint_id=root, planner=SPMDLoadPlanner())
    expected = state(5)
    for name, value in found.items():
        assert bool((value.cpu() == expected[name].cpu()).all()), name


def check_refusals(root: Path) -> None:
    """Another shape and a missing key are errors, and nothing is touched."""
    import torch_xla.distributed.spmd as xs

    ray_dcp.save({"w": state(1)["rows"]}, checkpoint_id=root, planner=SPMDSavePlanner())
    mesh = xs.Mesh(np.arange(4), (4,), ("x",))
    for shape in ((12, 6), (4, 6)):
        target = xs.mark_sharding(torch.full(shape, 7.0).to("xla"), mesh, ("x", None))
        try:
            ray_dcp.load({"w": target}, checkpoint_id=root, planner=SPMDLoadPlanner())
        except ShapeMismatchError as error:
            told = str(error)
        else:
            raise AssertionError(f"shape {shape} was loaded")
        assert "(8, 6) stored" in told
        assert bool((target.cpu() == 7).all())
    try:
        ray_dcp.load({"zz": target}, checkpoint_id=root, planner=SPMDLoadPlanner())
    except MissingKeyError as error:
        told = str(error)
    else:
        raise AssertionError("a missing key was loaded")
    assert "zz" in told


def check_manager(root: Path) -> None:
    """torch_xla's manager calls, with its meaning; SIGTERM also where there is no TPU."""
    manager = CheckpointManager(str(root), 10, max_to_keep=2)
    saved = [manager.save(step, state(step)) for step in (0, 5, 10)]
    assert saved == [True, False, True]
    assert manager.save_async(20, state(20))
    assert manager.save_async(20, state(20))  # again: replaced, not lost
    manager.join()
    assert manager.all_steps() == [10, 20], manager.all_steps()
    found = state(fill=False)
    assert manager.restore(10, found).step == 10
    check(found, 10)
    assert not manager.should_save(21)
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_save(22)
    assert manager.save(22, state(22))
    assert manager.reached_preemption(22)
    assert not manager.save(23, state(23))
    manager.close()


def check_ages(root: Path) -> None:
    """The oldest step is the one that was saved first; `all_steps` after `save` is what is left."""
    tensor = torch.ones(4).to("xla")

    def saved(*steps: int) -> list[list[int]]:
        kept = []
        with CheckpointManager(str(root), 100, 3, chkpt_on_preemption=False) as manager:
            for step in steps:
                assert manager.save(step, {"w": tensor * step})
                kept.append(manager.all_steps())
                found = {"w": torch.zeros(4).to("xla")}
                assert manager.restore("auto", found).step == step == manager.latest_step()
                assert bool((found["w"].cpu() == step).all())
        return kept

    assert saved(600, 700, 800)[-1] == [600, 700, 800]
    assert saved(100, 200, 300, 100) == [
        [100, 700, 800], [100, 200, 800], [100, 200, 300], [100, 200, 300]]  # fmt: skip


def check_sync_point(root: Path) -> None:
    """Where the program has activated torch_xla's preemption sync manager, its word counts."""
    import torch_xla

    xlac = torch_xla._XLAC
    xlac._ensure_xla_coordinator_initialized(global_rank=0, world_size=1, master_addr="localhost")
    with CheckpointManager(str(root), 1000) as manager:
        # Why now: the sync manager takes the signal, which ours no longer hears.
        xlac._activate_preemption_sync_manager()
        try:
            assert not manager.save(1, state(1))
            os.kill(os.getpid(), signal.SIGTERM)
            ends_s, step = time.monotonic() + 30, 2
            while not manager.save(step, state(step)):
                assert time.monotonic() < ends_s, "no step was saved"
                threading.Event().wait(0.1)
                step += 1
            assert manager.reached_preemption(step)
            assert manager.all_steps() == [step]
            assert not manager.save(step + 1, state(step))
        finally:
            xlac._deactivate_preemption_sync_manager()


class WithoutSome(SPMDSavePlanner):
    """A planner of a user who knows torch_xla's."""

    def set_up_planner(self, state_dict, is_coordinator):
        super().set_up_planner(state_dict, is_coordinator)
        del self.unsharded_state_dict["plain"]
        self.sharded_state_dict = {"rows": self.sharded_state_dict["rows"]}


class OnlyRows(SPMDLoadPlanner):
    """The other way round."""

    def create_local_plan(self):
        assert str(self.unsharded_state_dict["plain"].device).startswith("xla")
        self.unsharded_state_dict = {"step": self.unsharded_state_dict["step"]}
        self.sharded_state_dict = {"rows": self.sharded_state_dict["rows"]}
        return super().create_local_plan()


def check_subclasses(root: Path) -> None:
    """Planners that leave out values as they would with torch_xla's, whose signature they have."""
    metadata = ray_dcp.save(state(3), checkpoint_id=root, planner=WithoutSome())
    names = set(metadata.state_dict_metadata)
    assert {"rows", "step", "scalar"} <= names, names
    assert not {"plain", "both"} & names, names
    found = state(3, fill=False)
    ray_dcp.load(found, checkpoint_id=root, planner=OnlyRows())
    assert found["step"] == 3
    assert bool((found["rows"].cpu() == state(3)["rows"].cpu()).all())
    assert bool((found["scalar"].cpu() == -1).all())


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


def check_prime(root: Path) -> None:
    """Priming changes no parameter and no step count; the state is sharded, and is loaded into."""
    import torch_xla
    import torch_xla.distributed.spmd as xs

    mesh = xs.Mesh(np.arange(4), (4,), ("x",))

    def model():
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 4).to("xla")
        xs.mark_sharding(layer.weight, mesh, ("x", None))
        return layer, torch.optim.AdamW(layer.parameters(), weight_decay=0.5)

    layer, optimizer = model()
    layer(torch.ones(2, 8).to("xla")).sum().backward()
    optimizer.step()
    torch_xla.sync()
    with CheckpointManager(str(root), 1, chkpt_on_preemption=False) as manager:
        manager.save(1, {"m": layer.state_dict(), "o": optimizer.state_dict()})
        fresh, fresh_optimizer = model()
        before = {name: value.cpu().clone() for name, value in fresh.state_dict().items()}
        sharding = sharding_of(fresh.weight)
        assert prime_optimizer(fresh_optimizer) is fresh_optimizer
        for name, value in fresh.state_dict().items():
            assert bool((value.cpu() == before[name]).all()), name
        assert sharding_of(fresh.weight) == sharding != ""
        primed = fresh_optimizer.state[fresh.weight]
        assert float(primed["step"]) == 0.0
        assert not primed["exp_avg"].cpu().any()
        assert sharding_of(primed["exp_avg"]) == sharding
        assert fresh.weight.grad is None
        found = {"m": fresh.state_dict(), "o": fresh_optimizer.state_dict()}
        manager.restore(1, found)
        fresh.load_state_dict(found["m"])
        fresh_optimizer.load_state_dict(found["o"])
    for name, value in fresh.state_dict().items():
        assert bool((value.cpu() == layer.state_dict()[name].cpu()).all()), name
    now, then = fresh_optimizer.state[fresh.weight], optimizer.state[layer.weight]
    assert float(now["step"]) == 1.0
    assert bool((now["exp_avg_sq"].cpu() == then["exp_avg_sq"].cpu()).all())


CHECKS = (
    check_round_trip, check_async, check_theirs_to_ours, check_ours_to_theirs, check_cpu_shards,
    check_resharding, check_refusals, check_manager, check_ages, check_sync_point,
    check_subclasses, check_their_manager, check_prime,
)  # fmt: skip

UPSTREAM, STOCK = "--upstream", "--stock"
OF_TORCH_XLA_ALONE = ("test_master_ip_discovery",)
"""Tests of the file that call nothing of what is replaced."""
PRIVATE = ("test_manager_async",)
"""Tests of the file that replace a private method of torch_xla's manager, so that they can't pass
with another one."""


def upstream(file: Path, *, stock: bool = False) -> list[str]:
    """Runs torch_xla's own test file; returns the names of the tests that should not have failed.

    Args:
        file: `test_xla_distributed_checkpoint.py`, beside its `test_xla_sharding_base.py`.
        stock: Whether to leave torch_xla's names as they are.
    """
    import torch_xla.experimental.distributed_checkpoint as theirs
    import torch_xla.runtime as xr

    if not stock:
        for name in ray_dcp.xla.__all__:
            setattr(theirs, name, getattr(ray_dcp.xla, name))
    # Why: what it skips elsewhere than on TPUs needs only the address of the first host.
    xr.get_master_ip = lambda: "localhost"
    spec = importlib.util.spec_from_file_location("upstream", file)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    with unittest.mock.patch.object(xr, "device_type", return_value="TPU"):
        spec.loader.exec_module(module)
    suite = unittest.TestSuite(
        test
        for group in unittest.defaultTestLoader.loadTestsFromModule(module)
        for test in group
        if test.id().rpartition(".")[2] not in OF_TORCH_XLA_ALONE
    )
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    failed = [test.id() for test, _ in (*result.failures, *result.errors)]
    number = result.testsRun - len(result.skipped)
    print(f"{file.name} with {'torch_xla' if stock else 'ray_dcp.xla'}: "
          f"{number - len(failed)} of {number} passed; failed: {failed or 'none'}")  # fmt: skip
    return [name for name in failed if name.rpartition(".")[2] not in PRIVATE]


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
    place, names = DEFAULT_PLACE, sys.argv[1:]
    if names and not names[0].startswith("--"):
        place = Path(names.pop(0))
    names = [str(Path(name).absolute()) if name.endswith(".py") else name for name in names]
    return start(build(place), *names).returncode


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


def chosen(words: Sequence[str]) -> int:
    """Does what the command line asks for; returns how many checks or tests failed."""
    if UPSTREAM not in words:
        return inside(words)
    names = [word for word in words if word not in (UPSTREAM, STOCK)]
    return len(upstream(Path(*names), stock=STOCK in words))


if __name__ == "__main__":
    sys.exit(min(1, chosen(sys.argv[1:])) if os.environ.get(INSIDE) else main())

"""Steps of a job whose parts several processes give, in a real Ray; each of them is killed."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from ray.util import list_named_actors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    ParticipantError,
    RankDisagreementError,
)
from ray_dcp.job.value import save_values
from ray_dcp.options import SaveOptions
from ray_dcp.session.names import NAMESPACE, job_coordinator_name
from ray_dcp.store.opening import open_storage
from ray_dcp.view.damage_marks import read_marks
from tests.chaos.job_ledger import wrong_in
from tests.integration.conftest import mend
from tests.integration.test_frameworks import example
from tests.support.checkpoints import flip
from tests.support.processes import eventually
from tests.unit.test_job_looking import invoke

pytestmark = pytest.mark.usefixtures("ray_session")


NUM_RANKS = 2
PARTS = ("policy", "buffer")


class Held:
    """A Stateful whose state comes when a file is there, or never."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def state_dict(self) -> dict[str, Any]:
        assert eventually(self.gate.exists)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes it a Stateful."""


class Worker:
    """A process of a job: it trains, has a buffer, or drives."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def save(self, part: ray_dcp.Part, value: float) -> None:
        ray_dcp.save({"w": torch.full((4,), value)}, checkpoint_id=part)

    def stage(self, part: ray_dcp.Part, value: float) -> str:
        """Returns once the bytes are copied, without a wait for the commit."""
        self.handles.append(ray_dcp.async_save({"w": torch.full((4,), value)}, checkpoint_id=part))
        self.handles[-1].staged(120)
        return str(self.handles[-1].report().staging)

    def stage_with_no_thread_left(self, part: ray_dcp.Part) -> BaseException | None:
        """Returns the error of a save whose bytes are copied when its thread is refused."""
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name.startswith("ray_dcp save "):
                raise RuntimeError("can't start new thread")
            real(thread)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            handle = ray_dcp.async_save({"w": torch.zeros(4)}, checkpoint_id=part)
        assert handle.report().bytes_staged == 16
        return handle.exception(120)

    def never_stage(self, part: ray_dcp.Part, gate: Path) -> None:
        ray_dcp.save({"w": Held(gate)}, checkpoint_id=part)

    def load(self, part: ray_dcp.Part) -> float:
        state = {"w": torch.zeros(4)}
        ray_dcp.load(state, checkpoint_id=part)
        return float(state["w"][0])

    def state(self, value: float) -> dict[str, Any]:
        return {"x": torch.full((1 << 16,), value), "next": 5, "nested": {"a": [1, (2, "b")]}}

    def wrapped(self, value: float) -> ray_dcp.PartValue:
        return ray_dcp.PartValue(self.state(value))

    def fail(self) -> None:
        raise ValueError("the buffer is empty")

    def same(self, value: Any) -> Any:
        return value

    # As a driver

    def drive(self, root: Path, number: int, parts: tuple[str, ...]) -> ray_dcp.Part:
        """Opens a step, and returns its first part."""
        self.run = ray_dcp.JobCheckpoints(root, parts)
        self.step = self.run.step(number)
        return self.step.part(parts[0])

    def leave(self) -> None:
        with self.step:
            pass


@pytest.fixture(scope="module")
def worker_class(ray_session: str) -> Any:
    return ray.remote(Worker).options(num_cpus=0, max_concurrency=4)


@pytest.fixture(scope="module")
def worker(worker_class: Any) -> Any:
    """A process that lives on."""
    return worker_class.remote()


def coordinator_of(root: Path) -> Any:
    return ray.get_actor(job_coordinator_name(str(root), NAMESPACE), NAMESPACE)


def hold_commits(root: Path, gate: Path) -> None:
    """Has the coordinator create no record before a file is there."""

    def hold(_: Any, gate: Path) -> None:
        from ray_dcp.job import coordinator as module

        real = module.create_record

        def held(*arguments: Any) -> Any:
            assert eventually(gate.exists)
            return real(*arguments)

        module.create_record = held

    ray.get(coordinator_of(root).__ray_call__.remote(hold, gate))


def committed(root: Path) -> list[int]:
    return ray_dcp.JobCheckpoints(root, ("any",), read_only=True).all_steps()


def is_whole(part: Path) -> bool:
    """Returns whether a part is durable, and every byte of it is as it was saved."""
    with suppress(CheckpointNotFoundError):
        return ray_dcp.verify(part).ok
    return False


def has_ended(root: Path) -> bool:
    names = {one["name"] for one in list_named_actors(all_namespaces=True)}
    return job_coordinator_name(str(root), NAMESPACE) not in names


def test_a_staged_step_is_committed_though_all_who_gave_its_parts_are_killed(
    tmp_path: Path, worker: Any, worker_class: Any
):
    root, gate = tmp_path / "run", tmp_path / "gate"
    driver, trainer, buffer = (worker_class.remote() for _ in range(3))
    policy = ray.get(driver.drive.remote(root, 1, PARTS))
    hold_commits(root, gate)
    assert ray.get(trainer.stage.remote(policy, 1.0)) == "object_store"

    def put(self: Worker, buffer: Any) -> None:
        self.step.put("buffer", buffer.wrapped.remote(1.5), version=3)

    ray.get(driver.__ray_call__.remote(put, buffer))
    ray.get(driver.leave.remote())
    for one in (driver, trainer, buffer):
        ray.kill(one)
    # Its parts are no step without the record.
    assert eventually(lambda: is_whole(root / "step-00000001" / "policy"))
    assert committed(root) == []
    gate.touch()
    # The next driver waits for it.
    run = ray_dcp.JobCheckpoints(root, PARTS, max_to_keep=2)
    with run.latest() as last:
        assert (last.step, last.versions) == (1, {"buffer": 3})
        assert ray.get(worker.load.remote(last.part("policy"))) == 1.0
        found = ray.get(worker.same.remote(last.ref("buffer")))
        assert torch.equal(found.pop("x"), torch.full((1 << 16,), 1.5))
        assert found == {"next": 5, "nested": {"a": [1, (2, "b")]}}
    # Each part is a checkpoint by itself, also for stock DCP.
    state = {"w": torch.zeros(4)}
    stock.load(state, checkpoint_id=str(root / "step-00000001" / "policy"), no_dist=True)
    assert state["w"].tolist() == [1.0] * 4
    # And the step is one of a manager with these items.
    items = {"policy": ray_dcp.manager.Item(), "buffer": ray_dcp.manager.Item()}
    with ray_dcp.CheckpointManager(root, items=items, read_only=True, no_dist=True) as manager:
        assert manager.step_info(1).items == ("buffer", "policy")

    # A part of an earlier step is taken without a byte; either may be deleted.
    for number in (2, 3):
        with run.step(number, metrics={"loss": 0.5}) as step:
            step.keep("policy")
            step.put("buffer", [number])
        assert step.result(60) == str(root / f"step-0000000{number}")
    files = [
        next((root / f"step-0000000{number}" / "policy").glob("*.distcp")) for number in (2, 3)
    ]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    assert eventually(lambda: committed(root) == [2, 3])
    with run.latest() as last:
        assert (last.step, last.kept_from, last.metrics) == (3, {"policy": 2}, {"loss": 0.5})
        assert last.value("buffer") == [3]
        assert ray.get(worker.load.remote(last.part("policy"))) == 1.0
        with pytest.raises(InvalidRequestError, match="never changes"):
            ray.get(worker.save.remote(last.part("policy"), 9.0))

    # A damaged part means an earlier step, by name.
    damaged = next((root / "step-00000003" / "buffer").glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.warns(UserWarning, match=r"newer step 3, which is damaged: .*distcp"):
        assert run.latest().step == 2
    run.close()
    assert eventually(lambda: has_ended(root))


def part_state() -> dict[str, Any]:
    """Returns what a rank saves: a sharded tensor, and one that all have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(8.0)
    return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "w": torch.ones(4)}


def stage_part(part: ray_dcp.Part, on_rank_1: Callable[[], object] = int) -> int:
    """Stages a part on a rank, and returns its process id."""
    state = part_state()
    if dist.get_rank() == 1:
        on_rank_1()
    ray_dcp.async_save(state, checkpoint_id=part).staged(120)
    return os.getpid()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_ranks_of_a_group_save_a_part_together(tmp_path: Path, ranks: Any, worker: Any):
    root, gate = tmp_path / "run", tmp_path / "gate"
    run = ray_dcp.JobCheckpoints(root, PARTS)

    def buffer(step: ray_dcp.JobStep) -> None:
        step.put("buffer", {"x": step.step})

    give_step(run, 1, buffer, lambda step: ranks.save(step.part("policy"), part_state))
    # A rank that dies before it is staged ends the step for everyone.
    with pytest.raises((ParticipantError, ray_dcp.CheckpointError), match=r"rank 1|died"):
        give_step(run, 2, buffer, lambda step: ranks.run(stage_part, step.part("policy"), die))
    mend(ranks)
    assert committed(root) == [1]
    assert [*(root / "step-00000002").glob("*/[!.]*")] == []
    # After that, it is committed without them.
    hold_commits(root, gate)
    with run.step(3) as step:
        buffer(step)
        pids = ranks.run(stage_part, step.part("policy"))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    gate.touch()
    step.result(60)
    mend(ranks)
    with run.latest() as last:
        assert last.step == 3
        assert ray.get(worker.load.remote(last.part("policy"))) == 1.0
        found = ray_dcp.read_state_dict(last.part("policy"))
        assert found["sharded"].tolist() == [*range(8)]
        reports = ranks.load(last.part("policy"), part_state)
        assert len(reports) == NUM_RANKS
    run.close()


def give_step(
    run: ray_dcp.JobCheckpoints, number: int, *gives: Callable[[ray_dcp.JobStep], object]
) -> ray_dcp.JobStep:
    """Opens a step, has its parts given, leaves it, and waits until it is committed."""
    with run.step(number) as step:
        for give in gives:
            give(step)
    step.result(60)
    return step


def test_a_step_of_which_a_part_fails_never_was(tmp_path: Path, worker: Any, worker_class: Any):
    root = tmp_path / "run"
    run = ray_dcp.JobCheckpoints(root, PARTS)
    steps: list[ray_dcp.JobStep] = []

    def policy(step: ray_dcp.JobStep, version: int | None = None) -> None:
        steps.append(step)
        ray.get(worker.save.remote(step.part("policy", version=version), float(step.step)))

    def buffer(step: ray_dcp.JobStep, version: int | None = None) -> None:
        step.put("buffer", {"x": step.step}, version=version)

    def raising(_: object) -> None:
        raise ValueError("of mine")

    def parts_left() -> list[Path]:
        return [*root.glob("*/policy*"), *root.glob("*/buffer*")]

    with pytest.raises(CheckpointNotFoundError, match="but there is none"):
        give_step(run, 1, lambda step: step.keep("policy"))
    # A task that fails is the failure of the step, by name, for who asks and for who goes on.
    with pytest.raises(ParticipantError, match=r"'buffer' of step 2.*the buffer is empty"):
        give_step(run, 2, policy, lambda step: step.put("buffer", worker.fail.remote()))
    with pytest.raises(ParticipantError, match="the buffer is empty"):
        steps[0].result(60)
    with pytest.raises(InvalidRequestError, match=r"given up.*the buffer is empty"):
        policy(steps[0])
    assert parts_left() == []
    # Parts with versions are of one.
    with pytest.raises(RankDisagreementError, match=r"policy has 1, buffer has 2"):
        give_step(run, 3, partial(policy, version=1), partial(buffer, version=2))
    with pytest.raises(ValueError, match="of mine"):
        give_step(run, 4, buffer, raising)
    with pytest.raises(InvalidRequestError, match="step 4 is still open"):
        give_step(run, 4, lambda _: run.step(5))

    # A rank that dies while its part is staged.
    def dying(step: ray_dcp.JobStep) -> None:
        trainer = worker_class.remote()
        trainer.never_stage.remote(step.part("policy"), tmp_path / "never")
        assert eventually(lambda: step.report().parts["policy"].is_begun)
        ray.kill(trainer)

    with pytest.raises(ParticipantError, match=r"'policy' of step 5 .* rank 0"):
        give_step(run, 5, buffer, dying)
    assert parts_left() == []
    with pytest.raises(InvalidRequestError, match="saves it already"):
        give_step(run, 6, policy, policy)
    with pytest.raises(InvalidRequestError, match="'other'"):
        steps[0].part("other")
    # Bytes that are copied, of a process that may start no thread for the rest of the save.
    told: list[BaseException] = []

    def refused(step: ray_dcp.JobStep) -> None:
        steps.append(step)
        told.append(ray.get(worker.stage_with_no_thread_left.remote(step.part("policy"))))

    with pytest.raises(LimitError, match=r"'policy' of step 6 .*ulimit -u"):
        give_step(run, 6, buffer, refused)
    assert isinstance(told[0], LimitError)
    with pytest.raises(LimitError, match="'policy' of step 6"):
        steps[-1].result(60)
    assert parts_left() == []
    assert committed(root) == []
    # After all of that, a step is committed.
    step = give_step(run, 6, buffer, policy)
    with run.latest() as last:
        assert ray.get(worker.load.remote(last.part("policy"))) == 6.0
    with pytest.raises(InvalidRequestError, match="may never be committed"):
        ray.get(worker.load.remote(step.part("policy")))
    run.close()


def test_a_part_whose_coordinator_dies_as_it_is_staged_is_ended(tmp_path: Path, worker: Any):
    run = ray_dcp.JobCheckpoints(tmp_path, PARTS)

    def stage(_: Worker, part: ray_dcp.Part) -> str:
        from ray_dcp.job.part import PartSave

        report, state = PartSave.staged, {"w": torch.zeros(16 << 20)}

        def killing(self: PartSave, *told: Any, **how: Any) -> None:
            ray.kill(ray.get_actor(part.coordinator, part.namespace))
            report(self, *told, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartSave, "staged", killing)
            handle = ray_dcp.async_save(state, checkpoint_id=part)
            with pytest.raises(ParticipantError, match="its actor has ended"):
                handle.staged(120)
            assert isinstance(handle.exception(120), ParticipantError)
        return str(handle.report().attempt)

    part = run.step(1).part("policy")
    attempt = ray.get(worker.__ray_call__.remote(stage, part))
    # Else its coordinator and its stager would wait for bytes that nobody has any more.
    assert eventually(lambda: ray_dcp.outcome(part.url, attempt) != "open")


def test_a_value_that_is_being_written_when_its_step_is_given_up_does_not_come_back(tmp_path: Path):
    run = ray_dcp.JobCheckpoints(tmp_path, ("buffer", "cursor"))

    def raise_while_it_writes(step: ray_dcp.JobStep) -> None:
        step.put("buffer", {"x": torch.zeros(24 << 20)})
        assert eventually(lambda: step.report().parts["buffer"].is_staged)
        raise ValueError("of mine")

    for number in range(1, 4):
        step = run.step(number)
        with pytest.raises(ValueError, match="of mine"), step:
            raise_while_it_writes(step)
        with pytest.raises(CheckpointError, match="of mine"):
            step.result(60)
        assert [*tmp_path.glob("*/buffer*")] == []
    with run.step(4) as step:
        step.put("buffer", {"x": torch.zeros(2)})
        step.put("cursor", {"next": 4})
    step.result(60)
    # What was late would be there by now: the writer writes one value after the other.
    assert [*tmp_path.glob("step-0000000[123]/buffer*")] == []


def test_a_value_is_kept_as_it_was_and_calls_that_come_twice_are_one(tmp_path: Path):
    run = ray_dcp.JobCheckpoints(tmp_path, ("list", "dict"))
    value, ref = ["x", 1], ray.put(["x", 1])
    with run.step(1) as first:
        with pytest.raises(InvalidRequestError, match="an integer as version"):
            first.put("list", value, version="seven")  # type: ignore[arg-type]
        first.put("list", ref)
        first.put("list", ref)  # as when the answer was lost
        first.put("dict", {"next": 5})
        # The process lives: nobody takes its open step away.
        with pytest.raises(CheckpointExistsError, match=r"step 1 .* is open in this process"):
            ray_dcp.JobCheckpoints(tmp_path, ("list", "dict")).latest()
    first.result(120)
    for number in (2, 3):
        with run.step(number) as step:
            step.keep("list")
            step.keep("list")
            step.put("dict", {"next": number})
        step.result(120)
    with run.latest() as last:
        assert last.step == 3
        assert last.value("list") == ray.get(last.ref("list")) == value
        assert last.value("dict") == ray.get(last.ref("dict")) == {"next": 3}
    # Another coordinator has the name: it knows nothing of the step, and the storage does.
    ray.kill(coordinator_of(tmp_path))
    assert eventually(lambda: not has_coordinator(tmp_path))
    with ray_dcp.JobCheckpoints(tmp_path, ("list", "dict"), takeover=True).latest() as last:
        assert last.step == 3
    assert step.result(120) == step.checkpoint_id
    with pytest.raises(ParticipantError, match=r"ask JobStep\.result"):
        step.report()


def test_a_damaged_step_that_latest_went_past_may_be_saved_again(tmp_path: Path):
    run = ray_dcp.JobCheckpoints(tmp_path, PARTS)

    def both(step: ray_dcp.JobStep) -> None:
        for name in PARTS:
            step.put(name, {"x": torch.full((100,), float(step.step))})

    def keeping(step: ray_dcp.JobStep) -> None:
        step.keep("policy")
        step.put("buffer", [step.step])

    for number, give in ((1, both), (2, keeping), (10, both), (20, keeping)):
        give_step(run, number, give)
    (shared,) = (tmp_path / "step-00000020" / "policy").glob("*.distcp")
    flip(shared, shared.stat().st_size // 2)
    reader = ray_dcp.JobCheckpoints(tmp_path, PARTS, read_only=True)
    for who, marked in ((reader, set[int]()), (run, {10, 20})):
        with pytest.warns(UserWarning, match="is taken instead") as told:
            assert who.latest().step == 2
        passed = [
            re.findall(r"newer step (\d+), which is damaged", str(one.message)) for one in told
        ]
        assert passed == [["20"], ["10"]]
        assert marked_steps(tmp_path) == marked
    # The history goes on from step 2: with other steps, and with those of these numbers.
    give_step(run, 3, keeping)
    give_step(run, 10, keeping)
    # So it does with another coordinator, which has been told nothing.
    run.close()
    assert eventually(lambda: not has_coordinator(tmp_path))
    later = ray_dcp.JobCheckpoints(tmp_path, PARTS)
    give_step(later, 20, keeping)
    assert marked_steps(tmp_path) == set()
    with later.latest() as last:
        assert (last.step, last.kept_from) == (20, {"policy": 10})
        assert last.value("policy")["x"].tolist() == [1.0] * 100
    # All steps that are left have one policy; when that is damaged, the run may begin anew.
    (kept,) = (tmp_path / "step-00000003" / "policy").glob("*.distcp")
    flip(kept, kept.stat().st_size // 2)
    with pytest.raises(DamagedCheckpointError, match=r"all are damaged: step 20.*may begin anew"):
        reader.latest()
    assert marked_steps(tmp_path) == set()
    with pytest.raises(DamagedCheckpointError, match="all are damaged"):
        later.latest()
    assert marked_steps(tmp_path) == {*committed(tmp_path)} == {1, 2, 3, 10, 20}
    give_step(later, 1, both)
    with pytest.warns(UserWarning, match="is taken instead"), later.latest() as last:
        assert last.step == 1
    later.close()


def test_each_way_out_that_a_refused_step_names_is_one_of_the_job(tmp_path: Path):
    with ray_dcp.JobCheckpoints(tmp_path, ("cursor",)) as run:
        for number in (1, 2, 3):
            give_step(run, number, lambda step: step.put("cursor", step.step))
        with pytest.raises(InvalidRequestError, match="step 3 is committed already") as told:
            run.step(3)
        invoke("rm", "--yes", *re.findall(r"`ray-dcp rm (\S+@3)`", str(told.value)))
        give_step(run, 3, lambda step: step.put("cursor", -3))
        with pytest.raises(InvalidRequestError, match="step 2 is committed already"):
            run.step(2)
        invoke("rm", "--yes", f"{tmp_path}@3", f"{tmp_path}@2")
        with pytest.raises(InvalidRequestError, match="step 0 is older") as told:
            run.step(0)
        (way_out,) = re.findall(r"`ray-dcp rm (\S+@STEP)`", str(told.value))
        invoke("rm", "--yes", way_out.replace("STEP", "1"))
        give_step(run, 0, lambda step: step.put("cursor", 0))
        assert run.all_steps() == [0]


def marked_steps(run: Path) -> set[int]:
    return {step for step, _ in read_marks(Target(str(run)), open_storage)}


@ray.remote(num_cpus=0)
def given_at(gate: str) -> dict[str, int]:
    assert eventually(Path(gate).exists)
    return {"next": 1}


def test_a_value_that_is_not_given_in_time_fails_by_name_and_nothing_of_it_comes_later(tmp_path):
    late = given_at.remote(f"{tmp_path}/gate")
    options = SaveOptions(write_timeout_s=0.5)
    with pytest.raises(DeadlineError, match=r"part 'buffer' of step 7 to be given within 0\.5 s"):
        save_values(
            {"cursor": {"next": 7}, "buffer": late},
            7,
            lambda name: Target(f"{tmp_path}/{name}"),
            options,
        )
    (tmp_path / "gate").touch()
    assert ray.get(late) == {"next": 1}
    assert not (tmp_path / "buffer").exists()


def test_a_wrong_argument_of_a_wait_leaves_the_step_as_it_is(tmp_path: Path):
    run = ray_dcp.JobCheckpoints(tmp_path, ("cursor",))
    step = run.step(1)
    for ask in (step.result, step.staged):
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            ask("soon")  # type: ignore[arg-type]
    with step:
        step.put("cursor", {"next": 1})
    assert step.result(120) == step.checkpoint_id
    assert run.all_steps() == [1]


def has_coordinator(root: Path) -> bool:
    with suppress(ValueError):
        return bool(coordinator_of(root))
    return False


def test_a_run_has_one_history_whoever_is_killed_or_replaced(
    tmp_path: Path, worker: Any, worker_class: Any
):
    root = tmp_path / "run"
    driver = worker_class.remote()
    policy = ray.get(driver.drive.remote(root, 1, PARTS))
    # Another driver is refused while this one lives.
    run = ray_dcp.JobCheckpoints(root, PARTS)
    with pytest.raises(CheckpointExistsError, match="which lives"):
        run.step(2)
    # It dies before its part is staged: the step is given up, and the part refused.
    ray.kill(driver)
    assert eventually(lambda: _refused(worker, policy))
    assert run.latest() is None
    assert run.step(1).cancel()
    # One that was taken over, as it was paused, commits nothing.
    other = worker_class.remote()
    with pytest.raises(CheckpointExistsError, match="which lives"):
        ray.get(other.drive.remote(root, 2, PARTS))
    stale = run.step(2)
    taken = ray_dcp.JobCheckpoints(root, PARTS, takeover=True)

    def save(step: ray_dcp.JobStep) -> None:
        ray.get(worker.save.remote(step.part("policy"), step.step + 0.5))
        step.put("buffer", {"x": step.step})

    give_step(taken, 2, save)
    with pytest.raises(InvalidRequestError, match=r"part 'policy' of step 2 .*given up"):
        save(stale)
    with pytest.raises(CheckpointExistsError, match="does not write its run any more"):
        stale.put("policy", {"w": torch.ones(4)})

    # The coordinator dies: its step fails by name, and another one goes on.
    def kill(_: object) -> None:
        ray.kill(coordinator_of(root))

    with pytest.raises(ParticipantError, match="its actor has ended"):
        give_step(taken, 3, save, kill)
    assert taken.latest().step == 2
    # A value's writer that is killed in the middle may leave a hidden file, which nobody reads.
    assert [*(root / "step-00000003").glob("*/[!.]*")] == []
    give_step(taken, 3, save)
    with taken.latest() as last:
        assert (last.step, ray.get(worker.load.remote(last.part("policy")))) == (3, 3.5)
    taken.close()


def _refused(worker: Any, part: ray_dcp.Part) -> bool:
    try:
        ray.get(worker.save.remote(part, 0.0))
    except (InvalidRequestError, ParticipantError) as error:
        # Why either: once nothing is being saved, the coordinator of a driver that died ends.
        return "the driver" in str(error) or "its actor has ended" in str(error)
    return False


def test_each_prompt_is_trained_on_once_in_the_history_that_survives(tmp_path: Path):
    """The ledger of the program in docs/examples, whose coordinator is killed within a step.

    `python -m tests.chaos.job_ledger` kills each of its processes, in each phase.
    """
    root, program = tmp_path / "run", example("rl_on_ray.py")

    def killing(step: ray_dcp.JobStep, *_: Any) -> None:
        if step.step == 2:
            assert eventually(lambda: committed(root) == [1])
            ray.kill(coordinator_of(root))

    with suppress(CheckpointError, ray.exceptions.RayError):
        program["main"](str(root), 3, 2, killing)
    assert committed(root) == [1]
    # The run goes on, on another number of ranks.
    assert program["main"](str(root), 3, 1) == 1
    # What is not kept is deleted in the background.
    assert eventually(lambda: committed(root) == [2, 3])
    assert wrong_in(root) == []

"""Replicas under torchft in one Ray Train run; in each phase of a save a worker is killed.

The workers are those of `docs/examples/ray_train_replicas.py`, so that torchft has to be installed.
Of each kill: the run goes on, the next save is committed, the replacement takes part in one after
it has restored, and every committed step holds the values that its replicas had.

By hand: `python -m tests.chaos.replicas --rounds 5`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

import ray_dcp
from ray_dcp.integrations import ray_train
from ray_dcp.integrations.replica_groups import Replicas
from ray_dcp.manager import collective_actions
from ray_dcp.session.ray_transport import RayTransport
from ray_dcp.stage import link
from tests.support.daemons import Daemons
from tests.support.programs.train import note, notes

PHASES = {
    "before it is ready": (RayTransport, "ready", False),
    "in the quorum": (RayTransport, "ready", True),
    "before the decision": (collective_actions, "agree", False),
    "decided": (collective_actions, "agree", True),
    "captures": (collective_actions, "run_async_save", False),
    "stages": (link, "transfer", False),
    "staged": (collective_actions, "run_async_save", True),
    "before the report": (ray_train, "report", False),
    "reported": (ray_train, "report", True),
}
"""Where a worker is killed: a function, before it is called or after it has returned."""
EVERY = 3
"""Steps between saves."""


def train(config: dict[str, Any]) -> None:
    rank, folder = ray.train.get_context().get_world_rank(), config["folder"]
    replica = runpy.run_path(config["example"])["Replica"](rank)
    state = {"model": replica.model, "optimizer": replica.inner, "torchft": replica.manager}
    num_whole = num_last = kills = 0
    die: Callable[[], object] = dict
    with ray_dcp.train.checkpointer(save_interval=EVERY) as ckpt:
        restored = ckpt.restore(state)
        note(folder, rank, began=restored)
        while num_last < 2:
            before = replica.manager.current_step()
            replica.train_one_step(rank)
            step = replica.manager.current_step()
            if step == before or not ckpt.should_save(step):
                continue
            kills, before_kills = len([*Path(folder).glob("kill-*")]), kills
            if kills != before_kills:
                num_whole = 0  # The next one is killed once both have saved together again.
            if num_whole > 1 and kills < config["kills"] and rank == kills % 2:
                phase = [*PHASES][kills // 2 % len(PHASES)]
                die = die_at(phase, Path(folder, f"kill-{kills}"), rank, step)
            note(folder, rank, step=step, digest=digest_of(state))
            ckpt.save(step, state, metrics={"step": step})
            die()  # A phase may not come: this rank has no bytes, or nothing is reported.
            group = ckpt._group
            assert isinstance(group, Replicas)
            quorum = () if group.quorum is None else group.quorum.ranks
            note(folder, rank, saved=step, quorum=quorum)
            num_whole += len(quorum) == 2
            num_last += len(quorum) == 2 and kills == config["kills"]
    replica.manager.shutdown()


def digest_of(state: dict[str, Any]) -> float:
    """Returns the sum of weights and of what the optimizer has of them."""
    values = [*state["model"].parameters()]
    for one in state["optimizer"].state.values():
        values += [one["step"], one["exp_avg"], one["exp_avg_sq"]]
    with torch.no_grad():
        return float(sum(one.double().sum() for one in values))


def die_at(phase: str, mark: Path, rank: int, step: int) -> Callable[[], object]:
    """Has this process killed in a phase of the save that follows; returns what kills it."""
    holder, name, after = PHASES[phase]
    original = getattr(holder, name)

    def die() -> None:
        mark.write_text(f"{rank} {step} {phase}")
        os.kill(os.getpid(), signal.SIGKILL)

    def trapped(*args: Any, **kwargs: Any) -> Any:
        if not after:
            die()
        found = original(*args, **kwargs)
        die()
        return found

    setattr(holder, name, trapped)
    return die


def judge(folder: Path, result: Any) -> Counter[str]:
    """Counts what came of the run."""
    found: Counter[str] = Counter(runs_ended=int(result.error is not None))
    run = ray_dcp.open(folder / "runs" / "run" / "checkpoints")
    steps = {one.step: one for one in run if one.state == "committed"}
    digests: dict[int, set[float]] = {}
    for one in notes(folder, "digest"):
        digests.setdefault(one["step"], set()).add(one["digest"])
    for step, view in steps.items():
        model = torch.nn.Linear(8, 1)
        state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        state["torchft"] = {"step": -1}
        ray_dcp.load(state, checkpoint_id=view.path.url, no_dist=True)
        found["committed"] += 1
        found["wrong"] += (digests[step], state["torchft"]["step"]) != ({digest_of(state)}, step)
    due = sorted(digests)
    begun: dict[int, list[int | None]] = {}
    for one in notes(folder, "began"):
        begun.setdefault(one["rank"], []).append(one["began"])
    for mark in sorted(folder.glob("kill-*"), key=lambda one: int(one.name[5:])):
        rank, at, phase = mark.read_text().split(" ", 2)
        later = [step for step in due if step > int(at)]
        found["killed"] += 1
        found["save lost"] += int(at) not in steps
        found["next committed"] += later[0] in steps
        sizes = [steps[step].view.world_size if step in steps else 0 for step in later]
        begun[int(rank)].pop(0)
        restored = begun[int(rank)][0]
        own = [size for step, size in zip(later, sizes, strict=True) if step > (restored or 0)]
        found[f"replacement in save {own.index(2) + 1} after it restored"] += 1
        print(
            f"{mark.name}: {phase}; step {at} {'kept' if int(at) in steps else 'lost'}", sizes[:3]
        )
    registered = ray_train.parse(result.checkpoint.path)
    found["reported the last"] += registered is not None and registered.step == max(steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="kills of each rank in each phase")
    rounds = parser.parse_args().rounds
    from ray.train.torch import TorchTrainer
    from ray.train.v2.torch.torchft_config import TorchftConfig

    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    example = Path(__file__).parents[2] / "docs" / "examples" / "ray_train_replicas.py"
    folder = Path(tempfile.mkdtemp(prefix="replicas-"))
    with closing(Daemons()) as daemons:
        ray.init(daemons.address(), namespace="tests", log_to_driver=False)
        result = TorchTrainer(
            train,
            train_loop_config={
                "folder": str(folder),
                "example": str(example),
                "kills": 2 * rounds * len(PHASES),
            },
            scaling_config=ray.train.ScalingConfig(
                num_workers=2, resources_per_worker={"CPU": 0.5}
            ),
            torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
            run_config=ray.train.RunConfig(
                name="run",
                storage_path=str(folder / "runs"),
                failure_config=ray.train.FailureConfig(max_failures=-1),
            ),
        ).fit()
        print(dict(judge(folder, result)))
        ray.shutdown()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""A `Checkpointer` of one rank, with what it tells Ray Train written down instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.integrations.train import reports as telling
from ray_dcp.integrations.train.checkpointer import Checkpointer, Settings
from ray_dcp.integrations.train.joining import Group, Retention, RunFacts, parse
from ray_dcp.integrations.train.save_requests import REQUESTS, Asked
from ray_dcp.manager.catalogue import Root
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.view.run_listing import list_run
from tests.polling import eventually

Make = Callable[..., Checkpointer]


class Alone(InlineSession):
    """A session without a stager."""

    def staging(self, _options: object = None) -> Alone:
        return self

    def warm(self, num_bytes: int) -> Future[None]:
        return Future()


class Facts(RunFacts):
    """A run whose checkpoints are told by their paths."""

    def checkpoint(self, name: str) -> str:
        return name


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """What Ray Train would have been told: steps and metrics."""
    reports: list[tuple[int, dict[str, Any]]] = []

    def report(name: str, metrics: dict[str, Any]) -> None:
        folder = parse(name)
        assert folder is not None
        reports.append((folder.step, metrics))

    monkeypatch.setattr(telling, "report", report)
    monkeypatch.setattr(telling, "registered", lambda: None)
    return reports


@pytest.fixture
def make(told: Any, tmp_path: Path) -> Iterator[Make]:
    """Makes checkpointers of one run, each of a new worker group."""
    groups: list[int] = []
    made: list[Checkpointer] = []

    def making(
        interval: int = 1, on_error: Any = "warn", max_to_keep: int = 0, **options: Any
    ) -> Checkpointer:
        groups.append(len(groups) + 1)
        root = Root(Target(str(tmp_path)))
        listed = list_run(tmp_path).steps
        owner = "ray_dcp" if max_to_keep else "nobody"
        retention = Retention(root, owner, max_to_keep, groups[-1], ())
        session: Any = Alone()
        group = Group(root, groups[-1], "0a1b2c", session, False, bool(listed), retention=retention)
        facts = Facts(0, 1, "run", "id", None, 0.0, None, str(tmp_path))
        how = Settings(save_interval=interval, on_error=on_error, options=SaveOptions(**options))
        made.append(Checkpointer(facts, group, how))
        return made[-1]

    yield making
    for one in made:
        if not one._closed:
            one._leave(wait=True)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((4,), float(value)), "note": value}


def test_due_steps_are_saved_and_each_is_reported_when_the_next_has_begun(make: Make, told: Any):
    with make(interval=3) as ckpt:
        saved = []
        for step in range(8):
            assert ckpt.should_save(step) == (step % 3 == 0)
            if ckpt.save(step, state(step), {"loss": torch.tensor(float(step))}):
                saved.append((step, [one for one, _ in told]))
    assert saved == [(0, []), (3, [0]), (6, [0, 3])]
    assert told[-1] == (6, {"step": 6, "loss": 6.0})


def test_the_newest_step_comes_back_and_is_told_where_nobody_knew_of_it(make: Make, told: Any):
    with make() as ckpt:
        assert ckpt.restore(state()) is None
        ckpt.save(3, state(3.0), {"loss": 0.5})
    told.clear()
    with make() as ckpt:
        found = state()
        assert ckpt.restore(found) == 3
        assert (found["w"].tolist(), found["note"]) == ([3.0] * 4, 3.0)
        assert told == [(3, {"step": 3, "loss": 0.5})]
        assert ckpt.restored is not None
        with pytest.raises(InvalidRequestError, match="not newer than step 3"):
            ckpt.save(3, found)


def test_a_run_goes_back_to_the_newest_step_that_it_has_saved_itself(make: Make, told: Any):
    with make() as ckpt:
        assert ckpt.restore(state()) is None
        for step in (1, 2):
            ckpt.save(step, state(step))
        assert ckpt.should_save(3)
        found = state(float("nan"))
        assert ckpt.restore(found) == 2
        assert len(ckpt._under_way) == 0, "what other ranks still save is not to be missed"
        assert found["w"].tolist() == [2.0] * 4
        assert not told or told[-1][0] == 1, "what this group saved is told once, by the next save"
        held = REQUESTS.hold("asked")
        assert held is not None
        assert held.last_step == 2
        assert REQUESTS.ask(Asked("asked", "resize", held.last_step))
        assert ckpt.save(3, found)
        assert REQUESTS.state("asked") in ("saving", "committed")
    assert [step for step, _ in told] == [1, 2, 3]


def test_what_ray_train_knows_of_and_is_gone_is_an_error(make: Make, told: Any, monkeypatch: Any):
    monkeypatch.setattr(telling, "registered", lambda: "/run/g0001-0a1b2c-step-00000005")
    with make() as ckpt, pytest.raises(CheckpointNotFoundError, match="Bring them back"):
        ckpt.restore(state())


def test_saving_without_having_restored_is_told(make: Make, told: Any):
    with make() as ckpt:
        ckpt.save(1, state())
    with make() as ckpt, pytest.warns(UserWarning, match="training began anew"):
        ckpt.save(1, state())


def unsaveable() -> dict[str, Any]:
    return {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize:UserWarning")
def test_a_failed_save_warns_or_raises_and_training_goes_on(make: Make, told: Any, on_error: Any):
    raised = pytest.raises(CheckpointError) if on_error == "raise" else nullcontext()
    with make(on_error=on_error) as ckpt:
        ckpt.save(0, state())
        ckpt.save(1, unsaveable())
        with pytest.warns(UserWarning, match="Step 1 is not saved"), raised:
            ckpt.save(2, state())
    assert [step for step, _ in told] == [0, 2]


def test_an_error_in_training_waits_for_no_other_rank(make: Make, told: Any):
    with pytest.raises(KeyboardInterrupt), make() as ckpt:  # noqa: PT012
        ckpt.save(1, state())
        raise KeyboardInterrupt
    assert told == []
    assert ckpt._closed


def test_old_steps_are_deleted_where_ray_dcp_is_the_owner(make: Make, told: Any):
    with make(max_to_keep=2) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step))
    assert ray_dcp.load_newest(state(), ckpt.url, at_most=4).step == 4
    with pytest.raises(CheckpointNotFoundError):
        ray_dcp.load_newest(state(), ckpt.url, at_most=3)


def ask(linger_s: float, after_step: int) -> None:
    assert REQUESTS.hold("asked") is not None
    assert REQUESTS.ask(Asked("asked", "resize", after_step, linger_s))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize:UserWarning")
def test_a_step_that_is_asked_for_is_saved_and_the_asker_told_how_it_ended(make: Make, told: Any):
    with make(interval=100) as ckpt:
        assert not ckpt.save(1, state())
        ask(0.0, after_step=2)
        assert [ckpt.save(step, state()) for step in (2, 3, 4)] == [False, True, False]
        assert eventually(lambda: REQUESTS.state("asked") == "committed")
    assert [step for step, _ in told] == [3]
    ckpt = make(interval=100, on_error="raise")
    assert ckpt.restore(state()) == 3
    ask(1000.0, after_step=4)
    with pytest.warns(UserWarning, match="not saved"), pytest.raises(CheckpointError):
        ckpt.save(5, unsaveable())
    assert REQUESTS.state("asked") == "failed"


def test_before_the_workers_end_a_rank_waits_for_the_commit_and_makes_no_step(
    make: Make, told: Any
):
    ckpt = make(interval=100, when_full="skip")
    ask(1000.0, after_step=1)
    thread = threading.Thread(target=ckpt.save, args=(2, state()))
    thread.start()
    assert eventually(lambda: REQUESTS.state("asked") == "committed")
    assert thread.is_alive()
    assert told == []
    REQUESTS.drop("asked")
    thread.join(180)
    assert not thread.is_alive()
    assert [step for step, _ in told] == [2]


def test_a_damaged_step_is_passed_over_loudly(make: Make, told: Any, tmp_path: Path):
    with make() as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
    for path in tmp_path.glob("*-step-00000002/*.distcp"):
        path.write_bytes(b"")
    with make() as ckpt, pytest.warns(UserWarning, match="step-00000002, which is damaged"):
        assert ckpt.restore(state()) == 1


def test_nothing_is_saved_after_the_end(make: Make, told: Any):
    ckpt = make()
    ckpt.save(1, state())
    ckpt.close()
    ckpt.close()
    for call in (lambda: ckpt.save(2, state()), lambda: ckpt.restore(state())):
        with pytest.raises(InvalidRequestError, match="is closed"):
            call()
    assert [step for step, _ in told] == [1]

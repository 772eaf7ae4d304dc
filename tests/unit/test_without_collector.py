"""Every public call frees what it was given as soon as it has ended, without a garbage collector.

Training loops switch the collector off, as it stops all ranks at different moments. What ends only
by it (a state in a circle, a descriptor, a thread) then stays for the whole run.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import ray_dcp
from ray_dcp.manager.settings import Item

ROUNDS = 2


class SavePlanner(DefaultSavePlanner):
    """A planner of a user's own: its hooks are called."""


class LoadPlanner(DefaultLoadPlanner):
    """A planner of a user's own: its hooks are called."""


class World:
    """Makes states, each in a new place, and knows which of them still exist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.states: list[weakref.ref[object]] = []
        self.places = 0
        self.base = self.place()
        ray_dcp.save(self.state(), checkpoint_id=self.base)

    def state(self) -> dict[str, object]:
        values = torch.nn.Linear(4, 4), torch.ones(3), torch.ones(300_000)
        self.states += [weakref.ref(value) for value in values]
        model, small, large = values
        # `names` is an object that no plan knows the length of: its bytes are made at the end.
        return {"model": {"net": model}, "small": small, "large": large, "names": {"a", "b"}}

    def place(self) -> str:
        self.places += 1
        return f"{self.root}/{self.places}"


def save(world: World) -> None:
    ray_dcp.save(world.state(), checkpoint_id=world.place())


def save_with_planner(world: World) -> None:
    ray_dcp.save(world.state(), checkpoint_id=world.place(), planner=SavePlanner())


def save_with_progress(world: World) -> None:
    ray_dcp.save(world.state(), checkpoint_id=world.place(), progress=lambda _: None)


def async_save(world: World) -> None:
    ray_dcp.async_save(world.state(), checkpoint_id=world.place()).committed()


def async_save_in_background(world: World) -> None:
    options = ray_dcp.SaveOptions(staging="background")
    ray_dcp.async_save(world.state(), checkpoint_id=world.place(), options=options).committed()


def async_save_with_planner(world: World) -> None:
    place = world.place()
    ray_dcp.async_save(world.state(), checkpoint_id=place, planner=SavePlanner()).committed()


def load(world: World) -> None:
    ray_dcp.load(world.state(), checkpoint_id=world.base)


def load_with_planner(world: World) -> None:
    ray_dcp.load(world.state(), checkpoint_id=world.base, planner=LoadPlanner())


def load_newest(world: World) -> None:
    root = world.place()
    ray_dcp.save(world.state(), checkpoint_id=f"{root}/step-1")
    ray_dcp.load_newest(world.state(), root)


def views(world: World) -> None:
    view = ray_dcp.open(world.base)
    assert view["large"][:2].tolist() == [1.0, 1.0]
    assert ray_dcp.verify(world.base).ok


def made_of_others(world: World) -> None:
    ray_dcp.copy(world.base, world.place())
    ray_dcp.average([world.base, world.base], world.place())
    ray_dcp.export(world.base, world.place())


def manager(world: World) -> None:
    root = world.place()
    with ray_dcp.CheckpointManager(root, max_to_keep=1) as manager:
        manager.save(1, world.state())
        manager.save_async(2, world.state())
        manager.join()
        manager.restore("latest", world.state())
    assert [found.step for found in ray_dcp.follow(root, timeout_s=0.0)] == [2]


def manager_of_items(world: World) -> None:
    def states() -> dict[str, object]:
        return {"model": world.state(), "other": world.state()}

    items = {"model": Item(save_planner=SavePlanner, load_planner=LoadPlanner), "other": Item()}
    with ray_dcp.CheckpointManager(world.place(), max_to_keep=1, items=items) as manager:
        manager.save(1, states())
        manager.save_async(2, states())
        manager.join()
        manager.restore("latest", states())


CALLS = (
    save, save_with_planner, save_with_progress,
    async_save, async_save_in_background, async_save_with_planner,
    load, load_with_planner, load_newest, views, made_of_others, manager, manager_of_items,
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    # Else each collection here looks through all that other tests have left, 0.5 s of CPU.
    gc.collect()
    gc.freeze()
    return World(tmp_path_factory.mktemp("run"))


@pytest.fixture
def collector_off(world: World) -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


ONCE = ("ray_dcp coordinator",)
"""Threads that a process has one of until it ends."""
END_S = 20.0
"""How long a thread that ends by itself may take."""


def wait_for_threads(before: set[threading.Thread]) -> list[str]:
    """Waits for the threads that are new; returns the names of those that go on."""
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(END_S)
    return sorted(thread.name for thread in new if thread.is_alive())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def circles() -> Counter[str]:
    """What only a collector would have freed, of the types of this library."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(type(one).__qualname__ for one in gc.garbage if is_own(one))
    gc.garbage.clear()
    gc.set_debug(0)
    return found


def is_own(one: object) -> bool:
    home = getattr(one, "__module__", None) if callable(one) else type(one).__module__
    return str(home).startswith("ray_dcp.")


# The manager's parts know each other: a manager that is closed has neither state, nor thread, nor
# descriptor, and is one a run.
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.usefixtures("collector_off")
def test_a_call_leaves_nothing_to_the_collector(
    world: World, call: Callable[[World], None]
) -> None:
    first = set(threading.enumerate())
    call(world)  # what is made once a process is there now
    wait_for_threads({*first, *(one for one in threading.enumerate() if one.name in ONCE)})
    circles()
    world.states.clear()
    threads, num_open = set(threading.enumerate()), descriptors()
    for _ in range(ROUNDS):
        call(world)
    assert wait_for_threads(threads) == []
    assert [ref() for ref in world.states if ref() is not None] == []
    assert descriptors() == num_open
    if call not in (manager, manager_of_items):
        assert circles() == Counter()

"""A process that forks, and its collector: children begin anew, and a pause ends as it began.

`HANDLED` lists what modules have that a child inherits, each with how it is handled.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress

import ray_dcp
from ray_dcp.core.processes import ProcessLock, collector_paused
from tests.support.programs.forks import Programs

HANDLED = {
    "core.processes._collector_lock": "a new one; a collector that was paused goes on",
    "events._lock": "a new one; listeners stay, as handlers of logs do",
    "manager.preemption._listeners": "listen only in the process that asked for it",
    "manager.manager._open": "cleared: nothing of the parent's is closed at a child's exit",
    "core.damage.DAMAGE": "a new lock; what was found damaged stays so",
    "rank.rank_load._ended": "a new one; reads that hang do so in the parent",
    "session.ray_calls._changed": "a new one; the threads inside of Ray are the parent's",
    "session.ray_calls._asked": "of each thread",
    "session.group_sessions.sessions": "refuse calls in a child",
    "stage.staging_backend._memory": "begins anew; the memory is private",
    "stage.copy_threads._helpers": "new threads",
    "stage.link._scratch": "begins anew; the memory is private",
    "store.conditional_create._LOCK": "a new one",
    "store.filesystems._IN_MEMORY": "a new one; the content is copied",
    "store.local._LOCK": "a new one",
    "store.memory._LOCK": "a new one; the content is copied",
    "store.object_clients._LOCK": "a new one; obstore is refused, without its threads",
    "integrations.save_requests.REQUESTS": "of Ray Train's controller, which does not fork",
}  # fmt: skip

KINDS = (
    type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event,
    threading.Semaphore, threading.Thread, threading.local, Executor, ProcessLock,
)  # fmt: skip

SKIPPED = {"__main__"}


def resources() -> Iterator[str]:
    """Yields the names of what modules have that is a thread, waits for one, or is held by one."""
    for found in pkgutil.walk_packages(ray_dcp.__path__, "ray_dcp."):
        if found.name.rpartition(".")[2] in SKIPPED:
            continue
        try:
            # Some are torch's, which warns of those that it has renamed.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                module = importlib.import_module(found.name)
        except ModuleNotFoundError:
            continue  # of a framework that is not installed
        for name, value in vars(module).items():
            owner = type(value).__module__
            holds = owner.startswith("ray_dcp.") and any(
                isinstance(part, KINDS) for part in getattr(value, "__dict__", {}).values()
            )
            defined_here = not holds or owner == found.name or name.startswith("_")
            if (isinstance(value, KINDS) or holds) and defined_here:
                yield f"{found.name.removeprefix('ray_dcp.')}.{name}"


def test_every_resource_that_a_child_inherits_is_known():
    assert set(resources()) <= set(HANDLED), "say how a child that is forked begins anew with it"


def run(programs: Programs, code: str, *more: object) -> str:
    (ended,) = programs.run("-c", PREFACE + code, *map(str, more))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


PREFACE = """
import gc, os, signal, sys, threading
import torch, ray_dcp

def state(value):
    return {"w": torch.full((1 << 19,), float(value))}

def child(work):
    # A child that hangs is ended by the alarm.
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(100)
        work()
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(1)

def ended(*pids):
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

root = sys.argv[1]
"""

WORKERS = """
ray_dcp.async_save(state(0), checkpoint_id=f"{root}/parent").result()

def saves(worker):
    for turn in range(3):
        path = f"{root}/{worker}-{turn}"
        ray_dcp.async_save(state(10 * worker + turn), checkpoint_id=path).result()

print(ended(*[child(lambda: saves(worker)) for worker in range(1, 4)]))
"""


def test_workers_that_are_forked_save_their_own_values(programs, tmp_path):
    assert run(programs, WORKERS, tmp_path) == "[0, 0, 0]"
    for worker in range(1, 4):
        for turn in range(3):
            path = tmp_path / f"{worker}-{turn}"
            assert ray_dcp.verify(path).ok
            (saved,) = ray_dcp.read_state_dict(path)["w"].unique().tolist()
            assert saved == 10 * worker + turn


HELD = """
from importlib import import_module
from ray_dcp.core.processes import collector_paused
from ray_dcp.core.processes import ProcessLock
from ray_dcp.rank import rank_load

held, go_on = threading.Event(), threading.Event()

def hold():
    with collector_paused():
        rank_load._hung.add("a read that hangs")
        for name in sys.argv[2:]:
            module, _, name = name.rpartition(".")
            found = getattr(import_module(f"ray_dcp.{module}"), name)
            getattr(found, "_lock", found).__enter__()
        held.set()
        go_on.wait()

holder = threading.Thread(target=hold, daemon=True)
holder.start()
held.wait()

def works():
    assert gc.isenabled()
    ray_dcp.save(state(1), checkpoint_id=f"{root}/sync")
    ray_dcp.async_save(state(2), checkpoint_id=f"{root}/async").result()
    ray_dcp.save(state(3), checkpoint_id="memory://fork")
    for path, value in ((f"{root}/sync", 1), (f"{root}/async", 2), ("memory://fork", 3)):
        found = state(0)
        ray_dcp.load(found, checkpoint_id=path)
        assert found["w"].unique().tolist() == [value]
    ray_dcp.events.subscribe(print)()

print(ended(child(works)), flush=True)
os._exit(0)
"""


def test_a_child_saves_and_loads_though_threads_of_its_parent_held_every_lock(programs, tmp_path):
    locks = [
        name
        for name in resources()
        if name.rpartition(".")[2].lower() in ("_lock", "_ended", "_memory", "sessions")
    ]
    assert len(locks) >= 8
    assert run(programs, HELD, tmp_path, *locks) == "[0]"


UNDER_WAY = """
reached, gate = threading.Event(), threading.Event()

class Slow:
    # Pickled while the save is under way.
    def __reduce__(self):
        reached.set()
        gate.wait(100)
        return (int, (7,))

handles = []
saving = threading.Thread(
    target=lambda: handles.append(ray_dcp.async_save(
        {**state(5), "slow": Slow()}, checkpoint_id=f"{root}/parent"
    ))
)
saving.start()
reached.wait()

def works():
    ray_dcp.async_save(state(6), checkpoint_id=f"{root}/child").result()

pid = child(works)
print(ended(pid))
gate.set()
saving.join()
handles[0].result()
ray_dcp.async_save(state(7), checkpoint_id=f"{root}/next").result()
"""


def test_a_fork_while_a_save_is_under_way_harms_neither(programs, tmp_path):
    assert run(programs, UNDER_WAY, tmp_path) == "[0]"
    for name, value in (("parent", 5), ("child", 6), ("next", 7)):
        assert ray_dcp.verify(tmp_path / name).ok
        assert ray_dcp.read_state_dict(tmp_path / name)["w"].unique().tolist() == [value]


HANDLES = """
from concurrent.futures import Future
from torch.distributed.checkpoint.staging import AsyncStager
from ray_dcp import errors

class Later(AsyncStager):
    staged = Future()
    def stage(self, state_dict):
        self.state = state_dict
        return self.staged

stager = Later()
handle = ray_dcp.async_save(state(1), checkpoint_id=f"{root}/parent", async_stager=stager)

def asks():
    asked = (
        handle.result, handle.exception, handle.committed, handle.staged,
        handle.upload_completion.result, handle.staging_completion.result,
    )
    for ask in asked:
        try:
            ask()
        except errors.InvalidRequestError as error:
            assert "forked" in str(error)
        else:
            raise AssertionError(ask)
    assert not handle.cancel()
    handle.report(), handle.progress
    sys.stdout.flush()

print(ended(child(asks)))
stager.staged.set_result(stager.state)
handle.result()
"""


def test_a_handle_tells_a_child_that_its_save_is_the_parents(programs, tmp_path):
    assert run(programs, HANDLES, tmp_path) == "[0]"
    assert ray_dcp.verify(tmp_path / "parent").ok


MANAGERS = """
from ray_dcp import errors

with ray_dcp.CheckpointManager(root, save_interval=1, chkpt_on_preemption=False) as manager:
    manager.save_async(1, state(1))
    with manager.reading(1) if manager.join() is None else None:
        def tries():
            with manager:
                for act in (
                    lambda: manager.save(2, state(2)), lambda: manager.save_async(2, state(2)),
                    lambda: manager.restore(1, state(0)), lambda: manager.delete(1), manager.join,
                ):
                    try:
                        act()
                    except errors.InvalidRequestError as error:
                        assert "forked" in str(error)
                    else:
                        raise AssertionError(act)
                assert manager.all_steps() == [1]
            own = ray_dcp.CheckpointManager(root, read_only=True)
            found = state(0)
            own.restore(1, found)
            assert found["w"].unique().tolist() == [1]

        print(ended(child(tries)))
    manager.save(3, state(3))
    print(manager.all_steps())
"""


def test_a_child_neither_writes_with_a_managers_lease_nor_gives_it_back(programs, tmp_path):
    assert run(programs, MANAGERS, tmp_path).splitlines() == ["[0]", "[1, 3]"]


BUCKETS = """
from obstore.store import MemoryStore
from ray_dcp import errors

def saves():
    place = ray_dcp.Location("c", filesystem=MemoryStore())
    ray_dcp.save(state(1), checkpoint_id=place)

def is_refused():
    try:
        saves()
    except errors.InvalidRequestError as error:
        assert "forked" in str(error) and "spawn" in str(error)
    else:
        raise AssertionError("it hangs with a bucket on a server")

before = child(saves)
print(ended(before))
saves()
print(ended(child(is_refused)))
"""


def test_a_child_has_no_bucket_of_its_parent_and_is_told_so(programs, tmp_path):
    assert run(programs, BUCKETS, tmp_path).splitlines() == ["[0]", "[0]"]


IN_A_SAVE = """
pids = []

class Forks:
    def state_dict(self):
        pids.append(os.fork())
        if not pids[0]:
            signal.alarm(100)
        return state(1)

    def load_state_dict(self, _):
        pass

try:
    ray_dcp.save({"inner": Forks()}, checkpoint_id=f"{root}/c")
    code = 0
except ray_dcp.errors.InvalidRequestError as error:
    code = 7 if "anew in the child" in str(error) else 1
if not pids[0]:
    os._exit(code)
print(code, ended(*pids))
"""


def test_a_child_that_is_forked_in_the_midst_of_a_save_does_not_go_on_with_it(programs, tmp_path):
    assert run(programs, IN_A_SAVE, tmp_path) == "0 [7]"
    assert ray_dcp.verify(tmp_path / "c").ok


READING = """
from contextlib import ExitStack
from pathlib import Path
from ray_dcp.manager import CheckpointManager

with CheckpointManager(root, 1, chkpt_on_preemption=False) as manager, ExitStack() as stack:
    manager.save(1, state(1))
    stack.enter_context(manager.reading(1))
    print(ended(child(stack.close)), len(list(Path(root).glob("*/reading/*"))))
    stack.close()
    print(len(list(Path(root).glob("*/reading/*"))))
"""


def test_a_child_that_leaves_what_its_parent_reads_does_not_end_the_lease(programs, tmp_path):
    assert run(programs, READING, tmp_path).split() == ["[0]", "1", "0"]


# --- pauses of the collector ----------------------------------------------------------------------


def test_a_pause_lasts_until_the_last_thread_has_left_also_by_an_error():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with suppress(KeyError), collector_paused():
            entered.set()
            leave.wait(180)
            raise KeyError

    was = gc.isenabled()
    gc.enable()
    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert entered.wait(180)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
    (gc.enable if was else gc.disable)()

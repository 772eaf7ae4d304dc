"""What a node's memory has free is read as the kernel has it, and lent to one who writes."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp.core import bounds
from ray_dcp.errors import LimitError
from ray_dcp.stage import node_memory
from ray_dcp.stage.node_memory import (
    NoRoomError,
    ObjectStoreFile,
    free_address_bytes,
    free_memory_bytes,
)

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The files of a machine with 100 MiB of memory and no control groups."""
    lines = ("MemTotal: 204800 kB", "MemAvailable: 92160 kB", "SwapFree: 10240 kB", "HugePages: 0")
    (tmp_path / "meminfo").write_text("\n".join(lines))
    (tmp_path / "cgroup").write_text("")
    return tmp_path


def group(where: Path, limit: str, used: int, inactive: int, version: int) -> None:
    where.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (where / names[0]).write_text(f"{limit}\n")
    (where / names[1]).write_text(f"{used}\n")
    (where / "memory.stat").write_text(f"anon 3\n{names[2]} {inactive}\n")


def free(machine: Path) -> int:
    return free_memory_bytes(machine / "meminfo", machine / "cgroup", machine / "groups")


def test_the_machines_memory_counts_with_its_swap(machine):
    assert free(machine) == 100 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_control_group_with_the_least_left_limits_and_its_idle_files_do_not(machine, version):
    line, base = ("0::/job/rank\n", "groups") if version == 2 else ("4:memory:/job/rank\n", "")
    (machine / "cgroup").write_text(line)
    base = machine / (base or "groups/memory")
    unlimited = "max" if version == 2 else str((1 << 63) - 4096)
    group(base / "job" / "rank", unlimited, 5 * MIB, 0, version)
    assert free(machine) == 100 * MIB
    group(base / "job", str(50 * MIB), 40 * MIB, 7 * MIB, version)
    assert free(machine) == 17 * MIB
    group(base / "job" / "rank", str(9 * MIB), 6 * MIB, 0, version)
    assert free(machine) == 3 * MIB
    # In a container the path may be the machine's, and only its own group is mounted.
    (machine / "cgroup").write_text(line.replace("/job/rank", "/elsewhere"))
    group(base, str(20 * MIB), 30 * MIB, 0, version)
    assert free(machine) == 0


def test_what_can_not_be_read_does_not_limit(tmp_path):
    assert free(tmp_path) >= 1 << 60


def test_this_machine_has_memory():
    assert 0 < free_memory_bytes() < 1 << 62


class Store:
    """A file as an object store has it, on a tmpfs or any other disk, with all of it free."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        with path.open("wb") as file:
            file.truncate(num_bytes)
        self.file = ObjectStoreFile(str(path), str(path.parent))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "plasma", 40 * MIB)


def has_room(store: Store, num_bytes: int) -> bool:
    try:
        with store.file.room(num_bytes):
            return True
    except NoRoomError:
        return False


@pytest.mark.parametrize(
    ("free_bytes", "largest"), [(1 << 40, 64), (40 * MIB, 64), (39 * MIB, 19), (2 * MIB, 1)]
)
def test_an_object_has_room_beside_as_much_again_or_where_the_store_can_take_no_more(
    store, free_bytes, largest, monkeypatch
):
    monkeypatch.setattr(node_memory, "free_memory_bytes", lambda: free_bytes)
    assert [n for n in (1, 19, 20, 64) if has_room(store, n * MIB)][-1] == largest


def test_what_the_store_has_touched_it_uses_again(store, monkeypatch):
    monkeypatch.setattr(node_memory, "free_memory_bytes", lambda: 2 * MIB)
    assert not has_room(store, 4 * MIB)
    store.path.write_bytes(os.urandom(39 * MIB))
    os.truncate(store.path, 40 * MIB)
    assert has_room(store, 4 * MIB)


def test_where_room_is_scarce_one_writes_at_a_time(store, monkeypatch):
    monkeypatch.setattr(bounds, "TURN_S", 0.0)
    with store.file.room(1), store.file.room(1):  # ample: nobody waits
        pass
    monkeypatch.setattr(node_memory, "free_memory_bytes", lambda: 30 * MIB)
    refused = pytest.raises(NoRoomError, match="another process has put")
    with store.file.room(MIB), refused, store.file.room(MIB):
        pass
    with store.file.room(MIB), store.path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert has_room(store, MIB)


def test_the_file_is_found_by_the_socket_of_who_has_it_open(tmp_path):
    with (tmp_path / "plasmaAbC").open("w+b") as file, socket.socket(socket.AF_UNIX) as listener:
        file.truncate(MIB)
        (tmp_path / "plasmaAbC").unlink()
        listener.bind(str(tmp_path / "socket"))
        listener.listen(1)
        found = ObjectStoreFile.of_store(str(tmp_path / "socket"))
        assert found.directory == str(tmp_path)
        assert has_room_in(found)
    nobody = ObjectStoreFile.of_store(str(tmp_path / "no socket"))
    assert has_room_in(nobody)


def has_room_in(file: ObjectStoreFile) -> bool:
    with file.room(1):
        return True


def test_a_limit_of_addresses_fails_an_async_save_by_name_and_no_process(tmp_path):
    # Far more than the limit: memory that an earlier save has left counts as room.
    state = {"w": torch.zeros(400 * MIB, dtype=torch.uint8)}
    ray_dcp.save({"step": 0}, checkpoint_id=tmp_path / "warm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_bytes = pages * resource.getpagesize() + 95 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, before[1]))
    try:
        assert 0 < free_address_bytes() <= 95 * MIB
        with pytest.raises(LimitError, match=r"memory for a copy of the state.*Save synchronously"):
            ray_dcp.async_save(state, checkpoint_id=tmp_path / "c").committed(60)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    ray_dcp.async_save(state, checkpoint_id=tmp_path / "c").committed(60)


def test_a_store_that_addresses_do_not_admit_has_no_room(store, monkeypatch):
    monkeypatch.setattr(node_memory, "free_address_bytes", lambda: 40 * MIB)
    with pytest.raises(NoRoomError, match="RLIMIT_AS"), store.file.room(1):
        pass
    monkeypatch.setattr(node_memory, "free_address_bytes", lambda: 41 * MIB)
    assert has_room(store, 1)

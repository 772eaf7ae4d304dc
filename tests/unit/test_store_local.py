"""What `LocalStorage` promises beyond the protocol, and that readers write nothing."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp.errors import StorageError
from ray_dcp.store import local
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import Entry, KeyMissingError
from ray_dcp.testing import StorageConformance
from tests.support.processes import open_below


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of a disk, which does some things otherwise than memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


# --- Writing, reading and deleting ----------------------------------------------------------------


def open_descriptors(folder: Path) -> int:
    gc.collect()
    return len(open_below(folder))


def test_a_value_is_synced_before_it_is_linked_and_its_folder_after(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    calls, here = [], threading.get_ident()

    def note(name, real, *args):
        if threading.get_ident() == here:
            calls.append(name)
        return real(*args)

    for name in ("fsync", "link", "rename"):
        monkeypatch.setattr(local.os, name, partial(note, name, getattr(os, name)))
    storage.write("a", b"1", create=True)
    storage.write("a", b"2")
    writer = storage.open_writer("b")
    writer.write(b"3")
    assert calls == ["fsync", "link", "fsync", "fsync", "rename", "fsync"]
    writer.commit()
    assert calls[6:] == ["fsync", "link", "fsync"]
    synced, real_sync = [], local.sync_directory
    monkeypatch.setattr(
        local, "sync_directory", lambda path: (synced.append(path), real_sync(path))
    )
    LocalStorage(tmp_path / "x" / "y").write("z/a", b"1")
    assert synced == [str(tmp_path / folder) for folder in (".", "x", "x/y", "x/y/z")]


@pytest.mark.parametrize("shift", [0, 1, 64, 4095])
@pytest.mark.parametrize("lead", [0, 1, 70_000])
def test_large_writes_of_any_alignment_arrive_whole(tmp_path, shift, lead):
    storage = LocalStorage(tmp_path)
    room = mmap.mmap(-1, 3 << 20)
    data = os.urandom(2 << 20)
    room[shift : shift + len(data)] = data
    view = memoryview(room)[shift : shift + len(data)]
    writer = storage.open_writer("part")
    for piece in (b"x" * lead, view, b"tail", view[: (1 << 20) + 1]):
        writer.write(piece)
    writer.commit()
    expected = b"x" * lead + data + b"tail" + data[: (1 << 20) + 1]
    assert storage.read("part") == expected


def test_a_filesystem_that_refuses_direct_io_gets_buffered_io(tmp_path, monkeypatch):
    real_open, real_pwritev = os.open, os.pwritev
    refused = []

    def refusing_open(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            refused.append(path)
            os.close(real_open(path, flags & ~os.O_DIRECT, *args, **kwargs))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(local.os, "open", refusing_open)
    writer = LocalStorage(tmp_path).open_writer("part")
    writer.write(b"x" * 5_000_001)
    writer.commit()
    assert len(refused) == 1
    assert os.listdir(tmp_path) == ["part"]
    assert os.path.getsize(tmp_path / "part") == 5_000_001

    monkeypatch.undo()

    def refusing_pwritev(fd, views, offset):
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwritev(fd, views, offset)

    monkeypatch.setattr(local.os, "pwritev", refusing_pwritev)
    writer = LocalStorage(tmp_path).open_writer("late")
    writer.write(b"y" * 5_000_001)
    writer.commit()
    assert len(refused) == 2
    assert os.path.getsize(tmp_path / "late") == 5_000_001


def test_what_the_system_writes_only_in_part_is_gone_on_with(tmp_path, monkeypatch):
    real = os.pwritev

    def a_part(fd, views, offset):
        half = max(4096, len(views[0]) // 8192 * 4096)
        return real(fd, [memoryview(views[0])[:half]], offset)

    monkeypatch.setattr(local.os, "pwritev", a_part)
    data = os.urandom(3_000_000)
    room = mmap.mmap(-1, 3_000_000)
    room[:] = data
    writer = LocalStorage(tmp_path).open_writer("part")
    writer.write(b"h" * 4096)
    writer.write(memoryview(room))
    writer.commit()
    assert (tmp_path / "part").read_bytes() == b"h" * 4096 + data


@pytest.fixture
def small_files():
    """No file of this process may grow beyond 1 MB: writing more gives EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("sync", [True, False])
def test_a_write_that_the_system_refuses_names_errno_key_and_path(tmp_path, small_files, sync):
    storage = LocalStorage(tmp_path)
    before = open_descriptors(tmp_path)
    with pytest.raises(StorageError, match=r"\[EFBIG\] File too large") as caught:
        storage.write("x/a", b"x" * 3_000_000)
    assert caught.value.key == "x/a"
    assert str(tmp_path / "x/a") in str(caught.value)

    def write(num_bytes):
        writer.write(b"x" * num_bytes)
        writer.commit()

    for num_bytes in (3_000_000, 9_000_000):
        # The system refuses the first on commit, the second on write.
        writer = storage.open_writer("x/b", sync=sync)
        with pytest.raises(StorageError, match="EFBIG"):
            write(num_bytes)
        writer.abort()
    assert storage.list() == []
    assert storage.unpublished() == ()
    assert open_descriptors(tmp_path) == before


def test_a_root_that_can_not_be_made_names_the_nearest_parent(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    storage = LocalStorage(tmp_path / "file" / "x" / "y")
    for act in (lambda: storage.write("a", b"1"), lambda: storage.open_writer("a")):
        with pytest.raises(StorageError, match="ENOTDIR") as caught:
            act()
        assert f"nearest parent that exists is {tmp_path / 'file'})" in str(caught.value)
    with pytest.raises(KeyMissingError):
        storage.read("a")


def test_reading_leaves_few_descriptors_and_closing_none(tmp_path):
    before = open_descriptors(tmp_path)
    storage = LocalStorage(tmp_path)
    for number in range(50):
        storage.write(f"{number}", b"1")
        storage.read_into(f"{number}", 0, memoryview(bytearray(1)))
        storage.read(f"{number}")
    assert open_descriptors(tmp_path) <= before + 16
    del storage
    assert open_descriptors(tmp_path) == before


def test_unpublished_files_can_be_deleted_and_a_dropped_writer_leaves_none(tmp_path):
    storage, before = LocalStorage(tmp_path), open_descriptors(tmp_path)
    writer = storage.open_writer("x/part")
    (left,) = storage.unpublished()
    assert (left.key[:7], left.key[-5:], storage.list()) == ("x/.tmp-", "-part", [])
    storage.delete([left.key])
    assert storage.unpublished() == ()
    with pytest.raises(StorageError):
        writer.commit()
    with pytest.raises(StorageError, match="was aborted"):
        writer.write(b"more")
    writer = storage.open_writer("part")
    writer.write(b"x" * 5_000_000)
    del writer
    assert open_descriptors(tmp_path) == before
    assert os.listdir(tmp_path) == []


def test_links_to_files_are_read_folders_not_entered_and_pipes_not_waited_for(tmp_path):
    (tmp_path / "blob").write_bytes(b"data")
    root = tmp_path / "root"
    root.mkdir()
    os.mkfifo(root / "pipe")
    (root / "link").symlink_to(tmp_path / "blob")
    (root / "loop").symlink_to(root)
    (root / "dangling").symlink_to(tmp_path / "nothing")
    storage = LocalStorage(root)
    assert storage.list() == [Entry("link", 4)]
    assert storage.read("link") == b"data"
    for read in (storage.read, lambda key: storage.read_into(key, 0, memoryview(bytearray(1)))):
        with pytest.raises(StorageError, match="not a regular file"):
            read("pipe")


def test_delete_removes_folders_that_became_empty_but_not_the_root(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    storage.write("x/y/a", b"1")
    storage.write("x/b", b"1")
    storage.delete(["x/y/a"])
    assert sorted(os.listdir(tmp_path / "root" / "x")) == ["b"]
    storage.delete(["x/b"])
    assert os.listdir(tmp_path / "root") == []


def test_delete_tries_all_keys_before_it_fails(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    for key in ("a", "b", "c"):
        storage.write(key, b"1")
    real = os.unlink

    def refuse(path, *args, **kwargs):
        if path.endswith(("a", "b")):
            raise OSError(errno.EROFS, "Read-only file system")
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StorageError, match=r"EROFS.*1 more"):
        storage.delete(["a", "b", "c"])
    monkeypatch.undo()
    assert [e.key for e in storage.list()] == ["a", "b"]


def test_a_folder_that_a_collector_removes_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    make, removed = os.mkdir, []

    def make_and_lose_once(path, *args, **kwargs):
        make(path, *args, **kwargs)
        if not removed:
            removed.append(path)
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", make_and_lose_once)
    LocalStorage(tmp_path).write("x/a", b"1")
    assert removed == [str(tmp_path / "x")]
    assert (tmp_path / "x" / "a").read_bytes() == b"1"


# --- Whether a name is created only if it is absent -----------------------------------------------


def test_a_trial_of_links_removes_what_killed_trials_left_a_day_ago(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_KNOWN", {})
    names = {".tmp-00-probe-name": 100_000, ".tmp-01-probe-first": 10, ".tmp-02-data": 100_000}
    for name, age_s in names.items():
        (tmp_path / name).touch()
        changed_s = (tmp_path / name).stat().st_mtime - age_s
        os.utime(tmp_path / name, (changed_s, changed_s))
    assert LocalStorage(tmp_path / "new").traits.create_if_absent
    assert set(os.listdir(tmp_path)) == {".tmp-01-probe-first", ".tmp-02-data"}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(local, "_KNOWN", {})


def refuse(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def creates(directory):
    return LocalStorage(directory).traits.create_if_absent


@pytest.mark.parametrize("is_subvolume", [False, True])
@pytest.mark.parametrize(
    ("kind", "has_links", "expected"),
    [
        ("vfat", False, True), ("fuseblk", False, True), ("ext4", True, True), ("nfs4", True, True),
        ("fuse.sshfs", True, True), ("fuse", True, False), ("fuse.seaweedfs", True, False),
        ("fuse.rclone", False, False), (None, True, False),
    ],
)  # fmt: skip
def test_a_filesystem_is_believed_where_one_server_or_kernel_decides(
    tmp_path, tmp_path_factory, monkeypatch, kind, has_links, expected, is_subvolume
):
    folder = tmp_path / "a b"
    folder.mkdir()
    device = os.stat(folder).st_dev
    # Files of subvolumes of btrfs have another device number than their mount.
    number = "0:0" if is_subvolume else f"{os.major(device)}:{os.minor(device)}"
    point = str(folder).replace(" ", "\\040")
    table = tmp_path_factory.mktemp("mounts") / "mountinfo"
    table.write_text(
        f"22 1 0:0 / /proc rw - proc x rw\n36 22 {number} / {point} rw shared:1 - {kind} x:y rw\n"
        * (kind is not None)
    )
    monkeypatch.setattr(local, "_MOUNTS", str(table))
    if not has_links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    assert creates(folder) is expected
    assert os.listdir(folder) == []


def test_a_filesystem_on_which_the_second_wins_as_well_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", os.replace)
    assert not creates(tmp_path / "not" / "yet")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.ENOSPC, "ENOSPC.*free space"), (errno.EROFS, "EROFS.*mounted writable")],
)
def test_what_could_not_be_tried_is_an_error_and_no_answer(tmp_path, monkeypatch, number, told):
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse(number))
        with pytest.raises(StorageError, match=told):
            creates(tmp_path)
    assert os.listdir(tmp_path) == []
    assert creates(tmp_path)


class TestLocalWithoutHardLinks(StorageConformance):
    """Without RENAME_NOREPLACE as well it looks first, and does not promise one winner."""

    @pytest.fixture(params=["renames", "looks first"])
    def storage(self, request, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
        if request.param == "looks first":
            monkeypatch.setattr(local, "_rename_noreplace", refuse(errno.EINVAL))
            assert not creates(tmp_path)
        return LocalStorage(tmp_path / "root")


# --- readers write nothing, and need no right to write ------------------------------------------


READ = """
import os, sys, torch, ray_dcp
from ray_dcp.view.run_listing import list_checkpoints
run, uid, writable = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def read(run):
    path = f"{run}/step-2"
    state = {"w": torch.zeros(3000)}
    ray_dcp.load(state, checkpoint_id=path, no_dist=True)
    assert (state["w"] == 2).all()
    assert ray_dcp.load_newest(state, run, no_dist=True).step == 2
    assert ray_dcp.load_newest(state, run, at_most=1, no_dist=True).step == 1
    assert (state["w"] == 1).all()
    assert float(ray_dcp.open(path)["w"][5]) == 2
    assert ray_dcp.verify(path).ok
    assert [item.state for item in list_checkpoints(run)] == ["committed", "committed"]
    assert ray_dcp.outcome(path, "nobody") == "open"

if uid:
    # Why first another: the modules of the interpreter may be out of the other user's reach.
    read(writable)
    os.setgid(uid)
    os.setuid(uid)
read(run)
path = f"{run}/step-2"
try:
    open(f"{run}/step-2/written", "w")
except OSError:
    pass
else:
    sys.exit("this directory can be written to: the test shows nothing")
try:
    ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=path, no_dist=True)
except ray_dcp.StorageError as error:
    assert path in str(error), error
else:
    sys.exit("a save to a read-only place did not fail")
"""


def make_run(root):
    for step in (1, 2):
        state = {"w": torch.full((3000,), float(step)), "n": step}
        ray_dcp.save(state, checkpoint_id=root / f"step-{step}", no_dist=True)
    # What a crash between commit and publication leaves, and no reader needs.
    (root / "step-2" / ".metadata").unlink()


def read_it(programs, run, uid=0, writable=""):
    (done,) = programs.run("-c", READ, str(run), str(uid), str(writable))
    assert done.returncode == 0, done.stderr


def snapshot(root):
    return {
        path.relative_to(root): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in sorted(root.rglob("*"))
    }


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_without_write_permission_can_read(programs, tmp_path, tmp_path_factory):
    writable = tmp_path_factory.mktemp("writable")
    make_run(writable)
    make_run(tmp_path)
    for path in [tmp_path, *tmp_path.parents]:
        if path.stat().st_mode & 0o005 != 0o005 and path.stat().st_uid == os.getuid():
            path.chmod(path.stat().st_mode | 0o005)
    for path in tmp_path.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(tmp_path)
    read_it(programs, tmp_path, uid=65534, writable=writable)
    assert snapshot(tmp_path) == before


def test_a_view_gives_arrays_that_are_no_window_on_the_file(tmp_path):
    make_run(tmp_path)
    before = snapshot(tmp_path)
    array = ray_dcp.open(tmp_path / "step-2")["w"][:]
    assert isinstance(array, np.ndarray)
    if array.flags.writeable:
        array[:] = -1
    assert snapshot(tmp_path) == before


def test_a_save_to_a_place_that_only_looks_writable_fails_and_says_so(tmp_path):
    with pytest.raises(StorageError, match="/proc"):
        ray_dcp.save({"w": torch.ones(1)}, checkpoint_id="/proc/nowhere/step-1", no_dist=True)

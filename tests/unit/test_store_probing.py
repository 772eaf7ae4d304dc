"""Whether a directory creates a name only if it is absent is tried, once for each filesystem."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from ray_dcp.errors import StorageError
from ray_dcp.store import local
from ray_dcp.store.local import LocalStorage, publish
from ray_dcp.testing.storage_conformance import StorageConformance


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(local, "_KNOWN", {})


def refuse(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def no_links(monkeypatch):
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))


@pytest.fixture
def no_flags(monkeypatch):
    monkeypatch.setattr(local, "_rename_noreplace", refuse(errno.EINVAL))


@pytest.fixture
def mounted_as(tmp_path_factory, monkeypatch):
    """Says which kind of filesystem a directory lies on."""

    def say(directory, kind):
        device = os.stat(directory).st_dev
        table = tmp_path_factory.mktemp("mounts") / "mountinfo"
        table.write_text(
            "22 1 0:5 / /proc rw - proc proc rw\n"
            f"36 22 {os.major(device)}:{os.minor(device)} / /mnt rw shared:1 - {kind} x:y rw\n"
        )
        monkeypatch.setattr(local, "_MOUNTS", str(table))

    return say


def creates(directory):
    return LocalStorage(directory).traits.create_if_absent


def test_a_directory_is_tried_once_and_nothing_stays_behind(tmp_path, monkeypatch):
    tried = []
    real = local._tried
    monkeypatch.setattr(local, "_tried", lambda *at: tried.append(at[0]) or real(*at))
    assert creates(tmp_path / "not" / "yet")
    assert creates(tmp_path)
    assert creates(tmp_path / "other")
    assert tried == [str(tmp_path)]
    assert os.listdir(tmp_path) == []


def test_without_hard_links_and_flags_nothing_is_created_only_if_absent(
    tmp_path, no_links, no_flags, mounted_as
):
    mounted_as(tmp_path, "ext4")
    assert not creates(tmp_path)
    storage = LocalStorage(tmp_path)
    storage.write("a", b"1", create=True)
    with pytest.raises(StorageError, match="exists"):
        storage.write("a", b"2", create=True)
    assert storage.read("a") == b"1"
    assert os.listdir(tmp_path) == ["a"]


def test_a_system_without_the_call_creates_nothing_only_if_absent(tmp_path, no_links, monkeypatch):
    monkeypatch.setattr(local.ctypes, "CDLL", lambda *_, **__: object())
    assert not creates(tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_a_filesystem_refuses_for_another_reason_is_told(tmp_path, no_links, monkeypatch):
    monkeypatch.setattr(local, "_rename_noreplace", refuse(errno.ENOSPC))
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(OSError, match="space") as told:
        publish(str(tmp_path / "a"), str(tmp_path / "b"), create=True, sync=False)
    assert told.value.errno == errno.ENOSPC
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("kinds", "has_links", "expected"),
    [
        (["vfat", "cifs", "fuseblk", "9p"], False, True),
        (["ext4", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "fuse.sshfs"], True, True),
        (["fuse", "fuse.rclone", "fuse.seaweedfs", "fuse.unheard-of"], True, False),
        (["fuse", "fuse.rclone"], False, False),
    ],
    ids=["kernel without links", "exclusive links", "bridge", "bridge without links"],
)
def test_a_filesystem_is_believed_where_one_server_or_kernel_decides(
    tmp_path, mounted_as, monkeypatch, kinds, has_links, expected
):
    if not has_links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    for kind in kinds:
        local._KNOWN.clear()
        mounted_as(tmp_path, kind)
        assert creates(tmp_path) is expected, kind
    assert os.listdir(tmp_path) == []


def test_a_file_with_another_device_number_than_its_mount_is_found_by_its_path(
    tmp_path, tmp_path_factory, monkeypatch
):
    """So it is in subvolumes of btrfs."""
    table = tmp_path_factory.mktemp("mounts") / "mountinfo"
    folder = tmp_path / "a b"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    table.write_text(
        f"22 1 0:0 / / rw - ext4 x rw\n36 22 0:0 / {point} rw shared:1 - fuse.rclone x:y rw\n"
    )
    monkeypatch.setattr(local, "_MOUNTS", str(table))
    assert not creates(folder)
    local._KNOWN.clear()
    assert creates(tmp_path)


@pytest.mark.parametrize("table", ["", None])
def test_an_unknown_filesystem_is_not_believed(tmp_path, tmp_path_factory, monkeypatch, table):
    path = tmp_path_factory.mktemp("mounts") / "mountinfo"
    if table is not None:
        path.write_text(table)
    monkeypatch.setattr(local, "_MOUNTS", str(path))
    assert not creates(tmp_path)


def test_a_filesystem_on_which_the_second_wins_too_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", os.replace)
    assert not creates(tmp_path)
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


def test_a_mount_that_is_read_only_is_asked_again_when_it_is_not(small_disk):
    def remount(how):
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    remount("ro")
    with pytest.raises(StorageError, match="EROFS"):
        creates(small_disk / "run")
    remount("rw")
    assert creates(small_disk / "run")


class TestLocalThatLooksFirst(StorageConformance):
    """All promises without hard links and without RENAME_NOREPLACE, but that of one winner."""

    @pytest.fixture
    def storage(self, tmp_path, no_links, no_flags):
        return LocalStorage(tmp_path / "root")

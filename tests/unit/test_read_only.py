"""Loading, viewing and verifying a whole checkpoint write nothing, and need no right to write."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp.errors import StorageError

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

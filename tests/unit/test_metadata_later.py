"""A save without `.metadata`: what reads it, who makes it later, and what may remove it again."""

import shutil
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError

stock_load = partial(dcp.load, no_dist=True)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WITHOUT = ray_dcp.SaveOptions(stock_metadata=False)


def state_of(step):
    return {"w": torch.arange(6.0) + step, "step": step}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ckpt"
    ray_dcp.save(state_of(1), checkpoint_id=path, options=WITHOUT)
    return path


def loaded(load, path):
    state = state_of(0)
    load(state, checkpoint_id=path)
    return torch.equal(state["w"], state_of(1)["w"]) and state["step"] == 1


def test_made_later_it_is_what_the_save_would_have_written(path, tmp_path):
    assert ray_dcp.write_metadata(path)
    assert loaded(stock_load, path)
    assert loaded(ray_dcp.load, path)
    assert ray_dcp.verify(path).ok
    made = (path / ".metadata").read_bytes()
    assert ray_dcp.write_metadata(path)
    assert (path / ".metadata").read_bytes() == made


def test_it_stays_when_others_look_after_the_checkpoint_and_goes_with_it(path):
    ray_dcp.write_metadata(path)
    ray_dcp.collect(path)
    assert (path / ".metadata").exists()
    ray_dcp.save(state_of(1), checkpoint_id=path, options=WITHOUT)
    assert not (path / ".metadata").exists()
    ray_dcp.write_metadata(path)
    ray_dcp.delete(path)
    assert not (path / ".metadata").exists()


def test_what_has_no_use_for_it_is_refused(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        ray_dcp.write_metadata(tmp_path / "nothing")
    dcp.save(state_of(1), checkpoint_id=tmp_path / "stock", no_dist=True)
    before = (tmp_path / "stock" / ".metadata").read_bytes()
    with pytest.raises(InvalidRequestError, match="another program"):
        ray_dcp.write_metadata(tmp_path / "stock")
    assert (tmp_path / "stock" / ".metadata").read_bytes() == before


def test_a_copy_that_lacks_the_dot_file_gets_one_of_its_own(tmp_path):
    first, copy = tmp_path / "run" / "step-1", tmp_path / "elsewhere" / "step-1"
    ray_dcp.save(state_of(1), checkpoint_id=first)
    copy.mkdir(parents=True)
    for file in first.iterdir():
        if file.name != ".metadata":
            shutil.copy(file, copy)
    done = CliRunner().invoke(main, ["metadata", str(copy)])
    assert (done.exit_code, done.output) == (0, f"stock DCP can read {copy}\n")
    assert loaded(stock_load, copy)
    assert dcp.FileSystemReader(copy).read_metadata().storage_meta.checkpoint_id == str(copy)
    made = (copy / ".metadata").read_bytes()
    assert made != (first / ".metadata").read_bytes()
    assert loaded(ray_dcp.load, copy)
    report = ray_dcp.verify(copy)
    assert report.ok
    assert report.notes == ()
    assert (copy / ".metadata").read_bytes() == made
    ray_dcp.copy(copy, tmp_path / "third")
    assert loaded(stock_load, tmp_path / "third")
    # What is no projection of the checkpoint is still damage, and made anew.
    (copy / ".metadata").write_bytes(made.replace(b"1.0.0", b"1.0.1"))
    assert not ray_dcp.verify(copy).ok
    assert ray_dcp.write_metadata(copy)
    assert (copy / ".metadata").read_bytes() == made

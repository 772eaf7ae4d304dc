"""Saves of numpy-backed ranks beside stock DCP: it reads ours, and ours replace its own."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.errors import CheckpointExistsError
from ray_dcp.format.manifest import decode_record
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.tasks import perform
from tests.inline_ranks import run_ranks
from tests.numpy_ranks import load_and_check, save, save_ranks, state_of
from tests.scripted_storage import ChangeScript

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore:.*no_dist.*:UserWarning",
)


def stock_load(path, state):
    found = {
        name: torch.zeros(value.shape, dtype=torch.from_numpy(np.zeros(0, value.dtype)).dtype)
        for name, value in state.items()
        if isinstance(value, np.ndarray)
    }
    dcp.load(found, checkpoint_id=str(path), no_dist=True)
    return {name: tensor.numpy() for name, tensor in found.items()}


def check_stock(path, state):
    for name, found in stock_load(path, state).items():
        np.testing.assert_array_equal(found, state[name], err_msg=name)


def stock_save(path, value):
    dcp.save({"w": torch.full((6, 4), float(value))}, checkpoint_id=str(path), no_dist=True)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_stock_dcp_reads_what_any_number_of_ranks_saved(tmp_path, world_size):
    state = state_of(world_size)
    save(state, world_size, str(tmp_path))
    check_stock(tmp_path, state)


def test_stock_dcp_reads_the_new_checkpoint_after_an_overwrite(tmp_path):
    save(state_of(1), 3, str(tmp_path))
    save(state_of(2), 2, str(tmp_path))
    check_stock(tmp_path, state_of(2))


def test_a_stock_checkpoint_is_replaced_with_its_files(tmp_path):
    stock_save(tmp_path, 1)
    before = (tmp_path / ".metadata").read_bytes()
    (tmp_path / "notes.txt").write_text("mine")
    (first, _) = save(state_of(2), 2, str(tmp_path))
    assert decode_record(first.manifest).replaced_metadata == digest_bytes(before).hex()
    assert not list(tmp_path.glob("__?_?.distcp"))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    check_stock(tmp_path, state_of(2))
    load_and_check(state_of(2), 3, str(tmp_path))


def test_overwrite_false_does_not_replace_a_stock_checkpoint(tmp_path):
    stock_save(tmp_path, 3)
    results = run_ranks(
        save_ranks(state_of(), 2, str(tmp_path), options=SaveOptions(overwrite=False))
    )
    assert {type(result.error) for result in results} == {CheckpointExistsError}
    assert stock_load(tmp_path, {"w": np.zeros((6, 4), np.float32)})["w"][0, 0] == 3


def test_a_safetensors_save_over_a_stock_checkpoint_leaves_nothing_for_stock_dcp_to_mix_up(
    tmp_path,
):
    stock_save(tmp_path, 1)
    save(state_of(2), 2, str(tmp_path), options=SaveOptions(container="safetensors"))
    assert not (tmp_path / ".metadata").exists()
    load_and_check(state_of(2), 3, str(tmp_path))


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_at_every_fault_over_a_stock_checkpoint_one_of_the_two_loads_whole(tmp_path, container):
    for change in range(100):
        path = tmp_path / str(change)
        stock_save(path, 7)
        script = ChangeScript(change)
        results = run_ranks(
            save_ranks(
                state_of(2), 2, str(path), opener=script.open,
                options=SaveOptions(container=container),
            ),
            performer=partial(perform, opener=script.open),
        )  # fmt: skip
        if results[0].error is None:
            load_and_check(state_of(2), 2, str(path))
        else:
            assert stock_load(path, {"w": np.zeros((6, 4), np.float32)})["w"][5, 3] == 7
        if not script.hit:
            break
    assert change >= 6

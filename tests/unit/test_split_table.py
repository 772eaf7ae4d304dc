"""Large chunk tables: what all saves of a plan share, and what is of one save, in two files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.manifest import Manifest, decode_record
from ray_dcp.format.metadata_out import encode_metadata, fill_metadata, metadata_template
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.format.table_checks import MAGIC, encode_checks, join_checks
from ray_dcp.options import SaveOptions
from ray_dcp.plan import global_plan
from ray_dcp.plan.grouping import offsets_of
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime import commit_files
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.transfer import check_file
from ray_dcp.transfer.opening import checkpoint_from, read_checkpoint
from ray_dcp.view.listing import list_checkpoints
from tests.crash.array_states import same_state, sample_state
from tests.crash.ranks import load_state, save_state
from tests.format_cases import mixed_table
from tests.warm_ranks import Warm

WITHOUT = SaveOptions(num_threads=1, stock_metadata=False)


@pytest.fixture(autouse=True)
def always_split(monkeypatch):
    monkeypatch.setattr(commit_files, "SPLIT_CHUNKS", 0)


@pytest.fixture(params=["torch_save", "safetensors", "at end"])
def options(request, monkeypatch):
    """Also with the checksums at the ends of the data files."""
    container = request.param
    if container == "at end":
        monkeypatch.setattr(global_plan, "CHECKS_AT_END_CHUNKS", 0)
        container = "torch_save"
    return SaveOptions(num_threads=1, stock_metadata=False, container=container)


def manifest_of(storage) -> Manifest:
    keys = sorted(entry.key for entry in storage.list() if entry.key.startswith("manifest-"))
    return decode_record(storage.read(keys[-1]))


def same_table(one, other):
    for name, value in vars(one).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)
        else:
            assert value == getattr(other, name), name


def test_what_is_read_back_is_what_one_file_would_say(options, tmp_path, monkeypatch):
    warm = Warm(3, str(tmp_path / "split"))
    for result in warm.save(sample_state(3), options=options):
        result.get()
    storage = open_storage(Target(warm.url))
    manifest = manifest_of(storage)
    assert manifest.checks is not None
    split = read_checkpoint(storage).table
    monkeypatch.setattr(commit_files, "SPLIT_CHUNKS", 1 << 30)
    monkeypatch.setattr(global_plan, "CHECKS_AT_END_CHUNKS", 1 << 30)
    other = Warm(3, str(tmp_path / "whole"))
    for result in other.save(sample_state(3), options=options):
        result.get()
    storage = open_storage(Target(other.url))
    assert manifest_of(storage).checks is None
    whole = read_checkpoint(storage).table
    attempts = [manifest.attempt, manifest_of(storage).attempt]
    assert whole.files == tuple(key.replace(*attempts) for key in split.files)
    vars(whole)["files"] = split.files
    same_table(split, whole)


def test_it_loads_verifies_and_is_encoded_once(options, tmp_path, monkeypatch):
    made = []

    def counted(table):
        made.append(table)
        return encode_table(table)

    monkeypatch.setattr(commit_files, "encode_table", counted)
    warm = Warm(2, str(tmp_path / "ckpt"))
    tables = []
    for step in range(3):
        for result in warm.save(sample_state(step), options=options):
            result.get()
        storage = open_storage(Target(warm.url))
        assert same_state(sample_state(step), load_state(storage, sample_state(step), 3))
        tables.append(manifest_of(storage).table.digest)
    assert warm.was_warm
    assert len(made) == 1
    assert len(set(tables)) == 1
    assert ray_dcp.verify(warm.url).ok
    # Nothing of the earlier attempts is left, and both files of this one are known.
    kept = {entry.key for entry in storage.list()}
    manifest = manifest_of(storage)
    assert {key for key in kept if key.startswith("chunks.")} == {e.key for e in manifest.tables}
    assert ray_dcp.delete(warm.url).kept == ()
    assert [entry.key for entry in storage.list() if "manifest" not in entry.key] == []


@pytest.mark.parametrize("at_end", [False, True])
def test_the_metadata_of_stock_dcp_is_encoded_once(at_end, tmp_path, monkeypatch):
    if at_end:
        monkeypatch.setattr(global_plan, "CHECKS_AT_END_CHUNKS", 0)
    made = []

    def counted(table):
        made.append(table)
        return metadata_template(table)

    monkeypatch.setattr(commit_files, "metadata_template", counted)
    warm = Warm(2, "")
    for step in range(4):
        # Into another folder each time, as jobs do; in the last an object is longer.
        state = sample_state(step, note="x" * (20 if step < 3 else 2000))
        url = str(tmp_path / ("x" * 200 * (step % 2)) / f"step-{step}")
        for result in warm.save(state, options=SaveOptions(num_threads=1), url=url):
            result.get()
        storage = open_storage(Target(url))
        checkpoint = read_checkpoint(storage)
        attempt = checkpoint.manifest.attempt
        expected = encode_metadata(checkpoint.table, checkpoint_id=url, attempt=attempt)
        assert storage.read(".metadata") == expected
        assert len(made) == 1 + (step == 3)


def test_an_id_that_is_a_name_as_well_is_encoded_as_ever():
    table = replace(mixed_table(), files=tuple("{attempt}" + key for key in mixed_table().files))
    template = metadata_template(table)
    attempt = "0123456789abcdef"
    files = tuple(key.replace("{attempt}", attempt) for key in table.files)
    for url in ("file:///tmp/x", "y" * 300, ""):
        filled = fill_metadata(template, checkpoint_id=url, attempt=attempt)
        final = replace(table, files=files)
        assert filled == encode_metadata(final, checkpoint_id=url, attempt=attempt)
    assert fill_metadata(template, checkpoint_id=table.names[0], attempt=attempt) is None
    assert fill_metadata(template, checkpoint_id="x", attempt="short") is None


@pytest.mark.parametrize("harm", ["missing", "short", "flipped"])
def test_a_damaged_file_of_checksums_is_told(tmp_path, harm):
    ray_dcp.save({"w": torch.arange(99.0), "o": "x"}, checkpoint_id=tmp_path, options=WITHOUT)
    (path,) = tmp_path.glob("chunks.*.checks")
    data = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-8] if harm == "short" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedCheckpointError, match="checks"):
        ray_dcp.load({"w": torch.zeros(99)}, checkpoint_id=tmp_path)
    if harm != "flipped":
        assert [item.state for item in list_checkpoints(str(tmp_path))] == ["damaged"]


def test_metadata_can_be_made_of_it(tmp_path):
    state = {"w": torch.arange(99.0), "o": "x"}
    ray_dcp.save(state, checkpoint_id=tmp_path, options=WITHOUT)
    assert ray_dcp.write_metadata(tmp_path)
    wanted = {"w": torch.zeros(99), "o": ""}
    with pytest.warns(UserWarning, match="disabled"):
        torch.distributed.checkpoint.load(wanted, checkpoint_id=tmp_path)
    assert torch.equal(wanted["w"], state["w"])
    assert wanted["o"] == "x"


def test_with_metadata_it_is_two_files_as_well(tmp_path):
    ray_dcp.save({"w": torch.arange(99.0)}, checkpoint_id=tmp_path)
    assert len(list(tmp_path.glob("chunks.*.checks"))) == 1


def saved(world_size=2):
    storage = MemoryStorage("split-table")
    storage.delete([entry.key for entry in storage.list()])
    save_state(storage, sample_state(0), world_size, options=WITHOUT)
    manifest = manifest_of(storage)
    return decode_table(storage.read(manifest.table.key)), storage.read(manifest.checks.key)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_numbers_that_do_not_fit_are_damage_and_nothing_worse(data):
    table, checks = saved()
    words = np.frombuffer(checks, "<i8", offset=len(MAGIC)).copy()
    files, places, _ = words[:3].tolist()
    at = data.draw(st.integers(0, 3 + files + 3 * places))
    most = (1 << 63) - 1
    near = st.integers(-2, 2).map(lambda step: int(words[at]) + step)
    value = data.draw(st.one_of(near, st.sampled_from([-1, 0, most, -most - 1, 1 << 40])))
    changed = words.copy()
    changed[at] = value
    try:
        join_checks(table, MAGIC + changed.tobytes(), "a1")
    except DamagedCheckpointError:
        return
    # Only where an object lies can be moved without a contradiction; that its checksums tell.
    assert value == words[at] or 3 + files < at <= 3 + files + 3 * places


@pytest.mark.parametrize("data", [b"", MAGIC, b"RDCPCHK9" + bytes(24), MAGIC + bytes(24) + b"x"])
def test_other_bytes_are_refused(data):
    with pytest.raises(DamagedCheckpointError):
        join_checks(saved()[0], data, "a1")


def test_encoding_is_what_the_documentation_says():
    data = encode_checks(
        offsets_of(np.array([2, 0])), np.array([[7, 8, 9]]), [np.array([1, 2], np.uint64)]
    )
    data = b"".join(data)
    assert np.frombuffer(data, "<i8", offset=8).tolist() == [2, 1, 2, 0, 2, 2, 7, 8, 9, 1, 2]


def in_part(storage):
    """Returns the checkpoint as a rank opens it, and the manifest."""
    manifest = manifest_of(storage)
    slots = [entry.key for entry in storage.list() if entry.key.startswith("manifest-")]
    slot = max(int(key.split("-")[1].split(".")[0]) for key in slots)
    record = storage.read(sorted(slots)[-1])
    return checkpoint_from(storage, "native", slot, record, checks_later=True), manifest


def test_a_rank_reads_the_checksums_of_its_own_files_only():
    saved(world_size=4)
    storage = MemoryStorage("split-table")
    opened, manifest = in_part(storage)
    whole = read_checkpoint(storage).table
    head = opened.check_file.bytes_read
    assert not opened.table.checks.any()
    for files in ([1], [1, 3], [0, 1, 2, 3]):
        opened.check_file.read(files)
        of = np.repeat(whole.file, np.diff(whole.check_start))
        there = np.isin(of, sorted({*files, 1}))
        np.testing.assert_array_equal(opened.table.checks, np.where(there, whole.checks, 0))
        # Each checksum is read once, however often it is asked for.
        assert opened.check_file.bytes_read == head + 8 * int(there.sum())
    same_table(opened.table, whole)
    assert head <= manifest.checks.num_bytes


def test_damage_is_told_by_who_needs_the_bytes_and_by_nobody_else(monkeypatch):
    _, data = saved(world_size=4)
    storage = MemoryStorage("split-table")
    manifest = manifest_of(storage)
    storage.write(manifest.checks.key, data[:-1] + bytes([data[-1] ^ 1]))
    opened, _ = in_part(storage)
    last = len(opened.table.files) - 1
    opened.check_file.read(range(last))
    with pytest.raises(DamagedCheckpointError, match=f"checksums of {opened.table.files[last]}"):
        opened.check_file.read([last])
    storage.write(manifest.checks.key, data[:-8])
    with pytest.raises(DamagedCheckpointError, match="cut off"):
        in_part(storage)
    monkeypatch.setattr(check_file, "_HEAD_BYTES", 64)
    opened, _ = in_part(storage)
    with pytest.raises(DamagedCheckpointError, match="cut off"):
        opened.check_file.read([last])
    storage.delete([manifest.checks.key])
    with pytest.raises(DamagedCheckpointError, match="no such file"):
        in_part(storage)


def test_a_long_head_is_read_whole(monkeypatch):
    saved(world_size=2)
    storage = MemoryStorage("split-table")
    monkeypatch.setattr(check_file, "_HEAD_BYTES", 33)
    opened, _ = in_part(storage)
    opened.check_file.read(range(len(opened.table.files)))
    same_table(opened.table, read_checkpoint(storage).table)

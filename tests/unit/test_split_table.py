"""The chunk table and `.metadata`: what all saves of a plan share is encoded once."""

from dataclasses import replace

import pytest

import ray_dcp
from ray_dcp.format.manifest import Manifest, decode_record
from ray_dcp.format.metadata import encode_metadata, fill_metadata, metadata_template
from ray_dcp.format.table import encode_table
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.options import SaveOptions
from ray_dcp.planning import global_plan
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime import tasks
from ray_dcp.store.opening import open_storage
from tests.crash.array_states import same_state, sample_state
from tests.crash.ranks import load_state
from tests.format_cases import mixed_table
from tests.warm_ranks import Warm

WITHOUT = SaveOptions(num_threads=1, stock_metadata=False)


def manifest_of(storage) -> Manifest:
    keys = sorted(entry.key for entry in storage.list() if entry.key.startswith("manifest-"))
    return decode_record(storage.read(keys[-1]))


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_it_loads_verifies_and_is_encoded_once(container, tmp_path, monkeypatch):
    options = replace(WITHOUT, container=container)
    made = []

    def counted(table):
        made.append(table)
        return encode_table(table)

    for module in (tasks, global_plan):
        monkeypatch.setattr(module, "encode_table", counted)
    warm = Warm(2, str(tmp_path / "ckpt"))
    tables = []
    for step in range(3):
        for result in warm.save(sample_state(step), options=options):
            result.get()
        storage = open_storage(Target(warm.url))
        assert same_state(sample_state(step), load_state(storage, sample_state(step), 3))
        tables.append(manifest_of(storage).table.digest)
    assert warm.was_warm
    # Only where the data files have no room for them, the table has the checksums of one save.
    num_tables = 1 if container == "torch_save" else 3
    assert len(made) == len(set(tables)) == num_tables
    assert ray_dcp.verify(warm.url).ok
    # Nothing of the earlier attempts is left.
    kept = {entry.key for entry in storage.list()}
    table = manifest_of(storage).table
    assert {key for key in kept if key.startswith("chunks.")} == {table.key}
    assert ray_dcp.delete(warm.url).kept == ()
    assert [entry.key for entry in storage.list() if "manifest" not in entry.key] == []


def test_the_metadata_of_stock_dcp_is_encoded_once(tmp_path, monkeypatch):
    made = []

    def counted(table):
        made.append(table)
        return metadata_template(table)

    monkeypatch.setattr(tasks, "metadata_template", counted)
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

"""The chunk table is encoded once for all saves of a plan; `.metadata` follows from it."""

import ray_dcp
from ray_dcp import SaveOptions
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.format.metadata import encode_metadata
from ray_dcp.format.table import encode_table
from ray_dcp.io.checkpoint import newest_record, read_checkpoint
from ray_dcp.planning import global_plan
from ray_dcp.store.opening import open_storage
from tests.support.arrays import same_state, sample_state
from tests.support.world import Warm, committed, load_state

WITHOUT = SaveOptions(num_threads=1, stock_metadata=False)


def test_it_loads_verifies_and_is_encoded_once(tmp_path, monkeypatch):
    made = []

    def counted(table):
        made.append(table)
        return encode_table(table)

    monkeypatch.setattr(global_plan, "encode_table", counted)
    warm = Warm(2, str(tmp_path / "ckpt"))
    tables = []
    for step in range(3):
        committed(warm.save(sample_state(step), options=WITHOUT))
        storage = open_storage(Target(warm.url))
        assert same_state(sample_state(step), load_state(storage, sample_state(step), 3))
        tables.append(newest_record(storage).manifest.table.digest)
    assert warm.was_warm
    assert len(made) == len(set(tables)) == 1
    assert ray_dcp.verify(warm.url).ok
    # Nothing of the earlier attempts is left.
    kept = {entry.key for entry in storage.list()}
    table = newest_record(storage).manifest.table
    assert {key for key in kept if key.startswith("chunks.")} == {table.key}
    assert ray_dcp.delete(warm.url).kept == ()
    assert [entry.key for entry in storage.list() if "manifest" not in entry.key] == []


def test_the_metadata_of_stock_dcp_is_that_of_the_table_as_it_was_saved(tmp_path):
    warm = Warm(2, "")
    for step in range(3):
        # Into another folder each time, as jobs do; in the last an object is longer.
        state = sample_state(step, note="x" * (20 if step < 2 else 2000))
        url = str(tmp_path / f"step-{step}")
        committed(warm.save(state, options=SaveOptions(num_threads=1), url=url))
        storage = open_storage(Target(url))
        checkpoint = read_checkpoint(storage)
        attempt = checkpoint.manifest.attempt
        expected = encode_metadata(checkpoint.table, checkpoint_id=url, attempt=attempt)
        assert storage.read(".metadata") == expected

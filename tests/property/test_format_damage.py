"""One changed byte of stored data gives a value or an error of ours; `tests.fuzz` changes more."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.core.checksums import block_checks, first_bad_block
from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format import manifest as mf
from ray_dcp.format import safetensors as sf
from ray_dcp.format.metadata import decode_metadata, encode_metadata
from ray_dcp.format.table import GroupedTable, decode_table, encode_table, end_of
from ray_dcp.format.torch_items import parse_torch_save, torch_save_frame
from tests.format_cases import difference, grouped_table, manifest, many_table, mixed_table, saved

TABLE = mixed_table()
OURS = encode_metadata(TABLE, checkpoint_id="/x", attempt="a1")
STOCK = pickle.dumps(pickle.loads(OURS))
STOCK_2 = pickle.dumps(pickle.loads(OURS), 2)
STORED = encode_table(TABLE)
GROUPED = grouped_table()
END = GROUPED[end_of(GROUPED) :]
MANIFEST = mf.encode_record(mf.AbortRecord(attempt="a1", reason="late", rank=3))
COMMIT = mf.encode_record(manifest())
FRAME = torch_save_frame("float32", (3, 4)).header


def signed(body):
    """Reads a record that has the digest of whatever it says."""
    return mf.decode_record(mf.sealed("record", body))


ITEM = saved(torch.arange(12.0).reshape(3, 4).T)
SAFETENSORS = sf.header([("w", "float32", (3, 2), 0, 24)], sf.sharding_metadata({"w": (3, 0)}))[
    :300
]

DECODERS = {
    "our .metadata": (OURS, decode_metadata),
    "stock .metadata": (STOCK, decode_metadata),
    "stock .metadata of protocol 2": (STOCK_2, decode_metadata),
    "chunk table": (STORED, decode_table),
    "chunk table in groups": (GROUPED, decode_table),
    "end of a chunk table": (END, lambda data: GroupedTable(data, len(GROUPED))),
    "manifest": (MANIFEST, mf.decode_record),
    "manifest of a commit": (COMMIT, mf.decode_record),
    "manifest without its digest": (mf.unsealed("record", COMMIT), signed),
    "our frame": (FRAME, lambda data: parse_torch_save(data, len(FRAME) + 48 + 300)),
    "stock item": (ITEM, lambda data: parse_torch_save(data, len(ITEM))),
    "safetensors header": (SAFETENSORS, sf.parse_header),
}


@pytest.mark.parametrize("name", DECODERS)
def test_every_single_byte_that_is_lost_or_set_gives_a_value_or_an_error_of_ours(name):
    data, decode = DECODERS[name]
    errors = 0
    step = max(1, len(data) // 200)
    for at in range(0, len(data), step):
        for wrong in (
            data[:at],
            data[:at] + data[at + 1 :],
            data[:at] + b"\xff" + data[at + 1 :],
            data[:at] + b"\0" + data[at + 1 :],
        ):
            try:
                decode(wrong)
            except CheckpointError:
                errors += 1
    assert errors > len(data) // step, "hardly any damage was seen: is the decoder asleep?"


@settings(max_examples=40, deadline=None)
@given(
    data=st.binary(min_size=1, max_size=20_000),
    block_bytes=st.sampled_from([1, 7, 512, 4096, 1 << 20]),
    source=st.data(),
)
def test_the_first_block_with_a_flipped_bit_is_found(data, block_bytes, source):
    checks = block_checks(data, block_bytes)
    wrong = bytearray(data)
    places = source.draw(st.sets(st.integers(0, len(data) - 1), min_size=1, max_size=4))
    for place in places:
        wrong[place] ^= 1 << source.draw(st.integers(0, 7))
    assert first_bad_block(wrong, block_bytes, checks) == min(places) // block_bytes


def test_a_manifest_s_digest_field_alone_does_not_make_it_right():
    body = MANIFEST.replace(b'"late"', b'"LATE"')
    with pytest.raises(DamagedCheckpointError):
        mf.decode_record(body)


def test_big_tables_survive_too():
    table = many_table(500)
    assert difference(decode_table(encode_table(table)), table) == []
    assert decode_metadata(
        encode_metadata(table, checkpoint_id="", attempt="a")
    ).table.num_chunks == len(np.unique(table.tensor))

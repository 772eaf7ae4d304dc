import json
import struct

import pytest
import torch

from ray_dcp import DamagedCheckpointError, InternalError, UnsupportedValueError
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.format import safetensors as sf
from ray_dcp.format.torch_items import NeedMoreBytes
from tests.support.checkpoints import sharding_metadata


def raw(fields):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


def packed(tensors):
    """Entries and data of tensors, one after the other."""
    entries, data = [], b""
    for name, tensor in tensors.items():
        piece = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            sf.TensorEntry(name, dtype, tuple(tensor.shape), len(data), len(data) + len(piece))
        )
        data += piece
    return entries, data


TENSORS = {
    "w": torch.arange(12.0).reshape(3, 4),
    "scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "none": torch.zeros(0, 3, dtype=torch.int64),
    "ü": torch.arange(5, dtype=torch.int8),
}


def test_a_header_is_read_back_and_its_data_is_aligned():
    entries, data = packed(TENSORS)
    metadata = sharding_metadata(dict.fromkeys(TENSORS, (7,)))
    header = sf.header(entries, metadata)
    assert len(header) % sf.DATA_ALIGNMENT == 0
    found = sf.parse_header(header + data, len(header) + len(data))
    assert set(found.entries) == set(entries)
    assert found.data_offset == len(header)
    assert found.metadata == metadata
    assert sf.saved_offsets(found.metadata) == dict.fromkeys(TENSORS, (7,))
    assert sf.saved_offsets({}) is None


def test_dtypes_that_safetensors_lacks_are_refused():
    for dtype in set(ITEMSIZE) - set(sf.ALL_CODES):
        with pytest.raises(UnsupportedValueError, match="leave it out"):
            sf.header([("x", dtype, (1,), 0, ITEMSIZE[dtype])])


@pytest.mark.parametrize(
    "entries",
    [
        [("a", "int8", (3,), 1, 4)],
        [("a", "int8", (3,), 0, 2)],
        [("a", "int8", (3,), 0, 3), ("b", "int8", (3,), 4, 7)],
        [("a", "int8", (3,), 0, 3), ("b", "int8", (3,), 2, 5)],
        [("a", "int8", (3,), 0, 3), ("a", "int8", (3,), 3, 6)],
    ],
)
def test_gaps_overlaps_and_names_used_twice_are_bugs_of_ours(entries):
    with pytest.raises(InternalError):
        sf.header(entries, {"format": "pt"})


def test_a_short_head_says_how_much_to_read():
    header = sf.header([("a", "int8", (3,), 0, 3)])
    for length in (0, 7, 8, 100, len(header) - 1):
        with pytest.raises(NeedMoreBytes) as caught:
            sf.parse_header(header[:length], len(header) + 3)
        assert length < caught.value.num_bytes <= len(header)


GOOD = {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}
WRONG = {
    "a list": [],
    "no JSON": b"{{{{",
    "no utf-8": b"\xff\xff\xff",
    "a number as entry": {"a": 5},
    "unknown dtype": {"a": {**GOOD, "dtype": "F99"}},
    "list as dtype": {"a": {**GOOD, "dtype": []}},
    "no shape": {"a": {"dtype": "I8", "data_offsets": [0, 3]}},
    "float shape": {"a": {**GOOD, "shape": [3.0]}},
    "one offset": {"a": {**GOOD, "data_offsets": [0]}},
    "other length": {"a": {**GOOD, "data_offsets": [0, 4]}},
    "metadata list": {"__metadata__": []},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_header_that_contradicts_itself_is_damage(name):
    assert sf.parse_header(raw({"a": GOOD})).entries[0].size == (3,)
    with pytest.raises(DamagedCheckpointError):
        sf.parse_header(raw(WRONG[name]))


def test_a_header_longer_than_its_file_or_any_header_is_damage():
    header = raw({"a": GOOD})
    with pytest.raises(DamagedCheckpointError):
        sf.parse_header(header, len(header) + 2)
    with pytest.raises(DamagedCheckpointError):
        sf.parse_header(header, len(header) + 4)
    with pytest.raises(DamagedCheckpointError):
        sf.parse_header(struct.pack("<Q", 1 << 40))


@pytest.mark.parametrize(
    "text", ["[", "[]", '{"a": 5}', '{"a": {}}', '{"a": {"saved_offsets": [-1]}}']
)
def test_sharding_info_of_nonsense_is_damage(text):
    with pytest.raises(DamagedCheckpointError):
        sf.saved_offsets({"DCP_SHARDING_INFO": text})

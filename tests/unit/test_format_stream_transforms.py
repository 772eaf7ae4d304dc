"""Undoing the zstd of stock DCP's items."""

import tracemalloc

import pytest
import zstandard

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.stream_transforms import ZSTD, check_plain, unpacked_item

ITEM = b"PK\x03\x04" + bytes(range(256)) * 9000


def streamed(data):
    """As DCP writes: frames that do not tell the length of what is in them."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(
    ("stored", "layers"),
    [
        (ITEM, 0),
        (streamed(ITEM), 1),
        (zstandard.compress(ITEM), 1),
        (streamed(streamed(ITEM)), 2),
        (streamed(ITEM[:70_000]) + streamed(ITEM[70_000:]), 1),
    ],
    ids=["plain", "zstd", "zstd of told length", "zstd twice", "two frames"],
)
def test_an_item_comes_back(stored, layers, kind):
    assert bytes(unpacked_item(kind(stored), [ZSTD] * layers)) == ITEM


def test_what_metadata_does_not_call_compressed_is_not_unpacked():
    stored = streamed(ITEM)
    assert unpacked_item(stored, ()) is stored
    with pytest.raises(DamagedCheckpointError, match="28b52ffd"):
        check_plain(stored)


@pytest.mark.parametrize("stored", [b"", b"P", b"garbage", ITEM[::-1]])
def test_what_is_no_item_is_refused_with_the_way_out(stored):
    with pytest.raises(DamagedCheckpointError, match=r"torch\.save.*_extension_registry"):
        check_plain(stored)


@pytest.mark.parametrize("stored", [b"garbage", b"\x28\xb5\x2f\xfd", ITEM])
def test_what_is_not_compressed_although_it_should_be_is_refused(stored):
    with pytest.raises(DamagedCheckpointError, match="compressed with zstd"):
        unpacked_item(stored, [ZSTD])


@pytest.mark.parametrize("transforms", [["stream.mine/1"], [ZSTD, "stream.mine/1"], [""]])
def test_a_transform_of_a_plug_in_is_named_with_the_way_out(transforms):
    with pytest.raises(DamagedCheckpointError, match=r"_extension_registry") as caught:
        unpacked_item(streamed(ITEM), transforms)
    assert repr(transforms[-1]) in caught.value.message


@pytest.mark.parametrize("cut", [5, 100, -1])
def test_an_item_that_is_cut_off_is_never_taken_for_a_whole_one(cut):
    stored = streamed(ITEM)
    with pytest.raises(DamagedCheckpointError, match="compressed with zstd"):
        unpacked_item(stored[:cut], [ZSTD])


def test_an_item_that_unpacks_to_too_much_is_refused_early():
    stored = zstandard.compress(b"PK" + bytes(64 << 20))
    assert len(stored) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpointError, match="at most 1000 bytes"):
            unpacked_item(stored, [ZSTD], max_bytes=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_more_layers_than_anybody_writes_are_refused():
    with pytest.raises(DamagedCheckpointError, match="at most 4 layers"):
        unpacked_item(streamed(ITEM), [ZSTD] * 5)

"""Undoing the zstd of stock DCP's items."""

import tracemalloc

import pytest
import zstandard

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.stream_transforms import plain_item

ITEM = b"PK\x03\x04" + bytes(range(256)) * 9000


def streamed(data):
    """As DCP writes: frames that do not tell the length of what is in them."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(
    "stored",
    [
        ITEM,
        streamed(ITEM),
        zstandard.compress(ITEM),
        streamed(streamed(ITEM)),
        streamed(ITEM[:70_000]) + streamed(ITEM[70_000:]),
    ],
    ids=["plain", "zstd", "zstd of told length", "zstd twice", "two frames"],
)
def test_an_item_comes_back(stored, kind):
    assert bytes(plain_item(kind(stored))) == ITEM


def test_a_plain_item_is_not_copied():
    assert plain_item(ITEM, max_bytes=1) is ITEM


@pytest.mark.parametrize(
    "stored",
    [b"", b"P", b"garbage", streamed(b"garbage"), streamed(b""), b"\x28\xb5\x2f\xfd", ITEM[::-1]],
)
def test_what_is_no_item_is_refused_with_the_way_out(stored):
    with pytest.raises(DamagedCheckpointError, match=r"torch\.save|compressed with zstd"):
        plain_item(stored)


@pytest.mark.parametrize("cut", [5, 100, -1])
def test_an_item_that_is_cut_off_is_never_taken_for_a_whole_one(cut):
    stored = streamed(ITEM)
    try:
        found = bytes(plain_item(stored[:cut]))
    except DamagedCheckpointError:
        return
    pytest.fail(f"took {len(found)} bytes for an item of {len(ITEM)}")


def test_an_item_that_unpacks_to_too_much_is_refused_early():
    stored = zstandard.compress(b"PK" + bytes(64 << 20))
    assert len(stored) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpointError, match="at most 1000 bytes"):
            plain_item(stored, max_bytes=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_one_frame_in_another_without_end_is_refused():
    stored = ITEM
    for _ in range(9):
        stored = streamed(stored)
    with pytest.raises(DamagedCheckpointError, match="28b52ffd"):
        plain_item(stored)

import numpy as np
import pytest
import xxhash

from ray_dcp.core import checksums as cs
from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, 1024), (1, 1024), (256 * 1024, 1024), (256 * 1024 + 1, 2048), (3 << 20, 16384),
        (128 << 20, 512 << 10), ((128 << 20) + 1, 1 << 20), (1 << 50, 1 << 20),
    ],
)  # fmt: skip
def test_block_length_is_a_256th_rounded_up_to_a_power_of_two_within_bounds(num_bytes, expected):
    assert cs.block_bytes_for(num_bytes) == expected


def test_block_lengths_of_many_equal_those_of_each():
    edges = [256 << bit for bit in range(8, 32)]
    lengths = np.array([0, 1, *edges, *(e + 1 for e in edges), *(e - 1 for e in edges)])
    found = cs.block_bytes_for_many(lengths)
    assert found.tolist() == [cs.block_bytes_for(int(n)) for n in lengths]
    assert cs.num_blocks_many(lengths, found).tolist() == [
        cs.num_blocks(int(n), int(b)) for n, b in zip(lengths, found, strict=True)
    ]


@pytest.mark.parametrize("length", [0, 1, 4096, 4097, 12288, 12289])
def test_checks_are_xxh3_64_of_each_block_with_a_shorter_last_one(length):
    data = np.random.default_rng(length).bytes(length)
    expected = [xxhash.xxh3_64_intdigest(data[i : i + 4096]) for i in range(0, length, 4096)]
    found = cs.block_checks(memoryview(data), 4096)
    assert found.dtype == np.uint64
    assert found.tolist() == expected
    assert cs.first_bad_block(data, 4096, found) is None


def test_a_wrong_number_of_checks_is_damage():
    with pytest.raises(DamagedCheckpointError, match="Expected 3 checksum blocks"):
        cs.first_bad_block(bytes(8192), 4096, np.zeros(3, dtype=np.uint64))


def test_lengths_that_no_chunk_has_are_refused():
    with pytest.raises(InvalidRequestError):
        cs.block_bytes_for(-1)
    with pytest.raises(InvalidRequestError):
        cs.block_bytes_for_many(np.array([3, -1]))
    with pytest.raises(InvalidRequestError):
        cs.block_checks(b"x", 0)


def test_first_bad_block_is_the_first_of_those_that_changed():
    data = bytearray(np.random.default_rng(0).bytes(20000))
    checks = cs.block_checks(data, 4096)
    data[19999] ^= 1
    data[5000] ^= 1
    assert cs.first_bad_block(data, 4096, checks) == 1

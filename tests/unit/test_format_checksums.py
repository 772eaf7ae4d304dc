import numpy as np
import pytest
import xxhash

from ray_dcp import DamagedCheckpointError, InvalidRequestError
from ray_dcp.core import checksums as cs


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, 1024), (1, 1024), (256 * 1024, 1024), (256 * 1024 + 1, 2048), (3 << 20, 16384),
        (128 << 20, 512 << 10), ((128 << 20) + 1, 1 << 20), (1 << 50, 1 << 20),
    ],
)  # fmt: skip
def test_block_length_is_a_256th_rounded_up_to_a_power_of_two_within_bounds(num_bytes, expected):
    assert cs.block_bytes_for(num_bytes) == expected
    count = cs.num_blocks(num_bytes, expected)
    assert cs.num_blocks_many(np.array([num_bytes]), np.array([expected])).tolist() == [count]
    with pytest.raises(InvalidRequestError):
        cs.block_bytes_for(-1)


@pytest.mark.parametrize("length", [0, 1, 4096, 4097, 12288, 12289])
def test_checks_are_xxh3_64_of_each_block_with_a_shorter_last_one(length):
    data = np.random.default_rng(length).bytes(length)
    expected = [xxhash.xxh3_64_intdigest(data[i : i + 4096]) for i in range(0, length, 4096)]
    found = cs.block_checks(memoryview(data), 4096)
    assert found.dtype == np.uint64
    assert found.tolist() == expected
    assert cs.first_bad_block(data, 4096, found) is None


def test_the_first_block_that_changed_is_found_and_their_number_has_to_fit():
    data = bytearray(np.random.default_rng(0).bytes(20000))
    checks = cs.block_checks(data, 4096)
    data[19999] ^= 1
    assert cs.first_bad_block(data, 4096, checks) == 4
    data[5000] ^= 1
    assert cs.first_bad_block(data, 4096, checks) == 1
    with pytest.raises(DamagedCheckpointError, match="Expected 4 checksum blocks"):
        cs.first_bad_block(data, 4096, checks[:4])
    with pytest.raises(InvalidRequestError):
        cs.block_checks(b"x", 0)

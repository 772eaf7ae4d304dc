"""The longest checksum block is one constant: where it alone is changed, saves and loads go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from ray_dcp.core import checksums
checksums.MAX_BLOCK_BYTES = longest = int(sys.argv[1])  # before any other module reads it
checksums._BLOCKS_AIMED = 4  # so that a state of some MB has the longest block
import torch, ray_dcp
from ray_dcp.stage.stager_options import StagerOptions

def state(value):
    large = torch.full((40_000_003,), value, dtype=torch.uint8)
    return {"large": large, "object": {value}, "small": torch.full((33,), float(value))}

for call in (ray_dcp.save, ray_dcp.async_save):
    place = f"{sys.argv[2]}/{call.__name__}"
    ended = call(state(7), checkpoint_id=place)
    if call is ray_dcp.async_save:
        ended.committed()
    target = state(0)
    ray_dcp.load(target, checkpoint_id=place)
    assert all(torch.equal(target[k], state(7)[k]) for k in ("large", "small")), call
    assert target["object"] == {7}
# The shortest window that options permit has room for a block wherever it begins.
least = StagerOptions(window_bytes=2 * longest).window_bytes_within(0)
assert least >= 2 * longest
try:
    StagerOptions(window_bytes=2 * longest - 1)
except ray_dcp.InvalidRequestError:
    print(int(max(ray_dcp.open(place).table.block_bytes)))
"""


@pytest.mark.parametrize("longest", [1 << 16, 8 << 20])
def test_the_longest_block_is_changed_in_one_place(longest: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(longest), str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == longest

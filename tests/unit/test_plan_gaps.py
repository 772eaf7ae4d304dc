"""How much is read in vain between the ranges that are needed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.planning.reads import affordable_gap, coalesce

RANGES = st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 500)), min_size=1, max_size=30)


@settings(deadline=None)
@given(RANGES, st.integers(0, 50), st.integers(50, 3000), st.floats(0, 0.5))
def test_reads_in_vain_stay_within_the_share(ranges, free, longest, share):
    starts = np.cumsum([gap + length for gap, length in ranges])
    low = starts - [length for _, length in ranges]
    file = np.zeros(len(low), np.int32)
    gap = affordable_gap(file, low, starts, free_gap_bytes=free, max_gap_bytes=longest, share=share)
    assert free <= gap <= longest
    bounds = coalesce(file, low, starts, max_gap_bytes=gap, max_bytes=1 << 40)
    read = sum(int(starts[b - 1] - low[a]) for a, b in pairwise(bounds))
    needed = int((starts - low).sum())
    gaps = low[1:] - starts[:-1]
    small = int(gaps[gaps <= free].sum())
    # Equal gaps stand or fall together, so the bound may be missed by copies of the longest one.
    longest_read = gaps[(gaps > free) & (gaps <= gap)]
    copies = (
        int((longest_read == longest_read.max()).sum() * longest_read.max())
        if len(longest_read)
        else 0
    )
    assert read <= needed + small + share * needed + copies


@pytest.mark.parametrize(("share", "expected"), [(0.0, 2), (0.2, 64)])
def test_ranges_in_different_files_have_no_gap(share, expected):
    file = np.array([0, 1, 1], np.int32)
    low, high = np.array([0, 5000, 5110]), np.array([100, 5100, 5200])
    found = affordable_gap(file, low, high, free_gap_bytes=2, max_gap_bytes=64, share=share)
    assert found == expected

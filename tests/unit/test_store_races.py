"""16 committers race 50 times for one slot, on every kind of store with conditions that is here."""

from __future__ import annotations

import pytest

from tests.races import places, race_often


@pytest.mark.parametrize(
    "kind", ["local", "memory", "obstore in memory", "obstore on a disk", "fsspec, local"]
)
def test_16_committers_race_50_times_and_one_wins_each_time(kind, tmp_path):
    race_often(places(tmp_path)[kind], 16, 50)

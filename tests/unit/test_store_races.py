"""16 committers race 50 times for one slot, on every kind of store with conditions that is here."""

from __future__ import annotations

import pytest
from obstore.store import LocalStore, MemoryStore

from ray_dcp.store.location import Location
from tests.races import race_often


@pytest.mark.parametrize("kind", ["local", "memory", "obstore in memory", "obstore on a disk"])
def test_16_committers_race_50_times_and_one_wins_each_time(kind, tmp_path):
    store = LocalStore(str(tmp_path)) if kind.endswith("disk") else MemoryStore()
    places = {"local": str(tmp_path), "memory": f"memory://races-{id(store)}"}
    place = Location(places[kind]) if kind in places else Location("races", filesystem=store)
    race_often(place.__truediv__, 16, 50)

"""What Ray Data deals to ranks comes once, however many of them there are."""

from __future__ import annotations

from itertools import islice

import pytest
import ray

from ray_dcp.data import RowsSeen

# Ray Data sets options that it has deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@ray.remote(num_cpus=0)
def consume(shard, num_batches):
    """Plays a worker: goes over its part; returns ids and what would be saved."""
    rows = RowsSeen("id")
    batches = rows.follow(shard.iter_batches(batch_size=5, batch_format="numpy"))
    ids = [int(row) for batch in islice(batches, num_batches) for row in batch["id"]]
    return ids, rows.state_dict()


def test_rows_of_ray_data_come_once_across_a_resize(ray_session):
    dataset = ray.data.range(60, override_num_blocks=4)
    seen, driver = [], RowsSeen("id")
    for world_size, num_batches in ((2, 3), (1, 99)):
        shards = driver.left(dataset).streaming_split(world_size, equal=True)
        told = ray.get([consume.remote(shard, num_batches) for shard in shards])
        seen += [row for ids, _ in told for row in ids]
        own = [state["seen"] for _, state in told]
        # As a load by one rank of what several have saved.
        own[0].value = own[0].resized([each.value for each in own], 0, 1)
        driver.load_state_dict({"epoch": 0, "seen": own[0]})
    assert len(seen) == 60
    assert sorted(seen) == list(range(60))

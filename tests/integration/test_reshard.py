"""Real Ray ranks: what one layout saves, another loads, bit for bit, and reads once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

from tests.support import layouts
from tests.support.processes import eventually
from tests.support.programs import models as programs
from tests.support.servers.s3 import fresh_place

NUM_RANKS = 4

CHAINS = {
    "fsdp2 4-2-3-1-4": [("fsdp2", 4), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 1), ("fsdp2", 4)],
    "tp2xdp2-dp4-tp4": [("tp_dp", 4), ("fsdp2", 4), ("tp", 4), ("tp_dp", 4)],
    "hsdp-ddp-fsdp2": [("hsdp", 4), ("ddp", 4), ("fsdp2", 3), ("hsdp", 4)],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_a_training_state_survives_a_chain_of_layouts(ranks, tmp_path: Path, chain):
    layout, world_size = chain[0]
    ranks.resize(world_size)
    ranks.run(programs.seed_all, 7)
    ranks.run(programs.build, layout, 0)
    ranks.run(programs.train, 3)
    expected = ranks.run(programs.digests)[0]
    ranks.run(programs.save, str(tmp_path / "0"))
    for hop, (layout, world_size) in enumerate(chain[1:], start=1):
        ranks.resize(world_size)
        ranks.run(programs.seed_all, 100 + hop)
        ranks.run(programs.build, layout, 100 + hop)
        ranks.run(programs.restore, str(tmp_path / str(hop - 1)))
        for found in ranks.run(programs.digests):
            assert found == expected
        ranks.run(programs.save, str(tmp_path / str(hop)))


@pytest.mark.parametrize(("source", "target"), [(1, 4), (3, 5)])
def test_uneven_shapes_move_between_world_sizes_and_to_stock_dcp(
    ranks, tmp_path: Path, source, target
):
    ranks.resize(source)
    ranks.run(programs.save_uneven, str(tmp_path / "c"))
    ranks.resize(target)
    for wrong, needed, read in ranks.run(programs.check_uneven, str(tmp_path / "c")):
        assert wrong == []
        assert read <= 1.25 * needed
    found = {
        "a": torch.zeros(17, 5),
        "d": torch.zeros(1031, 64),
        "plain": torch.zeros(50, dtype=torch.int64),
        "scalar": torch.tensor(0.0),
        "note": {"text": ""},
    }
    stock.load(found, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert torch.equal(found["a"], torch.arange(85.0).reshape(17, 5))
    assert torch.equal(found["d"], torch.arange(1031.0 * 64).reshape(1031, 64) + 3000)
    assert torch.equal(found["plain"], torch.arange(50))
    assert found["scalar"] == 3.5
    assert found["note"] == {"text": "hello"}


UNIQUE = sum(4 * rows * columns for rows, columns in layouts.SHAPES)


def test_four_ranks_take_columns_from_a_two_dimensional_layout(ranks, tmp_path: Path):
    ranks.resize(4)
    ranks.run(layouts.save_layout, str(tmp_path), "2-D")
    for found in ranks.run(layouts.load_layout, str(tmp_path), "column"):
        assert found.wrong == []
        assert found.read <= 1.05 * UNIQUE
        assert found.instead == 0


def test_replicas_read_each_byte_once_and_get_the_rest_from_each_other(ranks, tmp_path: Path):
    ranks.resize(4)
    ranks.run(layouts.save_layout, str(tmp_path), "row")
    for found in ranks.run(layouts.load_layout, str(tmp_path), "replicated"):
        assert found.wrong == []
        assert found.needed == 4 * UNIQUE
        assert UNIQUE <= found.read <= 1.05 * UNIQUE
        assert found.from_peers >= 2.9 * UNIQUE
        assert found.instead == 0


@pytest.mark.parametrize("does", ["refuses", "says nothing"])
def test_what_a_rank_does_not_hand_on_the_others_read_themselves(ranks, tmp_path: Path, does):
    ranks.resize(3)
    ranks.run(layouts.save_layout, str(tmp_path / "c"), "row")
    for found in ranks.run(layouts.load_while_one, str(tmp_path / "c"), str(tmp_path), 0, does):
        assert found is not None, [p.read_text() for p in tmp_path.glob("?") if p.is_file()]
        assert found.wrong == []
        assert found.instead > 0
        assert found.read >= UNIQUE + found.instead - UNIQUE // 100


def test_a_store_far_away_is_read_once_without_being_asked(ranks, server):
    ranks.resize(3)
    place = fresh_place(server)
    ranks.run(layouts.save_layout, place, "column")
    for found in ranks.run(layouts.load_layout, place, "replicated", "auto"):
        assert found.wrong == []
        assert found.read <= 1.05 * UNIQUE
        assert found.from_peers >= 1.9 * UNIQUE


def test_a_reader_that_is_killed_is_named_and_the_next_load_works(ranks, tmp_path: Path):
    ranks.resize(3)
    ranks.run(layouts.save_layout, str(tmp_path / "c"), "row")
    with pytest.raises(Exception, match="rank 1"):
        ranks.run(layouts.load_while_one, str(tmp_path / "c"), str(tmp_path), 1, "dies")
    for rank in (0, 2):
        assert eventually((tmp_path / str(rank)).exists)
        assert (tmp_path / str(rank)).read_text() == "ParticipantError 1"
    ranks.resize(2)
    for found in ranks.run(layouts.load_layout, str(tmp_path / "c"), "replicated"):
        assert (found.wrong, found.instead) == ([], 0)


def test_a_disk_behind_one_page_cache_is_read_by_each_unless_asked(ranks, tmp_path: Path):
    ranks.resize(2)
    ranks.resize(4)
    ranks.run(layouts.save_layout, str(tmp_path), "row")
    for found in ranks.run(layouts.load_layout, str(tmp_path), "replicated", "auto"):
        assert (found.wrong, found.from_peers) == ([], 0)
        assert found.read >= 2 * UNIQUE

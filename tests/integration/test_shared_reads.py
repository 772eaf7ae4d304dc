"""Real Ray ranks read once what several of them need, and none hangs on another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import layouts
from tests.support.processes import eventually
from tests.support.servers.s3 import fresh_place

# Why four first: it only ever gets smaller, and starts each process once.
NUM_RANKS = 4

UNIQUE = sum(4 * rows * columns for rows, columns in layouts.SHAPES)


def test_four_ranks_take_columns_from_a_two_dimensional_layout(ranks, tmp_path: Path):
    ranks.run(layouts.save_layout, str(tmp_path), "2-D")
    for found in ranks.run(layouts.load_layout, str(tmp_path), "column"):
        assert found.wrong == []
        assert found.read <= 1.05 * UNIQUE
        assert found.instead == 0


def test_replicas_read_each_byte_once_and_get_the_rest_from_each_other(ranks, tmp_path: Path):
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
    ranks.run(layouts.save_layout, str(tmp_path), "row")
    for found in ranks.run(layouts.load_layout, str(tmp_path), "replicated", "auto"):
        assert (found.wrong, found.from_peers) == ([], 0)
        assert found.read >= 2 * UNIQUE

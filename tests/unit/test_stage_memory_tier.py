"""What stays in memory is what was written, goes when it should, and is never taken for more."""

from __future__ import annotations

import numpy as np
import pytest

from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.stage.memory_tier import TierFile, cut, too_many
from ray_dcp.stage.values import Slot
from tests.polling import eventually
from tests.staged import MIB, share
from tests.unit.test_stage_write_queue import MIXED, Node

KEEP = SaveOptions(keep_in_memory=1)


def save(node, path, name, seed=0, options=KEEP, sizes=(3 * MIB,), objects=()):
    """Stages and writes a share; returns its rank and what it was."""
    what = share(list(sizes), list(objects), seed=seed)
    rank = node.rank(what, Target(str(path / name)), save=name, options=options)
    rank.stage()
    return rank, what


def kept(node, rank):
    return node.queue.kept(rank.order.key.attempt)


def test_every_byte_of_a_payload_is_found_as_it_lies_in_its_file(tmp_path):
    node = Node(40)
    rank, _ = save(node, tmp_path, "c", sizes=MIXED * 3, objects=[b"pickled", bytes(3 * MIB)])
    assert eventually(lambda: kept(node, rank) is not None)
    found = kept(node, rank)
    assert found.address == node.arena.address
    num_bytes = 0
    for file in found.files:
        stored = np.frombuffer((tmp_path / "c" / file.key).read_bytes(), dtype=np.uint8)
        for start, length in zip(file.start.tolist(), file.num_bytes.tolist(), strict=True):
            got = node.queue.fetch(file.find(start, length))
            assert np.array_equal(got, stored[start : start + length])
            num_bytes += length
        ends = file.start + file.num_bytes
        assert file.find(int(ends[-1]) - 1, 2) is None
        assert file.find(int(file.start[0]) - 1, 2) is None
        whole = file.find(int(file.start[0]), int(ends[-1] - file.start[0]))
        assert sum(part.num_bytes for part in whole) == ends[-1] - file.start[0]
    assert num_bytes == node.queue.progress(rank.order.key).num_bytes


def test_without_the_option_nothing_stays(tmp_path):
    node = Node(8)
    rank, _ = save(node, tmp_path, "c", options=SaveOptions())
    assert node.idle()
    assert kept(node, rank) is None


def test_the_next_committed_one_takes_its_place_and_not_one_that_failed(tmp_path):
    node = Node(20)
    ranks = []
    for number, committed in enumerate([True, False, True]):
        what = share([3 * MIB], seed=number)
        rank = node.rank(
            what, Target(str(tmp_path / f"c{number}")), save=f"s{number}", options=KEEP
        )
        object.__setattr__(rank.order.key, "attempt", f"a{number}")
        rank.stage()
        assert eventually(lambda: kept(node, rank) is not None)  # noqa: B023
        assert node.queue.in_flight(str(tmp_path))[-1].is_written
        node.queue.release(rank.order.key, committed=committed)
        assert not node.queue.in_flight(str(tmp_path))
        ranks.append(rank)
        if number == 1:
            assert kept(node, ranks[0])
            assert kept(node, rank) is None
    assert node.queue.kept_attempts() == {"a2"}
    assert node.queue.num_active() == 0


def test_an_outcome_that_comes_before_the_answer_to_the_last_report_loses_nothing(tmp_path):
    node = Node(20)
    for options in (KEEP, SaveOptions()):
        node.may_report.clear()
        rank, _ = save(node, tmp_path, f"c{options.keep_in_memory}", options=options)
        key = rank.order.key
        assert eventually(lambda: node.queue.progress(key).reports)  # noqa: B023
        node.queue.release(key, committed=True)
        assert node.queue.progress(key) is not None
        assert not node.queue.in_flight(str(tmp_path))
        node.may_report.set()
        if options is KEEP:
            assert eventually(lambda: kept(node, rank) is not None)  # noqa: B023
            assert node.queue.progress(key).reports[0].receipt
        else:
            assert eventually(lambda: node.queue.progress(key) is None)  # noqa: B023


def test_what_another_save_needs_is_given_up_and_noticed_by_who_reads(tmp_path):
    node = Node(2)
    rank, _ = save(node, tmp_path, "c")
    assert eventually(lambda: kept(node, rank) is not None)
    file = kept(node, rank).files[0]
    parts = file.find(int(file.start[0]), int(file.num_bytes[0]))
    assert node.queue.fetch(parts) is not None
    save(node, tmp_path, "d", seed=1, options=SaveOptions())
    assert node.idle()
    assert node.queue.fetch(parts) is None
    assert kept(node, rank) is None


def test_only_saves_to_the_place_itself_or_below_are_in_flight(tmp_path):
    node = Node(8)
    what = share([3 * MIB])
    rank = node.rank(what, Target(str(tmp_path / "run" / "c")), options=KEEP).begin()
    for place, found in [("run/c", 1), ("run", 1), ("run/", 1), ("ru", 0), ("run/c/d", 0)]:
        assert len(node.queue.in_flight(f"{tmp_path}/{place}")) == found
    assert not node.queue.in_flight(str(tmp_path))[0].is_written
    node.queue.cancel(rank.order.key, by_rank=True)
    assert node.queue.in_flight(str(tmp_path)) == []


@pytest.mark.parametrize(("keep", "gone"), [(1, {"a", "b", "c"}), (2, {"a", "b"}), (3, {"b"})])
def test_the_last_committed_ones_stay_and_what_came_after_them(keep, gone):
    committed = {"a": True, "b": False, "c": True, "d": True, "e": False}
    seen = [("run", name, keep, is_committed) for name, is_committed in committed.items()]
    assert too_many(seen) == gone


def test_a_read_that_begins_between_two_runs_is_not_served():
    runs = np.array([[100, 170], [64, 36], [0, 64]])
    file = TierFile("x", *runs, (Slot(7, 1), Slot(7, 1)))
    for start, length in ((164, 1), (164, 10), (165, 5), (206, 1), (99, 2)):
        assert file.find(start, length) is None
    assert [part.num_bytes for part in file.find(163, 8)] == [1, 6, 1]
    assert [part.num_bytes for part in cut(file.find(163, 8), 0, 2)] == [1, 1]
    assert cut([], 0, 5) == []

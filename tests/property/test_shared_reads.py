"""What several ranks need is read once, comes to each of them whole, and within the budget."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.io import read_jobs
from ray_dcp.io.reader import prepare_reads, read_prepared
from ray_dcp.io.shared_read import SharedReadStorage
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Ranges, ShareCost, merged, plan_reads, share_reads
from ray_dcp.store.storage import ReadTraits
from tests.layout_cases import LAYOUTS, Counting, boxes_of, wanted_of, written
from tests.plan_cases import box_bytes
from tests.thread_peers import Board, ThreadExchange
from tests.unit.io_cases import Sink


def ranges_of(rows: list[tuple[int, int, int]]) -> Ranges:
    columns = np.array(rows, np.int64).reshape(-1, 3)
    return merged(columns[:, 0].astype(np.int32), columns[:, 1], columns[:, 1] + columns[:, 2])


some_ranges = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 25)), max_size=6
).map(ranges_of)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12)), max_size=12)
)
def test_merged_ranges_cover_the_same_bytes_once(rows):
    found = ranges_of(rows)
    covered = {(file, at) for file, low, n in rows for at in range(low, low + n)}
    listed = [
        (file, at)
        for file, low, high in zip(*(c.tolist() for c in (found.file, found.low, found.high)),
                                   strict=True)
        for at in range(low, high)
    ]  # fmt: skip
    assert listed == sorted(covered)
    ends = set(zip(found.file.tolist(), found.high.tolist(), strict=True))
    assert not ends & set(zip(found.file.tolist(), found.low.tolist(), strict=True))


@settings(max_examples=80, deadline=None)
@given(
    needs=st.dictionaries(st.integers(0, 5), some_ranges, max_size=6),
    unit_bytes=st.integers(1, 40),
    min_saved=st.integers(1, 30),
    twins=st.booleans(),
)
def test_a_unit_has_one_reader_who_needs_it_and_goes_to_all_who_do(
    needs, unit_bytes, min_saved, twins
):
    if twins and 0 in needs:
        needs[5] = needs[0]
    shares = share_reads(needs, world_size=6, unit_bytes=unit_bytes, min_saved_bytes=min_saved)
    bytes_of = {
        rank: {
            (file, at)
            for file, low, high in zip(r.file.tolist(), r.low.tolist(), r.high.tolist(),
                                       strict=True)
            for at in range(low, high)
        }
        for rank, r in needs.items()
    }  # fmt: skip
    holders: dict[int, list[int]] = {}
    for rank in range(6):
        part = shares.of_rank(rank)
        for row in range(len(part)):
            holders.setdefault(int(part.unit[row]), []).append(rank)
    seen: Counter[tuple[int, int]] = Counter()
    event(f"units: {min(len(shares), 5)}")
    for unit in range(len(shares)):
        low, high = int(shares.low[unit]), int(shares.high[unit])
        assert 0 < high - low <= unit_bytes
        own = {(int(shares.file[unit]), at) for at in range(low, high)}
        seen.update(own)
        need = [rank for rank, wanted in bytes_of.items() if wanted & own]
        assert sorted(holders[unit]) == sorted(need)
        assert int(shares.reader[unit]) in need
        part = shares.of_rank(need[0])
        assert int(part.ranks[part.unit.tolist().index(unit)]) == len(need) > 1
        saved = sum(len(bytes_of[rank] & own) for rank in need) - len(own)
        assert saved >= min_saved
        assert own <= set().union(*(bytes_of[rank] for rank in need))
    assert all(count == 1 for count in seen.values())
    places = list(zip(shares.file.tolist(), shares.low.tolist(), strict=True))
    assert places == sorted(places)


def test_readers_carry_equal_loads_and_equal_needs_are_looked_at_once():
    whole = ranges_of([(0, 0, 6400), (1, 0, 6400)])
    shares = share_reads(dict.fromkeys(range(64), whole), world_size=64, unit_bytes=100)
    assert len(shares) == 0  # 100 bytes for 64 ranks are not worth 64 messages
    shares = share_reads(
        dict.fromkeys(range(64), whole), world_size=64, unit_bytes=100, min_saved_bytes=1
    )
    assert np.bincount(shares.reader, minlength=64).tolist() == [2] * 64
    assert len(shares.group) == len(shares)


def test_who_reads_much_for_itself_reads_less_for_others():
    both = (0, 0, 1000)
    needs = {0: ranges_of([both, (1, 0, 1000)]), 1: ranges_of([both])}
    shares = share_reads(needs, world_size=2, unit_bytes=100, min_saved_bytes=1)
    assert np.bincount(shares.reader, minlength=2).tolist() == [0, 10]


def test_a_store_that_is_far_away_is_read_once_and_a_cached_disk_is_not():
    needs = dict.fromkeys(range(8), ranges_of([(0, 0, 64 << 20)]))
    far = ShareCost(request_s=0.03, bytes_per_s=1e8, cached=False)
    disk = ShareCost(request_s=20e-6, bytes_per_s=3e9, cached=True)
    nfs = ShareCost(request_s=1e-3, bytes_per_s=250e6, cached=True)
    two_nodes = ["a"] * 4 + ["b"] * 4
    assert len(share_reads(needs, world_size=8, cost=far)) == 4
    assert len(share_reads(needs, world_size=8, cost=disk)) == 0
    assert len(share_reads(needs, world_size=8, cost=nfs)) == 0
    assert len(share_reads(needs, world_size=8, cost=nfs, nodes=two_nodes)) == 4


# The whole of it, with threads as ranks.


@st.composite
def layouts(draw):
    source, target = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(LAYOUTS))
    writers, readers = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    shapes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1,
                           max_size=3))  # fmt: skip
    return source, target, writers, readers, shapes


@settings(max_examples=30, deadline=None)
@given(
    case=layouts(),
    unit_bytes=st.sampled_from([64, 500, 4096]),
    budget_bytes=st.sampled_from([1, 600, 1 << 20]),
    trouble=st.sampled_from(["none", "refused", "lost"]),
    seed=st.integers(0, 3),
)
def test_ranks_that_share_reads_get_what_each_would_read_alone(
    case, unit_bytes, budget_bytes, trouble, seed
):
    source, target, writers, readers, shapes = case
    table, files, expected = written(source, writers, shapes)
    storage = Counting(files)
    options = LoadOptions(num_threads=2)
    ranks = []
    for rank in range(readers):
        boxes = [boxes_of(target, shape, rank, readers) for shape in shapes]
        wanted = wanted_of(boxes)
        plan = plan_reads(table, wanted)
        prepared = prepare_reads(storage, table, plan, wanted, options=options)
        sink = Sink((wanted.size.prod(axis=1) * 4).tolist())
        ranks.append((prepared, sink, boxes))
    needs = {rank: merged(*prepared.reads()) for rank, (prepared, _, _) in enumerate(ranks)}
    shares = share_reads(needs, world_size=readers, unit_bytes=unit_bytes, min_saved_bytes=1)
    board = Board()

    def bad(unit: int) -> bool:
        return (unit + seed) % 3 == 0

    relays = {}
    for rank, (prepared, _, _) in enumerate(ranks):
        share = shares.of_rank(rank)
        if len(share):
            exchange = ThreadExchange(
                board, rank,
                refuses=bad if trouble == "refused" else lambda _: False,
                loses=bad if trouble == "lost" else lambda _: False,
            )  # fmt: skip
            relays[rank] = SharedReadStorage(
                storage, table.files, share, rank, prepared.reads(), exchange,
                budget_bytes=budget_bytes, num_threads=2,
            )  # fmt: skip
    errors: list[BaseException] = []

    def load(rank: int) -> None:
        prepared, sink, _ = ranks[rank]
        try:
            if rank not in relays:
                read_prepared(storage, prepared, sink, options=options)
                return
            relays[rank].start()
            read_prepared(relays[rank], prepared, sink, options=options)
            relays[rank].finish()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=load, args=(rank,)) for rank in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive(), "a rank waits for ever"
    assert errors == []
    for _, sink, boxes in ranks:
        for row, (low, size) in enumerate(boxes):
            assert bytes(sink.buffers[row]) == box_bytes(expected[row], low, size).tobytes()
    event(f"{trouble}, {min(len(shares), 4)} units")
    if trouble == "none":
        for unit in range(len(shares)):
            asked = storage.asked[table.files[shares.file[unit]]]
            assert set(asked[shares.low[unit] : shares.high[unit]].tolist()) == {1}
        assert all(relay.bytes_instead == 0 for relay in relays.values())
        everything = sum(int((asked > 0).sum()) for asked in storage.asked.values())
        total = sum(int(asked.sum()) for asked in storage.asked.values())
        assert total == everything  # each byte that anybody needs was asked for once
    if trouble == "lost" and any(len(shares.of_rank(rank)) for rank in relays):
        lost = [u for u in range(len(shares)) if bad(u)]
        assert (sum(relay.bytes_instead for relay in relays.values()) > 0) == bool(lost)
    longest = int((shares.high - shares.low).max(initial=0))
    assert all(most <= max(budget_bytes, longest) for most in board.most_bytes.values())
    assert board.handover.num_there == 0


@settings(max_examples=30, deadline=None)
@given(
    case=layouts(),
    gap=st.sampled_from([0, 64, 1 << 16]),
    scratch=st.sampled_from([64, 4096]),
    direct=st.sampled_from([1, 1 << 18]),
    verify=st.sampled_from(["always", "never"]),
)
def test_what_a_rank_says_it_will_read_is_what_it_reads(case, gap, scratch, direct, verify):
    source, target, writers, readers, shapes = case
    table, files, _ = written(source, writers, shapes)
    options = LoadOptions(num_threads=1, verify=verify)
    storage = Counting(files)
    storage.read_traits = ReadTraits(request_s=gap / 1e6, bytes_per_s=1e6)
    for rank in range(readers):
        boxes = [boxes_of(target, shape, rank, readers) for shape in shapes]
        wanted = wanted_of(boxes)
        storage.ranges.clear()
        plan = plan_reads(table, wanted)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(read_jobs, "DIRECT_BYTES", direct)
            patched.setattr(read_jobs, "SLICE_BYTES", 2 * direct)
            patched.setattr(read_jobs, "FREE_GAP_BYTES", 0)
            patched.setattr(read_jobs, "SCRATCH_BYTES", scratch)
            prepared = prepare_reads(storage, table, plan, wanted, options=options)
        sink = Sink((wanted.size.prod(axis=1) * 4).tolist())
        read_prepared(storage, prepared, sink, options=options)
        said = Counter(
            (table.files[file], at)
            for file, low, high in zip(*(c.tolist() for c in prepared.reads()), strict=True)
            for at in range(low, high)
        )
        done = Counter((key, at) for key, low, high in storage.ranges for at in range(low, high))
        assert said == done

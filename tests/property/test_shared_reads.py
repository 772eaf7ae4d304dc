"""What several ranks need is read once, comes to each of them whole, and few units at a time."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.commit_protocol.messages import pack_receipts
from ray_dcp.core.checksums import block_checks
from ray_dcp.core.values import Kind
from ray_dcp.io.reader import prepare_reads, read_prepared
from ray_dcp.io.shared_read import SharedReadStorage
from ray_dcp.options import LoadOptions
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.reads import Ranges, ShareCost, Wanted, merged, plan_reads, share_reads
from ray_dcp.store.memory import MemoryStorage
from tests.support.plan_cases import Case, Piece, Tensor, box_bytes, finish_table, truth, write
from tests.support.threads import Board, ThreadExchange
from tests.unit.io_cases import Sink

# --- Tensors in parallel layouts ------------------------------------------------------------------


LAYOUTS = ("row", "column", "2-D", "replicated")


def boxes_of(layout: str, shape: tuple[int, ...], rank: int, world_size: int):
    """Returns the part of a two-dimensional tensor that a rank wants."""
    rows, columns = {
        "row": (world_size, 1), "column": (1, world_size), "replicated": (1, 1),
        "2-D": (2, world_size // 2) if world_size % 2 == 0 else (1, world_size),
    }[layout]  # fmt: skip
    place = divmod(rank % (rows * columns), columns)
    bounds = [
        [length * index // parts for index in range(parts + 1)]
        for length, parts in zip(shape, (rows, columns), strict=True)
    ]
    low = [bound[at] for bound, at in zip(bounds, place, strict=True)]
    high = [bound[at + 1] for bound, at in zip(bounds, place, strict=True)]
    return low, [b - a for a, b in zip(low, high, strict=True)]


class Counting(MemoryStorage):
    """Counts how often each byte was asked for."""

    def __init__(self, files: dict[str, bytearray]) -> None:
        super().__init__("read-once")
        self.files = files
        self.asked = {key: np.zeros(len(data), np.int32) for key, data in files.items()}
        self.ranges: list[tuple[str, int, int]] = []
        self._counting = threading.Lock()

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        target[:] = memoryview(self.files[key])[start : start + len(target)]
        with self._counting:
            self.asked[key][start : start + len(target)] += 1
            self.ranges.append((key, start, start + len(target)))


def written(source: str, writers: int, shapes):
    """Returns the chunk table and files of tensors that ranks hold in a layout, and the values."""
    tensors = []
    for number, shape in enumerate(shapes):
        holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for rank in range(writers):
            low, size = boxes_of(source, shape, rank, writers)
            holders.setdefault((tuple(low), tuple(size)), []).append(rank)
        pieces = [Piece(low, size, tuple(ranks)) for (low, size), ranks in holders.items()]
        tensors.append(Tensor(f"t{number}", Kind.TENSOR, "float32", shape, True, tuple(pieces)))
    case = Case(writers, tuple(tensors))
    columns = case.columns()
    plan = make_plan(columns, part_bytes=1 << 30, min_piece_bytes=1)
    files, receipts = write(case, columns, plan, "a1")
    table = _with_checks(finish_table(plan, "a1", pack_receipts(receipts.values())), files)
    assert table.names == tuple(tensor.fqn for tensor in tensors)
    return table, files, [truth(tensor) for tensor in tensors]


def _with_checks(table, files):
    """Returns the table with the checksums that a load takes from the ends of the files."""
    checks = []
    for chunk in range(len(table.file)):
        start = int(table.payload_offset[chunk])
        payload = files[table.files[table.file[chunk]]][start:][: int(table.payload_bytes[chunk])]
        checks.append(block_checks(payload, int(table.block_bytes[chunk])))
    starts = np.cumsum([0, *(len(one) for one in checks)]).astype(np.int64)
    return replace(table, check_start=starts, checks=np.concatenate(checks))


def wanted_of(boxes) -> Wanted:
    return Wanted(
        np.arange(len(boxes), dtype=np.int32),
        np.array([low for low, _ in boxes], np.int64),
        np.array([size for _, size in boxes], np.int64),
        np.full(len(boxes), 4),
    )


# --- Sharing --------------------------------------------------------------------------------------


def ranges_of(rows: list[tuple[int, int, int]]) -> Ranges:
    columns = np.array(rows, np.int64).reshape(-1, 3)
    return merged(columns[:, 0].astype(np.int32), columns[:, 1], columns[:, 1] + columns[:, 2])


some_ranges = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 25)), max_size=6
).map(ranges_of)


@settings(max_examples=80)
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


@settings(max_examples=30)
@given(
    case=layouts(),
    unit_bytes=st.sampled_from([64, 500, 4096]),
    most_units=st.sampled_from([1, 2, 100]),
    trouble=st.sampled_from(["none", "refused", "lost"]),
    seed=st.integers(0, 3),
)
def test_ranks_that_share_reads_get_what_each_would_read_alone(
    case, unit_bytes, most_units, trouble, seed
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
                most_units=most_units,
            )  # fmt: skip
            relays[rank] = SharedReadStorage(
                storage, table.files, share, rank, prepared.reads(), exchange,
                num_threads=2,
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
    # Each of two threads may have asked for room before the other offered.
    assert all(most <= most_units + 1 for most in board.most.values())
    assert set(board.states()) <= {"gone"}

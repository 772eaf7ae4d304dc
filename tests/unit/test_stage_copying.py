"""Memory is copied whole, whoever takes part; staged tensors are what a synchronous save writes."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_dcp.errors import InternalError
from ray_dcp.io.writer import write_part
from ray_dcp.options import SaveOptions
from ray_dcp.planning.global_plan import make_plan, rank_plan
from ray_dcp.protocol.messages import Target
from ray_dcp.stage import copying
from ray_dcp.stage.allocator import SlotAllocator
from ray_dcp.stage.copying import HostFiller, copy_all, fill_window
from ray_dcp.stage.memory import StagingMemory
from ray_dcp.stage.values import StageKey, StagerOptions
from ray_dcp.stage.windows import lay_out_windows
from ray_dcp.stage.write_queue import Channel, WriteQueue
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.capture import capture
from tests.polling import eventually
from tests.staged import MIB, Rank, Share, same_files, share

SLOT = 2 * MIB


def state() -> dict[str, object]:
    """Returns tensors of many kinds; some share their memory."""
    base = torch.arange(3 << 20, dtype=torch.int32)
    tied = torch.randn(700, 500)
    return {
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "fp8": torch.arange(100, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "bf16": torch.randn(300, 700).bfloat16(),
        "half": torch.randn(33).half(),
        "complex": torch.randn(64, 3, dtype=torch.complex64),
        "complex_conj": torch.randn(5000, 3, dtype=torch.complex128).conj(),
        "empty": torch.zeros(0, 7),
        "transposed": torch.randn(800, 900).t(),
        "strided": base[::2],
        "whole": base,
        "slice": base[10:100_000],
        "tied_a": tied,
        "tied_b": tied,
        "grad": torch.randn(40, 40, requires_grad=True),
        "many": [torch.full((n % 7,), n, dtype=torch.int64) for n in range(300)],
        "step": 10,
        "note": {"text": "hello", "items": [1, 2, {"a"}]},
    }


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_every_kind_of_tensor_is_staged_as_it_is_written(container, tmp_path: Path):
    tensors = state()
    captured = capture(tensors, rank=0, world_size=1)
    plan = make_plan([captured.columns], container=container, part_bytes=6 * MIB)
    what = Share(captured, rank_plan(plan, 0), 0)
    places = Target(str(tmp_path / "staged")), Target(str(tmp_path / "rank"))
    write_part(
        open_storage(places[1]), what.plan, "a1",
        source=captured.source, deferred=captured.deferred, options=SaveOptions(),
    )  # fmt: skip
    arena = StagingMemory.create(6, SLOT)
    channel = Channel(SLOT, SlotAllocator(6), arena)
    reports = []
    queue = WriteQueue(
        {"arena": channel}, StagerOptions(), lambda _, report: reports.append(report)
    )
    rank = Rank(queue, channel, what, what.order(StageKey("s", 0, "a1"), places[0], SLOT))
    rank.stage()
    for value in tensors.values():
        if isinstance(value, torch.Tensor) and not value.requires_grad and value.numel():
            value.zero_()
    assert eventually(lambda: len(reports) == len(what.plan.files))
    assert not [report.error for report in reports if report.error]
    assert same_files(*places)


def filled(what: Share, filler) -> list[bytes]:
    lengths = [[len(what.items.deferred(r)) for r in f.deferred.tolist()] for f in what.plan.files]
    layout = lay_out_windows(what.plan, lengths, SLOT)
    windows = []
    for window in range(layout.num_windows):
        into = np.zeros(layout.used_bytes[window], np.uint8)
        fill_window(layout, window, into, filler, what.items.deferred)
        windows.append(into.tobytes())
    return windows


class Noting(HostFiller):
    """Notes what it is asked for."""

    def __init__(self, source) -> None:
        super().__init__(source)
        self.asked: list[object] = []

    def fill(self, row, start, target) -> None:
        self.asked.append((row, start, len(target)))
        super().fill(row, start, target)

    def fill_many(self, rows, starts, lengths, target) -> None:
        self.asked.append(len(rows))
        super().fill_many(rows, starts, lengths, target)

    def finish(self) -> None:
        self.asked.append("finish")


def test_small_items_are_asked_for_together_and_each_window_is_finished():
    what = share([1000] * 50 + [3 * MIB])
    filler = Noting(what.items.source)
    filled(what, filler)
    assert filler.asked[:1] == [50]
    assert filler.asked.count("finish") == 2
    assert sum(one[2] for one in filler.asked if isinstance(one, tuple)) == 3 * MIB


def test_a_source_that_gives_many_at_once_is_asked_so():
    what = share([1000] * 50)
    plain = filled(what, HostFiller(what.items.source))

    class Many:
        asked = 0

        def __call__(self, row):
            raise AssertionError("asked for one")

        def many(self, rows):
            self.asked += len(rows)
            return [what.items.source(row) for row in rows]

    many = Many()
    assert filled(what, HostFiller(many)) == plain
    assert many.asked == 50


def test_an_item_in_several_windows_is_asked_for_once():
    what = share([7 * MIB])
    asked = []

    def source(row):
        asked.append(row)
        return what.items.source(row)

    filled(what, HostFiller(source))
    assert asked == [0]


def test_items_of_another_length_than_planned_are_refused():
    what = share([1000, 1000])
    short = HostFiller(lambda row: what.items.source(row)[:999])
    with pytest.raises(InternalError, match="2000 bytes in 2 items"):
        filled(what, short)
    with pytest.raises(InternalError, match="row 0"):
        filled(share([100_000]), HostFiller(lambda row: memoryview(bytes(99_999))))


def test_parts_of_small_items_are_cut_out():
    filler = HostFiller(lambda row: memoryview(bytes(range(row, row + 10))))
    into = np.zeros(5, np.uint8)
    filler.fill_many([0, 100], [2, 0], [3, 2], into)
    assert into.tolist() == [2, 3, 4, 100, 101]
    filler.fill_many([0, 100], [0, 0], [3, 2], into)
    assert into.tolist() == [0, 1, 2, 100, 101]


def test_not_all_large_items_wait_for_the_end_of_a_window(monkeypatch):
    monkeypatch.setattr("ray_dcp.stage.copying._MOST_BEGUN_BYTES", 2 * MIB)
    filler = HostFiller(lambda row: memoryview(bytes([row]) * MIB))
    into = np.zeros((3, MIB), np.uint8)
    for place, row in enumerate((7, 1, 2)):
        filler.fill(row, 0, into[place])
    assert into[:, -1].tolist() == [7, 1, 0]
    filler.finish()
    assert into[:, -1].tolist() == [7, 1, 2]


# copies


def pairs(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(3)
    return [
        (np.zeros(length, np.uint8), random.integers(1, 256, length, dtype=np.uint8))
        for length in lengths
    ]


@pytest.mark.parametrize("num_threads", [None, 1, 3, 99])
def test_every_byte_of_every_length_is_copied(num_threads):
    given = pairs(0, 1, 9 * MIB + 5, 4 * MIB, 3, *range(200))
    copy_all(iter(given), num_threads)
    assert all(np.array_equal(into, found) for into, found in given)


def test_nothing_to_copy_is_fine():
    copy_all([])


def test_other_threads_take_part(monkeypatch):
    """The caller's own thread can't go on before another one has copied something."""
    real, seen, helped = np.copyto, set(), threading.Event()

    def copyto(*pair):
        seen.add(threading.get_ident())
        if threading.get_ident() == caller:
            assert helped.wait(180)
        else:
            helped.set()
        real(*pair)

    caller = threading.get_ident()
    monkeypatch.setattr(copying.np, "copyto", copyto)
    given = pairs(20 * MIB)
    copy_all(given, 2)
    assert len(seen) == 2
    assert np.array_equal(*given[0])


def test_it_returns_only_when_the_others_have_ended(monkeypatch):
    real, begun, go = np.copyto, threading.Event(), threading.Event()

    def copyto(*pair):
        if threading.get_ident() != caller:
            begun.set()
            assert go.wait(180)
        elif not begun.wait(180):
            raise AssertionError("nobody helps")
        elif not left:
            go.set()
        else:
            left.pop()
        real(*pair)

    caller, left = threading.get_ident(), [None]
    monkeypatch.setattr(copying.np, "copyto", copyto)
    given = pairs(12 * MIB)
    copy_all(given, 2)
    assert np.array_equal(*given[0])


def test_without_other_threads_the_caller_does_all(monkeypatch):
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr(copying, "_helpers", ended)
    given = pairs(20 * MIB)
    copy_all(given, 4)
    assert np.array_equal(*given[0])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_lengths_that_differ_are_an_error(num_threads):
    into, found = np.zeros(9 * MIB, np.uint8), np.ones(9 * MIB - 1, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        copy_all([(into, found)], num_threads)


def test_who_is_interrupted_leaves_nobody_who_goes_on_copying(monkeypatch):
    """The caller may use the memory for something else then."""
    begun, interrupted, copied = threading.Event(), threading.Event(), []

    def copyto(*pair):
        if threading.get_ident() == caller:
            assert begun.wait(180)
            interrupted.set()
            raise KeyboardInterrupt
        copied.append(pair)
        begun.set()
        assert interrupted.wait(180)

    caller = threading.get_ident()
    monkeypatch.setattr(copying.np, "copyto", copyto)
    monkeypatch.setattr(copying, "deque", SlowToEmpty)
    with pytest.raises(KeyboardInterrupt):
        copy_all(pairs(40 * MIB), 2)
    assert len(copied) == 1


class SlowToEmpty(deque):
    """Gives nothing more once it was asked by two threads, until it is empty."""

    def popleft(self):
        if len(self) < 9:
            assert eventually(lambda: not self)
        return super().popleft()

"""A rank reports windows whose bytes are there, and gives memory up when nothing moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.stage import transfer as stage_transfer
from ray_dcp.stage.orders import Grant, StageKey
from ray_dcp.stage.staged_memory import PrivateMemory
from ray_dcp.stage.transfer import transfer
from ray_dcp.stage.window_filling import HostFiller, copying_threads, fill_window, window_parts
from ray_dcp.stage.windows import lay_out_windows
from ray_dcp.torch_adapter.capture import TensorBytes
from ray_dcp.torch_adapter.devices import DeviceFiller, Moment
from tests.gpu.played import Played
from tests.support.staging import MIB, Share, share

SLOT = 2 * MIB
KEY = StageKey("s", 0, "a1")


class Stager:
    """The link to a stager that has room for a few windows more each time, and keeps what came."""

    stager = "played"
    window_bytes = SLOT

    def __init__(self, driver: Played, at_once: int) -> None:
        self.known_plans: set[bytes] = set()
        self.calls: list[tuple[str, int]] = []
        self.windows: dict[int, bytes] = {}
        self._driver = driver
        self._at_once = at_once
        self._granted = 0

    def call(self, method: str, *arguments: Any, **_: Any) -> Any:
        self.calls.append((method, self._driver.num_under_way))
        if method in ("deliver", "seal"):
            self.windows.update(arguments[1])
            return None
        self._granted += self._at_once
        return Grant(self._granted)

    def post(self, method: str, *_: Any) -> None:
        self.calls.append((method, self._driver.num_under_way))

    def put(self, parts: list[np.ndarray]) -> bytes:
        return b"".join(part.tobytes() for part in parts)


def filler_of(what: Share, driver: Played) -> DeviceFiller:
    tensors = [torch.from_numpy(value) for value in what.items.values]
    driver.own(*tensors)
    filler = Moment(tensors, driver).filler(tensors, HostFiller(TensorBytes(tensors)))
    assert filler is not None
    return filler


def handed(what: Share, link: Stager, filler: DeviceFiller) -> list[bytes]:
    order = what.order(KEY, Target("memory://x"), SLOT)
    transfer(link, order, what.plan, None, filler, what.items.deferred, timeout_s=60)
    return [link.windows[number] for number in range(len(link.windows))]


def pieces(what: Share, windows: list[bytes]) -> list[bytes]:
    """Returns what is written of windows: what lies between is whatever it was."""
    order = what.order(KEY, Target("memory://x"), SLOT)
    layout = lay_out_windows(what.plan, order.deferred_bytes, SLOT)
    columns = (layout.window, layout.offset, layout.num_bytes)
    return [
        windows[w][at : at + n] for w, at, n in zip(*map(np.ndarray.tolist, columns), strict=True)
    ]


def windows_of(what: Share) -> list[bytes]:
    """Returns what each window holds when it is filled by itself."""
    order = what.order(KEY, Target("memory://x"), SLOT)
    layout = lay_out_windows(what.plan, order.deferred_bytes, SLOT)
    windows = [np.zeros(used, np.uint8) for used in layout.used_bytes.tolist()]
    fill = partial(fill_window, layout)
    for window, into in enumerate(windows):
        fill(window, into, HostFiller(what.items.source), what.items.deferred)
    return [into.tobytes() for into in windows]


@pytest.fixture
def scratch(monkeypatch):
    """Memory that nobody used before."""
    memory = PrivateMemory()
    monkeypatch.setattr(stage_transfer, "_scratch", memory)
    return memory


def test_memory_for_a_devices_windows_is_pinned_and_used_again_by_the_next_save(scratch):
    what, driver = share([5 * MIB, 1000, 2000, 3 * MIB]), Played()
    for _ in range(3):
        link = Stager(driver, 8)
        assert pieces(what, handed(what, link, filler_of(what, driver))) == pieces(
            what, windows_of(what)
        )
        assert link.calls == [("begin", 0), ("seal", 0)]
        assert 1 <= len(driver.registered) <= copying_threads() + 1
    pinned = len(driver.registered)
    assert scratch.idle_bytes == pinned * SLOT
    scratch.clear()
    assert not driver.registered


@pytest.mark.parametrize("report_s", [1e9, 0.0])
def test_what_is_reported_to_the_stager_is_there(report_s, monkeypatch):
    monkeypatch.setattr(stage_transfer, "REPORT_S", report_s)
    what, driver = share([9 * MIB]), Played()
    link = Stager(driver, 2)
    assert handed(what, link, filler_of(what, driver)) == windows_of(what)
    assert all(under_way == 0 for _, under_way in link.calls)
    methods = [method for method, _ in link.calls]
    assert methods.count("more") == 2
    # Before each wait for room, and each full window but the last where that is due.
    assert methods.count("deliver") == (2 if report_s else 4)


@pytest.mark.parametrize("where", ["a copy", "between two windows"])
def test_room_is_given_up_when_nothing_comes_from_the_device_any_more(where, scratch):
    what, driver = share([9 * MIB]), Played()
    link = Stager(driver, 8)
    filler = filler_of(what, driver)
    owner, name = (driver, "copy") if where == "a copy" else (link, "put")
    real, calls = getattr(owner, name), []

    def third_fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    setattr(owner, name, third_fails)
    with pytest.raises(KeyboardInterrupt):
        handed(what, link, filler)
    assert link.calls == [("begin", 0), ("cancel", 0)]


def test_a_state_that_does_not_fit_is_told_with_the_way_out(caplog):
    what, driver = share([9 * MIB]), Played()
    link = Stager(driver, 2)
    call = link.call

    def short(method: str, *arguments: Any, **more: Any) -> Any:
        answer = call(method, *arguments, **more)
        told = method == "more" and answer.num_windows == 4
        return Grant(answer.num_windows, 3_000_000_000) if told else answer

    link.call = short
    handed(what, link, filler_of(what, driver))
    (said,) = caplog.messages
    assert "memory://x is 3 GB larger than" in said
    assert "--object-store-memory that is 6 GB larger, on a /dev/shm" in said


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_runs_of_an_object_are_its_window_and_large_items_are_where_they_are(where):
    objects = [b"note", bytes(MIB)] if where == "host" else []
    what, driver = share([3 * MIB, 500, 70_000, 2 * MIB + 7], objects), Played()
    host = HostFiller(what.items.source)
    filler = host if where == "host" else filler_of(what, driver)
    order = what.order(KEY, Target("memory://x"), SLOT)
    layout = lay_out_windows(what.plan, order.deferred_bytes, SLOT)
    not_copied = 0
    for window, whole in enumerate(windows_of(what)):
        scratch = np.zeros(len(whole), np.uint8)
        parts = window_parts(layout, window, scratch, filler, what.items.deferred)
        assert b"".join(part.tobytes() for part in parts) == whole
        views = [len(part) for part in parts if not np.shares_memory(part, scratch)]
        assert max(views, default=0) <= MIB  # Ray copies longer ones by threads of their own
        not_copied += sum(views)
    assert not_copied >= 4 * MIB if where == "host" else not_copied == 0

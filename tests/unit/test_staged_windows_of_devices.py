"""How long the windows are in which a rank hands bytes of a device to its stager."""

from types import SimpleNamespace

import pytest

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.values import RankPlan
from ray_dcp.options import SaveOptions
from ray_dcp.runtime import staging
from ray_dcp.stage.orders import StageKey
from tests.support.protocol import KEY


@pytest.mark.parametrize(
    ("pin", "node_bytes", "expected"),
    [(None, 128, 128), (print, 128, 64), (print, 16, 16)],
    ids=["host", "device", "device, small store"],
)
def test_windows_of_a_device_are_short_as_each_thread_pins_one(
    monkeypatch, pin, node_bytes, expected
):
    orders = []
    monkeypatch.setattr(staging, "filler_of", lambda _: SimpleNamespace(pin=pin))
    monkeypatch.setattr(staging, "transfer", lambda _, order, *rest, **more: orders.append(order))
    link = SimpleNamespace(window_bytes=node_bytes << 20, stager="a")
    monkeypatch.setattr(staging.RankStaging, "__init__", lambda self: None)
    monkeypatch.setattr(staging.RankStaging, "link", lambda self: link)
    monkeypatch.setattr(staging.RankStaging, "_process", "p", raising=False)
    staging.RankStaging().stage(
        StageKey((KEY, 1), 0, "a1"),
        RankPlan(0, ()),
        SimpleNamespace(source=None),
        target=Target("/nowhere"),
        options=SaveOptions(),
    )
    assert [order.window_bytes for order in orders] == [expected << 20]

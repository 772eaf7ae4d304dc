"""States to stage, their plans, and what a rank would write of them itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from ray_dcp.commit_protocol.messages import FileReceipt, Target
from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.core.values import Columns, RankPlan
from ray_dcp.io.writer import write_part
from ray_dcp.options import SaveOptions
from ray_dcp.planning.global_plan import make_plan, rank_plan
from ray_dcp.session.names import NAMESPACE
from ray_dcp.stage.orders import StageKey, StageOrder
from ray_dcp.stage.window_filler import HostFiller, deferred_items, fill_window
from ray_dcp.stage.windows import StagingLayout, lay_out_windows
from ray_dcp.stage.write_queue import WriteQueue
from ray_dcp.store.opening import open_storage

MIB = 1 << 20


@dataclass
class Items:
    """Implements `Captured` on arrays and bytes."""

    columns: Columns
    values: list[Any]
    warnings: tuple[str, ...] = ()
    tied: None = None

    def source(self, row: int) -> memoryview:
        return memoryview(self.values[row].reshape(-1).view(np.uint8))

    def deferred(self, row: int) -> bytes:
        return self.values[row]


@dataclass
class Share:
    """One rank's share: what it holds, and what it is to write."""

    items: Items
    plan: RankPlan
    num_bytes: int

    def written(self, target: Target, **options: Any) -> tuple[FileReceipt, ...]:
        """Writes it as a rank does in a synchronous save."""
        return write_part(
            open_storage(target), self.plan, "a1",
            source=self.items.source, deferred=self.items.deferred,
            options=SaveOptions(**options),
        )  # fmt: skip

    def order(self, key: StageKey, target: Target, window_bytes: int, **more: Any) -> StageOrder:
        _, lengths = deferred_items(self.plan, self.items.deferred)
        fields = {
            "process": "p0", "plan": self.plan,
            "deferred_bytes": lengths, "target": target, "options": SaveOptions(),
            "window_bytes": window_bytes,
        }  # fmt: skip
        return StageOrder(key, **{**fields, **more})


def share(
    sizes: list[int],
    deferred: list[bytes] = (),
    *,
    part_bytes: int = 1 << 30,
    seed: int = 0,
    settled: bool = False,
) -> Share:
    """Returns a share of uint8 tensors of these lengths and objects of these bytes."""
    items = _items(sizes, deferred, seed, settled=settled)
    plan = make_plan([items.columns], part_bytes=part_bytes)
    return Share(items, rank_plan(plan, 0), sum(sizes) + sum(map(len, deferred)))


def _items(
    sizes: list[int],
    deferred: Sequence[bytes],
    seed: int,
    prefix: str = "",
    *,
    settled: bool = False,
) -> Items:
    generator = np.random.default_rng(seed)
    builder = ColumnsBuilder()
    values: list[Any] = []
    for index, size in enumerate(sizes):
        values.append(generator.integers(0, 256, size, dtype=np.uint8))
        builder.tensor(f"{prefix}t{index:05d}", "uint8", (size,), settled=int(settled))
    for index, data in enumerate(deferred):
        values.append(data)
        builder.object(f"{prefix}o{index}")
    return Items(builder.build(), values)


def same_files(one: Target, other: Target) -> bool:
    """Returns whether two places hold the same keys and bytes, and at least one key."""
    a, b = open_storage(one), open_storage(other)
    keys = [entry.key for entry in a.list()]
    return (
        bool(keys)
        and keys == [entry.key for entry in b.list()]
        and all(a.read(key) == b.read(key) for key in keys)
    )


@dataclass
class Rank:
    """A rank that hands a share to a write queue in this process, step by step."""

    queue: WriteQueue
    share: Share
    order: StageOrder
    reporter: Any = None
    ref: Any = None
    num_granted: int = 0
    next_window: int = 0

    def begin(self) -> Rank:
        self.num_granted = self.queue.begin(self.order, self.reporter).num_windows
        return self

    def fill(self) -> None:
        """Fills the next window, after waiting for its room."""
        window = self.next_window
        while window >= self.num_granted:
            more = self.queue.more(self.order.key, self.num_granted)
            self.num_granted = more.result(180).num_windows
        layout, items = self.layout, self.share.items
        into = np.zeros(layout.used_bytes[window], np.uint8)
        fill_window(layout, window, into, HostFiller(items.source), items.deferred)
        self.next_window += 1
        self.queue.deliver(self.order.key, window, [into], self.ref)

    @property
    def layout(self) -> StagingLayout:
        order = self.order
        return lay_out_windows(self.share.plan, order.deferred_bytes, order.window_bytes)

    @property
    def num_windows(self) -> int:
        return self.layout.num_windows

    def stage(self) -> None:
        """Hands over everything and waits until it may go on."""
        self.begin()
        for _ in range(self.num_windows):
            self.fill()
        assert self.queue.seal(self.order.key).result(180) is True


def stagers_on(node_id: str, namespace: str = NAMESPACE) -> list[Any]:
    """Returns the handles of a node's stagers in a namespace, of all jobs."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and f":stager:{node_id}:" in actor["name"]:
            # Suppressed: it ends just now.
            with suppress(ValueError):
                found.append(ray.get_actor(actor["name"], namespace))
    return found


def end_stagers() -> None:
    """Ends the stagers that earlier tests left, with which a new one would share the node."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if ":stager:" in actor["name"]:
            # Suppressed: it ends just now.
            with suppress(ValueError):
                ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def scribbled(share: Share) -> Callable[[], None]:
    """Returns what changes every byte of a share's tensors in place."""

    def change() -> None:
        for value in share.items.values:
            if isinstance(value, np.ndarray):
                value ^= 0xFF

    return change

"""What a coordinator sees of the stagers that hold bytes of its saves: who died, froze, or lags."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayError

from ray_dcp.protocol.commands import Command
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import PartsWritten
from ray_dcp.runtime import ray_calls
from ray_dcp.runtime.stager_keeping import key_of
from ray_dcp.stage.values import StageKey, StageReport

__all__ = ["StagerWatch", "parts_written"]

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often stagers are asked, in seconds. They answer in a millisecond, and the whole save waits
for as long as nobody sees that one of them is slow."""


@dataclass
class _Seen:
    handle: Any = None
    heard_s: float = 0.0
    asking: set[asyncio.Task[None]] = field(default_factory=set)


class StagerWatch:
    """Asks each stager of an active save how far it is. Used in the event loop's thread.

    Args:
        coordination: What is told.
        carry_out: Does what it commands.
        namespace: Ray namespace of the stagers.
        lost: Told of each stager that is lost, before `coordination` is.
    """

    def __init__(
        self,
        coordination: Coordination,
        carry_out: Callable[[tuple[Command, ...]], None],
        namespace: str,
        lost: Callable[[str], None],
    ) -> None:
        self._coordination = coordination
        self._carry_out = carry_out
        self._namespace = namespace
        self._tell_lost = lost
        self._seen: dict[str, _Seen] = {}
        self._lost: set[str] = set()

    async def watch(self) -> None:
        """Looks for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Looks once at all stagers that are needed now."""
        now_s = asyncio.get_running_loop().time()
        needed = self._coordination.stagers()
        self._lost &= needed.keys()
        self._seen = {name: self._seen.get(name, _Seen(heard_s=now_s)) for name in needed}
        for name, keys in needed.items():
            seen = self._seen[name]
            patience_s = min(keys.values())
            if not seen.asking:
                task = asyncio.ensure_future(self._ask(name, seen))
                seen.asking.add(task)
                task.add_done_callback(seen.asking.discard)
            elif now_s - seen.heard_s > patience_s:
                why = (
                    f"it was not heard of for {now_s - seen.heard_s:.0f} s, though Ray does not "
                    f"say that it died: frozen, or its machine is out of reach"
                )
                self._lose(name, why)

    async def _ask(self, name: str, seen: _Seen) -> None:
        try:
            if seen.handle is None:
                actor, _, _ = name.partition("#")
                seen.handle = await asyncio.to_thread(
                    ray_calls.get_actor, actor, namespace=self._namespace
                )
            process, paces = await seen.handle.pulse.remote()
        except (RayActorError, ValueError) as error:
            self._lose(name, f"Ray says {type(error).__name__}")
            return
        except RayError:
            return
        now_s = seen.heard_s = asyncio.get_running_loop().time()
        if process != name:
            self._lose(name, "another stager has its place")
            return
        self._carry_out(self._coordination.stager_heard(_by_operation(paces), now_s))

    def _lose(self, name: str, why: str) -> None:
        self._seen.pop(name, None)
        if name not in self._lost:
            self._lost.add(name)
            logger.warning(
                "Lost stager %s: %s. It had bytes of %s: ranks that live hand theirs to another "
                "stager, and a save whose rank is dead as well fails", name, why,
                "; ".join(
                    f"ranks {ranks} in operation {key.seq} of session {key.session}"
                    for key, ranks in self._coordination.held_by(name).items()
                ),
            )  # fmt: skip
        self._tell_lost(name)
        self._carry_out(self._coordination.stager_lost(name, why))


def parts_written(report: StageReport, stager: str = "") -> PartsWritten:
    """Returns a stager's report as the protocol's message.

    Args:
        report: Of one file, as the stager tells it.
        stager: Who; for messages.
    """
    key, epoch = key_of(report.key.save)
    files = () if report.receipt is None else (report.receipt,)
    return PartsWritten(
        key, report.key.rank, report.key.attempt, epoch, stager, report.key.incarnation,
        files, report.error,
    )  # fmt: skip


def _by_operation(paces: Mapping[StageKey, tuple[int, int]]) -> dict[Any, dict[int, Any]]:
    found: dict[Any, dict[int, Any]] = {}
    for key, pace in paces.items():
        operation, _ = key_of(key.save)
        found.setdefault(operation, {})[key.rank] = pace
    return found

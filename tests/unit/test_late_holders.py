"""A coordinator that took up a save asks stagers of which it hears later what they had written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from ray_dcp.protocol.messages import OpKey, PartsHeld
from ray_dcp.runtime import hooks
from ray_dcp.runtime.resuming import StagedPlans, _Saved
from ray_dcp.stage.values import StageKey, StageProgress

KEY = OpKey("run", 3)


def test_a_holder_that_the_earlier_coordinator_did_not_note_is_asked_too(monkeypatch):
    monkeypatch.setattr(hooks, "remember", lambda name, text: None)
    asked, received = [], []
    coordination = SimpleNamespace(active=[KEY], receive=lambda one: received.append(one) or ())
    plans = StagedPlans("actor", coordination, lambda commands: None, "namespace")
    plans._saved[KEY] = _Saved(
        ["old", "older"], ["old"], is_told=True, taken_up=(1, "a1"), asked=frozenset({"old"})
    )
    plans._plans[KEY] = b"plan"

    async def ask(stager, method, *arguments):
        asked.append((stager, method, *arguments))
        return [StageProgress(StageKey("run", 1, "a1"), 8, 8, True, (), helps=True)]

    plans._ask = ask
    held = [PartsHeld(KEY, rank, "a1", 1, name) for rank, name in enumerate(["old", "new"])]
    assert [plans.note(one) for one in held] == [False, True]
    asyncio.run(plans.keep())
    assert asked == [("new", "shares", "a1")]
    assert received == [PartsHeld(KEY, 1, "a1", 1, "new", helps=True)]
    # Once is enough.
    assert not plans.note(held[1])
    asyncio.run(plans.keep())
    assert len(asked) == 1

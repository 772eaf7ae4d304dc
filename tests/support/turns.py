"""Work that takes turns, one storage call at a time: saves, deletes and collectors in any order.

A `Turn` is work in a thread of its own that waits before every call of its storage until it is its
turn, so that a seed gives one order of all calls. `World` lets actors use one directory so. A
listing is two calls there, as a directory that changes while it is read shows some of the changes.
An actor can crash before any call: it never calls again, and leaves the temporary files of what it
was writing.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import TEMP_PREFIX
from tests.support.storages import CrashError, Fault, FaultyStorage, Operation, Script

LIMIT_S = 400
"""How long a turn may last before it counts as a hang, in seconds."""
MOVING: list[Turn] = []
"""Whose turn it is. Its work may use threads of its own, as long as it waits for them."""


class Turn:
    """Work in a thread of its own, which moves only when it is its turn.

    Attributes:
        call: What it does when it is its turn: an operation of the storage and its key.
        result: What it returned.
        error: What it raised.
        killed: Its process died: it moves only to end.
        over: It does nothing any more.
    """

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self.call = ("start", "")
        self.result: Any = None
        self.error: BaseException | None = None
        self.killed = self.over = False
        self._effect: str | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._one_at_a_time = threading.Lock()
        threading.Thread(target=self._run, args=[work], daemon=True).start()

    def take(self, effect: str | None = None) -> None:
        """Lets it move to its next call; `effect` is that of the call that it waits before."""
        self._effect = effect
        MOVING[:] = [self]
        self._go.release()
        assert self._back.acquire(timeout=LIMIT_S), f"{self.name} hangs after {self.call}"
        MOVING.clear()

    def pause(self, call: tuple[str, str]) -> str | None:
        """In its thread: ends the turn; returns the effect that the call is to have."""
        if not self._one_at_a_time.acquire(blocking=False):
            raise CrashError(f"{self.name} calls {call} from two threads at once")
        self.call = call
        self._back.release()
        self._go.acquire()
        self._one_at_a_time.release()
        if self.killed:
            raise CrashError(f"{self.name} is dead")
        return self._effect

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._go.acquire()
            if not self.killed:
                self.result = work()
        except BaseException as error:
            if not (self.killed and isinstance(error, CrashError)):
                self.error = error
        self.over = True
        self._back.release()


class TurnScript(Script):
    """Ends the turn before every call of a storage, and does to the call what the next turn says.

    Args:
        pause: From the operation and its key to that effect, when it is its turn again.
    """

    def __init__(self, pause: Callable[[Operation, str], str | None]) -> None:
        super().__init__()
        self._pause = pause
        self._fault: Fault | None = None

    @contextmanager
    def call(self, operation: Operation, key: str, url: str) -> Iterator[Fault | None]:
        """See `Script.call`."""
        effect = self._pause(operation, key)
        if effect == "torn" and operation != "writer.write":
            effect = "after"
        self._fault = Fault(operation=operation, effect=effect) if effect else None
        with super().call(operation, key, url) as fault:
            yield fault

    def choose(self, call: object) -> Fault | None:
        """See `Script.choose`."""
        return self._fault


# --- Actors that use one directory ----------------------------------------------------------------


class Actor(Turn):
    """One thread of a `World`; `crashed` when it was stopped for ever."""

    def __init__(self, world: World, name: str, program: Callable[[Actor], Any]) -> None:
        self.world = world
        self.script = TurnScript(self._turn)
        super().__init__(name, lambda: program(self))

    @property
    def crashed(self) -> bool:
        return self.killed

    def opener(self, target: object) -> SteppedStorage:
        """Opens the storage of the world, for the calls of this actor."""
        return SteppedStorage(self.world.storage, self)

    def crash(self) -> None:
        """Stops it for ever, before the call that it waits before."""
        self.killed = self.script._stopped = True
        self.take()
        assert self.over

    def _turn(self, operation: Operation, key: str) -> str | None:
        if self.killed:
            raise CrashError
        return None if operation == "writer.write" else self.pause((operation, key))


class World:
    """A directory and the actors that use it.

    Args:
        root: The directory.
        order: What chooses; a `random.Random`.
    """

    def __init__(self, root, order):
        self.storage = LocalStorage(root, durable=False)
        self.order = order
        self.actors = []
        self.steps = 0

    def begin(self, name, program):
        """Adds an actor; its program takes the actor, whose `opener` it has to use."""
        actor = Actor(self, name, program)
        self.actors.append(actor)
        return actor

    def run(self, *, crashes=0.0, lull=0.0, look=lambda: None):
        """Runs all actors to their ends.

        Args:
            crashes: Chance that an actor crashes instead of taking its turn.
            lull: Chance that an actor lies still until all others have ended.
            look: Called after every step.
        """
        still = set()
        while living := [actor for actor in self.actors if not actor.over]:
            awake = [actor for actor in living if actor not in still]
            if not awake:
                still.clear()
                awake = living
            actor = self.order.choice(awake)
            if self.order.random() < crashes:
                actor.crash()
            elif self.order.random() < lull:
                still.add(actor)
            else:
                actor.take()
            self.steps += 1
            look()


class SteppedStorage(FaultyStorage):
    """A storage by another one, each call in its actor's turn."""

    def __init__(self, inner, actor):
        super().__init__(inner, actor.script)
        self._order = actor.world.order

    def write(self, key, data, *, create=False):
        try:
            super().write(key, data, create=create)
        except CrashError:
            leave_temp(self._inner, key)
            raise

    def list(self, prefix=""):
        return self._either(lambda: super(SteppedStorage, self).list(prefix))

    def unpublished(self):
        return tuple(self._either(super().unpublished))

    def _either(self, call):
        before = {entry.key: entry for entry in call()}
        after = {entry.key: entry for entry in call()}
        found = before.keys() & after.keys()
        found |= {key for key in sorted(before.keys() ^ after.keys()) if self._order.random() < 0.5}
        return [(after | before)[key] for key in sorted(found)]


def leave_temp(storage, key):
    """Leaves what a process leaves that is killed in a `write`."""
    path = f"{storage.url}/{TEMP_PREFIX}{secrets.token_hex(6)}-{key}"
    with suppress(FileNotFoundError), open(path, "wb") as file:
        file.write(b"half of it")

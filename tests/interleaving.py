"""Saves, deletes and collectors that touch one directory in any order, one storage call at a time.

Each actor is a thread that waits before every call of its storage until it is its turn, so that a
seed gives one order of all calls. A listing is two calls, as a directory that changes while it is
read shows some of the changes; a delete is one for every key. An actor can crash before any call:
it never calls again, and leaves the temporary files of what it was writing.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress

from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import TEMP_PREFIX

PATIENCE_S = 60


class CrashError(BaseException):
    """The actor is dead: no code of ours may catch it."""


class Actor:
    """One thread of a `World`.

    Attributes:
        result: What its program returned.
        error: What it raised.
        crashed: It was stopped for ever.
        over: It does nothing any more.
    """

    def __init__(self, world, name, program):
        self.world, self.name = world, name
        self.result = self.error = None
        self.crashed = self.over = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._program = program
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    def opener(self, target):
        """Opens the storage of the world, for the calls of this actor."""
        return SteppedStorage(self.world.storage, self)

    def turn(self):
        """Waits until it is this actor's turn; called before every call of its storage."""
        if not self.crashed:
            self._stopped.release()
            self._go.acquire()
        if self.crashed:
            raise CrashError

    def advance(self):
        """Lets it do the call that it waits before, and all up to the next one."""
        self._go.release()
        self._wait()

    def crash(self):
        """Stops it for ever, before the call that it waits before."""
        self.crashed = True
        self.advance()
        assert self.over

    def _wait(self):
        assert self._stopped.acquire(timeout=PATIENCE_S), f"{self.name} hangs"

    def _run(self):
        try:
            self.turn()
            self.result = self._program(self)
        except CrashError:
            pass
        except Exception as error:  # handed to the test, which looks at it
            self.error = error
        self.over = True
        self._stopped.release()


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
        self.writers = []  # kept: a writer that is dropped tidies up, a process that dies does not
        self.steps = 0

    def begin(self, name, program):
        """Adds an actor; its program takes the actor, whose `opener` it has to use."""
        actor = Actor(self, name, program)
        self.actors.append(actor)
        return actor

    def living(self):
        return [actor for actor in self.actors if not actor.over]

    def run(self, *, crashes=0.0, lull=0.0, look=lambda: None):
        """Runs all actors to their ends.

        Args:
            crashes: Chance that an actor crashes instead of taking its turn.
            lull: Chance that an actor lies still until all others have ended.
            look: Called after every step.
        """
        still = set()
        while living := self.living():
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
                actor.advance()
            self.steps += 1
            look()


class SteppedStorage:
    """Implements `Storage` by another one, each call in its actor's turn."""

    def __init__(self, inner, actor):
        self._inner, self._actor = inner, actor
        self.url, self.traits = inner.url, inner.traits

    def read(self, key, *where):
        self._actor.turn()
        return self._inner.read(key, *where)

    def read_into(self, key, start, target):
        self._actor.turn()
        self._inner.read_into(key, start, target)

    def write(self, key, data, *, create=False):
        try:
            self._actor.turn()
        except CrashError:
            leave_temp(self._inner, key)
            raise
        self._inner.write(key, data, create=create)

    def open_writer(self, key, **how):
        self._actor.turn()
        writer = self._inner.open_writer(key, **how)
        self._actor.world.writers.append(writer)
        return SteppedWriter(writer, self._actor)

    def list(self, prefix=""):
        return self._listed(lambda: self._inner.list(prefix))

    def unpublished(self):
        return tuple(self._listed(self._inner.unpublished))

    def _listed(self, call):
        self._actor.turn()
        before = {entry.key: entry for entry in call()}
        self._actor.turn()
        after = {entry.key: entry for entry in call()}
        found = before.keys() & after.keys()
        for key in sorted(before.keys() ^ after.keys()):
            if self._actor.world.order.random() < 0.5:
                found.add(key)
        return [(after | before)[key] for key in sorted(found)]

    def delete(self, keys):
        for key in keys:
            self._actor.turn()
            self._inner.delete([key])


class SteppedWriter:
    def __init__(self, inner, actor):
        self._inner, self._actor = inner, actor
        self.write = inner.write

    def commit(self):
        self._actor.turn()
        self._inner.commit()

    def abort(self):
        if not self._actor.crashed:
            self._inner.abort()


def leave_temp(storage, key):
    """Leaves what a process leaves that is killed in a `write`."""
    path = f"{storage.url}/{TEMP_PREFIX}{secrets.token_hex(6)}-{key}"
    with suppress(FileNotFoundError), open(path, "wb") as file:
        file.write(b"half of it")

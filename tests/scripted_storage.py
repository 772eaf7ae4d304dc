"""A storage on which one change, by its number over all storages of a test, goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_dcp.errors import StorageError
from ray_dcp.store.opening import open_storage


class CrashError(BaseException):
    """The power went out: no code of ours may catch it."""


@dataclass
class Script:
    """What happens at which change; make one for a run and hand its `open` to ranks and tasks.

    A change is a written key, a published part file or one deleted key.
    """

    at: int | None = None
    effect: str = "crash"
    """`crash`: everything stops before it. `before`: an error, nothing happened. `after`: an
    error, but it happened. `broken`: like `before`, and all later changes fail too."""
    keys: list[str] = field(default_factory=list)
    """Every change that was asked for."""

    @property
    def hit(self) -> bool:
        return self.at is not None and len(self.keys) > self.at

    def open(self, target):
        return ScriptedStorage(open_storage(target), self)

    def change(self, key, act):
        number = len(self.keys)
        self.keys.append(key)
        if self.at is None or number < self.at or (number > self.at and self.effect != "broken"):
            return act()
        if self.effect == "crash":
            raise CrashError(key)
        if self.effect == "after":
            act()
        raise StorageError(f"scripted at change {number}", key=key)


class ScriptedStorage:
    def __init__(self, inner, script):
        self._inner = inner
        self._script = script
        self.url, self.traits = inner.url, inner.traits
        self.read, self.read_into, self.list = inner.read, inner.read_into, inner.list

    def write(self, key, data, *, create=False):
        self._script.change(key, lambda: self._inner.write(key, data, create=create))

    def open_writer(self, key, **how):
        return ScriptedWriter(self._inner.open_writer(key, **how), key, self._script)

    def delete(self, keys):
        for key in keys:
            self._script.change(f"delete {key}", lambda key=key: self._inner.delete([key]))


class ScriptedWriter:
    def __init__(self, inner, key, script):
        self._inner, self._key, self._script = inner, key, script
        self.write, self.abort = inner.write, inner.abort

    def commit(self):
        self._script.change(self._key, self._inner.commit)

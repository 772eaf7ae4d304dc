"""Where the keys of a storage lie in its bucket: plainly below a root, or spread over prefixes.

Pure. Some stores limit requests by prefix; many ranks that write below one are then throttled.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["HashedKeys", "PlainKeys"]


@dataclass(frozen=True)
class PlainKeys:
    """Keys directly below a root.

    Args:
        root: Without slashes at its ends; empty for none.

    Example:
        >>> keys = PlainKeys("run/step-1")
        >>> keys.path("a/b"), keys.key("run/step-1/a/b"), keys.places("a/x")
        ('run/step-1/a/b', 'a/b', ['run/step-1/a'])
    """

    root: str

    def path(self, key: str) -> str:
        """Returns where a key lies."""
        return f"{self.root}/{key}" if self.root else key

    def key(self, path: str) -> str | None:
        """Returns the key that lies at a path; None when it is not below the root."""
        if not self.root:
            return path
        head = f"{self.root}/"
        return path[len(head) :] if path.startswith(head) else None

    def places(self, prefix: str) -> list[str]:
        """Returns the folders in which all keys with a prefix lie.

        Stores list by folders, while `Storage.list` takes any beginning of a key.
        """
        folder = prefix.rpartition("/")[0]
        # Why: a prefix is any text, a folder is not.
        is_folder = not {"", ".", ".."} & set(folder.split("/"))
        return [self.path(folder) if is_folder else self.root]


@dataclass(frozen=True)
class HashedKeys:
    """Keys spread over prefixes by a hash: each folder of a checkpoint over all of them.

    Args:
        root: Without slashes at its ends.
        count: How many prefixes, at most 256.

    Example:
        >>> keys = HashedKeys("run", 16)
        >>> path = keys.path("step-1/__0_0.distcp")
        >>> path[2:], keys.key(path), len(keys.places("step-1/"))
        ('/run/step-1/__0_0.distcp', 'step-1/__0_0.distcp', 16)
    """

    root: str
    count: int

    def path(self, key: str) -> str:
        """Returns where a key lies."""
        whole = PlainKeys(self.root).path(key)
        number = hashlib.blake2s(whole.encode(), digest_size=2).digest()
        return f"{int.from_bytes(number, 'big') % self.count:02x}/{whole}"

    def key(self, path: str) -> str | None:
        """Returns the key that lies at a path; None when none of ours can."""
        key = PlainKeys(self.root).key(path[3:])
        return key if key and self.path(key) == path else None

    def places(self, prefix: str) -> list[str]:
        """Returns the folders in which all keys with a prefix lie."""
        (place,) = PlainKeys(self.root).places(prefix)
        return [f"{number:02x}/{place}".rstrip("/") for number in range(self.count)]

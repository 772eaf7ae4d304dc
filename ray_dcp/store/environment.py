"""What storages read in the environment of their process.

A stager writes with the variables of the rank whose bytes it has, not with those that the process
of some other job happened to start with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PREFIXES = (
    "AWS_", "AZURE_", "ARROW_", "BOTO", "CLOUDSDK_", "CURL_CA_", "FSSPEC_", "GCE_", "GCS_",
    "GOOGLE_", "HADOOP_", "HF_", "KRB5", "REQUESTS_CA_", "S3_", "SSL_CERT_",
)  # fmt: skip
"""How the names begin of what object stores, fsspec, pyarrow and their tools read."""

NAMES = frozenset({"HOME", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NETRC", "NO_PROXY"})


def is_of_storages(name: str) -> bool:
    """Returns whether storages may read a variable."""
    upper = name.upper()  # proxies are named in both cases
    return upper in NAMES or upper.startswith(PREFIXES)


class StorageVariables:
    """Variables of storages, with keys among them: they are never printed.

    Args:
        values: By name.

    Examples:
        >>> StorageVariables({"AWS_SECRET_ACCESS_KEY": "x"})
        StorageVariables(1 variables)
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = dict(values)

    def __repr__(self) -> str:
        return f"StorageVariables({len(self.values)} variables)"

    @classmethod
    def of_this_process(cls) -> StorageVariables:
        """Returns those of this process, as they are now."""
        return cls({name: text for name, text in os.environ.items() if is_of_storages(name)})

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Makes these the variables of this process for the time of the block.

        For a process that works for others afterwards, as one that runs tasks.
        """
        before = StorageVariables.of_this_process()
        self.become()
        try:
            yield
        finally:
            before.become()

    def become(self) -> None:
        """Makes these the variables of this process, in place of all others of storages.

        *Why* only where they differ: other threads may read the environment, and few systems let
        them while it changes.
        """
        for name in [name for name in os.environ if is_of_storages(name)]:
            if name not in self.values:
                del os.environ[name]
        for name, text in self.values.items():
            if os.environ.get(name) != text:
                os.environ[name] = text

"""Which version of the manifest's format says what."""

from __future__ import annotations

from ray_dcp.format.file_entries import MANY_FILES, FileEntry

__all__ = [
    "CHECKS_VERSION",
    "COLUMNS_VERSION",
    "END_CHECKS_VERSION",
    "FORMAT_VERSION",
    "GROUPS_VERSION",
    "SINCE",
    "USUAL_VERSION",
    "version_for",
]

FORMAT_VERSION = 6
"""Newest that can be read. Version 1 had no `DeleteRecord` and no `Manifest.decided`."""
USUAL_VERSION = 2
"""What is written where nothing newer is needed, so that older ray_dcp can read it."""
CHECKS_VERSION = 3
"""From which on a manifest may have `checks`."""
COLUMNS_VERSION = 4
"""From which on a manifest may list its files as columns."""
END_CHECKS_VERSION = 5
"""From which on the file `checks` may leave the checksums to the ends of the data files."""
GROUPS_VERSION = 6
"""From which on a manifest may have `table_end`."""

SINCE = {"checks": CHECKS_VERSION, "table_end": GROUPS_VERSION}
"""Fields of manifests that older versions lack."""


def version_for(
    num_files: int,
    checks: FileEntry | None,
    *,
    checks_at_end: bool = False,
    table_end: FileEntry | None = None,
) -> int:
    """Returns the oldest format version that can say this."""
    if table_end is not None:
        return GROUPS_VERSION
    if checks_at_end:
        return END_CHECKS_VERSION
    if num_files >= MANY_FILES:
        return COLUMNS_VERSION
    return USUAL_VERSION if checks is None else CHECKS_VERSION

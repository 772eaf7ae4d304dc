"""Bytes on storage: item frames of each container, the manifest, the chunk table, `.metadata`.

Pure functions from values to bytes and back; no torch, no ray, no disk.
"""

from ray_dcp.errors import DamagedCheckpointError


def damaged(
    expected: str, found: str, where: str = "", *, key: str | None = None
) -> DamagedCheckpointError:
    """Returns the error for stored bytes that are not as they were written.

    Args:
        expected: What was expected, for the message.
        found: What was found.
        where: The part of the file, such as `" in the record"`; empty if `expected` says it.
        key: The file, if it is known here.
    """
    return DamagedCheckpointError(
        f"Expected {expected}{where}, found {found}; it is damaged, load an earlier step", key=key
    )

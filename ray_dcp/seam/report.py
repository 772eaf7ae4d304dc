"""What a load did, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadReport"]


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `ray_dcp.load` did on this rank.

    Example:
        >>> report = LoadReport(loaded=("w",), missing=(), unexpected=("b",), cast=())
        >>> report.unexpected_keys
        ['b']
    """

    loaded: tuple[str, ...]
    """FQNs that were loaded, in the order of the state dict."""
    missing: tuple[str, ...]
    """FQNs that the checkpoint lacks; their values are as they were. Only with
    `LoadOptions(allow_partial_load=True)`, else they are an error."""
    unexpected: tuple[str, ...]
    """FQNs of the checkpoint that the state dict did not ask for."""
    cast: tuple[tuple[str, str, str], ...]
    """`(FQN, dtype in the checkpoint, dtype of the target)` where the two differ."""
    bytes_needed: int = 0
    """Bytes that the targets of all ranks hold."""
    bytes_read: int = 0
    """Bytes that all ranks read from storage."""
    path: str = "native"
    """Which way it went: `"native"`, `"planner hooks"` (a user's planner ran) or
    `"foreign storage"` (a third party's reader; no checksums, and only this field is known)."""

    @property
    def missing_keys(self) -> list[str]:
        """The missing FQNs, as `torch.nn.Module.load_state_dict` names them."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """The unexpected FQNs, as `torch.nn.Module.load_state_dict` names them."""
        return list(self.unexpected)

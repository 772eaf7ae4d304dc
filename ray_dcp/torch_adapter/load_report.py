"""`LoadReport`: what a load returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_dcp.core.quantities import seconds_text, size_text
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError

_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadReport:
    """The result of `ray_dcp.load` or `ray_dcp.load_newest` on this rank.

    Examples:
        >>> report = LoadReport(loaded=("w",), missing=(), unexpected=("b",), cast=())
        >>> report.unexpected_keys
        ['b']
        >>> report
        LoadReport(None, native, 1 loaded, 1 unexpected (b), 0 B read in 0.00 ms)
    """

    loaded: tuple[str, ...]
    """FQNs that were loaded, in the order of the state dict."""
    missing: tuple[str, ...]
    """FQNs that the checkpoint lacks; their values are unchanged. Only with
    `LoadOptions(strict=False)`; otherwise missing FQNs are an error."""
    unexpected: tuple[str, ...]
    """FQNs of the checkpoint that the state dict did not request."""
    cast: tuple[tuple[str, str, str], ...]
    """`(FQN, dtype in the checkpoint, dtype of the target)` of each value whose dtypes differ."""
    resized: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """`(FQN, shape in the checkpoint, shape of the target)` of each value whose shapes differ,
    which `LoadOptions.resize` allows."""
    bytes_needed: int = 0
    """Bytes that the targets of all ranks hold."""
    bytes_read: int = 0
    """Bytes that all ranks read, from storage or from the memory of the nodes."""
    bytes_from_peers: int = 0
    """Bytes that ranks received from another rank, which had read them for all; see
    `LoadOptions.share_reads`. Not included in `bytes_read`."""
    bytes_read_instead: int = 0
    """The part of `bytes_read` that another rank should have sent, but did not (it hung, or the
    object store failed), so that it was read from storage. 0 if no rank failed to send."""
    bytes_from_memory: int = 0
    """The part of `bytes_read` that came from the memory of the nodes instead of storage, after an
    asynchronous save with `SaveOptions(keep_in_memory=...)`."""
    path: str = "native"
    """The path of the load: `"native"`, `"planner hooks"` (a user's planner ran) or
    `"foreign storage"` (a third-party reader; no checksums, and only this field and `checkpoint_id`
    are known)."""
    checkpoint_id: str | None = None
    """Path or URL that was loaded; None if only a third-party reader knows it."""
    step: int | None = None
    """Step that was loaded, which `load_newest` reads from the folder's name; None for `load`."""
    skipped: tuple[tuple[str, CheckpointError], ...] = ()
    """`(path or URL, error)` of newer steps that `load_newest` skipped, newest first. The error is
    a `CheckpointNotFoundError` if none is committed, otherwise it describes the damage. Equal on
    all ranks."""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Duration of each phase on this rank: `plan` (find the stored chunks and assign the reads,
    until all ranks were ready), `read`, and `finish` (until all ranks had read). Summed over all
    tries of `load_newest`."""

    def __repr__(self) -> str:
        told = [f"{len(self.loaded)} loaded"]
        for what in ("missing", "unexpected", "cast", "resized", "skipped"):
            found = getattr(self, what)
            names = [one if isinstance(one, str) else one[0] for one in found[:_NAMES_SHOWN]]
            if found:
                more = ", …" if len(found) > _NAMES_SHOWN else ""
                told.append(f"{len(found)} {what} ({', '.join(names)}{more})")
        memory = self.bytes_from_memory
        some = f" ({size_text(memory)} from memory)" if memory else ""
        took = seconds_text(sum(self.seconds.values()))
        told.append(f"{size_text(self.bytes_read)} read{some} in {took}")
        return f"LoadReport({self.checkpoint_id!r}, {self.path}, {', '.join(told)})"

    @property
    def damaged(self) -> tuple[tuple[str, CheckpointError], ...]:
        """The part of `skipped` that was committed and can't be loaded."""
        return tuple(
            (path, error)
            for path, error in self.skipped
            if not isinstance(error, CheckpointNotFoundError)
        )

    @property
    def missing_keys(self) -> list[str]:
        """The missing FQNs, as `torch.nn.Module.load_state_dict` names them."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """The unexpected FQNs, as `torch.nn.Module.load_state_dict` names them."""
        return list(self.unexpected)

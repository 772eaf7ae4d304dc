"""What a caller can choose about a save or a load, as frozen values that check themselves.

No option is read from the environment; whoever reads one (entrypoints, the CLI) makes a value
of it here and passes it whole.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from ray_dcp.errors import InvalidRequestError

__all__ = ["Container", "DtypePolicy", "LoadOptions", "SaveOptions", "Verify", "WhenFull"]

Container = Literal["torch_save", "safetensors"]
DtypePolicy = Literal["widen", "error", "cast"]
Verify = Literal["always", "sample", "never"]
WhenFull = Literal["wait", "skip", "replace"]

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save.

    Raises:
        InvalidRequestError: A field has a value that it can't have; the message says which and
            what is accepted.

    Example:
        >>> SaveOptions(container="safetensors").overwrite
        True
        >>> SaveOptions(container="zip")
        Traceback (most recent call last):
        ...
        ray_dcp.errors.InvalidRequestError: SaveOptions.container must be one of \
'torch_save', 'safetensors', but is 'zip' [key container]
    """

    overwrite: bool = True
    """Replace a committed checkpoint of the same id, atomically. False refuses, as DCP does with
    `FileSystemWriter(overwrite=False)`."""
    container: Container = "torch_save"
    """`torch_save`: DCP's own format. `safetensors`: flat files for other readers."""
    replicas: Literal["warn", "check"] = "warn"
    """What to do when ranks hold different values where one is expected: take the lowest rank's
    and warn, or refuse."""
    dedup_save_to_lowest_rank: bool = False
    """Let the lowest rank that holds a replicated item write it whole, instead of sharing the
    bytes out over its holders; as DCP's `DefaultSavePlanner` argument of this name."""
    objects: Literal["warn", "refuse"] = "warn"
    """What to do with an object that a safe load would refuse."""
    part_bytes: int = 1024 * MIB
    """Aimed size of a part file, in bytes; a rank with a larger share writes several."""
    num_threads: int = 2
    """Threads with which a rank writes its part files."""
    sync_files: bool = True
    """Make files durable (fsync) before they are reported. False only for throw-away saves."""
    direct_io: bool = True
    """Bypass the page cache where the filesystem allows it."""
    stock_metadata: bool = True
    """Write DCP's `.metadata` as well, without which stock DCP can't read the checkpoint. It takes
    100 to 160 bytes for each tensor and rank and as long to make as all else of a commit: with
    many thousand ranks leave it out, and let `ray-dcp metadata PATH` make it when it is needed."""
    max_pending: int = 1
    """Asynchronous saves of a session that may be under way at a time; each holds a copy of the
    state in memory."""
    when_full: WhenFull = "wait"
    """What an asynchronous save does when `max_pending` are under way. `wait`: until one has ended.
    `skip`: it ends at once with `SaveSkippedError`. `replace`: it takes the place of the newest
    one of which nothing is written yet, which ends with `SaveCancelledError`; else it waits."""
    keep_in_memory: int = 0
    """How many of the last committed asynchronous saves of a run (those into one folder) stay in
    the memory of the nodes, beside those under way, while there is room: loads take their bytes
    from there, and verify them. They outlive the ranks."""
    keep_peer_copy: bool = False
    """What stays in memory by `keep_in_memory` is also copied into the memory of another node, and
    so survives the loss of one. Needs a cluster of two nodes or more."""
    plan_timeout_s: float = 600.0
    """Deadline for all ranks to come with their plans, in seconds."""
    write_timeout_s: float = 3600.0
    """Deadline for all receipts after the plan went out, in seconds."""
    commit_timeout_s: float = 300.0
    """Deadline for writing the chunk table, the manifest and `.metadata`, in seconds. Also for
    asking the storage what became of a save whose coordinator is gone."""
    heartbeat_timeout_s: float = 60.0
    """Silence after which a process that takes part counts as frozen, in seconds: a rank that
    was not heard is blamed, however long the phase's own deadline is, and a coordinator that does
    not answer is given up. One that is slow but speaks is not concerned."""

    def __post_init__(self) -> None:
        _check_literals(self)
        _check_positive(
            self, "part_bytes", "num_threads", "max_pending", "plan_timeout_s", "write_timeout_s",
            "commit_timeout_s", "heartbeat_timeout_s",
        )  # fmt: skip
        keep = self.keep_in_memory
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise InvalidRequestError(
                f"SaveOptions.keep_in_memory must be a number of checkpoints, 0 or more, but is "
                f"{keep!r}",
                key="keep_in_memory",
            )
        if self.keep_peer_copy and not keep:
            raise InvalidRequestError(
                "SaveOptions.keep_peer_copy copies what stays in memory, but keep_in_memory is 0. "
                "Set keep_in_memory as well",
                key="keep_peer_copy",
            )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load.

    Raises:
        InvalidRequestError: A field has a value that it can't have.

    Example:
        >>> LoadOptions().verify
        'always'
    """

    allow_partial_load: bool = False
    """Leave keys that the checkpoint lacks as they are, instead of raising `MissingKeyError`."""
    strict: bool = False
    """Also refuse keys of the checkpoint that the state dict does not ask for."""
    dtype: DtypePolicy = "widen"
    """`widen`: cast where no value can be lost, refuse otherwise. `error`: never cast.
    `cast`: cast anything, as stock DCP does."""
    verify: Verify = "always"
    """Which block checksums to verify: all that are read, one block in 16, or none."""
    weights_only: bool = True
    """Load objects by `torch.load(weights_only=True)` rules. False runs code from the
    checkpoint: only for files that you wrote yourself."""
    num_threads: int = 4
    """Threads with which a rank reads."""
    from_memory: bool = True
    """Take bytes from memory where the nodes keep the checkpoint there, and wait for an
    asynchronous save of it that is staged and not yet committed."""
    scratch_bytes: int = 64 * MIB
    """Most temporary memory per reading thread for regions that are not contiguous, in bytes."""
    plan_timeout_s: float = 600.0
    """Deadline for all ranks to come and to plan their reads, in seconds."""
    read_timeout_s: float = 3600.0
    """Deadline for all ranks to have read, in seconds."""
    heartbeat_timeout_s: float = 60.0
    """Silence after which a process that takes part counts as frozen, in seconds; see
    `SaveOptions.heartbeat_timeout_s`."""

    def __post_init__(self) -> None:
        _check_literals(self)
        _check_positive(
            self, "num_threads", "scratch_bytes", "plan_timeout_s", "read_timeout_s",
            "heartbeat_timeout_s",
        )  # fmt: skip


def _check_literals(options: SaveOptions | LoadOptions) -> None:
    hints = {
        "container": Container,
        "dtype": DtypePolicy,
        "verify": Verify,
        "replicas": Literal["warn", "check"],
        "objects": Literal["warn", "refuse"],
        "when_full": WhenFull,
    }
    for field in fields(options):
        value = getattr(options, field.name)
        hint = hints.get(field.name)
        if hint is not None and get_origin(hint) is Literal and value not in get_args(hint):
            raise InvalidRequestError(
                f"{type(options).__name__}.{field.name} must be one of "
                f"{', '.join(map(repr, get_args(hint)))}, but is {value!r}",
                key=field.name,
            )
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise InvalidRequestError(
                f"{type(options).__name__}.{field.name} must be True or False, but is {value!r}",
                key=field.name,
            )


def _check_positive(options: SaveOptions | LoadOptions, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise InvalidRequestError(
                f"{type(options).__name__}.{name} must be a number above 0, but is {value!r}",
                key=name,
            )

"""What a caller can choose about a save or a load, as frozen values that check themselves.

No option is read from the environment; whoever reads one (entrypoints, the CLI) makes a value
of it here and passes it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ray_dcp.core.checks import check_above_0, check_whole
from ray_dcp.errors import InvalidRequestError

__all__ = ["DtypePolicy", "KeyMap", "LoadOptions", "SaveOptions", "Verify", "WhenFull"]

DtypePolicy = Literal["widen", "error", "cast", "keep"]
KeyMap = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], "str | None"]
ShareReads = Literal["auto"] | bool
Verify = Literal["always", "sample", "never"]
WhenFull = Literal["wait", "skip"]

MIB = 1 << 20

INSTEAD_OF_SAFETENSORS = (
    "save as it is by default, and make safetensors files of the checkpoint with "
    "ray_dcp.export(path, target, 'hf') or `ray-dcp export --format hf`"
)


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save.

    Raises:
        InvalidRequestError: A field has a value that it can't have; the message names it and
            what is accepted.

    Examples:
        >>> SaveOptions(num_threads=4).overwrite
        True
        >>> SaveOptions(replicas="first")
        Traceback (most recent call last):
        ...
        ray_dcp.errors.InvalidRequestError: SaveOptions.replicas must be one of \
'warn', 'check', but is 'first' [key replicas]
    """

    overwrite: bool = True
    """Replace a committed checkpoint of the same id, atomically. False refuses, as DCP does with
    `FileSystemWriter(overwrite=False)`."""
    container: Literal["torch_save"] = "torch_save"
    """How data files are made: as DCP's own. For safetensors files, `export` the checkpoint."""
    replicas: Literal["warn", "check"] = "warn"
    """What to do when ranks hold different values where one is expected: take the lowest rank's
    and warn, or refuse."""
    dedup_save_to_lowest_rank: bool = False
    """Let the lowest rank that holds a replicated item write it whole, instead of sharing the
    bytes out over its holders; as DCP's `DefaultSavePlanner` argument of this name."""
    objects: Literal["warn", "refuse"] = "warn"
    """What to do with an object that a safe load would refuse."""
    nonfinite: Literal["ignore", "warn", "refuse"] = "ignore"
    """What to do with NaN and infinities: save them; save them, and warn with tensor, rank and
    count; or fail the save on all ranks with `NonFiniteError` before anything is written. Looking
    takes 1 to 3 ns a value, up to 8 where cores are shared, also in the call of an asynchronous
    save."""
    part_bytes: int = 1024 * MIB
    """Aimed size of a part file, in bytes; a rank with a larger share writes several."""
    num_threads: int = 2
    """Threads with which a rank writes its part files."""
    sync_files: bool = True
    """Make files durable (fsync) before they are reported, and write them past the page cache where
    the filesystem allows it. False only for throw-away saves."""
    stock_metadata: bool = True
    """Write DCP's `.metadata` as well, without which stock DCP can't read the checkpoint. It takes
    100 to 160 bytes for each tensor and rank and as long to make as all else of a commit: with
    many thousand ranks leave it out, and let `ray-dcp metadata PATH` or `ray_dcp.write_metadata`
    make it when it is needed."""
    max_pending: int = 1
    """Asynchronous saves of a session that may be under way at a time; each holds a copy of the
    state in memory."""
    when_full: WhenFull = "wait"
    """What an asynchronous save does when `max_pending` are under way. `wait`: until one has ended.
    `skip`: it ends at once with `SaveSkippedError`."""
    keep_in_memory: int = 0
    """How many of the last committed asynchronous saves of a run (those into one folder) stay in
    the memory of the nodes, beside those under way, while there is room: loads take their bytes
    from there, and verify them. They outlive the ranks."""
    staging: Literal["call", "background"] = "call"
    """Where `async_save` copies the state. `call`: in the call; the state may change when it
    returns. `background`: in a thread, from devices on a stream of their own, behind what the
    caller's streams had been given by the call, which returns when the save is planned. The state
    must not change before `SaveHandle.staged()` has returned; `SaveHandle.before_step(optimizer)`
    waits where an optimizer would change it. `CheckpointManager`, the integrations and planners of
    your own copy in the call."""
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
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load.

    Raises:
        InvalidRequestError: A field has a value that it can't have.

    Examples:
        >>> LoadOptions().verify
        'always'
    """

    strict: bool | None = None
    """None: keys that the checkpoint lacks are an error; those that nobody asked for are one if
    they are of a module or optimizer that is given as itself, and else reported. True: both are
    errors. False: neither is, as in `Module.load_state_dict`, and what the checkpoint lacks stays
    as it is; DCP's `DefaultLoadPlanner(allow_partial_load=True)` means that too. Shapes that
    differ are an error in any case; see `resize`."""
    key_map: KeyMap | None = field(default=None, hash=False)
    """New names for the keys of the checkpoint, where the state dict calls them otherwise: a dict
    of old to new names; `(regular expression, replacement)` pairs, applied in order to each; or a
    function of the old name, which returns None to leave a key out."""
    prefixes: Sequence[str] = field(default=(), hash=False)
    """Load only what lies at or below these dotted names of the state dict; the rest stays as it
    is and is not missed. None given: everything."""
    resize: Mapping[str, int | Sequence[int]] = field(default_factory=dict, hash=False)
    """Shell patterns of FQNs, each with the dimensions in which the saved and the wanted length
    may differ. What both have is loaded; what only the target has keeps its value; what only the
    checkpoint has is left out. Told by `LoadReport.resized`."""
    dtype: DtypePolicy = "widen"
    """`widen`: cast where no value can be lost, refuse otherwise. `error`: never cast.
    `cast`: cast anything, as stock DCP does, also between tensor classes that round. `keep`: keep
    the saved dtype, by putting a new tensor in the place of a target that has another; a `Stateful`
    casts what it is given."""
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
    share_reads: ShareReads = "auto"
    """Read what several ranks need once, and hand it on through Ray's object store. `auto`: where
    that is sooner there, judged by the kind of storage: from object stores it is, from a disk
    behind one page cache it is not. True: whatever saves bytes. False: every rank reads for
    itself, as with a Ray that the job started for itself. Objects are always read by each."""
    plan_timeout_s: float = 600.0
    """Deadline for all ranks to come and to plan their reads, in seconds."""
    read_timeout_s: float = 3600.0
    """Deadline for all ranks to have read, in seconds."""
    heartbeat_timeout_s: float = 60.0
    """Silence after which a process that takes part counts as frozen, in seconds; see
    `SaveOptions.heartbeat_timeout_s`."""

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_choices(self)

    def without_choices(self) -> LoadOptions:
        """Returns them without what only this rank needs to know, for others to read.

        Functions of a user's script do not arrive in another process.
        """
        return replace(self, key_map=None, prefixes=(), resize={})

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of the fields that choose which values go where, as far as they are set."""
        named = {
            "key_map": self.key_map is not None,
            "prefixes": bool(self.prefixes),
            "resize": bool(self.resize),
            "dtype='keep'": self.dtype == "keep",
        }
        return tuple(name for name, is_set in named.items() if is_set)


def _check_choices(options: LoadOptions) -> None:
    wrong: list[tuple[str, str, object]] = []
    if options.strict not in (None, True, False):
        wrong.append(("strict", "None, True or False", options.strict))
    if not _is_key_map(options.key_map):
        wrong.append(("key_map", "a dict, pairs of texts or a function", options.key_map))
    prefixes = options.prefixes
    is_list = isinstance(prefixes, Iterable) and not isinstance(prefixes, str)
    if not is_list or not all(isinstance(it, str) and it for it in prefixes):
        wrong.append(("prefixes", "a list of dotted names", prefixes))
    if not isinstance(options.resize, Mapping) or not all(
        isinstance(pattern, str) and all(type(dim) is int for dim in dims_of(dims))
        for pattern, dims in options.resize.items()
    ):
        wrong.append(("resize", "a dict of patterns to dimensions", options.resize))
    for name, expected, found in wrong:
        raise InvalidRequestError(
            f"LoadOptions.{name} must be {expected}, but is {found!r}", key=name
        )


def dims_of(dims: int | Sequence[int]) -> tuple[Any, ...]:
    """Returns the dimensions of an entry of `LoadOptions.resize`."""
    return tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)


def _is_key_map(key_map: object) -> bool:
    if key_map is None or callable(key_map):
        return True
    if isinstance(key_map, Mapping):
        pairs: list[Any] = list(key_map.items())
    elif isinstance(key_map, (list, tuple)):
        pairs = [pair if isinstance(pair, (list, tuple)) else () for pair in key_map]
    else:
        return False
    return all(len(pair) == 2 and all(isinstance(it, str) for it in pair) for pair in pairs)


def _check_fields(options: SaveOptions | LoadOptions) -> None:
    """Checks choices, flags and numbers by their types; `others` are checked elsewhere."""
    cls = SaveOptions if isinstance(options, SaveOptions) else LoadOptions
    for name, hint in _HINTS[cls.__name__].items():
        value = getattr(options, name)
        expected = None
        if get_origin(hint) is Literal:
            choices = get_args(hint)
            some = "one of " * (len(choices) > 1)
            expected = None if value in choices else f"{some}{', '.join(map(repr, choices))}"
        elif hint is bool and not isinstance(value, bool):
            expected = "True or False"
        elif hint == ShareReads and not isinstance(value, bool) and value != "auto":
            expected = "True or False or 'auto'"
        elif hint is int:
            check_whole(value, f"{cls.__name__}.{name}", 0 if name == "keep_in_memory" else 1)
        elif hint is float:
            check_above_0(value, f"{cls.__name__}.{name}")
        if expected is not None:
            way_out = f": {INSTEAD_OF_SAFETENSORS}" if name == "container" else ""
            raise InvalidRequestError(
                f"{cls.__name__}.{name} must be {expected}, but is {value!r}{way_out}", key=name
            )


_HINTS = {cls.__name__: get_type_hints(cls) for cls in (SaveOptions, LoadOptions)}

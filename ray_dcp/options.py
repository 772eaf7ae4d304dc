"""`SaveOptions` and `LoadOptions`: frozen dataclasses that validate themselves.

The environment sets no option. Entry points and the CLI build one of these values and pass it on
unchanged. `check_whole`, `check_above_0` and `check_wait` check numbers that users pass, and
`check_patterns` patterns; `matches` compares names with them; `plain_integer` converts numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Literal, TypeGuard, get_args, get_origin, get_type_hints

from ray_dcp.errors import InvalidRequestError

LONGEST_S = 10 * 365 * 24 * 3600
"""The longest wait that is accepted, in seconds."""


def check_patterns(patterns: object, name: str) -> None:
    """Checks that patterns are a list of texts. A text would be a pattern per letter.

    Args:
        patterns: The argument that the user passed.
        name: Name of the argument.

    Raises:
        InvalidRequestError: They are not.
    """
    given = patterns if isinstance(patterns, Collection) else None
    if isinstance(given, str) or not (
        given is not None and all(isinstance(pattern, str) for pattern in given)
    ):
        raise InvalidRequestError(
            f"{name} must be a list of patterns, as ['model.*'], but is {patterns!r}", key=name
        )


def matches(name: str, patterns: Collection[str]) -> bool:
    """Returns whether a name matches any of the patterns, or there are none.

    Examples:
        >>> matches("model.w", ["model.*"]), matches("step", ["model.*"]), matches("step", [])
        (True, False, True)
    """
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def plain_integer(value: Any) -> Any:
    """Returns an integer of any class, such as numpy's, as Python's; other values as they are.

    Examples:
        >>> import numpy as np
        >>> plain_integer(np.int64(3)), plain_integer(True), plain_integer("latest")
        (3, True, 'latest')
    """
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def check_whole(value: object, name: str, least: int = 0) -> int:
    """Returns a number as Python's after checking that it is an integer of any class.

    Args:
        value: The argument that the user passed.
        name: Name of the argument; the part after its last dot is the error's key.
        least: Smallest value accepted.

    Raises:
        InvalidRequestError: The value is no integer, or too small.

    Examples:
        >>> check_whole(3, "EverySteps.interval", 1)
        3
    """
    found = plain_integer(value)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise InvalidRequestError(
            f"{name} must be a whole number from {least}, but is {value!r}",
            key=name.rpartition(".")[2],
        )
    return found


def check_above_0(value: object, name: str, *, or_0: bool = False) -> float:
    """Returns a number as Python's after checking that it is finite and above 0.

    Args:
        value: The argument that the user passed.
        name: See `check_whole`. A name that ends with `_s` means seconds, at most ten years. Why:
            Python's waits raise OverflowError beyond some hundreds of years.
        or_0: Accept 0 as well.

    Raises:
        InvalidRequestError: The value is not such a number.
    """
    if or_0 and _is_number(value) and value == 0:
        return 0.0
    most = LONGEST_S if name.endswith("_s") else math.inf
    if not _is_number(value) or not 0 < value <= most or value == math.inf:
        bound = f" and at most {LONGEST_S}, ten years" if name.endswith("_s") else ""
        raise InvalidRequestError(
            f"{name} must be {'0 or ' if or_0 else ''}a number above 0{bound}, but is {value!r}",
            key=name.rpartition(".")[2],
        )
    return float(value)


def check_wait(value: object, name: str) -> float | None:
    """Returns a timeout in seconds, or None for no timeout, after checking it.

    Args:
        value: The argument that the user passed. Values below 0 become 0, values above ten years
            become ten years.
        name: See `check_whole`.

    Raises:
        InvalidRequestError: The value is neither a number nor None.
    """
    if value is None:
        return None
    if not _is_number(value) or math.isnan(value):
        raise InvalidRequestError(
            f"{name} must be a number of seconds, or None to wait for ever, but is {value!r}",
            key=name.rpartition(".")[2],
        )
    return min(max(0.0, float(value)), LONGEST_S)


def _is_number(value: object) -> TypeGuard[int | float]:
    # Why Real: numpy's numbers are of that class.
    return isinstance(value, Real) and not isinstance(value, bool)


def set_checked(owner: object, **checked: object) -> None:
    """Sets fields of a frozen dataclass to their checked values, in its `__post_init__`."""
    for name, value in checked.items():
        object.__setattr__(owner, name, value)


__all__ = ["DtypePolicy", "KeyMap", "LoadOptions", "SaveOptions", "Verify", "WhenFull"]

DtypePolicy = Literal["widen", "error", "cast", "keep"]
KeyMap = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], "str | None"]
ShareReads = Literal["auto"] | bool
Unchanged = Literal["write", "link"]
Verify = Literal["always", "sample", "never"]
WhenFull = Literal["wait", "skip"]

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of `save` and `async_save`.

    Raises:
        InvalidRequestError: A field has an invalid value; the message names the field and the
            accepted values.

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
    """Replace a committed checkpoint of the same id, atomically. If False, the save raises
    `CheckpointExistsError`, like DCP's `FileSystemWriter(overwrite=False)`."""
    replicas: Literal["warn", "check"] = "warn"
    """What to do when ranks hold different values of an item that should be equal. `warn`: save
    the lowest rank's value, which a load gives to all ranks, and warn of what is lost, whose names
    `SaveReport.differing` has too. `check`: fail the save with `PlanConflictError`. What each
    rank has of its own goes into a `PerRank`."""
    dedup_save_to_lowest_rank: bool = False
    """Let the lowest rank that holds a replicated item write all of it, instead of dividing its
    bytes among the holders. Same as the argument of DCP's `DefaultSavePlanner`."""
    objects: Literal["warn", "refuse"] = "warn"
    """What to do with an object that a load with `weights_only=True` would refuse."""
    nonfinite: Literal["ignore", "warn", "refuse"] = "ignore"
    """What to do with NaN and infinities. `ignore`: save them. `warn`: save them and warn with
    tensor, rank and count. `refuse`: fail the save on all ranks with `NonFiniteError` before
    anything is written. The check takes 1 to 3 ns per value, up to 8 ns on shared cores; an
    asynchronous save makes it during the call."""
    part_bytes: int = 1024 * MIB
    """Target size of a part file, in bytes; a rank with a larger share writes several."""
    num_threads: int = 2
    """Number of threads with which a rank writes its part files."""
    sync_files: bool = True
    """Make files durable (fsync) before they are reported, and bypass the page cache where the
    filesystem allows it. Use False only for throw-away saves."""
    unchanged: Unchanged = "write"
    """What to do with part files that would equal one of the last committed step of the run (those
    in one folder). `write`: write them. `link`: keep what is not expected to change in files of its
    own, and give such a file, where its block checksums are those of the last step's file, another
    name (a hard link; on S3, GCS and Azure a copy that the store makes) instead of writing it
    again. Only files whose bytes this process wrote or read less than a day and 100 links ago are
    taken. Each step stays whole by itself, but steps share bytes on a disk, and so their damage."""
    stock_metadata: bool = True
    """Also write DCP's `.metadata`, without which stock DCP can't read the checkpoint. It has 100
    to 160 bytes per tensor and rank, and takes as long to build as the rest of the commit. With
    many thousand ranks, set this to False and write it when it is needed, with `ray-dcp metadata
    PATH` or `ray_dcp.write_metadata`."""
    max_pending: int = 1
    """Most asynchronous saves of a session that may be in progress at a time; each holds a copy of
    the state in memory."""
    when_full: WhenFull = "wait"
    """What an asynchronous save does when `max_pending` saves are in progress. `wait`: it starts
    when one of them ends. `skip`: it ends at once with `SaveSkippedError`."""
    keep_in_memory: int = 0
    """How many of the last committed asynchronous saves of a run (those into one folder) the nodes
    keep in memory, in addition to those in progress, while there is room. Loads read and verify
    these bytes instead of the storage's. They outlive the ranks."""
    staging: Literal["call", "background"] = "call"
    """Where `async_save` copies the state. `call`: in the call; the state may change when it
    returns. `background`: in a thread; the call returns when the save is planned. Copies from
    devices run on a separate stream, after the work that the caller's streams had queued by then.
    The state must not change before `SaveHandle.staged()` returns;
    `SaveHandle.before_step(optimizer)` makes an optimizer wait for that. `CheckpointManager`, the
    integrations and custom planners always copy in the call."""
    plan_timeout_s: float = 600.0
    """Deadline for all ranks to join the save with their items, in seconds."""
    write_timeout_s: float = 3600.0
    """Deadline for all receipts, in seconds from when the plan was sent."""
    commit_timeout_s: float = 300.0
    """Deadline for writing the chunk table, the manifest and `.metadata`, in seconds. Also for
    reading from storage how a save ended whose coordinator is gone."""
    heartbeat_timeout_s: float = 60.0
    """Silence, in seconds, after which a process counts as frozen. A silent rank fails the
    operation, whatever the phase's own deadline; ranks stop waiting for a silent coordinator. A
    process that is slow but sends heartbeats is not affected."""

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `load` and `load_newest`.

    Raises:
        InvalidRequestError: A field has an invalid value.

    Examples:
        >>> LoadOptions().verify
        'always'
    """

    strict: bool | None = None
    """None: missing keys (asked for, but not in the checkpoint) are an error; unexpected keys (in
    the checkpoint, but not asked for) are an error if they belong to a module or optimizer that
    the state dict holds as an object, and are reported otherwise. True: both are errors. False:
    neither is, as in `Module.load_state_dict`, and targets that the checkpoint lacks keep their
    values; DCP's `DefaultLoadPlanner(allow_partial_load=True)` means the same. Shapes that differ
    are always an error; see `resize`."""
    key_map: KeyMap | None = field(default=None, hash=False)
    """How to rename keys of the checkpoint to those of the state dict: a dict from old to new
    names; `(regular expression, replacement)` pairs, applied in order to each name; or a function
    of the old name, which returns None to leave a key out. Parameter groups of an optimizer are
    matched by the new names."""
    prefixes: Sequence[str] = field(default=(), hash=False)
    """Load only values at or below these dotted names of the state dict; all others keep their
    values and are not reported as missing. If empty, load everything."""
    resize: Mapping[str, int | Sequence[int]] = field(default_factory=dict, hash=False)
    """Shell patterns of FQNs, each with the dimensions in which the saved and the target length
    may differ. The region that both have is loaded; elements that only the target has keep their
    values; elements that only the checkpoint has are ignored. `LoadReport.resized` lists them."""
    dtype: DtypePolicy = "widen"
    """`widen`: cast where no value can be lost, raise otherwise. `error`: never cast. `cast`: cast
    anything, like stock DCP, also between tensor classes that round. `keep`: keep the saved dtype,
    and replace a target of another dtype by a new tensor; a `Stateful` casts what it is given."""
    verify: Verify = "always"
    """Which block checksums to verify. `always`: those of all blocks that are read. `sample`: one
    block in 16. `never`: none."""
    weights_only: bool = True
    """Load objects under the rules of `torch.load(weights_only=True)`. False runs code from the
    checkpoint: use it only for files that you wrote yourself."""
    num_threads: int = 4
    """Number of threads with which a rank reads."""
    from_memory: bool = True
    """Read from the memory of the nodes where they keep the checkpoint, and wait for an
    asynchronous save of it that is staged but not committed."""
    share_reads: ShareReads = "auto"
    """Read bytes that several ranks need once, and pass them on through Ray's object store.
    `auto`: where the kind of storage makes that faster; it does for object stores, and does not
    for a disk behind one page cache. True: wherever it saves bytes. False: every rank reads for
    itself, as it always does with a private Ray. Every rank reads objects for itself."""
    plan_timeout_s: float = 600.0
    """Deadline for all ranks to join and to plan their reads, in seconds."""
    read_timeout_s: float = 3600.0
    """Deadline for all ranks to finish reading, in seconds."""
    heartbeat_timeout_s: float = 60.0
    """Silence, in seconds, after which a process counts as frozen; see
    `SaveOptions.heartbeat_timeout_s`."""

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_choices(self)

    def without_choices(self) -> LoadOptions:
        """Returns a copy for the coordinator, without the fields that only this rank needs.

        *Why*: functions of a user's script can't be unpickled in another process.
        """
        return replace(self, key_map=None, prefixes=(), resize={})

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of the fields that are set among those that choose which value goes where."""
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
    return tuple(map(plain_integer, dims if isinstance(dims, (list, tuple)) else (dims,)))


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
    """Checks the fields whose type is a `Literal`, a bool or a number; skips all others."""
    cls = SaveOptions if isinstance(options, SaveOptions) else LoadOptions
    for name, hint in _HINTS[cls.__name__].items():
        value = getattr(options, name)
        expected = None
        if get_origin(hint) is Literal:
            choices = get_args(hint)
            expected = None if value in choices else f"one of {', '.join(map(repr, choices))}"
        elif hint is bool and not isinstance(value, bool):
            expected = "True or False"
        elif hint == ShareReads and not isinstance(value, bool) and value != "auto":
            expected = "True or False or 'auto'"
        elif hint is int:
            least = 0 if name == "keep_in_memory" else 1
            set_checked(options, **{name: check_whole(value, f"{cls.__name__}.{name}", least)})
        elif hint is float:
            set_checked(options, **{name: check_above_0(value, f"{cls.__name__}.{name}")})
        if expected is not None:
            raise InvalidRequestError(
                f"{cls.__name__}.{name} must be {expected}, but is {value!r}", key=name
            )


_HINTS = {cls.__name__: get_type_hints(cls) for cls in (SaveOptions, LoadOptions)}

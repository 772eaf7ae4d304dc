"""The progress of long operations: `Progress`, what `progress=` accepts, and what it draws.

The work counts into a `Meter`. A thread of the meter looks at it ten times a second, and calls the
function of the user, or draws: a bar on a terminal and in a notebook, lines elsewhere. So neither
can delay the work or fail it. Without `progress=` the meter counts nothing and has no thread.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from html import escape
from shutil import get_terminal_size
from typing import Any, Literal, TextIO

from ray_dcp import events
from ray_dcp.core import bounds
from ray_dcp.core.processes import start_thread
from ray_dcp.core.quantities import seconds_text, size_text
from ray_dcp.errors import InvalidRequestError, LimitError
from ray_dcp.view.wording import printable

TICK_S = 0.1
LINE_S = 10.0
"""Interval of lines where the output is no terminal, in seconds."""
_BAR = range(10, 41)
"""Lengths of a bar, in characters."""
_LEAST_S = 1e-6
_LEAST_NAME = 8
"""To how many characters a name is shortened."""
_DONE = {"saving": "saved", "loading": "loaded", "importing": "imported", "exporting": "exported",
         "copying": "copied", "verifying": "verified", "averaging": "averaged",
         "comparing": "compared", "reading": "read", "warming up": "warmed up"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a long operation is.

    Examples:
        >>> now = Progress(doing="saving", name="run/step-1", done_bytes=1 << 20,
        ...                total_bytes=4 << 20, seconds=2.0)
        >>> now.fraction, now.bytes_per_s, now.left_s
        (0.25, 524288.0, 6.0)
        >>> print(now)
        saving run/step-1: 25%, 1.0 of 4.0 MiB, 512.0 KiB/s, 6 s left
    """

    doing: str
    """The operation: `"saving"`, `"loading"`, `"verifying"`, …"""
    name: str
    """Path or URL of the checkpoint, or of the target of an export, import, copy or average."""
    phase: str = ""
    """What this rank does in a save or load: `"waiting"`, `"writing"`, `"reading"`, …"""
    file: str = ""
    """Name of a file that is read or written now; empty if none is."""
    done_bytes: int = 0
    """Bytes that are done. In a save or load, those of this rank."""
    total_bytes: int = 0
    """Bytes in all; 0 as long as that is unknown."""
    step: int = 0
    """Number of the checkpoint among `num_steps`, from 1; 0 if there is just one."""
    num_steps: int = 0
    """Number of checkpoints; 0 if there is just one."""
    rank: int = 0
    """This rank, of a save or load."""
    world_size: int = 1
    """Number of ranks that save or load together."""
    seconds: float = 0.0
    """Time since the operation began, in seconds."""
    outcome: Literal["", "done", "failed"] = ""
    """How the operation ended; empty while it runs. The last call has the outcome."""

    @property
    def fraction(self) -> float | None:
        """The part that is done, from 0 to 1; None if that is unknown."""
        done, total = self.done_bytes, self.total_bytes
        if not total:
            done, total = self.step, self.num_steps
        return min(done / total, 1.0) if total else None

    @property
    def bytes_per_s(self) -> float:
        """Average rate, in bytes per second."""
        return self.done_bytes / self.seconds if self.seconds > _LEAST_S else 0.0

    @property
    def left_s(self) -> float | None:
        """Time left at the average rate, in seconds; None if that is unknown."""
        part = self.fraction
        return None if not part else self.seconds * (1 - part) / part

    def __str__(self) -> str:
        if self.outcome:
            size = f"{size_text(self.done_bytes)} in " if self.done_bytes else ""
            how = "failed after " if self.outcome == "failed" else size
            return f"{_title(self)}: {how}{seconds_text(self.seconds)}"
        file = f", {printable(self.file)}" if self.file else ""
        return f"{_title(self)}{file}: {', '.join(_numbers(self))}"


def bar_text(now: Progress, width: int, marks: str = "█░") -> str:
    """Returns progress as one line with a bar.

    Where that is too long, it has no file, no rate, a shorter name, and at last no bar.

    Args:
        now: The progress.
        width: Most characters.
        marks: Characters for what is done, and for what is left.

    Examples:
        >>> sizes = {"done_bytes": 1 << 20, "total_bytes": 4 << 20}
        >>> now = Progress(doing="saving", name="run/step-1", seconds=2, **sizes)
        >>> bar_text(now, 72, "#.")
        'saving run/step-1  #####.................  25%  1.0 of 4.0 MiB  6 s left'
        >>> bar_text(now, 44, "#.")
        'saving …/step  25%  1.0 of 4.0 MiB  6 s left'
    """
    part = now.fraction
    least = 0 if part is None else _BAR.start + 2
    title, numbers = _title(now), "  ".join(_numbers(now))
    if len(title) + least + len(numbers) + 2 > width:
        numbers = "  ".join(_numbers(now, rate=False))
    room = max(width - len(numbers) - 2, 0)
    file = f", {printable(now.file)}" if now.file else ""
    if len(title) + len(file) + least <= room:
        title += file
    elif (over := len(title) + least - room) > 0:
        title = _title(now, max(len(now.name) - over, _LEAST_NAME))
    drawn = ""
    if part is not None and len(title) + least <= room:
        length = min(max(room - len(title) - 2, _BAR.start), _BAR.stop - 1)
        filled = int(part * length)
        drawn = f"{marks[0] * filled}{marks[1] * (length - filled)}  "
    return f"{title[:room]}  {drawn}{numbers}"[:width]


def _title(now: Progress, most: int | None = None) -> str:
    """Returns what is done to which checkpoint, whose name has at most `most` characters."""
    doing = _DONE.get(now.doing, now.doing) if now.outcome == "done" else now.doing
    name = now.name
    if most is not None and len(name) > most:
        name = f"…{name[1 - most :]}"
    rank = f" on rank {now.rank} of {now.world_size}" if now.world_size > 1 else ""
    step = f", step {now.step} of {now.num_steps}" if now.num_steps else ""
    return printable(f"{doing} {name}{rank}{step}")


def _numbers(now: Progress, *, rate: bool = True) -> list[str]:
    """Returns percentage, bytes, rate, and time left, as far as they are known."""
    part, left_s = now.fraction, now.left_s
    told = [f"{part:.0%}"] if part is not None else [now.phase] if now.phase else []
    if now.total_bytes:
        (done, unit), total = size_text(now.done_bytes).split(), size_text(now.total_bytes)
        told.append(f"{done if total.endswith(f' {unit}') else f'{done} {unit}'} of {total}")
        told += [f"{size_text(int(now.bytes_per_s))}/s"] if rate else []
    return [
        *told,
        _duration_text(now.seconds) if left_s is None else f"{_duration_text(left_s)} left",
    ]


def _duration_text(seconds: float) -> str:
    """Returns a duration in whole seconds, minutes, or tenths of hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class _Lines:
    """Prints a line from time to time, and one at the end."""

    def __init__(self, stream: TextIO, *, ends: bool) -> None:
        self._stream, self._ends, self._last_s = stream, ends, 0.0

    def __call__(self, now: Progress) -> None:
        if self._ends if now.outcome else now.seconds - self._last_s >= LINE_S:
            self._last_s = now.seconds
            self._stream.write(f"{now}\n")
            self._stream.flush()


class _Terminal:
    """Draws a bar in the last line of a terminal, and prints a line at the end."""

    def __init__(self, stream: TextIO, *, ends: bool) -> None:
        self._stream, self._ends = stream, ends
        self._drawn = False
        self._marks = "█░"
        try:
            self._marks.encode(stream.encoding or "ascii")
        except UnicodeError:
            self._marks = "#."

    def __call__(self, now: Progress) -> None:
        if now.outcome:
            self.hide()
            if self._ends:
                self._stream.write(f"{now}\n")
        else:
            width = get_terminal_size().columns
            with suppress(OSError, ValueError):  # Why first: standard output may be a file
                width = os.get_terminal_size(self._stream.fileno()).columns
            # Why one less: a terminal wraps when its last column is written.
            self._stream.write(f"\r{bar_text(now, width - 1, self._marks)}\x1b[K")
            self._drawn = True
        self._stream.flush()

    def hide(self) -> None:
        """Removes the bar, which would be in the way of other output."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False


class _Notebook:
    """Draws a bar below a cell."""

    def __init__(self) -> None:
        display: Any = importlib.import_module("IPython.display")
        self._display = display.display
        self._handle: Any = None

    def __call__(self, now: Progress) -> None:
        text = escape(str(now))
        part = "" if now.fraction is None else f' value="{now.fraction:.3f}"'
        bar = "" if now.outcome else f"<progress{part}></progress> "
        data = {"text/plain": str(now), "text/html": f"<div>{bar}{text}</div>"}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


Show = Callable[[Progress], object]

Look = Callable[[], tuple[str, str, int, int]]
"""Returns phase, file, bytes done, and bytes in all; 0 if that is unknown."""


class Meter:
    """Counts what an operation has done, and shows it. Thread-safe.

    Args:
        doing: As `Progress.doing`.
        name: As `Progress.name`.
        sizes: About how many bytes each of several checkpoints has; `begin` begins the next one.
        ranks: As `Progress.rank` and `Progress.world_size`.
        counts: Whether it counts; False for the progress of an operation that nobody follows.
    """

    def __init__(
        self,
        doing: str,
        name: str,
        sizes: Sequence[int] = (),
        ranks: tuple[int, int] = (0, 1),
        *,
        counts: bool = True,
    ) -> None:
        self._counts = counts
        self._lock, self._drawing = threading.Lock(), threading.Lock()
        self._began_s = time.monotonic()
        self._sizes = tuple(sizes)
        self._now = Progress(
            doing=doing, name=name, num_steps=len(sizes), rank=ranks[0], world_size=ranks[1]
        )
        self._done = self._expected = self._earlier = 0
        self._look: Look | None = None
        self._looked = (0, 0)
        self._over = threading.Event()
        self._show: Show | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(
        self,
        name: str,
        step: int | None = None,
        num_steps: int | None = None,
        *,
        doing: str = "",
    ) -> None:
        """Records that the next checkpoint begins.

        Args:
            name: Its path or URL.
            step: Its number; by default, one more than that of the one before.
            num_steps: Number of checkpoints, if it was unknown.
            doing: What is done to it, if it is something else than before.
        """
        with self._lock:
            now = self._now
            # Why: what is smaller than it was expected to be is done all the same.
            self._done = self._expected = max(self._done + self._looked[0], self._expected)
            self._looked = (0, 0)
            if step is None:
                step = now.step + 1
            if step != now.step:
                self._earlier = self._done
            self._now = replace(
                now,
                name=name,
                doing=doing or now.doing,
                file="",
                step=step if num_steps or now.num_steps else 0,
                num_steps=now.num_steps if num_steps is None else num_steps,
            )

    def expect(self, num_bytes: int) -> None:
        """Adds bytes that the operation will move."""
        with self._lock:
            self._expected += num_bytes

    def add(self, num_bytes: int, file: str = "") -> None:
        """Adds bytes that were moved, and the name of the file."""
        if not self._counts:  # Why: this is called for each piece of a file
            return
        with self._lock:
            self._done += num_bytes
            self._now = replace(self._now, file=file)

    @contextmanager
    def following(self, look: Look) -> Iterator[None]:
        """Adds what `look` returns while the block runs, instead of counts by `add`.

        Args:
            look: Where the bytes that it returns fall, the work has begun its next phase, and they
                stay as they were.
        """
        if not self._counts:
            yield
            return
        with self._lock:
            self._look, self._looked = look, (0, 0)
        try:
            yield
            with events.contained("The progress"):
                self._update()
            self._looked = (max(self._looked),) * 2
        finally:
            with self._lock:
                self._done += self._looked[0]
                self._expected = max(self._expected, self._done)
                self._look, self._looked = None, (0, 0)
                self._now = replace(self._now, phase="", file="")

    def _update(self) -> None:
        look = self._look
        if look is None:
            return
        phase, file, done, total = look()  # Why without the lock: it may look at a slow storage
        # Why: a load also reads the ends of files, which it does not count as needed.
        done = min(done, total) if total else done
        with self._lock:
            if self._look is look:
                self._looked = max(self._looked[0], done), max(self._looked[1], total)
                self._now = replace(self._now, phase=phase, file=file)

    def now(self, outcome: Literal["", "done", "failed"] = "") -> Progress:
        """Returns the progress."""
        self._update()
        with self._lock:
            done = self._done + self._looked[0]
            at, sizes = self._now.step, self._sizes
            now_bytes = self._earlier + sum(sizes[max(at - 1, 0) : at])
            total = max(self._expected, self._done + self._looked[1], now_bytes) + sum(sizes[at:])
            if outcome == "done":
                done = total = max(done, total)
            return replace(
                self._now,
                done_bytes=min(done, total),
                total_bytes=total,
                seconds=time.monotonic() - self._began_s,
                outcome=outcome,
            )

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Removes the bar from the terminal while the block prints."""
        with self._drawing:
            if isinstance(self._show, _Terminal):
                self._show.hide()
            yield

    def start(self, show: Show) -> None:
        """Begins to show progress. It is not shown if no thread can be started."""
        self._show = show
        try:
            self._thread = start_thread(self._run, "ray_dcp progress")
        except LimitError as error:
            self._error = error

    def end(self, outcome: Literal["done", "failed"]) -> None:
        """Shows how the operation has ended; warns if that failed before, or takes too long."""
        self._outcome = outcome
        self._over.set()
        if self._thread is not None:
            self._thread.join(bounds.SHOWN_END_S)
        wrong = ""
        if self._error is not None:
            wrong = f"failed: {type(self._error).__name__}: {self._error}"
        elif self._thread is not None and self._thread.is_alive():
            wrong = f"has not returned for {bounds.SHOWN_END_S:g} s"
        if wrong:
            now = self._now
            events.warn(
                f"The progress of {now.doing} {now.name} was not shown to its end, as what "
                f"progress= calls {wrong}. The operation itself is not affected",
                stacklevel=6,
            )

    def _run(self) -> None:
        outcome: Literal["", "done", "failed"] = ""
        try:
            while not outcome:
                if self._over.wait(TICK_S):
                    outcome = self._outcome
                with self._drawing:
                    if self._show is not None:
                        self._show(self.now(outcome))
        except BaseException as error:  # noqa: BLE001 - whatever a function of the user raises
            self._error = error


def uncounted() -> Meter:
    """Returns a meter that counts nothing.

    Each operation has its own: a child that is forked would inherit the lock of a shared one.
    """
    return Meter("", "", counts=False)


ShowProgress = bool | Show | Meter
"""What `progress=` accepts: whether to draw, or a function that is called about ten times a second
and once at the end, by a thread of its own. A `Meter` is that of an operation around this one."""


@contextmanager
def reporting(
    progress: ShowProgress,
    doing: str,
    name: str,
    ranks: tuple[int, int] = (0, 1),
    *,
    sizes: Sequence[int] = (),
    ends: bool = True,
) -> Iterator[Meter]:
    """Shows the progress of the block.

    Args:
        progress: As the user gave it.
        doing: As `Progress.doing`.
        name: As `Progress.name`.
        ranks: This rank, and the number of ranks; only rank 0 draws.
        sizes: As for `Meter`.
        ends: Whether a line remains that says how it ended.

    Yields:
        What the block counts into; it does nothing if nobody wants to know.

    Raises:
        InvalidRequestError: `progress` is neither a bool nor a function.
    """
    if isinstance(progress, Meter):
        yield progress
        return
    show: Show | None = None
    if progress is True:
        show = _display_here(ends=ends) if ranks[0] == 0 else None
    elif callable(progress):
        show = progress
    elif progress is not False:
        raise InvalidRequestError(
            f"progress must be True, False or a function of one argument, but is {progress!r}",
            key="progress",
        )
    meter = Meter(doing, name, sizes, ranks=ranks, counts=show is not None)
    if show is None:
        yield meter
        return
    meter.start(show)
    outcome: Literal["done", "failed"] = "failed"
    try:
        yield meter
        outcome = "done"
    finally:
        meter.end(outcome)


def _display_here(*, ends: bool) -> Show | None:
    """Returns what draws in this process: a notebook, a terminal, or another standard error."""
    stream = sys.stderr
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if get_shell is not None and getattr(get_shell(), "kernel", None) is not None:
        return _Notebook()
    if stream is None:
        return None
    with suppress(OSError, ValueError):
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            return _Terminal(stream, ends=ends)
    return _Lines(stream, ends=ends)

"""`SaveOptions(unchanged="link")` for a state of which 99 % is frozen.

The limit of a save that links is one pass over the bytes for their checksums, and a direct write of
what is trained.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ray_dcp
from ray_dcp.core import bounds
from ray_dcp.core.checksums import block_checks
from ray_dcp.options import SaveOptions
from tests.bench.async_saves import one_node, session_of
from tests.bench.measure import interleaved, show, state_of
from tests.bench.single import raw_write

KEPT = 2
"""Steps that stay on the disk."""


class Tuned(nn.Module):
    """1.4 GB of frozen weights, and 14 MB of adapters."""

    def __init__(self) -> None:
        super().__init__()
        base = {name.replace(".", "-"): tensor for name, tensor in state_of().items()}
        self.base = nn.ParameterDict(
            {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in base.items()}
        )
        self.adapters = nn.ParameterList(nn.Parameter(torch.randn(64, 1200)) for _ in range(46))


class Run:
    """Saves steps of one run, each after a step of training."""

    def __init__(self, root: Path, state: dict[str, Any], trained: list[Any], **how: Any) -> None:
        self._root, self._state, self._trained = root, state, trained
        self._options = SaveOptions(**how)
        self._step = 0
        self.reports: list[Any] = []
        self.written: list[int] = []

    def train(self) -> None:
        """Changes what is trained, and removes what is too old."""
        with torch.no_grad():
            for tensor in self._trained:
                tensor.add_(1e-3)
        shutil.rmtree(self._root / f"step-{self._step - KEPT}", ignore_errors=True)

    def save(self) -> None:
        """Saves the next step and waits until it is committed."""
        path = self._root / f"step-{self._step}"
        ray_dcp.save(self._state, checkpoint_id=path, options=self._options)
        self._step += 1
        self.written.append(self._new_bytes(path))

    def save_beside(self) -> None:
        """Saves the next step asynchronously, and waits until it is committed."""
        path = self._root / f"step-{self._step}"
        handle = ray_dcp.async_save(self._state, checkpoint_id=path, options=self._options)
        handle.committed(600)
        self._step += 1
        self.reports.append(handle.report())

    def _new_bytes(self, path: Path) -> int:
        files = [file.stat() for file in path.glob("*.distcp")]
        return sum(status.st_size for status in files if status.st_nlink == 1)


def unchanged(rounds: int, directory: str | None, *, on_ray: bool = False) -> None:
    """Runs it; asynchronous saves are written by Ray's stager if `on_ray`."""
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    try:
        with ExitStack() as ended:
            if on_ray:
                ended.enter_context(one_node(4 << 30))
                ended.enter_context(session_of("unchanged"))
            _tuned(root, rounds, on_ray=on_ray)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _tuned(root: Path, rounds: int, *, on_ray: bool) -> None:
    model = Tuned()
    optimizer = torch.optim.AdamW(model.adapters.parameters())
    sum(adapter.sum() for adapter in model.adapters).backward()
    optimizer.step()
    moments = [t for one in optimizer.state.values() for t in one.values() if t.numel() > 1]
    trained = [*model.adapters.parameters(), *moments]
    state = {"model": model, "optimizer": optimizer}
    num_trained = sum(tensor.nbytes for tensor in trained)
    frozen = list(model.base.parameters())
    num_bytes = num_trained + sum(tensor.nbytes for tensor in frozen)
    views = [memoryview(t.view(-1).view(torch.uint8).numpy()) for t in [*frozen, *trained]]

    def limit() -> None:
        for view in views:
            block_checks(view, 1 << 20)
        raw_write(root / "raw", num_trained)

    runs = {
        how: Run(root / how.replace(" ", "-"), state, trained, unchanged=how.split()[0])
        for how in ("write", "link", "write beside", "link beside")
    }
    contestants: dict[str, Callable[[], object]] = {
        "unchanged=write": runs["write"].save,
        "unchanged=link": runs["link"].save,
        "async, unchanged=write": runs["write beside"].save_beside,
        "async, unchanged=link": runs["link beside"].save_beside,
        "limit: checksums + write trained": limit,
    }
    training = dict(zip(contestants, [*runs.values(), None], strict=True))

    def train(name: str) -> None:
        run = training[name]
        if run is not None:
            run.train()
        if on_ray and name.startswith("async"):
            # Jobs save less often than it takes until the memory of a save is free.
            time.sleep(2 * bounds.LINGER_S)

    rows = interleaved(contestants, rounds, before=train)
    share = num_trained / num_bytes
    show(f"99 % frozen, {share:.1%} trained", rows, num_bytes, "unchanged=write")
    later = runs["link"].written[1:]
    print(f"  written from the second save on: {max(later) / num_trained:.4f} of what is trained")
    print(f"  staged in: {runs['link beside'].reports[-1].staging}")
    for how in ("write beside", "link beside"):
        stalls = sorted(report.stall_s for report in runs[how].reports[1:])
        print(f"  stall, async, {how.split()[0]}: {stalls[len(stalls) // 2]:.3f} s (median)")
    os.unlink(root / "raw")

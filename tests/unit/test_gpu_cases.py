"""The cases of `python -m tests.gpu`: with a played driver, and on a GPU where there is one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.gpu.__main__ import run
from tests.gpu.cases import CASES, no_leaks
from tests.gpu.machine import Gpu, PlayedGpu
from tests.gpu.rates import RATES

QUICK = {**CASES, "no leaks": partial(no_leaks, num_saves=8)}
IN_A_PROCESS_OF_ITS_OWN = ("FSDP2 through Ray",)


@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_A_PROCESS_OF_ITS_OWN])
def test_with_a_played_driver(name, tmp_path):
    ((_, where, _, verdict, seen),) = run(name, QUICK[name], PlayedGpu(), str(tmp_path))
    assert where == "played"
    assert verdict in ("held", "not run"), seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*CASES, *RATES])
def test_on_a_gpu(name, tmp_path):
    rows = run(name, {**QUICK, **RATES}[name], Gpu(1 << 30), str(tmp_path))
    assert not [row for row in rows if row[3] == "FAILED"]

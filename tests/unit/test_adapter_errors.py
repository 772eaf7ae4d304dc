"""`CheckpointError` is a `CheckpointException` once `torch_adapter` is imported, in any order."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle
from torch.distributed.checkpoint.api import CheckpointException

import ray_dcp.torch_adapter  # noqa: F401
from ray_dcp import errors
from ray_dcp.errors import CheckpointError, CommitUnknownError, MissingKeyError

REPOSITORY = Path(__file__).parents[2]


def run(program: str, data: bytes = b"") -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=data,
        capture_output=True,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import ray_dcp.errors, torch, ray_dcp.torch_adapter",
        "import torch, ray_dcp.errors, ray_dcp.torch_adapter",
        "import ray_dcp.torch_adapter, ray_dcp.errors",
        "import ray_dcp.torch_adapter as a, importlib; importlib.reload(a); import ray_dcp.errors",
    ],
)
def test_any_order_of_imports_makes_an_error_that_both_except_clauses_catch(imports: str) -> None:
    run(
        f"{imports}\n"
        "from ray_dcp.errors import *\n"
        "from torch.distributed.checkpoint.api import CheckpointException\n"
        "for cls in (Exception, CheckpointException, CheckpointError, RuntimeError):\n"
        "    try: raise MissingKeyError('gone', key='w', rank=3)\n"
        "    except cls as error: kept = error\n"
        "    assert str(kept) == 'gone [rank 3, key w]' and list(kept.failures) == [3]\n"
        "assert CheckpointError.__bases__ == (Exception, CheckpointException)\n"
    )


def test_an_error_made_before_torch_was_imported_is_caught_as_torchs_afterwards() -> None:
    run(
        "from ray_dcp.errors import StorageError\n"
        "error = StorageError('disk', key='k')\n"
        "import ray_dcp.torch_adapter\n"
        "from torch.distributed.checkpoint.api import CheckpointException\n"
        "try: raise error\n"
        "except CheckpointException as kept: assert str(kept) == 'disk [key k]'\n"
    )


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_of_the_tree_is_a_torch_exception_and_survives_both_picklers(name: str) -> None:
    cls = getattr(errors, name)
    error = cls("message", checkpoint_id="/c", step=4, rank=1, key="k")
    error.__notes__ = ["a note"]
    assert isinstance(error, (Exception, CheckpointException))
    for module in (pickle, cloudpickle):
        back = module.loads(module.dumps(error))
        assert type(back) is cls
        assert str(back) == str(error)
        assert back.__notes__ == ["a note"]
        assert set(back.failures) == {1}


def test_an_error_of_a_process_with_torch_is_read_without_torch_and_comes_back() -> None:
    error = CommitUnknownError("unknown", attempt="a1", rank=2)
    back = pickle.loads(
        run(
            "import pickle, sys\n"
            "error = pickle.loads(sys.stdin.buffer.read())\n"
            "assert 'torch' not in sys.modules, 'reading the error imported torch'\n"
            "assert error.attempt == 'a1' and error.rank == 2\n"
            "sys.stdout.buffer.write(pickle.dumps(error))\n",
            pickle.dumps(error),
        )
    )
    assert isinstance(back, CheckpointException)
    assert (type(back), back.attempt, back.rank) == (CommitUnknownError, "a1", 2)


def test_failures_of_several_ranks_survive_cloudpickle() -> None:
    error = MissingKeyError("gone").with_failures(
        {1: (ValueError("one"), CheckpointError("x").failures[0][1])}
    )
    back = cloudpickle.loads(cloudpickle.dumps(error))
    assert list(back.failures) == [1]
    assert str(back.failures[1][0]) == "one"

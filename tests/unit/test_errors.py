"""Every error keeps its story across pickling, notes and all, and says it in one line."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from torch.distributed.checkpoint.api import CheckpointException

import ray_dcp.torch_adapter  # noqa: F401 - makes the errors torch's
from ray_dcp import CheckpointError, CommitUnknownError, errors

REPOSITORY = Path(__file__).parents[2]
CLASSES = [getattr(errors, name) for name in errors.__all__]

FIELDS: dict[str, Any] = {"checkpoint_id": "/run/step-7", "step": 7, "rank": 3, "key": "a.b"}


def filled(cls: type[CheckpointError]) -> CheckpointError:
    """Makes an error with every field of its class set to something."""
    extra = {
        name: f"the {name}"
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in FIELDS
    }
    return cls("expected 1, found 2; do 3", **FIELDS, **extra)


def state_of(error: CheckpointError) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name != "_failures"}


def test_the_tree_lists_every_class_of_the_module():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_every_error_is_torchs_and_survives_pickling_with_all_its_fields(module: Any):
    for cls in CLASSES:
        error = filled(cls)
        assert isinstance(error, CheckpointException)
        # Why not add_note: it is new in Python 3.11.
        error.__notes__ = ["caused by OSError: no space left", "second note"]
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            found = module.loads(module.dumps(error, protocol))
            assert type(found) is cls
            assert (state_of(found), str(found)) == (state_of(error), str(error))
            assert found.__notes__ == ["caused by OSError: no space left", "second note"]
            assert list(found.failures) == [3]


def test_the_failures_of_other_ranks_survive_pickling():
    frames = traceback.StackSummary.from_list([("train.py", 12, "step", "save()")])
    error = CheckpointError("two ranks failed").with_failures(
        {1: (ValueError("one"), frames), 5: (filled(errors.StorageError), frames)}
    )
    for module in (pickle, cloudpickle):
        found = module.loads(module.dumps(error)).failures
        assert sorted(found) == [1, 5]
        assert repr(found[1][0]) == "ValueError('one')"
        assert found[5][0].key == "a.b"
        assert found[1][1][0].lineno == 12


def test_the_text_of_an_error_is_its_message_and_where():
    found = CheckpointError("m", key="k", rank=0, step=0, checkpoint_id="/c")
    assert str(found) == "m [checkpoint /c, step 0, rank 0, key k]"
    assert str(CheckpointError("m")) == "m"


def test_an_error_is_caught_as_the_builtin_that_it_resembles():
    for cls, builtin in (
        (errors.InvalidRequestError, ValueError), (errors.MissingKeyError, RuntimeError),
        (errors.CheckpointNotFoundError, FileNotFoundError), (errors.StorageError, OSError),
        (errors.CheckpointExistsError, FileExistsError), (errors.DeadlineError, TimeoutError),
    ):  # fmt: skip
        assert issubclass(cls, builtin)


PROGRAM = """
import pickle, sys
error = pickle.loads(sys.stdin.buffer.read())
assert "torch" not in sys.modules, "reading the error imported torch"
print(error, file=sys.stderr)
sys.stdout.buffer.write(pickle.dumps(error))
import importlib, torch, ray_dcp.torch_adapter as adapter
importlib.reload(adapter)
from ray_dcp.errors import CheckpointError, MissingKeyError
from torch.distributed.checkpoint.api import CheckpointException
try: raise error
except CheckpointException as kept: assert sorted(kept.failures) == [3]
for cls in (Exception, CheckpointException, CheckpointError, RuntimeError):
    try: raise MissingKeyError("gone", key="w", rank=3)
    except cls as kept: found = kept
    assert str(found) == "gone [rank 3, key w]" and list(found.failures) == [3]
assert CheckpointError.__bases__ == (Exception, CheckpointException)
"""


def test_an_error_is_read_without_torch_and_is_torchs_too_once_that_is_imported():
    error = filled(CommitUnknownError)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=pickle.dumps(error), capture_output=True,
        check=False, timeout=400, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    back = pickle.loads(done.stdout)
    assert type(back) is CommitUnknownError
    assert state_of(back) == state_of(error)

"""Checkpoints of PyTorch Lightning: their names, any structure, and a run that was killed."""

from __future__ import annotations

import datetime
import json
import signal
import tempfile
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from safetensors.torch import load_file

import ray_dcp
from ray_dcp.integrations.lightning import RayDcpCheckpointIO
from tests.support.programs import lightning_fit
from tests.support.programs.forks import plain_environment

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of many kinds


def alike(one: Any, other: Any) -> bool:
    """Returns whether two checkpoints are equal, but for classes of mappings."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        same = isinstance(other, dict) and sorted(map(repr, one)) == sorted(map(repr, other))
        return same and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        same = type(one) is type(other) and len(one) == len(other)
        return same and all(map(alike, one, other))
    return type(one) is type(other) and one == other


FIT = ("-m", lightning_fit.__name__)
IMPORTS = ["pytorch_lightning"]


def test_a_run_that_was_killed_goes_on_and_logs_what_it_would_have_logged(programs, tmp_path):
    """Every number of every step, with schedulers, early stopping, clipping and batch norm."""
    whole, model = lightning_fit.fit(tmp_path / "whole", 9, tmp_path / "whole.log")
    assert (whole.current_epoch, whole.early_stopping_callback.stopped_epoch) == (3, 2)
    words = [str(tmp_path / "run"), "9", str(tmp_path / "killed.log"), "7"]
    (killed,) = programs.run(*FIT, *words, env=plain_environment(), imports=IMPORTS)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert lightning_fit.newest(tmp_path / "run").name == "epoch=1.ckpt"
    trainer, resumed = lightning_fit.fit(tmp_path / "run", 9, tmp_path / "resumed.log")

    def lines(name: str) -> list[list[Any]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    before = [line for line in lines("killed.log") if line[0] < 6]
    assert before + lines("resumed.log") == lines("whole.log")
    assert lines("killed.log") == lines("whole.log")[: len(lines("killed.log"))]
    assert trainer.current_epoch == whole.current_epoch
    stopping = [one.early_stopping_callback.state_dict() for one in (trainer, whole)]
    scores = [one.checkpoint_callback.state_dict() for one in (trainer, whole)]
    assert alike(*stopping)
    for name in ("best_model_score", "current_score", "kth_value"):
        assert alike(scores[0][name], scores[1][name])
    assert alike(resumed.state_dict(), model.state_dict())
    assert alike(resumed.seen, model.seen)


def test_ranks_that_train_by_ddp_go_on_and_log_what_they_would_have_logged(programs, tmp_path):
    """Rank 1 dies in the third epoch; what rank 0 alone has saved is loaded by both."""

    def train(run: str, log: str, *kill_at: str) -> list[int]:
        ended = programs.run(
            *FIT, str(tmp_path / run), "3", str(tmp_path / log), *kill_at,
            ranks=2, env=plain_environment(OMP_NUM_THREADS="1"), imports=IMPORTS,
        )  # fmt: skip
        return [one.returncode for one in ended]

    def lines(log: str, first: int = 0) -> list[str]:
        """Of both ranks, whoever wrote first."""
        read = map(json.loads, (tmp_path / log).read_text().splitlines())
        return sorted(map(json.dumps, (line for line in read if line[0] >= first)))

    assert train("whole", "whole.log") == [0, 0]
    assert train("run", "killed.log", "5")[1] == -signal.SIGKILL
    assert lightning_fit.newest(tmp_path / "run").name == "epoch=1.ckpt"
    assert train("run", "resumed.log") == [0, 0]
    assert lines("resumed.log") == lines("whole.log", first=4)
    for rank in range(2):
        states = [torch.load(tmp_path / f"{log}.log.{rank}") for log in ("whole", "resumed")]
        assert alike(*states)


def test_a_checkpoint_has_the_names_of_lightning_and_comes_back_as_torch_saves_it(tmp_path):
    class Both(RayDcpCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, path, storage_options)
            TorchCheckpointIO().save_checkpoint(checkpoint, tmp_path / Path(path).name)

    _, model = lightning_fit.fit(tmp_path / "run", 2, tmp_path / "log", io=Both())
    place = tmp_path / "run" / "epoch=1.ckpt"
    stock = torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)
    assert alike(RayDcpCheckpointIO().load_checkpoint(place), stock)
    view = ray_dcp.open_checkpoint(place)
    weights = dict(model.state_dict())
    assert {
        *(f"state_dict.{name}" for name in weights), "epoch", "global_step",
        "optimizer_states.0.state.0.exp_avg", "optimizer_states.0.param_groups.0.lr",
        "lr_schedulers.0.last_epoch", "loops.fit_loop.epoch_progress.total.ready",
        "callbacks.EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}.best_score",
        "hyper_parameters.width", "seen.1",
    } <= set(view.names)  # fmt: skip
    assert not [name for name in view.names if name.startswith("tensors.")]
    # What the names are good for: a part, a file of weights, a comparison, Lightning's own file.
    part = {"state_dict": {name: torch.zeros_like(one) for name, one in weights.items()}}
    ray_dcp.load(part, checkpoint_id=place, no_dist=True)
    assert alike(part["state_dict"], weights)
    file = tmp_path / "weights.safetensors"
    ray_dcp.export(place, file, include=["state_dict.*"], strip_prefix="state_dict.")
    assert alike(load_file(file), weights)
    changed = view.diff(ray_dcp.open_checkpoint(tmp_path / "run" / "epoch=0.ckpt")).changed
    assert {"state_dict.layers.0.weight", "optimizer_states.0.state.0.exp_avg"} <= set(changed)
    ray_dcp.dcp_to_torch_save(place, tmp_path / "own.ckpt")
    own = lightning_fit.Model.load_from_checkpoint(tmp_path / "own.ckpt", weights_only=False)
    assert alike(dict(own.state_dict()), weights)
    # A part of it is a checkpoint too.
    sources, keys = [tmp_path / "run" / "epoch=0.ckpt", place], ["state_dict.*", "structure"]
    ray_dcp.average(sources, tmp_path / "mean", keys=keys)
    mean = RayDcpCheckpointIO().load_checkpoint(tmp_path / "mean")
    assert mean.keys() == {"state_dict"}
    assert mean["state_dict"].keys() == weights.keys()


LEAVES = st.sampled_from(
    [None, True, 3, 0.5, "text", torch.ones(2), torch.tensor(3), torch.zeros(0, 2), (), (1, "a"),
     (torch.ones(1), {"a": [torch.zeros(2)]}), datetime.timedelta(1), torch.float16, {}, [],
     OrderedDict(a=1), torch.nn.Parameter(torch.ones(1))]
)  # fmt: skip
KEYS = st.sampled_from(
    ["a", "b.c", "b", "", ".", "0", "structure", "tensors", "state_dict", "checkpoint", 0, 1, -1,
     2**61, True, None, 0.5, ("a", 1)]
)  # fmt: skip
CONTENTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@example({"a": {"b.c": torch.ones(2), "b": {"c": torch.zeros(2)}}, "a.d": [{0: 1, "0": 2}]})
@example({"a": {"b": torch.ones(2)}, "a.b": 3, "structure": 1})
@example({"a": [{"b": (torch.ones(2), {1: torch.ones(1)})}, {2**61: 1}, datetime.timedelta(1)]})
@given(st.dictionaries(KEYS, CONTENTS, max_size=4))
def test_any_structure_comes_back(checkpoint):
    io = RayDcpCheckpointIO()
    with tempfile.TemporaryDirectory() as folder:
        io.save_checkpoint(checkpoint, f"{folder}/c")
        assert alike(io.load_checkpoint(f"{folder}/c", weights_only=False), checkpoint)


def test_values_that_a_state_dict_would_treat_in_its_own_way_come_back_as_they_are(tmp_path):
    module = torch.nn.Linear(2, 1)
    given_ = {"module": module, "list": [{"m": module}], "view": types.SimpleNamespace(a=1)}
    RayDcpCheckpointIO().save_checkpoint(given_, tmp_path / "c")
    found = RayDcpCheckpointIO().load_checkpoint(tmp_path / "c", weights_only=False)
    for one in (found["module"], found["list"][0]["m"]):
        assert isinstance(one, torch.nn.Linear)
        assert alike(dict(one.state_dict()), dict(module.state_dict()))
    assert found["view"] == given_["view"]


@pytest.mark.parametrize("kind", ["module", "optimizer", "scheduler"])
@pytest.mark.parametrize(
    "put",
    [lambda x: x, lambda x: [x], lambda x: (x, 1), lambda x: ({"a": [x]},), lambda x: {(1, 2): x}],
)
def test_objects_that_have_states_come_back_as_objects_from_any_container(kind, put, tmp_path):
    """As torch.save keeps them: a callback may have put them there."""
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    value = put({"module": module, "optimizer": optimizer, "scheduler": scheduler}[kind])
    RayDcpCheckpointIO().save_checkpoint({"epoch": 1, "x": value}, tmp_path / "c")
    found = RayDcpCheckpointIO().load_checkpoint(tmp_path / "c", weights_only=False)

    def classes(one):
        if isinstance(one, dict):
            return {key: classes(each) for key, each in one.items()}
        return [*map(classes, one)] if isinstance(one, (list, tuple)) else type(one)

    assert classes(found["x"]) == classes(value)
    assert type(found["x"]) is type(value)


def test_a_checkpoint_whose_tensors_have_numbers_is_read(tmp_path):
    """As `RayDcpCheckpointIO` wrote it before its values had names."""

    def place(number: int) -> dict[str, str]:
        return {"__ray_dcp_tensor__": str(number)}

    structure = {"state_dict": {"a.b": place(0)}, "seen": (place(1), [{3: place(2)}]), "epoch": 3}
    tensors = {str(number): torch.full((2, number), float(number)) for number in range(3)}
    state = {"structure": (structure,), "tensors": tensors}
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    wanted = {"state_dict": {"a.b": tensors["0"]}, "seen": (tensors["1"], [{3: tensors["2"]}])}
    found = RayDcpCheckpointIO().load_checkpoint(tmp_path / "c")
    assert alike(found, wanted | {"epoch": 3})
    ray_dcp.save({"structure": ({"epoch": 1},), "tensors": {}}, checkpoint_id=tmp_path / "d")
    assert RayDcpCheckpointIO().load_checkpoint(tmp_path / "d") == {"epoch": 1}

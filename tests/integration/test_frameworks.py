"""Adapters, with the real frameworks on the CPU."""

from __future__ import annotations

import filecmp
import gc
import importlib
import json
import runpy
import shutil
import signal
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import ray_dcp
from ray_dcp.cli.main import main as cli
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    UnsafeCheckpointError,
)
from ray_dcp.integrations.hf import RayDcpCallback, export_pretrained
from ray_dcp.manager import CheckpointManager
from tests.support import titan
from tests.support.checkpoints import flip
from tests.support.programs import hf_trainer, hub_ranks, whole_state_ranks
from tests.support.programs.forks import plain_environment

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of many kinds


def example(name: str) -> dict[str, Any]:
    """Returns what a program of docs/examples defines."""
    return runpy.run_path(str(EXAMPLES / name))


# --- Lightning ----------------------------------------------------------------------------------


def test_lightning_trains_saves_removes_and_goes_on_as_if_it_had_not_stopped(tmp_path):
    fit = partial(example("lightning_trainer.py")["fit"], in_background=True)
    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "run", 3)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["epoch=1.ckpt", "epoch=2.ckpt"]
    cut_off = tmp_path / "run" / "epoch=9.ckpt"  # before its commit
    cut_off.mkdir()
    (cut_off / "__0_0.0123456789abcdef.distcp").touch()
    resumed = fit(tmp_path / "run", 4)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "epoch=2.ckpt", "epoch=3.ckpt", "epoch=9.ckpt"]  # fmt: skip


def test_a_lightning_checkpoint_comes_back_exactly_and_damage_is_seen(tmp_path):
    from ray_dcp.integrations.lightning import RayDcpCheckpointIO

    io = RayDcpCheckpointIO()
    given = {
        "state_dict": {"a.b": torch.ones(2, 3), "shared": torch.zeros(())},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{1: 2}]}],
        "tuple": (1, [None, torch.arange(500)], {}),
        "epoch": 3,
    }
    io.save_checkpoint(given, tmp_path / "c")
    found = io.load_checkpoint(tmp_path / "c", map_location=lambda tensor, _: tensor)
    assert str(found) == str(given)
    assert torch.equal(found["tuple"][1][1], torch.arange(500))
    with pytest.raises(InvalidRequestError):
        io.save_checkpoint(given, tmp_path / "d", storage_options={"a": 1})
    (file,) = (tmp_path / "c").glob("*.distcp")
    for offset in range(0, file.stat().st_size, 512):
        flip(file, offset)
    with pytest.raises(CheckpointError):
        io.load_checkpoint(tmp_path / "c")
    io.remove_checkpoint(tmp_path / "c")
    assert list(tmp_path.glob("c*")) == []
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("place", ["memory://lightning", "memory://fit/epoch=1.ckpt", "file"])
def test_a_lightning_checkpoint_at_a_url_is_removed(tmp_path, place):
    from ray_dcp.integrations.lightning import RayDcpCheckpointIO

    io, path = RayDcpCheckpointIO(), f"file://{tmp_path}/c/" if place == "file" else place
    io.save_checkpoint({"epoch": 3}, path)
    io.remove_checkpoint(path)
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint(path)


def test_a_run_that_lightning_saved_in_files_goes_on(tmp_path, monkeypatch):
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

    from ray_dcp.integrations.lightning import RayDcpCheckpointIO

    io, path = RayDcpCheckpointIO(), tmp_path / "epoch=1.ckpt"
    TorchCheckpointIO().save_checkpoint({"a": torch.ones(2), "epoch": 1}, path)
    # Why: Lightning up to 2.5 has no weights_only.
    monkeypatch.setattr(TorchCheckpointIO, "load_checkpoint", lambda self, path, where=None: None)
    assert str(io.load_checkpoint(path)) == str({"a": torch.ones(2), "epoch": 1})
    assert io.load_checkpoint(path, map_location="meta")["a"].is_meta
    with pytest.raises(CheckpointError, match="choose a path that is no file"):
        io.save_checkpoint({"epoch": 2}, path)
    io.remove_checkpoint(path)
    assert not path.exists()
    ray_dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=path, no_dist=True)
    with pytest.raises(InvalidRequestError, match=r"RayDcpCheckpointIO saved, found .*model.w"):
        io.load_checkpoint(path)


# --- Hugging Face -------------------------------------------------------------------------------


def test_a_hugging_face_trainer_saves_and_goes_on_as_if_it_had_not_stopped(tmp_path):
    fit = example("hf_trainer.py")["fit"]
    whole, _, steps = fit(tmp_path / "whole", 8)
    assert steps == [6, 8]
    fit(tmp_path / "run", 4)
    # A rank to which the storage does not show the step yet resumes with the others.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointManager, "all_steps", lambda self: [])
        resumed, callback, steps = fit(tmp_path / "run", 8)
    assert callback.restored.step == 4
    assert resumed.state.global_step == 8
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(CheckpointNotFoundError):
        fit(tmp_path / "nothing", 2, resume="latest")
    with pytest.raises(InvalidRequestError):
        RayDcpCallback("run")


def stopped_and_resumed(folder, step, *, every=2, **arguments):
    """Returns what an undisturbed run has logged, and a resumed one; and the latter's manager.

    The latter also as it is started once more, after its end.
    """

    def fit(name, *others):
        with CheckpointManager(folder / name, every, **hf_trainer.kept()) as manager:
            trainer = hf_trainer.made(folder / name, manager, *others, **arguments)
            trainer.train()
            manager.join()
            return hf_trainer.numbers_of(trainer), manager

    whole, _ = fit("whole")
    with pytest.raises(InterruptedError):
        fit("run", hf_trainer.StopAtStep(step, kills=False))
    return whole, *fit("run"), *fit("run")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        # The last step of an epoch is saved after the evaluation that follows it.
        {"eval_strategy": "epoch", "every": 5, "logging_steps": 4},
        {"gradient_accumulation_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"},
        {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True},
    ],
    ids=str,
)
def test_a_resumed_hugging_face_trainer_logs_what_it_would_have_logged(tmp_path, arguments):
    whole, resumed, _, again, manager = stopped_and_resumed(tmp_path, 7, **arguments)
    assert resumed == whole
    assert again == whole
    evaluated = {one["step"]: one["eval_loss"] for one in whole["log"] if "eval_loss" in one}
    for step in manager.all_steps():
        assert manager.step_info(step).metrics.get("eval_loss") == evaluated.get(step)
    # What retention keeps, and what a command takes as the best, is the best.
    saved = [step for step in evaluated if step % arguments.get("every", 2) == 0]
    best = min(saved, key=lambda step: (evaluated[step], -step))
    assert manager.best_step() == best
    shown = CliRunner().invoke(cli, ["show", f"{manager.path}@best:eval_loss"])
    assert f"step-{best:08d}" in shown.output


def test_a_hugging_face_trainer_is_gone_with_its_last_reference(tmp_path):
    gc.collect()
    gc.disable()
    try:
        with CheckpointManager(tmp_path / "run", **hf_trainer.kept()) as manager:
            trainer = hf_trainer.made(tmp_path / "run", manager, max_steps=2)
            trainer.train()
            gone = weakref.ref(trainer), weakref.ref(trainer.model)
            del trainer
            assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_two_killed_ranks_of_a_hugging_face_trainer_log_what_they_would_have_logged(
    programs, tmp_path
):
    for stop, status in (("9", -signal.SIGKILL), (None, 0)):
        ended = programs.run(
            "-m", "tests.support.programs.hf_trainer", str(tmp_path), *([stop] if stop else []),
            ranks=2, env=plain_environment(OMP_NUM_THREADS="1"),
        )  # fmt: skip
        assert [one.returncode for one in ended] == [status] * 2, [one.stderr for one in ended]
    for rank in range(2):
        whole, resumed = (
            json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("whole", "run")
        )
        assert resumed == whole


def test_a_hugging_face_trainer_that_ran_out_of_memory_goes_on_by_smaller_batches(tmp_path):
    """As if it had been restarted with them: the Trainer begins its loop again by itself."""

    def fit(name, *others, **arguments):
        with CheckpointManager(tmp_path / name, 2, **hf_trainer.kept()) as manager:
            trainer = hf_trainer.made(tmp_path / name, manager, *others, **arguments)
            trainer.train()
            manager.join()
            return hf_trainer.numbers_of(trainer), manager.all_steps()

    # The step that it resumed from is not the last one that ended before.
    found = fit("run", hf_trainer.OutOfMemoryAtStep(9), auto_find_batch_size=True)
    with pytest.raises(InterruptedError):
        fit("other", hf_trainer.StopAtStep(9, kills=False))
    assert found == fit("other", per_device_train_batch_size=3)


def test_a_hugging_face_trainer_goes_back_if_the_weights_of_its_newest_step_are_damaged(tmp_path):
    def fit(*others, **arguments):
        with CheckpointManager(tmp_path / "run", 2, **hf_trainer.kept()) as manager:
            trainer = hf_trainer.made(tmp_path / "run", manager, *others, **arguments)
            trainer.train()
            return hf_trainer.numbers_of(trainer), manager

    with pytest.raises(InterruptedError):
        fit(hf_trainer.StopAtStep(7, kills=False))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    step_6 = tmp_path / "run" / "step-00000006"
    weight = ray_dcp.read_state_dict(step_6)["model"]["layers.0.weight"]
    (file,) = step_6.glob("*.distcp")
    flip(file, file.read_bytes().index(weight.numpy().tobytes()))
    with pytest.warns(UserWarning, match="Restored step 4 of .* instead of the newer step 6"):
        resumed, manager = fit()
    assert manager.step_info(6).metrics  # saved again
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "copy", tmp_path / "run")
    whole, _ = fit()
    assert resumed == whole


def test_a_hugging_face_trainer_goes_on_from_the_newest_step_that_is_trusted(tmp_path):
    def fit(steps, trust, **given):
        given = {"order": "any", "max_to_keep": 1, "trust": "ok", **given}
        with CheckpointManager(tmp_path, 2, chkpt_on_preemption=False, **given) as manager:
            callback = RayDcpCallback(manager, trust=trust)
            hf_trainer.made(tmp_path, manager, callback=callback, max_steps=steps).train()
            manager.join()
            return callback.restored, manager.all_steps()

    assert fit(2, "ok") == (None, [2])
    # Without a verdict it does not begin anew beside what is there.
    with pytest.raises(CheckpointNotFoundError, match=r"trusted by 'ok' .* without such a verdict"):
        fit(4, "ok")
    ray_dcp.record_metrics(tmp_path, 2, {"ok": 1})
    restored, steps = fit(6, None)
    assert (restored.step, steps) == (2, [2, 6])
    restored, steps = fit(4, "ok")
    assert restored.step == 2
    assert 2 in steps
    with pytest.raises(InvalidRequestError, match=r'order="any"'):
        fit(4, "ok", order="increasing")
    with pytest.raises(InvalidRequestError, match="trust must be"):
        fit(4, 5)


def test_a_hugging_face_run_of_which_only_counters_were_saved_goes_on(tmp_path):
    # As earlier versions of the callback saved it: without what the Trainer logs.
    with CheckpointManager(tmp_path / "run", chkpt_on_preemption=False) as manager:
        trainer = hf_trainer.made(tmp_path / "run", manager)
        trainer.create_optimizer_and_scheduler(24)
        loss = trainer.model(torch.ones(4, 4), torch.ones(4, 1))["loss"]
        loss.backward()
        trainer.optimizer.step()
        state = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler.state_dict(),
            "trainer": {"global_step": 14, "epoch": 1.4, "total_flos": 0},
        }
        manager.save(14, state)
        other = hf_trainer.made(tmp_path / "run", manager)
        other.train()
        manager.join()
        assert [one["step"] for one in other.state.log_history if "loss" in one][:2] == [15, 18]
        assert other.state.log_history[0]["epoch"] == 1.5
        assert manager.all_steps() == [*range(14, 25)]


def test_a_callback_that_a_hugging_face_trainer_was_given_later_is_attached_by_hand(tmp_path):
    with CheckpointManager(tmp_path / "run", **hf_trainer.kept()) as manager:
        made = hf_trainer.made(tmp_path / "run", manager, max_steps=2)
        data = {"train_dataset": made.train_dataset, "eval_dataset": made.eval_dataset}
        trainer = Trainer(made.model, made.args, **data)
        trainer.add_callback(later := RayDcpCallback(manager))
        with pytest.raises(InvalidRequestError, match=r"callback\.attach\(trainer\)"):
            trainer.train()
        later.attach(trainer)
        trainer.train()
        manager.join()
        assert manager.all_steps() == [1, 2]


def test_a_step_of_a_hugging_face_trainer_becomes_a_pretrained_model(tmp_path):
    config = BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    item = {"input_ids": [1, 2, 3], "labels": 1}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "hf"), save_strategy="no", max_steps=1, use_cpu=True, report_to=[]
    )
    with CheckpointManager(tmp_path / "run", chkpt_on_preemption=False) as manager:
        callbacks = [RayDcpCallback(manager)]
        words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
        words.pre_tokenizer = Whitespace()
        words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[UNK]")
        Trainer(
            model, arguments, train_dataset=[item] * 8, callbacks=callbacks, processing_class=words
        ).train()
        path = manager.step_info(1).checkpoint_id
    export_pretrained(path, tmp_path / "model")
    found = BertForSequenceClassification.from_pretrained(tmp_path / "model")
    assert found.config.to_dict() == {**model.config.to_dict(), **found.config.to_dict()}
    for one, other in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
    assert json.loads((tmp_path / "model" / "training_args.json").read_text())["max_steps"] == 1
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert words("a b")["input_ids"] == [1, 2]

    hostile = {"model": model.state_dict(), "trainer": {"files": {"../outside": b"x"}}}
    ray_dcp.save(hostile, checkpoint_id=tmp_path / "hostile", no_dist=True)
    with pytest.raises(UnsafeCheckpointError):
        export_pretrained(tmp_path / "hostile", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "outside").exists()


# --- torchtitan ---------------------------------------------------------------------------------


def test_torchtitan_s_contract_is_kept_with_its_own_base_class_and_its_checkpoints_are_read(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(titan.installed())
    base = importlib.import_module("torchtitan.components.checkpointer.base")
    Trainer = example("torchtitan_manager.py")["Trainer"]  # noqa: N806 - a class

    def run(steps, folder="checkpoint", last=False, **config):
        trainer = Trainer(tmp_path / folder, **config)
        assert isinstance(trainer.manager, base.BaseCheckpointManager)
        return trainer.model, trainer.train(steps, last=last)

    whole, began = run(6, "whole")
    assert began is None
    assert run(4)[1] is None
    resumed, began = run(6, seed=2)
    assert began == 4
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    names = sorted({p.parent.name for p in (tmp_path / "checkpoint").glob("step-*/*.distcp")})
    assert names == ["step-00000004", "step-00000006"]

    # What torchtitan's own manager wrote: DCP, in `step-4`.
    other = Trainer(tmp_path / "none", seed=3)
    other.state.step = 4
    theirs = {**other.model.state_dict(), "optimizer": other.optimizers,
              "lr_scheduler": other.schedulers, "train_state": other.state}  # fmt: skip
    torch.distributed.checkpoint.save(theirs, checkpoint_id=tmp_path / "theirs" / "step-4")
    found, began = run(4, "theirs", seed=9)
    assert began == 4
    assert torch.equal(found.weight, other.model.weight)

    last, _ = run(2, "last", last=True, export_dtype="bfloat16")
    exported = {"weight": torch.zeros(1, 4, dtype=torch.bfloat16)}
    CheckpointManager(tmp_path / "last", read_only=True).restore("latest", exported)
    assert torch.equal(exported["weight"], last.weight.detach().bfloat16())


class Renaming:
    """torchtitan's interface of adapters: the model of the example under other names."""

    fqn_to_index_mapping = None

    def __init__(self, hf_assets_path=None):
        self.hf_assets_path = hf_assets_path

    def to_hf(self, state):
        return {f"model.{name}": value for name, value in state.items()}

    def from_hf(self, state):
        return {name.removeprefix("model."): value for name, value in state.items()}

    def get_hf_storage_reader(self, path, from_quantized=False):
        dcp = torch.distributed.checkpoint
        if from_quantized:
            return dcp.QuantizedHuggingFaceStorageReader(path, block_size=128)
        return dcp.HuggingFaceStorageReader(path)


def test_a_torchtitan_run_begins_and_ends_with_a_hugging_face_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(titan.installed())
    Trainer = example("torchtitan_manager.py")["Trainer"]  # noqa: N806 - a class

    def trainer(folder, adapter=None, **config):
        adapter = adapter or Renaming()
        return Trainer(tmp_path / folder, sd_adapter=adapter, **config)

    first = trainer("run", last_save_in_hf=True, export_dtype="bfloat16")
    for _ in range(2):  # The second time it replaces the model.
        assert first.train(5, last=True) in (None, 4)
        made = load_file(tmp_path / "run/step-5/model-00001-of-00001.safetensors")
        assert made.keys() == {"model.weight", "model.bias"}
        assert made["model.weight"].equal(first.model.weight.detach().bfloat16())
        assert sorted(p.name for p in (tmp_path / "run/step-5").iterdir()) == [
            "model-00001-of-00001.safetensors", "model.safetensors.index.json",
        ]  # fmt: skip
        # It is no step: the run goes on from the newest whole one.
        first = trainer("run", seed=3, last_save_in_hf=True, export_dtype="bfloat16")

    # In float32 from bfloat16, once from the path and once from the adapter's assets.
    hub = str(tmp_path / "run/step-5")
    for folder, adapter, path in (("a", None, hub), ("b", Renaming(hub), None)):
        other = trainer(folder, adapter, seed=4, initial_load_in_hf=True, initial_load_path=path)
        assert other.manager.load()
        assert other.model.weight.equal(made["model.weight"].float())
        assert other.train(1) == 0
    # A quantised model goes through the reader that the adapter gives.
    weight, file = torch.tensor([[1.0, -2.0, 4.0, 0.5]]), "model-00001-of-00001.safetensors"
    tensors = {"weight": weight.to(torch.float8_e4m3fn), "bias": torch.ones(1)}
    tensors["weight_scale_inv"] = torch.full((1, 1), 0.25)
    tensors = {f"model.{name}": value for name, value in tensors.items()}
    (tmp_path / "quantised").mkdir()
    save_file(tensors, tmp_path / "quantised" / file)
    index = json.dumps({"weight_map": dict.fromkeys(tensors, file)})
    (tmp_path / "quantised" / "model.safetensors.index.json").write_text(index)
    path = str(tmp_path / "quantised")
    quantised = trainer(
        "q", initial_load_in_hf=True, initial_load_in_hf_quantized=True, initial_load_path=path
    )
    assert quantised.manager.load()
    assert quantised.model.weight.equal(weight / 4)
    # A run that has steps ignores the model.
    resumed = trainer("run", initial_load_in_hf=True, initial_load_path="/nowhere")
    assert resumed.train(4) == 4

    with pytest.raises(InvalidRequestError, match="initial_load_path"):
        trainer("c", initial_load_in_hf=True).manager.load()
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        trainer("c", initial_load_in_hf=True, initial_load_path="/nowhere").manager.load()
    for name in ("initial_load_in_hf", "last_save_in_hf"):
        with pytest.raises(InvalidRequestError, match=f"{name} needs an sd_adapter"):
            Trainer(tmp_path / "c", **{name: True})


def test_torchtitan_goes_on_from_the_newest_step_that_is_trusted(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(titan.installed())
    Trainer = example("torchtitan_manager.py")["Trainer"]  # noqa: N806 - a class
    assert Trainer(tmp_path / "run", trust="ok").train(8) is None
    with pytest.raises(CheckpointNotFoundError, match=r"trusted by 'ok' .* without such a verdict"):
        Trainer(tmp_path / "run", trust="ok").train(8)
    ray_dcp.record_metrics(tmp_path / "run", 6, {"ok": 1})
    assert [Trainer(tmp_path / "run", trust="ok").train(steps) for steps in (10, 14)] == [6, 6]
    # The newest trusted step is kept, whatever follows.
    steps = {one.step for one in ray_dcp.open_run(tmp_path / "run") if one.is_readable}
    assert {6, 14} <= steps


def test_a_seed_checkpoint_of_torchtitan_gives_the_model_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(titan.installed())
    Trainer = example("torchtitan_manager.py")["Trainer"]  # noqa: N806 - a class
    seeded = Trainer(tmp_path / "run")
    seeded.manager.save(0, last_step=True)
    seeded.manager.close()
    other = Trainer(tmp_path / "run", seed=2)
    assert other.train(0) == 0
    assert other.model.weight.equal(seeded.model.weight)


# --- the Hugging Face hub, FSDP2 -----------------------------------------------------------------


def test_a_model_with_tied_embeddings_is_exported_as_save_pretrained_does(tmp_path: Path):
    sizes = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    model = LlamaForCausalLM(config)
    ray_dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    model.save_pretrained(tmp_path / "theirs")
    told = CliRunner().invoke(
        cli, ["export", f"{tmp_path}/saved", f"{tmp_path}/ours", "--format", "hf", "--model-only"]
    )
    assert "once what was of one memory" in told.output
    assert "model.lm_head.weight = model.model.embed_tokens.weight" in told.output
    config.save_pretrained(tmp_path / "ours")
    (ours,) = (tmp_path / "ours").glob("*.safetensors")
    assert set(load_file(ours)) == set(load_file(tmp_path / "theirs/model.safetensors"))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_an_export_has_what_from_pretrained_needs_beside_the_weights(tmp_path: Path):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 7
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 1}, unk_token="a")))
    state = {"app": {"model": model.state_dict()}, "hf_assets": ray_dcp.hf_assets(model, words)}
    ray_dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    made = ["export", f"{tmp_path}/saved", f"{tmp_path}/ours", "--format", "hf", "--model-only"]
    assert "generation_config.json" in CliRunner().invoke(cli, made).output
    model.save_pretrained(tmp_path / "theirs")
    told = [json.loads((tmp_path / one / "config.json").read_text()) for one in ("ours", "theirs")]
    assert told[0]["architectures"] == told[1]["architectures"] == ["LlamaForCausalLM"]
    found = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert found.generation_config.max_new_tokens == 7
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").get_vocab() == {"a": 1}


def test_an_adapter_comes_back_through_peft(tmp_path: Path):
    peft = pytest.importorskip("peft")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    base = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    chosen = peft.LoraConfig(r=2, use_dora=True, bias="lora_only", **targets)
    model = peft.get_peft_model(LlamaForCausalLM(base), chosen)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value))
    state = {"model": model.state_dict(), "hf_assets": ray_dcp.hf_assets(model)}
    ray_dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    plan = ray_dcp.export(
        tmp_path / "saved", tmp_path / "ours", "hf", include=["model.*"], strip_prefix="model."
    )
    assert (plan.adapter, plan.assets) == ("default", ("adapter_config.json",))
    model.save_pretrained(tmp_path / "theirs")
    one, other = (
        load_file(tmp_path / of / "adapter_model.safetensors") for of in ("ours", "theirs")
    )
    assert {*one} == {*other}
    assert all(torch.equal(one[name], other[name]) for name in one)
    again = peft.PeftModel.from_pretrained(LlamaForCausalLM(base), tmp_path / "ours")
    found = peft.get_peft_model_state_dict(again)
    for name, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(found[name], value), name


def test_two_ranks_under_fsdp2_begin_and_end_with_a_model_of_the_hub(tmp_path: Path, programs):
    first = hub_ranks.Adapter().to_hf(hub_ranks.Decoder(seed=1).state_dict())
    hub_ranks.write_model(tmp_path / "hub", first)
    tied = hub_ranks.Adapter().to_hf(hub_ranks.Decoder(seed=7, tied=True).state_dict())
    del tied["lm_head.weight"]
    hub_ranks.write_model(tmp_path / "tied", tied)
    ended = programs.run(
        "-m", "tests.support.programs.hub_ranks", str(tmp_path), str(titan.installed()),
        ranks=2, env=plain_environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    assert all("all equal" in one.stdout for one in ended)
    # torchtitan's manager: the tensors lie in the files in which the first model has them.
    left = filecmp.dircmp(tmp_path / "hub", tmp_path / "titan" / "step-7")
    assert not left.left_only
    assert not left.right_only
    ray_dcp.export(tmp_path / "adapted", tmp_path / "exported", "hf")
    found = hub_ranks.read_model(tmp_path / "exported")
    assert found.keys() == first.keys()
    assert all(found[name].equal(first[name]) for name in first)


def test_a_run_goes_on_as_it_was_unless_a_part_of_its_state_is_left_out(programs, tmp_path):
    ended = programs.run(
        "-m", "tests.support.programs.whole_state_ranks", str(tmp_path),
        ranks=2, env=plain_environment(OMP_NUM_THREADS="1"), imports=["tokenizers"],
    )  # fmt: skip
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    for found in map(json.loads, (one.stdout for one in ended)):
        whole = found.pop("whole")
        assert found.pop("adapters") == whole
        assert whole[3:] == found.pop("again") == found.pop("adapters again")
        assert len(found) == len(whole_state_ranks.PARTS)
        assert [part for part, log in found.items() if log == whole[3:]] == []
    saved = ray_dcp.open(tmp_path / "adapters" / "step-00000003").tensors
    assert {name for name in saved if name.startswith("model.")} == {
        f"model.{layer}.lora_{side}.weight" for layer in (2, 4) for side in "AB"
    }


def test_fsdp2_goes_on_with_fewer_ranks(programs, tmp_path):
    for ranks, last_step, told in ((2, "10", "steps 1 to 10"), (1, "15", "steps 11 to 15")):
        first, *_ = programs.run(
            str(EXAMPLES / "fsdp2_torchrun.py"), str(tmp_path), last_step,
            ranks=ranks, env=plain_environment(),
        )  # fmt: skip
        assert first.returncode == 0, first.stderr
        assert first.stdout.startswith(told)

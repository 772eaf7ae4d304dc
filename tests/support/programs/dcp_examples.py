"""The examples of DCP's documentation: FSDP, asynchronous saves, Hugging Face.

Nothing here knows ray_dcp. `dcp_examples_runner` runs this text as it is, and again with nothing
but the imports changed.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class AppState(Stateful):
    """Wraps what is saved; `dcp.save` and `dcp.load` call its methods themselves."""

    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(16, 17)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(17, 8)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def make(seed):
    torch.manual_seed(seed)
    model = ToyModel()
    for layer in (model.net1, model.net2):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model, optimizer, steps=1):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((8, 16), 0.1 * (step + 1))).sum().backward()
        optimizer.step()


def fsdp_checkpoint_save(directory):
    model, optimizer = make(seed=1)
    train(model, optimizer, 2)
    state_dict = {"app": AppState(model, optimizer)}
    dcp.save(state_dict, checkpoint_id=directory)
    train(model, optimizer)
    return model


def fsdp_checkpoint_load(directory):
    model, optimizer = make(seed=2)
    state_dict = {"app": AppState(model, optimizer)}
    dcp.load(state_dict=state_dict, checkpoint_id=directory)
    train(model, optimizer)  # What it was trained to goes on from where it was.
    return model


def async_checkpoint_save(directory):
    model, optimizer = make(seed=3)
    # A group of its own: DCP's background thread must not mix its collectives with training's.
    process_group = dist.new_group(backend="gloo")
    checkpoint_future = None
    for step in range(3):
        train(model, optimizer)
        # Waits for the previous checkpoint to finish if it has not.
        if checkpoint_future is not None:
            checkpoint_future.result()
        writer = dcp.FileSystemWriter(f"{directory}/step{step}", thread_count=2)
        state_dict = {"app": AppState(model, optimizer)}
        checkpoint_future = dcp.async_save(
            state_dict, storage_writer=writer, process_group=process_group
        )
    checkpoint_future.result()
    train(model, optimizer)
    return model


def async_checkpoint_load(directory):
    model, optimizer = make(seed=4)
    state_dict = {"app": AppState(model, optimizer)}
    reader = dcp.FileSystemReader(f"{directory}/step2")
    dcp.load(state_dict, storage_reader=reader, planner=DefaultLoadPlanner())
    train(model, optimizer)
    return model


def hugging_face_save(directory):
    model, _ = make(seed=5)
    writer = HuggingFaceStorageWriter(
        path=directory, save_distributed=True, enable_consolidation=True, thread_count=2
    )
    state_dict = get_model_state_dict(model)
    dcp.save(state_dict, storage_writer=writer, planner=DefaultSavePlanner())
    return model


def hugging_face_load(directory):
    model, _ = make(seed=6)
    state_dict = get_model_state_dict(model)
    dcp.load(state_dict, storage_reader=HuggingFaceStorageReader(path=directory, thread_count=2))
    set_model_state_dict(model, state_dict, options=StateDictOptions(strict=True))
    return model

"""Plans that are kept, interrupted at every call: all stays readable, and the next job is right."""

from contextlib import contextmanager

import numpy as np
import pytest

from ray_dcp.format.plan_template import INDEX_KEY, encode_index, is_template, template_key
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.plan_templates import MOST_TEMPLATES
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.testing import NEW, NEXT, OLD, Operation, check_crashes
from ray_dcp.testing.array_states import same_state
from ray_dcp.testing.interruptions import _StorageInterruption
from ray_dcp.testing.invariants import (
    all_keys,
    an_allowed_checkpoint_loads_whole,
    expect,
    only_what_stands_is_listed,
    what_stands_verifies,
)
from ray_dcp.testing.ranks import load_state, save_state
from ray_dcp.testing.unconditional_storage import UnconditionalStorage

# The place of an operation is one storage: the templates lie beside the files of the checkpoint.
KEPT = SaveOptions(num_threads=1, plan_templates=True)
OTHERS = [template_key(bytes([number]) * 32) for number in range(MOST_TEMPLATES)]


def save_and_fill(place):
    """What stands before: a checkpoint, and as many templates as are kept."""
    place.save(OLD)
    for name in OTHERS:
        place.storage.write(name, b"of others")
    place.storage.write(INDEX_KEY, encode_index(OTHERS))


def a_later_job_saves_by_what_is_left(after):
    """Its first save is right, whether it finds a template or not; then the folder is tidy."""
    save_state(after.storage, NEXT, options=KEPT)
    expect(same_state(NEXT, load_state(after.storage, NEXT)), "the later job saved something else")
    save_state(after.storage, {"rep.w": np.arange(3.0)}, options=KEPT)
    kept = [key for key in all_keys(after.storage) if is_template(key)]
    expect(len(kept) <= MOST_TEMPLATES, f"{len(kept)} templates are left")


CHECKED = (
    an_allowed_checkpoint_loads_whole,
    what_stands_verifies,
    only_what_stands_is_listed,
    a_later_job_saves_by_what_is_left,
)


class OfTemplates(_StorageInterruption):
    """Interrupts only what is asked about templates; all else goes as ever."""

    @property
    def steps(self):
        return tuple(step for step in super().steps if is_of_templates(step.what, step.where))

    def choose(self, call):
        return super().choose(call) if is_of_templates(call.operation, call.key) else None


def is_of_templates(operation, key):
    return is_template(key) or key == INDEX_KEY


@contextmanager
def interrupted_templates(storage, at, variant):
    script = OfTemplates(at, variant)
    yield script.wrap(storage), script


KEEPING = Operation(
    name="keep a new plan, for which another has to go",
    prepare=save_and_fill,
    run=lambda place: place.save(NEW, options=KEPT),
    previous=OLD,
    new=NEW,
)
USING = Operation(
    name="save by the plan of another job",
    prepare=lambda place: place.save(OLD, options=KEPT),
    run=lambda place: place.save(NEW, options=KEPT),
    previous=OLD,
    new=NEW,
)


def test_a_process_that_dies_leaves_the_new_checkpoint_and_no_wrong_plan():
    reached = check_crashes(
        KEEPING, invariants=CHECKED, interrupt=interrupted_templates, variants=["before", "after"]
    )
    # Nothing is at stake any more: the commit came before.
    assert reached.stood == {"new": 6}
    assert reached.calls == {"write": 4, "delete": 2}


@pytest.mark.parametrize("operation", [KEEPING, USING], ids=str)
def test_no_answer_about_a_template_fails_a_save(operation):
    reached = check_crashes(
        operation, invariants=CHECKED, interrupt=interrupted_templates,
        variants=["refused", "lost", "broken"],
    )  # fmt: skip
    assert reached.told.keys() == {"committed"}
    assert reached.stood.keys() == {"new"}
    assert {"read", "write", "delete"} <= reached.calls.keys() or operation is USING


def test_a_storage_that_creates_nothing_conditionally_keeps_templates_too():
    """Equal bytes whoever writes them: it does not matter who comes last."""
    storage = UnconditionalStorage(MemoryStorage("templates/unconditional"))
    for state in (OLD, NEW):
        save_state(storage, state, options=KEPT)
        assert same_state(state, load_state(storage, state))
    assert len([entry for entry in storage.list() if is_template(entry.key)]) == 1

"""Every rank of a failed operation is told the same error, the true one, and it says where."""

from __future__ import annotations

import resource

import pytest

from ray_dcp.errors import (
    ParticipantError,
    PlanConflictError,
    RankDisagreementError,
    StorageError,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.commands import Failed
from ray_dcp.protocol.messages import OpKey, Target
from ray_dcp.runtime.rank_load import drive
from ray_dcp.store.local import LocalStorage
from tests.protocol_play import Play
from tests.rank_saves import load_rank, save_rank


def test_a_rank_that_comes_after_others_disagreed_is_told_what_they_were_told():
    play = Play(world_size=4)
    play.join(0)
    play.join(1, target=Target("memory://other"))
    play.expire()
    told = play.errors("SaveJoin")[0]
    assert type(told) is RankDisagreementError
    assert play.join(2).error is told
    assert play.join(3, target=Target("memory://third")).error is told


def test_an_error_of_the_coordinators_work_names_the_checkpoint():
    play = Play()
    play.join(0)
    play.join(1)
    failed = PlanConflictError("'w' differs")
    play.done(Failed(failed))
    assert {error.checkpoint_id for error in play.errors("SaveJoin").values()} == {"memory://ckpt"}
    assert failed.checkpoint_id is None


def test_an_error_on_the_way_to_the_coordinator_names_the_checkpoint():
    def out_of_reach(request):
        raise ParticipantError("the coordinator is gone")

    target, here = Target("memory://ckpt"), {"rank": 0, "world_size": 1}
    save = save_rank(
        OpKey("s", 0), target=target, options=SaveOptions(), capture=lambda: None, **here
    )
    load = load_rank(
        OpKey("s", 1), target=target, options=LoadOptions(), plan=lambda found: None, **here
    )
    for steps in (save, load):
        with pytest.raises(ParticipantError) as caught:
            drive(steps, out_of_reach)
        assert caught.value.checkpoint_id == "memory://ckpt"


@pytest.fixture
def small_files():
    """No file of this process may grow beyond 1 MB: writing more gives EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [3_000_000, 9_000_000], ids=["on commit", "on write"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_full_disk_is_not_hidden_by_the_cleaning_up_after_it(
    tmp_path, small_files, num_bytes, sync
):
    def write():
        writer = storage.open_writer("x", sync=sync)
        try:
            writer.write(b"x" * num_bytes)
            writer.commit()
        except StorageError:
            writer.abort()
            raise

    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageError, match="EFBIG"):
        write()
    assert storage.list() == []
    assert storage.unpublished() == ()

"""Models of the Hugging Face hub at both ends of a run of two ranks under FSDP2."""

from __future__ import annotations

import filecmp
from pathlib import Path

import ray_dcp
from tests.support import titan
from tests.support.programs import hub_ranks
from tests.support.programs.forks import plain_environment


def test_two_ranks_begin_and_end_with_a_model_of_the_hub(tmp_path: Path, programs):
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

"""Real Ray ranks: what one layout saves, another loads, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

from tests.support.programs import models as programs

NUM_RANKS = 4

CHAINS = {
    "fsdp2 4-2-3-1-4": [("fsdp2", 4), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 1), ("fsdp2", 4)],
    "tp2xdp2-dp4-tp4": [("tp_dp", 4), ("fsdp2", 4), ("tp", 4), ("tp_dp", 4)],
    "hsdp-ddp-fsdp2": [("hsdp", 4), ("ddp", 4), ("fsdp2", 3), ("hsdp", 4)],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_a_training_state_survives_a_chain_of_layouts(ranks, tmp_path: Path, chain):
    layout, world_size = chain[0]
    ranks.resize(world_size)
    ranks.run(programs.seed_all, 7)
    ranks.run(programs.build, layout, 0)
    ranks.run(programs.train, 3)
    expected = ranks.run(programs.digests)[0]
    ranks.run(programs.save, str(tmp_path / "0"))
    for hop, (layout, world_size) in enumerate(chain[1:], start=1):
        ranks.resize(world_size)
        ranks.run(programs.seed_all, 100 + hop)
        ranks.run(programs.build, layout, 100 + hop)
        ranks.run(programs.restore, str(tmp_path / str(hop - 1)))
        for found in ranks.run(programs.digests):
            assert found == expected
        ranks.run(programs.save, str(tmp_path / str(hop)))


@pytest.mark.parametrize(("source", "target"), [(1, 4), (3, 5)])
def test_uneven_shapes_move_between_world_sizes_and_to_stock_dcp(
    ranks, tmp_path: Path, source, target
):
    ranks.resize(source)
    ranks.run(programs.save_uneven, str(tmp_path / "c"))
    ranks.resize(target)
    for wrong, needed, read in ranks.run(programs.check_uneven, str(tmp_path / "c")):
        assert wrong == []
        assert read <= 1.25 * needed
    found = {
        "a": torch.zeros(17, 5),
        "d": torch.zeros(1031, 64),
        "plain": torch.zeros(50, dtype=torch.int64),
        "scalar": torch.tensor(0.0),
        "note": {"text": ""},
    }
    stock.load(found, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert torch.equal(found["a"], torch.arange(85.0).reshape(17, 5))
    assert torch.equal(found["d"], torch.arange(1031.0 * 64).reshape(1031, 64) + 3000)
    assert torch.equal(found["plain"], torch.arange(50))
    assert found["scalar"] == 3.5
    assert found["note"] == {"text": "hello"}

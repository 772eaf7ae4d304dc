"""FSDP2 of docs/examples; others are in `test_evaluator`, `test_frameworks` and `test_train`."""

from __future__ import annotations

from tests.integration.test_frameworks import EXAMPLES
from tests.support.programs.forks import plain_environment


def test_fsdp2_goes_on_with_fewer_ranks(programs, tmp_path):
    for ranks, last_step, told in ((2, "10", "steps 1 to 10"), (1, "15", "steps 11 to 15")):
        first, *_ = programs.run(
            str(EXAMPLES / "fsdp2_torchrun.py"), str(tmp_path), last_step,
            ranks=ranks, env=plain_environment(),
        )  # fmt: skip
        assert first.returncode == 0, first.stderr
        assert first.stdout.startswith(told)

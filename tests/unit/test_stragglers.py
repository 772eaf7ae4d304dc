"""When a slow stager is helped: after a look at its pace, and where help pays."""

from __future__ import annotations

import pytest

from ray_dcp.commit_protocol.liveness import HELP_COSTS_S, LEAST_WAIT_S, WriteProgress


def stragglers(
    paces: dict[int, tuple[int, int]], usual_s: float, elapsed_s: float, num_done: int = 3
) -> dict[int, str]:
    """Returns who needs help where others were done after `usual_s`."""
    writes, done = WriteProgress(), dict.fromkeys(range(1, 1 + num_done), ())
    left = {**{rank: (rank,) for rank in paces}, **done}
    writes.stragglers({}, {}, 0.0)
    writes.stragglers({}, left, min(usual_s, elapsed_s))
    return writes.stragglers(paces, left, elapsed_s)


@pytest.mark.parametrize("usual_s", [0.6, 4.0, 60.0])
def test_a_tenth_of_the_pace_is_seen_as_soon_as_the_others_are_done(usual_s):
    assert stragglers({0: (10, 100)}, usual_s, usual_s) == {
        0: f"after {usual_s:.1f} s 10 of 100 bytes were written, where others took "
        f"{usual_s:.1f} s for theirs"
    }


ELAPSED_S = 0.6
LEFT = HELP_COSTS_S / ELAPSED_S


@pytest.mark.parametrize(
    ("paces", "usual_s", "elapsed_s", "num_done", "helped"),
    [
        pytest.param({0: (0, 100)}, 0.1, 0.9 * LEAST_WAIT_S, 3, [], id="nothing yet, too early"),
        pytest.param({0: (0, 100)}, 0.1, LEAST_WAIT_S, 3, [0], id="nothing yet"),
        pytest.param(
            {0: (round(1000 / (1 + 0.9 * LEFT)), 1000)}, 0.06, ELAPSED_S, 3, [], id="ends soon"
        ),
        pytest.param(
            {0: (round(1000 / (1 + 1.1 * LEFT)), 1000)}, 0.06, ELAPSED_S, 3, [0], id="ends late"
        ),
        pytest.param({0: (55, 100)}, 10.0, 10.0, 3, [], id="less than twice as long"),
        pytest.param({0: (45, 100)}, 10.0, 10.0, 3, [0], id="more than twice as long"),
        pytest.param(
            dict.fromkeys((10, 11, 12), (1, 100)), 1.0, 50.0, 2, [], id="less than half are done"
        ),
        pytest.param(
            dict.fromkeys((10, 11, 12), (1, 100)), 1.0, 50.0, 3, [10, 11, 12], id="half are done"
        ),
        pytest.param({0: (0, 0)}, 1.0, 50.0, 3, [], id="no bytes"),
    ],
)
def test_who_is_helped(paces, usual_s, elapsed_s, num_done, helped):
    assert [*stragglers(paces, usual_s, elapsed_s, num_done)] == helped

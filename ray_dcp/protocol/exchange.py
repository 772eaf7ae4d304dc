"""The exchange machine: every rank sends bytes to others, and receives what they sent to it.

The one primitive of the paths on which user code of DCP's interfaces runs in the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_dcp.errors import InvalidRequestError
from ray_dcp.protocol.commands import Command, Result
from ray_dcp.protocol.error_aggregation import name_ranks
from ray_dcp.protocol.messages import Exchange, Exchanged, Request
from ray_dcp.protocol.operation import Commands, Operation


class ExchangeMachine(Operation):
    """One exchange between all ranks of a session.

    Args:
        first: The first request; hand it to `receive` as well.
    """

    def __init__(self, first: Exchange) -> None:
        super().__init__(first)
        self._tag, self._timeout_s = first.tag, first.timeout_s
        self._outboxes: dict[int, Mapping[int, bytes]] = {}

    def _on_request(self, request: Request) -> Commands:
        if self.phase != "joining" or not isinstance(request, Exchange):
            raise self._contradiction(f"{type(request).__name__} of rank {request.rank}")
        self._admit(request)
        self._outboxes[request.rank] = request.outbox
        strangers = [rank for rank in request.outbox if not 0 <= rank < self.world_size]
        if strangers:
            error = InvalidRequestError(
                f"Expected receivers from 0 to {self.world_size - 1}, but rank {request.rank} "
                f"has bytes for {name_ranks(strangers)}",
                rank=request.rank,
            )
            self._roll.blame({request.rank: error})
        return self._came()

    def _on_result(self, result: Result) -> Commands:
        raise self._contradiction(f"result {type(result).__name__}")

    def _on_expired(self) -> Commands:
        raise self._contradiction("deadline")

    def _awaited(self) -> tuple[str, float, str]:
        return f"come to exchange {self._tag!r}", self._timeout_s, "raise the timeout"

    def _all_came(self) -> Commands:
        boxes = self._outboxes
        answers = self._give(
            lambda rank: Exchanged(
                {sender: boxes[sender][rank] for sender in sorted(boxes) if rank in boxes[sender]}
            )
        )
        given = dict(self._given)
        ended = self._end("done")
        # Why these stay: there is no one outcome that could be the answer to a request that
        # comes once more.
        self._given = given
        return (*answers, *ended)

    def _end(self, phase: str) -> list[Command]:
        self._outboxes = {}
        return super()._end(phase)

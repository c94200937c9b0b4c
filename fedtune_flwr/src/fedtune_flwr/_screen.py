"""What stands between the replies of clients and the inner strategy."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

from ._clients import ClientTable
from ._replies import fault, mismatch, odd_evaluations, odd_ones, take_own, weight_of
from ._survey import Survey

log = logging.getLogger(__name__)


class Screen:
    """Takes this plugin's records out of replies, and sets aside what cannot be averaged.

    Args:
        table: where failures are counted.
        survey: what files metrics that come with a train reply.
        weight_key: key of the aggregation weight.

    Attributes:
        quarantined: replies set aside so far.
    """

    def __init__(self, table: ClientTable, survey: Survey, weight_key: str) -> None:
        self.table = table
        self.survey = survey
        self.weight_key = weight_key
        self.quarantined = 0

    def trained(
        self,
        server_round: int,
        replies: Iterable[Message],
        sent: ArrayRecord | None,
        *,
        averages: bool,
    ) -> list[Message]:
        """The train replies that are sound, and the errors.

        Args:
            server_round: for the log.
            replies: of one round.
            sent: the arrays that were sent.
            averages: whether the inner strategy wants replies that are alike.
        """
        kept: list[Message] = []
        before = self.quarantined
        for reply in replies:
            node_id = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("round %d: node %d failed: %s", server_round, node_id, reply.error)
                kept.append(reply)
                continue
            self._read_own(reply)
            problem = fault(reply.content, self.weight_key)
            if problem is not None:
                self._set_aside(server_round, node_id, problem)
                continue
            kept.append(reply)
        if averages:
            kept = self._without(
                server_round, kept, lambda contents: odd_ones(contents, self.weight_key, sent)
            )
        for reply in kept:
            if not reply.has_error():
                row = self.table.row(reply.metadata.src_node_id)
                self.survey.notice(row, weight_of(reply.content, self.weight_key))
        if all(reply.has_error() for reply in kept):
            log.error(
                "round %d: no client returned a usable reply (%d failed, %d set aside); "
                "the model stays as it was",
                server_round, len(kept), self.quarantined - before,
            )  # fmt: skip
        return kept

    def evaluated(self, server_round: int, replies: Iterable[Message]) -> list[Message]:
        """The evaluate replies that are sound, and the errors."""
        return self._without(
            server_round, list(replies), lambda contents: odd_evaluations(contents, self.weight_key)
        )

    def _without(
        self,
        server_round: int,
        replies: list[Message],
        judge: Callable[[list[RecordDict]], list[str | None]],
    ) -> list[Message]:
        """Replies, errors included, less those that cannot be averaged with the others."""
        sound = [reply for reply in replies if not reply.has_error()]
        problems = judge([r.content for r in sound])
        odd = {id(r): p for r, p in zip(sound, problems, strict=True) if p is not None}
        for reply in sound:
            if id(reply) in odd:
                self._set_aside(server_round, reply.metadata.src_node_id, odd[id(reply)])
        return [reply for reply in replies if id(reply) not in odd]

    def _set_aside(self, server_round: int, node_id: int, problem: str) -> None:
        self.quarantined += 1
        self.table.row(node_id).quarantined += 1
        log.warning("round %d: reply of node %d set aside: %s", server_round, node_id, problem)

    def _read_own(self, reply: Message) -> None:
        metrics, applied = take_own(reply.content)
        row = self.table.row(reply.metadata.src_node_id)
        if applied is not None and row.values:
            echoed: dict[str, Any] = dict(applied.items())
            problem = mismatch(row.values, echoed)
            if problem is not None:
                row.mismatches += 1
                log.warning("node %d did not apply what it was sent: %s", row.node_id, problem)
        if metrics is not None:
            self.survey.accept(row, metrics)

"""Asking clients for their metrics: one query each, outside the strategy's own messages."""

import logging
from collections.abc import Iterable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ._clients import ClientRow, ClientTable
from ._drift import grown_or_shrunk
from ._metrics import received
from ._wire import METRICS_RECORD, PROFILE_KEY, QUERY, REFERENCE_KEY, SCHEMA, pack_arrays

log = logging.getLogger(__name__)

# Rounds to wait before a client that did not answer is asked again.
RETRY_ROUNDS = 5


class Survey:
    """Keeps the table of clients filled.

    Args:
        table: where reports go.
        arrays_key: key under which the reference model's arrays are sent.
        timeout_s: seconds to wait for answers to a query.

    Attributes:
        problems: numbers in answers that could not be used.
        first_failure: the first query that failed, and why; None while none has.
    """

    def __init__(self, table: ClientTable, arrays_key: str, timeout_s: float) -> None:
        self.table = table
        self.arrays_key = arrays_key
        self.timeout_s = timeout_s
        self.problems = 0
        self.first_failure: str | None = None
        self._packed: tuple[int, bytes] | None = None

    def due(self, node_ids: Iterable[int], server_round: int) -> list[int]:
        """Nodes to ask now: never asked, changed since, or failed and waited long enough."""
        rows = [self.table.row(node_id) for node_id in node_ids]
        return [
            row.node_id
            for row in rows
            if (row.metrics is None or row.stale)
            and not row.by_mod
            and server_round >= row.retry_round
        ]

    def ask(
        self, grid: Grid, node_ids: Sequence[int], reference: ArrayRecord, server_round: int
    ) -> None:
        """Sends the query to nodes and files their answers; failures are logged and retried."""
        if not node_ids:
            return
        messages = [
            Message(
                RecordDict(
                    {self.arrays_key: reference, "config": ConfigRecord({"fedtune": SCHEMA})}
                ),
                dst_node_id=node_id,
                message_type=QUERY,
                group_id=str(server_round),
            )
            for node_id in node_ids
        ]
        silent = set(node_ids)
        for reply in grid.send_and_receive(messages, timeout=self.timeout_s):
            node_id = reply.metadata.src_node_id
            silent.discard(node_id)
            row = self.table.row(node_id)
            if reply.has_error():
                self._failed(row, server_round, reply.error.reason or "no reason given")
            else:
                self.file(row, reply.content, server_round)
        for node_id in silent:
            row = self.table.row(node_id)
            self._failed(row, server_round, f"no answer within {self.timeout_s:g} s")

    def file(self, row: ClientRow, content: RecordDict, server_round: int) -> None:
        """Takes the metrics out of an answer."""
        record = content.config_records.get(METRICS_RECORD)
        if record is None:
            self._failed(row, server_round, f"the answer has no record {METRICS_RECORD!r}")
            return
        self.accept(row, record)

    def accept(self, row: ClientRow, record: ConfigRecord) -> None:
        """Files metrics, counting and logging what is unusable in them."""
        report = received(dict(record.items()))
        row.metrics, row.by_mod, row.stale = report.values, False, False
        # Assigned anew from these metrics, and compared with the examples of the next reply.
        row.values, row.examples = {}, None
        if report.problems:
            self.problems += len(report.problems)
            log.info("node %d: %s", row.node_id, "; ".join(report.problems))

    def notice(self, row: ClientRow, examples: float | None) -> None:
        """Takes note of the examples in a train reply: a client that changed is asked anew."""
        if examples is None:
            return
        if row.examples is not None and grown_or_shrunk(row.examples, examples):
            log.info("node %d: %g examples, %g before", row.node_id, examples, row.examples)
            row.stale = row.metrics is not None
            row.examples = examples
        elif row.examples is None:
            row.examples = examples

    def request_by_mod(self, reference: ArrayRecord) -> dict[str, bool | bytes]:
        """What to add to the train config of a client that is asked through its mod."""
        if self._packed is None or self._packed[0] != id(reference):
            self._packed = (id(reference), pack_arrays(reference))
        return {PROFILE_KEY: True, REFERENCE_KEY: self._packed[1]}

    def _failed(self, row: ClientRow, server_round: int, reason: str) -> None:
        row.failures += 1
        reason = " ".join(reason.split())[:200]
        self.first_failure = self.first_failure or f"node {row.node_id}: {reason}"
        row.retry_round = server_round + RETRY_ROUNDS
        # The client has no such query, or a mod of it refuses one: only a train reply is left.
        refused = "No query function" in reason or "expects exactly one" in reason
        row.by_mod = refused or "message type" in reason.lower()
        level = logging.INFO if row.by_mod else logging.WARNING
        log.log(
            level,
            "node %d gave no metrics (%s); it %s, asked again %s",
            row.node_id,
            reason,
            "keeps its values" if row.usable else "gets the values of the median client",
            "in its train message" if row.by_mod else f"in round {row.retry_round}",
        )

"""The server's table of clients: what each reported, what it got, what went wrong."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ._metrics import as_matrix
from ._policy import Assignment, Policy
from ._space import Scalar


@dataclass
class ClientRow:
    """One client.

    Attributes:
        node_id: Flower's identifier of the node.
        metrics: what it reported, NaN where unusable; None before it reported.
        values: the hyperparameters it gets.
        weight_factor: what its aggregation weight is multiplied by.
        rounds: rounds it was asked to train in.
        failures: profile queries that failed or were not answered.
        retry_round: the next round in which a failed query is tried again.
        by_mod: metrics are asked for in the train message, since it refuses queries.
        mismatches: replies that echo other values than were sent.
        quarantined: replies that were not averaged in.
        examples: its aggregation weight when its metrics were new; None before its first reply.
        stale: its metrics are to be asked for anew.
    """

    node_id: int
    metrics: dict[str, float] | None = None
    values: dict[str, Scalar] = field(default_factory=dict)
    weight_factor: float = 1.0
    rounds: int = 0
    failures: int = 0
    retry_round: int = 0
    by_mod: bool = False
    mismatches: int = 0
    quarantined: int = 0
    examples: float | None = None
    stale: bool = False

    @property
    def usable(self) -> bool:
        """Whether at least one metric is a number."""
        return self.metrics is not None and any(map(math.isfinite, self.metrics.values()))

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON can hold, numbers that are NaN left out."""
        fields = asdict(self)
        if self.metrics is not None:
            fields["metrics"] = {k: v for k, v in self.metrics.items() if math.isfinite(v)}
        return fields


class ClientTable(dict[int, ClientRow]):
    """Rows by node id; `row` makes a missing one."""

    def row(self, node_id: int) -> ClientRow:
        """The row of a node."""
        if node_id not in self:
            self[node_id] = ClientRow(node_id)
        return self[node_id]

    def reported(self) -> list[dict[str, float]]:
        """The metrics of the clients that reported any, in the order they first did."""
        return [row.metrics for row in self.values() if row.usable and row.metrics is not None]

    def assign(self, policy: Policy, node_ids: Iterable[int]) -> None:
        """Gives each node what the policy says; all in one matrix product."""
        rows = [self.row(node_id) for node_id in node_ids]
        if not rows:
            return
        matrix = as_matrix([row.metrics or {} for row in rows])
        columns = policy.coordinates_many(matrix)
        factors = np.exp(policy.log_weight_many(matrix))
        for i, row in enumerate(rows):
            values = policy.space.values_at({k: float(v[i]) for k, v in columns.items()})
            given = Assignment(values, float(factors[i]))
            row.values, row.weight_factor = given.values, given.weight_factor

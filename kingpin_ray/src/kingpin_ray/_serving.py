"""A trained estimator as a function over batches, for Ray Data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from kingpin_ray._estimator import GroupedEstimator


class BatchPredictor:
    """Adds predictions to each batch; made by `GroupedEstimator.as_map_batches`.

    Args:
        estimator: the fitted estimator.
        proba: whether to add a probability column for each class instead of the prediction.
    """

    def __init__(self, estimator: GroupedEstimator, proba: bool) -> None:
        self.estimator = estimator
        self.proba = proba

    def __call__(self, batch: Any) -> pa.Table:
        """Returns the batch (Arrow, pandas or a dict of arrays) as Arrow with columns added.

        Raises:
            UnknownGroupError: rows belong to groups that nothing can serve.
        """
        if isinstance(batch, dict):
            batch = pa.table({name: pa.array(values) for name, values in batch.items()})
        elif not isinstance(batch, pa.Table):
            batch = pa.Table.from_pandas(batch, preserve_index=False)
        if not self.proba:
            return batch.append_column("prediction", pa.array(self.estimator.predict(batch)))
        proba = self.estimator.predict_proba(batch)
        for j, label in enumerate(self.estimator.classes_):
            batch = batch.append_column(f"proba_{label}", pa.array(proba[:, j]))
        return batch

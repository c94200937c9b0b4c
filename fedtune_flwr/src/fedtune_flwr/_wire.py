"""What crosses the network beyond the strategy's own messages, and nothing more.

Query, server to client (type `query.fedtune`): the reference model's arrays and a config with the
schema version. Answer: one ConfigRecord of allow-listed numbers under `fedtune.metrics`. In train
replies: optionally the same record (through `FedTuneMod`) and `fedtune.applied`, the
hyperparameters a client says it used. A ConfigRecord is used because strategies ignore it.
"""

import io
from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ._space import Scalar

SCHEMA = 1
ACTION = "fedtune"
QUERY = f"query.{ACTION}"
METRICS_RECORD = "fedtune.metrics"
APPLIED_RECORD = "fedtune.applied"
# Keys inside the train config that ask `FedTuneMod` for metrics.
PROFILE_KEY = "fedtune-profile"
REFERENCE_KEY = "fedtune-reference"


def config_key(content: RecordDict, preferred: str = "config") -> str | None:
    """The key of the ConfigRecord that carries hyperparameters; None if there is none."""
    records = content.config_records
    if preferred in records:
        return preferred
    return next(iter(records), None)


def pack_arrays(arrays: ArrayRecord) -> bytes:
    """Arrays as one npz, to travel inside a config where no second ArrayRecord may be sent."""
    buffer = io.BytesIO()
    named = {f"{i}:{key}": array.numpy() for i, (key, array) in enumerate(arrays.items())}
    np.savez(buffer, allow_pickle=False, **named)
    return buffer.getvalue()


def unpack_arrays(packed: bytes) -> ArrayRecord:
    """The arrays that `pack_arrays` packed; no pickled object is ever loaded.

    Raises:
        ValueError: the bytes are not such a package.
    """
    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        named = {name.split(":", 1)[1]: Array(np.asarray(file[name])) for name in file.files}
    return ArrayRecord(named)


def with_config(content: RecordDict, key: str, values: Mapping[str, Scalar | bytes]) -> RecordDict:
    """A new RecordDict that shares every record but has its own config, with `values` set."""
    rebuilt = RecordDict(dict(content.items()))
    base = dict(content.config_records[key]) if key in content.config_records else {}
    rebuilt[key] = ConfigRecord({**base, **values})
    return rebuilt

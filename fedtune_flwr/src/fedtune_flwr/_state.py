"""What survives the server: policy, report, clients, the global model, the inner strategy's state.

One JSON file and one npz a round; the JSON names its npz and is renamed into place last, so that a
crash leaves the previous round whole.
"""

import io
import json
import math
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from ._clients import ClientRow
from ._errors import StateError
from ._files import write_atomic, write_bytes_atomic
from ._inner import Manifest
from ._metrics import NAMES
from ._policy import Policy
from ._report import TuneReport
from ._space import SearchSpace

VERSION = 1
FILE = "fedtune-state.json"
_AGAIN = "Use another state_dir, or remove this one to start anew"


@dataclass
class Saved:
    """The content of a state folder.

    Attributes:
        server_round: the last round that was finished; 0 before the first.
        policy: the policy in use, None before tuning.
        provisional: whether it was found without metrics.
        report: what tuning did.
        rows: the clients.
        arrays: the global model after that round; None before the first.
        inner: description of the inner strategies' state.
        inner_arrays: the arrays it names.
        sampling: state of Python's global generator, which Flower samples nodes from.
    """

    server_round: int = 0
    policy: Policy | None = None
    provisional: bool = False
    report: TuneReport | None = None
    rows: list[ClientRow] = field(default_factory=list)
    arrays: ArrayRecord | None = None
    inner: Manifest = field(default_factory=list)
    inner_arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sampling: Any = None


class StateFolder:
    """A folder that holds the state of one federation.

    Args:
        path: made if it does not exist.
        space: the search space; a folder written for another one is refused.
        settings: what else must not change between runs, as JSON can hold it.

    Raises:
        StateError: the path is a file or cannot be made.
    """

    def __init__(self, path: str | Path, space: SearchSpace, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        self.space = space
        self.settings = settings
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"state_dir {self.path}: {error}") from error

    def load(self) -> Saved | None:
        """What was saved last; None for an empty folder.

        Raises:
            StateError: the file is damaged, or was written for another space or version.
        """
        path = self.path / FILE
        if not path.exists():
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            self._check(fields, path)
            return self._read(fields)
        except StateError:
            raise
        # A damaged zip file also gives RuntimeError (a flag), zlib.error or MemoryError (a size).
        except (
            OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError,
            ArithmeticError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error,
        ) as error:  # fmt: skip
            raise StateError(f"{path} is damaged: {error!r}. {_AGAIN}") from error

    def _check(self, fields: dict[str, Any], path: Path) -> None:
        if fields["version"] != VERSION:
            raise StateError(
                f"{path} has version {fields['version']!r}, this plugin reads {VERSION}. {_AGAIN}"
            )
        if fields["space"] != self.space.digest():
            raise StateError(
                f"{path} was written for another search space, not for {self.space}. {_AGAIN}"
            )
        was = {k: fields["settings"].get(k) for k in self.settings}
        if was != self.settings:
            raise StateError(f"{path} was written with {was}, now {self.settings}. {_AGAIN}")

    def _read(self, fields: dict[str, Any]) -> Saved:
        server_round = fields["round"]
        if isinstance(server_round, bool) or not isinstance(server_round, int) or server_round < 0:
            raise ValueError(f"round {server_round!r}")
        if server_round and fields["arrays"] is None:
            raise ValueError(f"no model after round {server_round}")
        for name in ("clients", "inner"):
            if not isinstance(fields[name], list):
                raise TypeError(f"{name} is no list")
        named: dict[str, np.ndarray] = {}
        if fields["file"] is not None:
            # Nothing but the file that `save` names is read, wherever the folder came from.
            if fields["file"] != _npz(server_round):
                raise ValueError(f"file {fields['file']!r} after round {server_round}")
            # Opened here, since np.load leaves a damaged file open.
            with (
                (self.path / fields["file"]).open("rb") as raw,
                np.load(raw, allow_pickle=False) as file,
            ):
                named = {name: np.asarray(file[name]) for name in file.files}
        arrays = None
        if fields["arrays"] is not None:
            arrays = ArrayRecord(
                {k: Array(named[f"model:{i}"]) for i, k in enumerate(fields["arrays"])}
            )
        return Saved(
            server_round,
            None if fields["policy"] is None else Policy.from_dict(fields["policy"]),
            bool(fields["provisional"]),
            None if fields["report"] is None else TuneReport.from_dict(fields["report"]),
            [_row(row) for row in fields["clients"]],
            arrays,
            fields["inner"],
            named,
            fields["sampling"],
        )

    def save(self, saved: Saved) -> None:
        """Writes the state; files of earlier rounds go once the new one is named.

        Raises:
            StateError: the folder cannot be written.
        """
        named = dict(saved.inner_arrays)
        for i, array in enumerate((saved.arrays or ArrayRecord()).values()):
            named[f"model:{i}"] = array.numpy()
        name = _npz(saved.server_round) if named else None
        fields = {
            "version": VERSION,
            "space": self.space.digest(),
            "settings": self.settings,
            "round": saved.server_round,
            "policy": None if saved.policy is None else saved.policy.to_dict(),
            "provisional": saved.provisional,
            "report": None if saved.report is None else saved.report.to_dict(),
            "clients": [row.to_dict() for row in saved.rows],
            "arrays": None if saved.arrays is None else list(saved.arrays),
            "inner": saved.inner,
            "sampling": saved.sampling,
            "file": name,
        }
        try:
            if name is not None:
                buffer = io.BytesIO()
                np.savez(buffer, allow_pickle=False, **named)
                write_bytes_atomic(self.path / name, buffer.getvalue())
            write_atomic(self.path / FILE, json.dumps(fields))
            for old in self.path.glob("round-*.npz"):
                if old.name != name:
                    old.unlink(missing_ok=True)
        except (OSError, ValueError, TypeError) as error:
            raise StateError(f"state_dir {self.path} cannot be written: {error}") from error


def _npz(server_round: int) -> str:
    return f"round-{server_round:06d}.npz"


def _row(fields: dict[str, Any]) -> ClientRow:
    row = ClientRow(**fields)
    if not isinstance(row.node_id, int) or not isinstance(row.values, dict):
        raise TypeError(f"client {row.node_id!r}")
    if row.metrics is not None:
        row.metrics = {name: float(row.metrics.get(name, math.nan)) for name in NAMES}
    return row

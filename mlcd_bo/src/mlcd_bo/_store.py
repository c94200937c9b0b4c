"""Where a search is kept: SQLite, and the same events as JSON lines for people and other tools.

Every event is on disk before the search goes on: the start of a trial, signs of life while it
runs, its outcome. A process killed at any point loses nothing but the trial it was in, and what
that trial is known to have run is charged.
"""

import json
import math
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from ._catalog import Catalog, InstanceType
from ._check import at_least_zero, whole
from ._errors import CatalogChanged, StoreError
from ._job import Job
from ._ledger import Lost
from ._scenario import Scenario
from ._space import Deployment, SearchSpace
from ._transfer import EarlierJob
from ._trial import Observation, Trial

_FORMAT = 3
# A search on another machine that wrote to the store so lately is still being run there.
_FRESH_S = 60.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS search (id INTEGER PRIMARY KEY CHECK (id = 1), content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS running (
    row INTEGER PRIMARY KEY, batch INTEGER NOT NULL, began REAL NOT NULL, alive REAL NOT NULL);
CREATE TABLE IF NOT EXISTS owner (
    id INTEGER PRIMARY KEY CHECK (id = 1), host TEXT NOT NULL, process INTEGER NOT NULL,
    born TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS options (
    id INTEGER PRIMARY KEY CHECK (id = 1), content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS lost (
    batch INTEGER NOT NULL, hours REAL NOT NULL, dollars REAL NOT NULL);
CREATE TABLE IF NOT EXISTS trial (
    number INTEGER PRIMARY KEY, deployment INTEGER NOT NULL, content TEXT NOT NULL);
"""


@contextmanager
def sound(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what goes wrong in reading a kept value into a StoreError that names the file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise StoreError(
            f"store {str(path)!r} is damaged or was edited ({type(problem).__name__}: {problem}); "
            "restore a copy of it, or begin a new search with another path"
        ) from problem


class Store:
    """The file of one search.

    Args:
        path: the SQLite file; the JSON lines lie beside it, with ``.jsonl`` added to the name.
        create: make what is not there. Otherwise nothing is written before it must be.

    Raises:
        StoreError: the file cannot be opened, or is not a store of this format.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False) -> None:
        if not isinstance(path, str | os.PathLike) or not Path(path).name or Path(path).is_dir():
            raise StoreError(f"store must be the path of a file, got {path!r}; name the file")
        # Whole: the process may change its folder meanwhile.
        self.path = Path(os.path.abspath(path))
        self.lines = self.path.with_name(self.path.name + ".jsonl")
        if create:
            with self._open("rwc") as database:
                database.executescript(_SCHEMA)

    @contextmanager
    def _open(self, mode: str = "rw") -> Iterator[sqlite3.Connection]:
        try:
            where = f"{self.path.as_uri()}?mode={mode}"
            with closing(sqlite3.connect(where, timeout=30.0, uri=True)) as database:
                # Full: an outcome that was paid for survives a power cut, too.
                database.execute("PRAGMA synchronous = FULL")
                with database:
                    yield database
        except UnicodeDecodeError as problem:
            raise StoreError(f"store {str(self.path)!r} is damaged: {problem}") from problem
        except sqlite3.Error as problem:
            raise StoreError(
                f"store {str(self.path)!r} cannot be used: {problem}; give another path, or free "
                "the file or the disk"
            ) from problem

    def _note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}, allow_nan=False)
        try:
            with open(self.lines, "ab+") as file:
                # Whatever a kill has left of the line before ends here.
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                torn = file.read(1) not in (b"", b"\n")
                file.write(b"\n" * torn + line.encode() + b"\n")
        except OSError as problem:
            raise StoreError(f"{str(self.lines)!r} cannot be written: {problem}") from problem

    def begin(self, content: Mapping[str, Any]) -> None:
        """Keeps what the search is, once.

        Raises:
            StoreError: another search is kept there already.
        """
        kept = self.content()
        if kept is None:
            with self._open() as database:
                database.execute("INSERT INTO search VALUES (1, ?)", [_dump(content)])
            self._note("search", **content)
        elif kept != json.loads(_dump(content)):
            raise StoreError(
                f"store {str(self.path)!r} holds another search; go on with it by `mlcd resume` "
                "or DeploymentOptimizer.resume(store), or give another path"
            )

    def content(self) -> dict[str, Any] | None:
        """Returns what the search is, or None if none was begun."""
        with self._open() as database:
            table = "SELECT 1 FROM sqlite_master WHERE name = 'search'"
            if database.execute(table).fetchone() is None:
                return None
            row = database.execute("SELECT content FROM search").fetchone()
        if row is None:
            return None
        with sound(self.path):
            content: dict[str, Any] = json.loads(row[0])
            found = content.get("format")
        if found != _FORMAT:
            raise StoreError(
                f"store {str(self.path)!r} has format {found!r}, this version reads {_FORMAT}"
            )
        return content

    def begun(self) -> bool:
        """Returns whether a trial was ever begun."""
        with self._open() as database:
            found = [
                database.execute(f"SELECT EXISTS (SELECT 1 FROM {table})").fetchone()[0]
                for table in ("trial", "running", "lost")
            ]
        return any(found)

    def keep_options(self, options: Mapping[str, Any]) -> None:
        """Keeps how the search is profiled, which is not part of what it is."""
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO options VALUES (1, ?)", [_dump(options)])

    def options(self) -> dict[str, Any]:
        """Returns what `keep_options` has kept, nothing if it was not called."""
        with self._open() as database:
            row = database.execute("SELECT content FROM options").fetchone()
        with sound(self.path):
            return {} if row is None else dict(json.loads(row[0]))

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Keeps other processes from running this search meanwhile.

        Raises:
            StoreError: another process is running it.
        """
        me = (socket.gethostname(), os.getpid(), _birth(os.getpid()))
        with self._open() as database:
            # At once the only writer, so that of two that come together one is refused.
            database.execute("BEGIN IMMEDIATE")
            self._refuse_others(database)
            database.execute("INSERT OR REPLACE INTO owner VALUES (1, ?, ?, ?)", me)
        try:
            yield
        finally:
            with self._open() as database:
                database.execute("DELETE FROM owner WHERE process = ?", [os.getpid()])

    def _refuse_others(self, database: sqlite3.Connection) -> None:
        for host, process, born in database.execute("SELECT host, process, born FROM owner"):
            # A number is given again, after a restart of the machine most of all: see when
            # the process that has it now was born.
            here = host == socket.gethostname() and process != os.getpid()
            if here and _lives(process) and _birth(process) == born:
                raise StoreError(
                    f"the search in {str(self.path)!r} is being run by process {process}; "
                    "wait for its end or stop it"
                )
            last = database.execute("SELECT MAX(alive) FROM running").fetchone()[0]
            if host != socket.gethostname() and last and abs(time.time() - last) < _FRESH_S:
                raise StoreError(
                    f"the search in {str(self.path)!r} is being run on {host!r}, which last wrote "
                    f"to it {abs(time.time() - last):.0f} s ago; wait for its end, or for "
                    f"{_FRESH_S:.0f} s if it has been stopped"
                )

    def start(self, rows: list[int], batch: int, began: float) -> None:
        """Keeps that trials of these deployments have begun, before they cost anything."""
        with self._open() as database:
            database.executemany(
                "INSERT OR REPLACE INTO running VALUES (?, ?, ?, ?)",
                [(row, batch, began, began) for row in rows],
            )
        self._note("start", deployments=rows, batch=batch, began=began)

    def alive(self, now: float) -> None:
        """Keeps that the trials under way were still running at this Unix time."""
        with self._open() as database:
            database.execute("UPDATE running SET alive = ?", [now])

    def close_running(self, rate: Sequence[float]) -> None:
        """Charges every trial that ended with the process that ran it.

        Each is charged from its begin to its last sign of life.

        Args:
            rate: dollars per hour of each deployment.

        Raises:
            StoreError: the process that runs them is still alive.
        """
        with sound(self.path), self._open() as database:
            self._refuse_others(database)
            found = database.execute("SELECT row, batch, began, alive FROM running")
            cut = []
            for row, batch, began, alive in found.fetchall():
                _place(row, len(rate))
                hours = at_least_zero("hours of a lost trial", (alive - began) / 3600)
                cut.append((row, Lost(whole("batch", batch), hours, hours * rate[row])))
        for row, lost in cut:
            self.lose([row], lost)

    def lose(self, rows: Sequence[int], lost: Lost) -> None:
        """Keeps that trials of these deployments gave no observation and what they cost."""
        with self._open() as database:
            database.execute("INSERT INTO lost VALUES (?, ?, ?)", list(astuple(lost)))
            database.executemany("DELETE FROM running WHERE row = ?", [[row] for row in rows])
        self._note("lost", deployments=list(rows), **asdict(lost))

    def lost(self) -> list[Lost]:
        """Returns the trials that raised or ended with the process that ran them."""
        with sound(self.path), self._open() as database:
            return [
                Lost(
                    whole("batch of a lost trial", batch),
                    at_least_zero("lost hours", hours),
                    at_least_zero("lost dollars", dollars),
                )
                for batch, hours, dollars in database.execute("SELECT * FROM lost")
            ]

    def add(self, row: int, trial: Trial) -> None:
        """Keeps the outcome of a trial."""
        content = trial_fields(trial)
        with self._open() as database:
            database.execute(
                "INSERT INTO trial (deployment, content) VALUES (?, ?)", [row, _dump(content)]
            )
            database.execute("DELETE FROM running WHERE row = ?", [row])
        self._note("trial", number=row, **content)

    def trials(self, space: SearchSpace) -> list[Trial]:
        """Returns every kept trial in order, its deployment taken from `space`."""
        with sound(self.path), self._open() as database:
            found = database.execute("SELECT deployment, content FROM trial ORDER BY number")
            kept: list[Trial] = []
            for row, content in found:
                trial = trial_of(space[_place(row, len(space))], json.loads(content))
                kept = in_order([*kept, trial], space)
            return kept


def in_order(trials: Sequence[Trial], space: SearchSpace) -> list[Trial]:
    """Returns trials of which the last is new, those of its batch in the order of the space.

    So the order does not depend on which of them, side by side, happened to end first.
    """
    last = trials[-1].batch
    begin = len(trials)
    while last is not None and begin > 0 and trials[begin - 1].batch == last:
        begin -= 1
    batch = sorted(trials[begin:], key=lambda trial: space.position(trial.deployment))
    return [*trials[:begin], *batch]


def search_fields(
    space: SearchSpace,
    scenario: Scenario,
    job: Job,
    strategy: str,
    seed: int,
    earlier: Sequence[EarlierJob] = (),
) -> dict[str, Any]:
    """Returns what a search is, as plain values that JSON can hold."""
    types = list(dict.fromkeys(d.instance_type for d in space))
    return {
        "format": _FORMAT,
        "types": [{k: v for k, v in asdict(kind).items() if v is not None} for kind in types],
        "dated": space.catalog.dated,
        "deployments": [
            [d.instance_type.name, d.count, d.spot, [list(k) for k in d.knobs]] for d in space
        ],
        "scenario": asdict(scenario),
        "job": {
            "total_steps": job.total_steps,
            "total_samples": job.total_samples,
            "script": None if job.script is None else os.fspath(job.script),
            "args": list(job.args),
            "checkpoint": None if job.checkpoint is None else os.fspath(job.checkpoint),
            "batch_policy": job.batch_policy,
        },
        "strategy": strategy,
        "seed": seed,
        "earlier": [one.as_rows() for one in earlier],
    }


def space_of(content: Mapping[str, Any]) -> SearchSpace:
    """Returns the search space that was kept."""
    kinds = {fields["name"]: InstanceType(**fields) for fields in content["types"]}
    deployments = [
        Deployment(kinds[name], count, spot, tuple((k, v) for k, v in knobs))
        for name, count, spot, knobs in content["deployments"]
    ]
    return SearchSpace.of(Catalog(kinds.values(), dated=content["dated"]), deployments)


def same_space(kept: Mapping[str, Any], space: SearchSpace, accept_prices: bool) -> SearchSpace:
    """Returns `space` in the order of the kept one, or refuses it if it is another.

    Raises:
        CatalogChanged: deployments differ, or prices or sizes do and are not accepted.
    """
    now = search_fields(space, Scenario.fastest(), Job(total_samples=1), "", 0)
    places = {json.dumps(d): i for i, d in enumerate(now["deployments"])}
    wanted = [json.dumps(d) for d in kept["deployments"]]
    if set(places) != set(wanted):
        raise CatalogChanged(
            "the search space has other deployments than the store; resume with the same "
            "types and counts, or begin a new store"
        )
    today = {kind["name"]: kind for kind in now["types"]}
    changed = [
        f"{a['name']}.{field}: {a.get(field)} -> {b.get(field)}"
        for a, b in ((kind, today[kind["name"]]) for kind in kept["types"])
        for field in sorted(set(a) | set(b))
        if a.get(field) != b.get(field)
    ]
    if changed and not accept_prices:
        raise CatalogChanged(
            f"the catalogue has changed since the store was begun ({'; '.join(changed[:5])}); "
            "say accept_prices=True (--accept-prices) to go on with the new one (trials keep what "
            "they cost)"
        )
    # Trials are kept by place.
    return SearchSpace.of(space.catalog, [space[places[deployment]] for deployment in wanted])


def trial_fields(trial: Trial) -> dict[str, Any]:
    """Returns a trial as plain values; NaN becomes None."""
    seen = asdict(trial.observation)
    return {
        "deployment": trial.deployment.key,
        "price_per_hour": trial.price_per_hour,
        "batch": trial.batch,
        "began": trial.began,
        "observation": {
            k: None if isinstance(v, float) and math.isnan(v) else v for k, v in seen.items()
        },
    }


def trial_of(deployment: Deployment, content: Mapping[str, Any]) -> Trial:
    """Returns the trial of `trial_fields`."""
    seen = dict(content["observation"])
    for name in ("speed", "speed_sem"):
        seen[name] = math.nan if seen[name] is None else seen[name]
    return Trial(
        deployment,
        Observation(**seen),
        content["batch"],
        content["price_per_hour"],
        content["began"],
    )


def _place(row: object, length: int) -> int:
    """Returns `row` if it is the place of a deployment; below zero would count from the end."""
    if not isinstance(row, int) or not 0 <= row < length:
        raise ValueError(f"deployment {row!r} is not one of the {length} of the search")
    return row


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _birth(process: int) -> str:
    """Returns when a process was started, in the system's own words; empty if it does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{boot} {fields[19].decode()}"
    except (OSError, IndexError):
        return ""


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)

"""What a state counts and times while it runs."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hipress_torch._errors import FileError

EVENTS_KEPT = 20_000
STAGES = (
    "encode",
    "send wait",
    "ring",
    "merge",
    "gather wait",
    "decode",
    "all-reduce wait",
    "exposed",
)


@dataclass(frozen=True)
class Event:
    """A timed stage of one part of one bucket: a bar of the trace."""

    stage: str
    iteration: int
    bucket: int
    part: int
    thread: str
    began_ns: int
    ended_ns: int


class Recorder:
    """Counters, summed times and the latest events; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        # Seconds from a bucket's hook to its mean, by bucket, since the last call of taken().
        self._taken: dict[int, list[float]] = {}

    def exchanged(self, bucket: int, seconds: float) -> None:
        """Keeps how long a bucket's exchange took."""
        with self._lock:
            self._taken.setdefault(bucket, []).append(seconds)

    def taken(self) -> dict[int, list[float]]:
        """Returns the times of exchanges by bucket since the last call."""
        with self._lock:
            found, self._taken = self._taken, {}
        return found

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    @contextmanager
    def timed(self, stage: str, iteration: int, bucket: int, part: int = 0) -> Iterator[None]:
        """Times a stage and keeps it as an event."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            ended = time.perf_counter_ns()
            thread = threading.current_thread().name
            with self._lock:
                self._seconds[stage] = self._seconds.get(stage, 0.0) + (ended - began) * 1e-9
                self.events.append(Event(stage, iteration, bucket, part, thread, began, ended))

    def counts(self, name: str) -> int:
        """Returns a counter."""
        return self._counts.get(name, 0)

    def seconds(self, stage: str) -> float:
        """Returns the time spent in a stage so far."""
        return self._seconds.get(stage, 0.0)


def write_trace(path: Path, recorder: Recorder, rank: int) -> None:
    """Writes the events in the trace event format: microseconds, a row for each thread.

    Raises:
        FileError: the file cannot be written.
    """
    events = list(recorder.events)
    start = min((e.began_ns for e in events), default=0)
    threads = {name: i for i, name in enumerate(dict.fromkeys(e.thread for e in events))}
    rows: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    ]
    rows += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": i, "args": {"name": name}}
        for name, i in threads.items()
    ]
    rows += [
        {
            "name": e.stage,
            "ph": "X",
            "pid": rank,
            "tid": threads[e.thread],
            "ts": (e.began_ns - start) / 1e3,
            "dur": (e.ended_ns - e.began_ns) / 1e3,
            "args": {"iteration": e.iteration, "bucket": e.bucket, "part": e.part},
        }
        for e in events
    ]
    write_text(path, json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole: beside its place first, then renamed.

    Raises:
        FileError: it cannot be written.
    """
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise FileError(
            f"{path} cannot be written ({error.strerror or error}); name a file in a folder that "
            f"is there and that you may write to"
        ) from error

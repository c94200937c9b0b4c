"""The pipeline on CPU tensors: encode in the hook, then two workers, one a hop.

::

    hook thread      encode -> all_to_all (group 1) --.
    worker "merge"      wait -> merge, re-encode -> all_gather (group 2) --.
    worker "decode"        wait -> decode into the bucket -> complete the future

Each group's collectives are issued from one thread in bucket order, so their order is the same on
all ranks. The workers wait inside the backend and encode inside C, both without the interpreter
lock, so the pipeline overlaps with the rest of the backward pass.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hipress_torch._compll._hashing import stream_of
from hipress_torch._errors import HiPressError, PeerError
from hipress_torch._groups import all_gather_flat, guarded
from hipress_torch._layout import Part
from hipress_torch._metrics import Recorder
from hipress_torch._ring import RingContext, pass_round
from hipress_torch._wire import HEADER_BYTES, NOT_FINITE, read_header, write_header

SEND_HOP, MERGE_HOP = 0, 1


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Returns what a gradient holds: itself, or a sparse one's values."""
    return gradient._values() if gradient.is_sparse else gradient


@dataclass
class Exchange:
    """A bucket on its way, or several: the gradient, what is left to do, futures to complete."""

    bucket: int
    iteration: int
    grad: torch.Tensor
    residual: torch.Tensor | None
    velocity: torch.Tensor | None
    remaining: int
    finish: Callable[[], None]
    futures: "Sequence[torch.futures.Future[torch.Tensor]]"
    work: Any = None
    began_s: float = field(default_factory=time.perf_counter)


@dataclass
class _Step:
    """One part of an exchange in a worker's queue."""

    exchange: Exchange
    part: Part
    work: Any
    flags: int = 0
    own_flags: int = 0
    # In a ring: the ranges of others that this rank encoded; all of them else.
    encoded: list[int] | None = None


@dataclass
class Engine:
    """The two workers of one state.

    Attributes:
        first: group of the first hop; issued from the thread that calls :meth:`submit`.
        second: group of the second hop; issued from the merge worker.
        seed: seed of the codecs' random numbers.
        checksum: the codec's checksum, in every header.
        recorder: counters and times.
        failure: what ended the exchange, if something did.
        troubled: whether some rank had a value that is not finite since this was last cleared.
    """

    first: dist.ProcessGroup
    second: dist.ProcessGroup
    seed: int
    checksum: int
    recorder: Recorder
    failure: HiPressError | None = None
    troubled: bool = False
    _pending: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _queues: "tuple[queue.SimpleQueue[_Step | Exchange | None], ...]" = field(
        default_factory=lambda: (queue.SimpleQueue(), queue.SimpleQueue())
    )
    _threads: list[threading.Thread] = field(default_factory=list)

    def submit(self, exchange: Exchange, parts: list[Part]) -> None:
        """Encodes and sends a bucket; its future completes when the bucket holds the mean.

        Raises:
            PeerError: an earlier exchange failed, or this one could not be sent.
        """
        self._begin()
        for part in parts:
            flags = self._encode(exchange, part)
            work = guarded(
                lambda part=part: dist.all_to_all_single(
                    part.received.view(-1),
                    part.send,
                    part.receive_sizes,
                    part.send_sizes,
                    group=self.first,
                    async_op=True,
                ),
                f"bucket {exchange.bucket}, first hop",
            )
            self.recorder.count("bytes_sent", part.bytes_sent)
            self._queues[0].put(_Step(exchange, part, work, flags))

    def submit_ring(self, exchange: Exchange, parts: list[Part]) -> None:
        """Passes a bucket round a ring; its future completes like that of :meth:`submit`.

        Raises:
            PeerError: an earlier exchange failed.
        """
        self._begin()
        for part in parts:
            self.recorder.count("bytes_sent", part.bytes_sent)
            self._queues[0].put(_Step(exchange, part, None))

    def submit_plain(self, exchange: Exchange) -> None:
        """Sums a bucket by a plain all-reduce; its future completes like that of :meth:`submit`.

        Raises:
            PeerError: an earlier exchange failed, or this one could not be sent.
        """
        self._begin()
        exchange.work = guarded(
            lambda: dist.all_reduce(exchange.grad, group=self.first, async_op=True),
            f"bucket {exchange.bucket}, all-reduce",
        )
        ranks = self.first.size()
        values = values_of(exchange.grad)
        size = values.numel() * values.element_size()
        self.recorder.count("bytes_sent", 2 * (ranks - 1) * size // ranks)
        self._queues[0].put(exchange)

    def wait(self) -> None:
        """Returns when all that was submitted is complete.

        Raises:
            HiPressError: an exchange failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0 or self.failure is not None)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Stops the workers after what was submitted."""
        if self._threads:
            self._queues[0].put(None)
            for thread in self._threads:
                thread.join(timeout=60)
            self._threads.clear()

    def _begin(self) -> None:
        """Starts the workers if they are not, and counts one more exchange."""
        if not self._threads:
            for hop, name in enumerate(("hipress-merge", "hipress-decode")):
                thread = threading.Thread(target=self._work, args=(hop,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        if self.failure is not None:
            raise self.failure
        with self._changed:
            self._pending += 1

    def _encode(self, exchange: Exchange, part: Part) -> int:
        flags = [0] * len(part.sizes)
        stream = stream_of(self.seed, exchange.iteration, SEND_HOP)
        with self.recorder.timed("encode", exchange.iteration, exchange.bucket, part.number):
            for coded in part.coded:
                bad = coded.codec.encode(
                    coded.send,
                    exchange.grad,
                    1.0 / self.first.size(),
                    exchange.residual,
                    None,
                    part.send,
                    stream,
                )
                if exchange.velocity is not None:
                    coded.codec.clear_sent(coded.send, part.send, exchange.velocity)
                for i in torch.nonzero(bad).view(-1).tolist():
                    flags[coded.send_owners[i]] |= NOT_FINITE
        start = 0
        for owner, size in enumerate(part.send_sizes):
            if owner != part.rank:
                head = part.send[start : start + HEADER_BYTES]
                write_header(
                    head,
                    flags[owner],
                    exchange.iteration,
                    self._label(exchange, part),
                    self.checksum,
                )
            start += size
        return max(flags)

    def _work(self, hop: int) -> None:
        """What the worker of a hop does until it is told to end."""
        while (step := self._queues[hop].get()) is not None:
            try:
                if isinstance(step, Exchange):
                    self._finish_plain(step)
                elif hop == 0:
                    self._merge(step)
                    self._queues[1].put(step)
                else:
                    self._decode(step)
            except Exception as error:  # any error must reach the training thread
                self._fail(step if isinstance(step, Exchange) else step.exchange, error)
        if hop == 0:
            self._queues[1].put(None)

    def _finish_plain(self, exchange: Exchange) -> None:
        self._wait_for(exchange.work, "all-reduce wait", exchange, 0)
        exchange.grad.div_(self.first.size())
        # Sums that are not finite tell of themselves, but for a sparse gradient's.
        if not exchange.grad.is_sparse and not bool(exchange.grad.sum().isfinite()):
            self.troubled |= not bool(exchange.grad.isfinite().all())
        self._complete(exchange)

    def _merge(self, step: _Step) -> None:
        exchange, part = step.exchange, step.part
        if step.work is None:
            with self.recorder.timed("ring", exchange.iteration, exchange.bucket, part.number):
                step.own_flags, step.encoded = pass_round(part, self._ring_context(step))
            incoming = part.received[:1]
        else:
            self._collect(step)
            incoming = part.received
        self._merge_own(step, incoming)

    def _ring_context(self, step: _Step) -> RingContext:
        exchange = step.exchange
        return RingContext(
            self.second,
            exchange.grad,
            exchange.residual,
            exchange.velocity,
            exchange.iteration,
            self._label(exchange, step.part),
            self.checksum,
            self.seed,
            f"bucket {exchange.bucket}",
        )

    def _collect(self, step: _Step) -> None:
        exchange, part = step.exchange, step.part
        self._wait_for(step.work, "send wait", exchange, part.number)
        senders = [r for r in range(len(part.sizes)) if r != part.rank]
        for sender, message in zip(senders, part.received, strict=True):
            step.own_flags |= read_header(
                message[:HEADER_BYTES],
                sender,
                exchange.iteration,
                self._label(exchange, part),
                self.checksum,
            )

    def _merge_own(self, step: _Step, incoming: torch.Tensor) -> None:
        """Encodes the mean of this rank's range and sends it to all."""
        exchange, part = step.exchange, step.part
        if not step.own_flags:
            stream = stream_of(self.seed, exchange.iteration, MERGE_HOP)
            with self.recorder.timed("merge", exchange.iteration, exchange.bucket, part.number):
                for coded in part.coded:
                    bad = coded.codec.encode(
                        coded.own,
                        exchange.grad,
                        1.0 / self.first.size(),
                        exchange.residual,
                        incoming,
                        part.own,
                        stream,
                    )
                    if exchange.velocity is not None:
                        coded.codec.clear_sent(coded.own, part.own, exchange.velocity)
                    if bool(bad.any()):
                        step.flags |= NOT_FINITE
        head = part.own[:HEADER_BYTES]
        flags = step.own_flags | step.flags
        write_header(head, flags, exchange.iteration, self._label(exchange, part), self.checksum)
        step.work = guarded(
            lambda: all_gather_flat(part.gathered, part.own, self.second),
            f"bucket {exchange.bucket}, second hop",
        )

    def _decode(self, step: _Step) -> None:
        exchange, part = step.exchange, step.part
        self._wait_for(step.work, "gather wait", exchange, part.number)
        flags = [
            read_header(
                row[:HEADER_BYTES],
                r,
                exchange.iteration,
                self._label(exchange, part),
                self.checksum,
            )
            for r, row in enumerate(part.gathered)
        ]
        if any(f & NOT_FINITE for f in flags):
            self.recorder.count("not_finite")
            self.troubled = True
            self._undo(step, flags)
        with self.recorder.timed("decode", exchange.iteration, exchange.bucket, part.number):
            for coded in part.coded:
                coded.codec.decode(coded.gathered, part.gathered.view(-1), exchange.grad)
        for coded in part.coded:
            for segment, owner in zip(coded.gathered.segments, coded.gathered_owners, strict=True):
                if flags[owner] & NOT_FINITE:
                    exchange.grad[segment.grad : segment.grad + segment.count] = float("nan")
        exchange.remaining -= 1
        if exchange.remaining == 0:
            self._complete(exchange)

    def _undo(self, step: _Step, flags: list[int]) -> None:
        """Takes back what this rank's encodes for owners in trouble did to the residual."""
        exchange, part = step.exchange, step.part
        if exchange.residual is None:
            return
        scale = 1.0 / self.first.size()
        for coded in part.coded:
            done = range(len(flags)) if step.encoded is None else step.encoded
            for owner in done:
                if flags[owner] & NOT_FINITE and owner != part.rank:
                    first = step.encoded is None or owner == step.encoded[0]
                    arrived = None if first else part.ring.view(1, -1)
                    coded.codec.undo(
                        coded.send_to(owner),
                        exchange.grad,
                        scale,
                        exchange.residual,
                        arrived,
                        part.send,
                    )
            # An owner that was told of trouble has encoded nothing.
            if flags[part.rank] & NOT_FINITE and not step.own_flags:
                incoming = part.received if step.encoded is None else part.received[:1]
                coded.codec.undo(
                    coded.own, exchange.grad, scale, exchange.residual, incoming, part.own
                )

    def _wait_for(self, work: Any, stage: str, exchange: Exchange, part: int) -> None:
        with self.recorder.timed(stage, exchange.iteration, exchange.bucket, part):
            guarded(work.wait, f"bucket {exchange.bucket}, {stage}")

    def _label(self, exchange: Exchange, part: Part) -> int:
        return exchange.bucket << 16 | part.number

    def _complete(self, exchange: Exchange) -> None:
        self.recorder.exchanged(exchange.bucket, time.perf_counter() - exchange.began_s)
        exchange.finish()
        with self._changed:
            self._pending -= 1
            self._changed.notify_all()

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        wrapped = (
            error
            if isinstance(error, HiPressError)
            else PeerError(f"bucket {exchange.bucket}: {type(error).__name__}: {error}")
        )
        with self._changed:
            if self.failure is None:
                self.failure = wrapped
            self._pending -= 1
            self._changed.notify_all()
        # DDP may be waiting for these futures and for nothing else.
        for future in exchange.futures:
            if not future.done():
                future.set_exception(wrapped)  # type: ignore[arg-type]

"""The exchange on GPU tensors: everything is enqueued in the hook, on a stream of its own.

On a GPU the collectives and kernels of a stream run in the order they were enqueued, on every
rank, so one thread is enough and nothing waits on the host. With gloo, messages pass through host
memory: only the compressed bytes do. The same code runs on CPU tensors, step by step, which is how
it is tested.

A bad value reaches all ranks as on the CPU, but the other ranks' residuals of that range are not
put back (that would need to know on the host what the device found), unless ``rollback`` keeps a
copy of all of them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hipress_torch._compll._hashing import stream_of
from hipress_torch._engine import MERGE_HOP, SEND_HOP, Exchange, values_of
from hipress_torch._errors import HiPressError
from hipress_torch._groups import all_gather_flat, guarded
from hipress_torch._layout import Part
from hipress_torch._metrics import Recorder
from hipress_torch._wire import HEADER_BYTES, write_header

FLAGS_AT = 3


@dataclass
class InlineEngine:
    """Has the methods of :class:`hipress_torch._engine.Engine`, without workers."""

    first: dist.ProcessGroup
    second: dist.ProcessGroup
    seed: int
    checksum: int
    recorder: Recorder
    failure: HiPressError | None = None
    troubled: bool | torch.Tensor = False
    _stream: Any = None

    def submit(self, exchange: Exchange, parts: list[Part]) -> None:
        """Enqueues a bucket's exchange; its future completes with it.

        Raises:
            PeerError: a collective failed.
        """
        with self._side_stream(exchange.grad):
            for part in parts:
                self._run(exchange, part)
                self.recorder.count("bytes_sent", part.bytes_sent)
            exchange.finish()

    def submit_plain(self, exchange: Exchange) -> None:
        """Enqueues a plain all-reduce.

        Raises:
            PeerError: the collective failed.
        """
        with self._side_stream(exchange.grad):
            what = f"bucket {exchange.bucket}, all-reduce"
            guarded(lambda: dist.all_reduce(exchange.grad, group=self.first), what)
            exchange.grad.div_(self.first.size())
            if not exchange.grad.is_sparse:
                self.troubled = self.troubled | ~exchange.grad.isfinite().all()
            values = values_of(exchange.grad)
            size, ranks = values.numel() * values.element_size(), self.first.size()
            self.recorder.count("bytes_sent", 2 * (ranks - 1) * size // ranks)
            exchange.finish()

    def wait(self) -> None:
        """Makes the current stream wait for what was enqueued; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def close(self) -> None:
        """Does nothing: there are no workers."""

    @contextlib.contextmanager
    def _side_stream(self, grad: torch.Tensor) -> Iterator[None]:
        device = grad.device
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The gradient was written on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        if not grad.is_sparse:
            # A converted copy of the gradient must not be freed while this stream reads it.
            grad.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def _run(self, exchange: Exchange, part: Part) -> None:
        scale = 1.0 / self.first.size()
        bucket, iteration = exchange.bucket, exchange.iteration
        label = bucket << 16 | part.number
        with self.recorder.timed("encode", iteration, bucket, part.number):
            self._put_heads(part, iteration, label)
            starts = [0]
            for size in part.send_sizes:
                starts.append(starts[-1] + size)
            stream = stream_of(self.seed, iteration, SEND_HOP)
            for coded in part.coded:
                bad = coded.codec.encode(
                    coded.send, exchange.grad, scale, exchange.residual, None, part.send, stream
                )
                if exchange.velocity is not None:
                    coded.codec.clear_sent(coded.send, part.send, exchange.velocity)
                if bad.numel():
                    places = [starts[o] + FLAGS_AT for o in coded.send_owners]
                    _raise_flags(part.send, places, bad)
        what = f"bucket {bucket}, first hop"
        guarded(lambda: self._all_to_all(part), what)
        with self.recorder.timed("merge", iteration, bucket, part.number):
            stream = stream_of(self.seed, iteration, MERGE_HOP)
            told = part.received[:, FLAGS_AT].amax()
            part.own[FLAGS_AT] = told
            for coded in part.coded:
                bad = coded.codec.encode(
                    coded.own,
                    exchange.grad,
                    scale,
                    exchange.residual,
                    part.received,
                    part.own,
                    stream,
                )
                if exchange.velocity is not None:
                    coded.codec.clear_sent(coded.own, part.own, exchange.velocity)
                if bad.numel():
                    _raise_flags(part.own, [FLAGS_AT] * bad.numel(), bad)
        guarded(lambda: self._all_gather(part), f"bucket {bucket}, second hop")
        with self.recorder.timed("decode", iteration, bucket, part.number):
            flags = part.gathered[:, FLAGS_AT]
            # A truth value on the device: nothing here may wait for it.
            self.troubled = self.troubled | (flags != 0).any()
            for coded in part.coded:
                coded.codec.decode(coded.gathered, part.gathered.view(-1), exchange.grad)
                for segment, owner in zip(
                    coded.gathered.segments, coded.gathered_owners, strict=True
                ):
                    at = exchange.grad[segment.grad : segment.grad + segment.count]
                    at.masked_fill_(flags[owner] != 0, float("nan"))

    def _put_heads(self, part: Part, iteration: int, label: int) -> None:
        head = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        write_header(head, 0, iteration, label, self.checksum)
        head = head.to(part.send.device, non_blocking=True)
        start = 0
        for owner, size in enumerate(part.send_sizes):
            if owner != part.rank:
                part.send[start : start + HEADER_BYTES] = head
            start += size
        part.own[:HEADER_BYTES] = head

    def _all_to_all(self, part: Part) -> None:
        through_host = self._through_host(part)
        given = part.send.cpu() if through_host else part.send
        taken = torch.empty_like(part.received, device="cpu") if through_host else part.received
        dist.all_to_all_single(
            taken.view(-1), given, part.receive_sizes, part.send_sizes, group=self.first
        )
        if through_host:
            part.received.copy_(taken)

    def _all_gather(self, part: Part) -> None:
        through_host = self._through_host(part)
        own = part.own.cpu() if through_host else part.own
        taken = torch.empty_like(part.gathered, device="cpu") if through_host else part.gathered
        all_gather_flat(taken, own, self.second).wait()
        if through_host:
            part.gathered.copy_(taken)

    def _through_host(self, part: Part) -> bool:
        return part.send.device.type != "cpu" and dist.get_backend(self.first) == "gloo"


def _raise_flags(message: torch.Tensor, places: list[int], bad: torch.Tensor) -> None:
    """Raises the flag at each place where ``bad`` is 1, without asking the device which."""
    unique = {place: i for i, place in enumerate(dict.fromkeys(places))}
    device = message.device
    at = torch.tensor([unique[p] for p in places], device=device)
    # Segments of one owner share a place: their sum, which a byte might not hold.
    counts = torch.zeros(len(unique), dtype=torch.int32, device=device)
    counts.index_add_(0, at, bad.to(device))
    message[torch.tensor(list(unique), device=device)] |= counts.clamp_(max=1).to(torch.uint8)

"""The state of compressed synchronization for one DDP module."""

import contextlib
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from hipress_torch import codecs
from hipress_torch._calibrate import calibrate
from hipress_torch._checks import check_arguments, check_state, saved_count, saved_tensors
from hipress_torch._codec import Codec
from hipress_torch._compll._algorithm import Algorithm
from hipress_torch._engine import Engine, Exchange, values_of
from hipress_torch._errors import CodecError, PlanError, RegistrationError, UnsupportedError
from hipress_torch._groups import check_agreement, new_like, require_group, wire_device
from hipress_torch._inline import InlineEngine
from hipress_torch._layout import Part, Placed, build_parts
from hipress_torch._metrics import Recorder, write_trace
from hipress_torch._plan import Choice, Plan, saved_plan
from hipress_torch._registry import Registry
from hipress_torch._tables import table

STRATEGIES = ("auto", "ps", "ring", "allreduce")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class HiPressState:
    """What :func:`hipress_hook` needs: codec, residuals, process groups, counters.

    Made by :func:`hipress_torch.register`; make it yourself where a framework registers the hook
    for you (``ddp.register_comm_hook(state, hipress_hook)``). One state serves one DDP module.
    Nothing is started until the first bucket arrives, so it can be made before the process group.

    Attributes:
        codec: the codec in use.
        error_feedback: whether residuals are kept.
    """

    def __init__(
        self,
        codec: str | Algorithm | Codec = "onebit",
        *,
        process_group: dist.ProcessGroup | None = None,
        strategy: str = "auto",
        plan: str | Plan = "auto",
        error_feedback: bool | None = None,
        seed: int = 0,
        timeout_s: float | None = None,
        min_elements: int = 1024,
        part_elements: int = 1 << 22,
        **codec_options: Any,
    ) -> None:
        """Checks the arguments; starts nothing.

        Args:
            codec: a name (see :func:`hipress_torch.codecs.available`), or a codec.
            process_group: the group that DDP synchronizes; the default group if None.
            strategy: ``ps`` (each rank merges its share of every bucket), ``ring`` (messages go
                round and are added to; CPU tensors only), ``allreduce`` (plain, for codec ``none``
                only), or ``auto``: ``allreduce`` for ``none``, else ``ps``.
            plan: ``auto`` measures the network and the kernels when training starts and compresses
                the buckets for which that is faster (else fp16 or plain all-reduce); ``always``
                and ``never`` do not measure; a :class:`Plan` is taken as it is.
            error_feedback: whether what a message lost is added to the next gradient; None leaves
                it to the codec.
            seed: seed of the codecs' random numbers; the same on all ranks.
            timeout_s: how long to wait for another rank before :class:`PeerTimeoutError`; None is
                torch's default.
            min_elements: parameters with fewer elements (biases, norms) are sent as they are.
            part_elements: a bucket with more elements is exchanged in parts of about this many.
            codec_options: options of the codec.

        Raises:
            CodecError: the codec or its options are wrong.
            PlanError: another argument is.
        """
        self.codec = make_codec(codec, codec_options)
        if strategy not in STRATEGIES:
            raise PlanError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
        if strategy == "allreduce" and self.codec.name != "none":
            raise PlanError(
                f"strategy='allreduce' sums on the wire and so needs codec='none', got "
                f"{self.codec.name!r}; use strategy='ps'"
            )
        if not isinstance(plan, Plan) and plan not in PLANS:
            raise PlanError(
                f"plan must be a Plan or one of {', '.join(PLANS)}, got {plan!r}; calibrate() "
                f"makes the profile that a Plan needs"
            )
        for name, value in (("min_elements", min_elements), ("part_elements", part_elements)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PlanError(f"{name} must be a whole number of at least 0, got {value!r}")
        check_arguments(process_group, error_feedback, seed, timeout_s)
        self.strategy = strategy
        self.plan = plan
        self.error_feedback = self.codec.feedback if error_feedback is None else error_feedback
        self.seed = seed
        self.timeout_s = timeout_s
        self._min_elements = min_elements
        self._part_elements = max(1, part_elements)
        self._group = process_group
        self._plain = make_codec("none", {})
        self._codecs = {c.name: c for c in (make_codec("fp16", {}), self.codec)}
        self._choices: dict[int, Choice] = {}
        self._buckets: dict[int, int] = {}
        self._registry = Registry()
        self._recorder = Recorder()
        self._engine: Engine | InlineEngine | None = None
        self._device = torch.device("cpu")
        self._layouts: dict[int, tuple[tuple[Placed, ...], Codec, list[Part]]] = {}
        self._iteration = -1
        self._closed = False

    @property
    def iteration(self) -> int:
        """How many backward passes were synchronized."""
        return self._iteration + 1

    def start(self) -> None:
        """Makes the process groups and checks that all ranks agree; the first bucket does it else.

        Every rank of the group must call it.

        Raises:
            RegistrationError: the state was closed.
            MismatchError: ranks were given different settings.
            UnsupportedError: no process group, or a backend that is not handled.
            PeerError: another rank failed or did not come in time.
        """
        if self._engine is not None:
            return
        if self._closed:
            raise RegistrationError(
                "this state was closed; register a new one on a fresh DistributedDataParallel "
                "(load_state_dict() goes on where this one was)"
            )
        group = require_group(self._group)
        backend = dist.get_backend(group)
        if self._device.type == "cpu" and "gloo" not in backend:
            raise UnsupportedError(
                f"process group: backend {backend!r} cannot send gradients that are on the CPU; "
                f"use 'gloo', or move the module to a GPU"
            )
        if self._device.type == "cuda" and self.strategy == "ring":
            raise UnsupportedError("strategy='ring' is for CPU tensors; use strategy='ps'")
        if self._device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"gradients on {self._device} are not handled; move the module to the CPU or a GPU"
            )
        first = new_like(group, self.timeout_s, "first hop")
        second = new_like(group, self.timeout_s, "second hop")
        check_agreement(first, self._settings(), wire_device(first, self._device))
        checksum = zlib.crc32(self.codec.fingerprint().encode())
        kind = Engine if self._device.type == "cpu" else InlineEngine
        self._engine = kind(first, second, self.seed, checksum, self._recorder)
        if self.plan == "auto" and first.size() > 1 and not self._plain_sum:
            names = tuple(self._codecs)
            profile = calibrate(first, codecs=tuple(self._codecs.values()), device=self._device)
            self.plan = Plan(profile, names)

    def _choose(self, elements: int) -> Choice:
        """Returns what to do with a bucket of that size; asked again, the answer is the same."""
        if elements not in self._choices:
            if isinstance(self.plan, Plan):
                made = self.plan.choose(elements, self._codecs)
            else:
                plain = self.plan == "never" or self._plain_sum
                made = Choice("none" if plain else self.codec.name, self._part_elements)
            self._choices[elements] = made
        return self._choices[elements]

    def bind(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives parameters their names, which residuals are saved under."""
        named = list(named_parameters)
        self._registry.add_named(named)
        if named:
            self._device = named[0][1].device

    def synchronize(self, bucket: GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """Returns the future of the bucket's mean over all ranks; what the hook does.

        Raises:
            PeerError: this or an earlier exchange failed.
            UnsupportedError: the gradients' dtype is not handled.
        """
        buffer = bucket.buffer()
        if self._engine is None:
            self._device = buffer.device
            self.start()
        assert self._engine is not None
        engine = self._engine
        if buffer.dtype not in DTYPES:
            allowed = ", ".join(str(d) for d in DTYPES)
            raise UnsupportedError(
                f"gradients of dtype {buffer.dtype} are not handled; allowed: {allowed}"
            )
        if bucket.index() == 0:
            self._iteration += 1
            self._recorder.count("iterations")
            # Raises our own error type from backward(), which DDP's wait for the future would not.
            # Outside of a backward pass (DDP's join) there is no such queue.
            with contextlib.suppress(RuntimeError):
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        ranks = engine.first.size()
        self._recorder.count("bytes_plain", 8 * (ranks - 1) * values_of(buffer).numel() // ranks)
        devices: list[int | str | torch.device] = []
        if buffer.device.type == "cuda":
            devices.append(buffer.device)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if ranks == 1 or buffer.numel() == 0:
            future.set_result(buffer)
            return future
        # A sparse gradient names its rows: there is no fixed layout to code it in.
        if buffer.is_sparse:
            engine.submit_plain(self._exchange(bucket, buffer, buffer, 1, future))
            return future
        if bucket.is_last():
            for known in (self._layouts, self._buckets):
                for index in [i for i in known if i > bucket.index()]:
                    del known[index]
        choice = self._choose(buffer.numel())
        self._buckets[bucket.index()] = buffer.numel()
        placed = self._placed(bucket, buffer)
        if self._registry.outgrown:
            # The buffers are about to be replaced by larger ones: nothing may be writing to them.
            engine.wait()
        own = self.codec.at(self._iteration)
        same = buffer.dtype == torch.float32 or (choice.codec == "none" and not own.momentum)
        grad = buffer if same else buffer.float()
        if own.momentum:
            self._accelerate(own, placed, grad)
        if choice.codec == "none":
            engine.submit_plain(self._exchange(bucket, buffer, grad, 1, future))
            return future
        codec = own if choice.codec == self.codec.name else self._codecs[choice.codec]
        parts = self._layout(bucket, buffer, placed, codec, choice.part_elements)
        exchange = self._exchange(bucket, buffer, grad, len(parts), future)
        if self.strategy == "ring" and isinstance(engine, Engine):
            engine.submit_ring(exchange, parts)
        else:
            engine.submit(exchange, parts)
        return future

    @property
    def _plain_sum(self) -> bool:
        return self.strategy not in ("ps", "ring") and self.codec.name == "none"

    def _exchange(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        grad: torch.Tensor,
        parts: int,
        future: "torch.futures.Future[torch.Tensor]",
    ) -> Exchange:
        def finish() -> None:
            if grad is not buffer:
                buffer.copy_(grad)
            future.set_result(buffer)

        residual = None
        if self.error_feedback and not grad.is_sparse:
            residual = self._registry.buffer("residual", grad.device)
        velocity = None
        if self.codec.momentum and not grad.is_sparse:
            velocity = self._registry.buffer("velocity", grad.device)
        return Exchange(
            bucket.index(), self._iteration, grad, residual, velocity, parts, finish, future
        )

    def _accelerate(self, codec: Codec, placed: tuple[Placed, ...], grad: torch.Tensor) -> None:
        """Replaces each gradient by its velocity, ``momentum * velocity + clipped gradient``."""
        velocity = self._registry.buffer("velocity", grad.device)
        assert self._engine is not None
        limit = codec.clip / self._engine.first.size() ** 0.5
        for p in placed:
            g = grad[p.grad : p.grad + p.known.count]
            if not bool(torch.isfinite(g).all()):
                continue  # reported by the encode; the velocity keeps its value
            if limit:
                g.mul_((limit / g.norm()).clamp(max=1.0))
            v = velocity[p.known.residual : p.known.residual + p.known.count]
            v.mul_(codec.momentum).add_(g)
            g.copy_(v)

    def _placed(self, bucket: GradBucket, buffer: torch.Tensor) -> tuple[Placed, ...]:
        return tuple(
            Placed(self._registry.lookup(p), int(g.storage_offset() - buffer.storage_offset()))
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)
        )

    def _layout(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        placed: tuple[Placed, ...],
        codec: Codec,
        part_elements: int,
    ) -> list[Part]:
        assert self._engine is not None
        found = self._layouts.get(bucket.index())
        if found is None or found[0] != placed or found[1] is not codec:
            group = self._engine.first
            parts = build_parts(
                placed,
                codec,
                self._plain,
                self._min_elements,
                part_elements,
                group.size(),
                group.rank(),
                buffer.device,
            )
            found = self._layouts[bucket.index()] = (placed, codec, parts)
        return found[2]

    def _end_of_backward(self) -> None:
        assert self._engine is not None
        with self._recorder.timed("exposed", self._iteration, -1):
            self._engine.wait()

    def _settings(self) -> str:
        return (
            f"codec={self.codec.fingerprint()} strategy={self.strategy} plan={self.plan!r} "
            f"seed={self.seed} error_feedback={self.error_feedback} "
            f"min_elements={self._min_elements} part_elements={self._part_elements}"
        )

    def metrics(self) -> dict[str, Any]:
        """Returns what was sent and how long it took, as plain values.

        Returns:
            ``iterations``; ``bytes_sent`` and ``bytes_plain``: bytes this rank put on the wire,
            and what float32 ring all-reduce would have, both in all; ``ratio``: the second over
            the first; ``not_finite``: parts in which some rank had a value that was not finite;
            ``seconds`` of each stage in all (``exposed``: backward waiting for the rest of the
            exchange); ``backend``: what encodes and decodes; ``residual_bytes``; ``codec``.
        """
        r = self._recorder
        sent, plain = r.counts("bytes_sent"), r.counts("bytes_plain")
        return {
            "codec": repr(self.codec),
            "backend": self.codec.backend,
            "iterations": r.counts("iterations"),
            "bytes_sent": sent,
            "bytes_plain": plain,
            "ratio": plain / sent if sent else 1.0,
            "not_finite": r.counts("not_finite"),
            "residual_bytes": self._registry.bytes,
            "seconds": {s: r.seconds(s) for s in STAGES},
        }

    def explain(self) -> str:
        """Returns the plan as a table: what is done with each bucket, and what else would take.

        Buckets are those of the latest backward pass; times are predictions in milliseconds.
        """
        names = ["none", *self._codecs]
        rows = [["bucket", "elements", "codec", "part elements", *(f"{n} ms" for n in names)]]
        for index, elements in sorted(self._buckets.items()):
            choice = self._choose(elements)
            predicted = dict(choice.candidates)
            times = [f"{predicted[n] * 1e3:.2f}" if n in predicted else "-" for n in names]
            part = str(min(elements, choice.part_elements))
            rows.append([str(index), str(elements), choice.codec, part, *times])
        return table(rows)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals and counters: tensors and plain values, own copies.

        Every rank saves its own: residuals differ from rank to rank. What :func:`torch.save` makes
        of it loads with ``weights_only=True``.

        Returns:
            ``version``, ``iteration``, ``seed``, ``ranks``, and ``residuals``: float32 tensors of
            the parameters' shapes by name, each this rank's share of what the mean still owes; and
            ``velocities`` likewise, of codecs with momentum.
        """
        ranks = 0 if self._engine is None else self._engine.first.size()
        return {
            "version": STATE_VERSION,
            "iteration": self.iteration,
            "seed": self.seed,
            "ranks": ranks,
            "residuals": self._registry.save("residual"),
            "velocities": self._registry.save("velocity"),
            "plan": self._saved_plan(),
        }

    def _saved_plan(self) -> dict[str, Any] | str:
        if isinstance(self.plan, Plan):
            return {"profile": self.plan.profile.to_dict(), "codecs": list(self.plan.codecs)}
        return self.plan

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state_dict` left off, bit for bit, whatever the buckets' sizes.

        Call it on every rank, before training goes on. With more ranks than before, a new rank
        loads another's state with ``residuals`` replaced by ``{}``; with fewer, add the residuals
        of the ranks that are gone to those of one that stays: residuals are shares of the mean, so
        that no factor is needed.

        Raises:
            StateError: something is missing, of another version, or of another shape.
        """
        check_state(state, ("iteration", "residuals"), STATE_VERSION, self.seed)
        iteration = saved_count(state["iteration"], "iteration")
        kinds = {
            "residual": saved_tensors(state["residuals"], "residuals"),
            "velocity": saved_tensors(state.get("velocities", {}), "velocities"),
        }
        plan = saved_plan(state.get("plan"))
        # All is checked before anything is changed.
        for kind, saved in kinds.items():
            self._registry.check(kind, saved)
        for kind, saved in kinds.items():
            self._registry.load(kind, saved)
        self._iteration = iteration - 1
        # A measured plan goes on, so that the same buckets are compressed as before.
        if (
            plan is not None
            and isinstance(self.plan, Plan)
            and plan.profile.ranks == self.plan.profile.ranks
        ):
            self.plan = plan
            self._choices.clear()

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the latest stages of every bucket as a trace for Perfetto or chrome://tracing.

        Args:
            path: a JSON file; written beside and renamed.
        """
        rank = 0 if self._engine is None else self._engine.first.rank()
        write_trace(Path(path), self._recorder, rank)

    def close(self) -> None:
        """Stops the workers and gives the process groups back; it is of no use afterwards."""
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            for group in (engine.first, engine.second):
                with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                    dist.destroy_process_group(group)


STATE_VERSION = 1
PLANS = ("auto", "always", "never")
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


def make_codec(codec: str | Algorithm | Codec, options: dict[str, Any]) -> Codec:
    """Returns the codec for what a user passed.

    Raises:
        UnknownCodecError: no codec has that name.
        CodecError: the options are wrong, or it is no codec.
    """
    if isinstance(codec, Codec):
        if options:
            raise CodecError(
                f"codec options {sorted(options)} were given with a codec that already has its "
                f"own; pass the codec's name or set them when you make it"
            )
        return codec
    found: Any = codecs.get(codec) if isinstance(codec, str) else codec
    if not callable(found):
        raise CodecError(
            f"codec must be a name, a codec or an algorithm made with @codec, got "
            f"{type(codec).__name__}"
        )
    try:
        made = found(**options)
    except TypeError as error:
        raise CodecError(f"codec {codec!r}: {error}") from error
    if not isinstance(made, Codec):
        raise CodecError(f"codec {codec!r} gave a {type(made).__name__}, not a Codec")
    return made

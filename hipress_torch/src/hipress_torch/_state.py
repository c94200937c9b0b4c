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

from hipress_torch._buckets import Bundle, Filled, accelerate, bundle, pay
from hipress_torch._checks import check_arguments, check_state, saved_count, saved_tensors
from hipress_torch._codec import Codec
from hipress_torch._compll._algorithm import Algorithm
from hipress_torch._engine import Engine, Exchange, values_of
from hipress_torch._errors import PlanError, RegistrationError, UnsupportedError
from hipress_torch._groups import check_agreement, new_like, require_group, wire_device
from hipress_torch._inline import InlineEngine
from hipress_torch._layout import Part, Placed, build_parts
from hipress_torch._making import make_codec
from hipress_torch._metrics import STAGES, Recorder, write_trace
from hipress_torch._plan import Choice, Plan, saved_plan
from hipress_torch._planner import Planner
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
        part_elements: int = 1 << 21,
        rollback: bool = False,
        **codec_options: Any,
    ) -> None:
        """Checks the arguments; starts nothing.

        Args:
            codec: a name (see :func:`hipress_torch.codecs.available`), or a codec.
            process_group: the group that DDP synchronizes; the default group if None.
            strategy: ``ps`` (each rank merges its share of every bucket), ``ring`` (messages go
                round and are added to; CPU tensors only), ``allreduce`` (plain, for codec ``none``
                only), or ``auto``: ``allreduce`` for ``none``, else what the plan finds shorter,
                and ``ps`` where there is none.
            plan: ``auto`` measures the network and the kernels when training starts and compresses
                the buckets for which that is faster (else fp16 or plain all-reduce); it plans
                again when the backward pass is known and when exchanges take 25 % more or less
                time than they did, for two windows of 50 passes. ``always`` and ``never`` do not
                measure; a :class:`Plan` is taken as it is.
            error_feedback: whether what a message lost is added to the next gradient; None leaves
                it to the codec.
            seed: seed of the codecs' random numbers; the same on all ranks.
            timeout_s: how long to wait for another rank before :class:`PeerTimeoutError`; None is
                torch's default.
            min_elements: parameters with fewer elements (biases, norms) are sent as they are.
            part_elements: a bucket with more elements is exchanged in parts of about this many.
            rollback: for training with a GradScaler: a backward pass in which some rank had a
                value that is not finite leaves no trace in any residual, since the scaler skips
                its step. Keeps a copy of the residuals, which takes their memory once more. Without
                it the ranges that had the value are put back, up to rounding, and those of other
                parameters keep what they lost or gained.
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
        if not isinstance(rollback, bool):
            raise PlanError(f"rollback must be True or False, got {rollback!r}")
        check_arguments(process_group, error_feedback, seed, timeout_s)
        self.strategy = strategy
        self.error_feedback = self.codec.feedback if error_feedback is None else error_feedback
        self.seed = seed
        self.timeout_s = timeout_s
        self._min_elements = min_elements
        self._part_elements = part_elements
        self._group = process_group
        self._plain = make_codec("none", {})
        self._codecs = {c.name: c for c in (make_codec("fp16", {}), self.codec)}
        self._rollback = rollback
        self._before: dict[str, torch.Tensor] | None = None
        self._buckets: dict[int, tuple[int, int]] = {}
        self._held: list[Filled] = []
        # Parameters that were compressed: a plain sum has to send what they still owe.
        self._owed: set[int] = set()
        self._registry = Registry()
        self._recorder = Recorder()
        plain = plan == "never" or self._plain_sum
        self._planner = Planner(
            plan,
            self._codecs,
            Choice("none" if plain else self.codec.name, max(1, part_elements)),
            self._recorder,
            (strategy,) if strategy in ("ps", "ring") else ("ps", "ring"),
        )
        self._engine: Engine | InlineEngine | None = None
        self._device = torch.device("cpu")
        self._layouts: dict[int, tuple[tuple[Placed, ...], Codec, list[Part]]] = {}
        self._iteration = -1
        self._closed = False

    @property
    def iteration(self) -> int:
        """How many backward passes were synchronized."""
        return self._iteration + 1

    @property
    def plan(self) -> str | Plan:
        """What was given, or the plan that was measured."""
        return self._planner.plan

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
        first = new_like(group, self.timeout_s, "first hop", self._device)
        second = new_like(group, self.timeout_s, "second hop", self._device)
        check_agreement(first, self._settings(), wire_device(first, self._device))
        checksum = zlib.crc32(self.codec.fingerprint().encode())
        kind = Engine if self._device.type == "cpu" else InlineEngine
        self._engine = kind(first, second, self.seed, checksum, self._recorder)
        if self._planner.plan == "auto" and first.size() > 1 and not self._plain_sum:
            self._planner.measure(first, self._device)

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
            self._begin_pass()
        ranks = engine.first.size()
        self._recorder.count("bytes_plain", 8 * (ranks - 1) * values_of(buffer).numel() // ranks)
        devices: list[int | str | torch.device] = []
        if buffer.device.type == "cuda":
            devices.append(buffer.device)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if ranks == 1:
            future.set_result(buffer)
            return future
        if buffer.is_sparse or buffer.numel():
            # A sparse gradient names its rows: there is no fixed layout to code it in.
            placed = () if buffer.is_sparse else self._placed(bucket, buffer)
            self._held.append(Filled(bucket.index(), buffer, placed, future))
        else:
            future.set_result(buffer)
        if not bucket.is_last() and all(b.small for b in self._held):
            return future
        held, self._held = self._held, []
        alone = 0 if not held or held[-1].small else 1
        for together in (held[: len(held) - alone], held[len(held) - alone :]):
            if together:
                self._send(together)
        if bucket.is_last():
            for known in (self._layouts, self._buckets):
                for index in [i for i in known if i > bucket.index()]:
                    del known[index]
        return future

    def _begin_pass(self) -> None:
        """What comes before the first bucket of a backward pass."""
        assert self._engine is not None
        self._settle()
        self._planner.between_passes(self._engine.first, self._device)
        if self._rollback:
            self._before = self._registry.copies()
        self._iteration += 1
        self._recorder.count("iterations")
        # Raises our own error type from backward(), which DDP's wait for the future would not.
        # Outside of a backward pass (DDP's join) there is no such queue.
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _settle(self) -> None:
        """Puts all residuals back after a pass with a value that is not finite, if asked to."""
        assert self._engine is not None
        if self._rollback and self._before is not None:
            self._engine.wait()
            troubled = torch.as_tensor(self._engine.troubled)
            if troubled.device.type != "cpu" or bool(troubled):
                self._registry.put_back(self._before, troubled)
        self._before = None
        self._engine.troubled = False

    def _send(self, buckets: list[Filled]) -> None:
        """Hands buckets to the engine as one."""
        engine, first = self._engine, buckets[0]
        assert engine is not None
        ranks = engine.first.size()
        if first.buffer.is_sparse:
            engine.submit_plain(self._exchange(bundle(buckets, False), 1))
            return
        elements = sum(b.buffer.numel() for b in buckets)
        self._planner.arrived(first.index, elements)
        choice = self._planner.choose(first.index, elements)
        self._buckets[first.index] = (buckets[-1].index, elements)
        for bucket in buckets[1:]:
            self._buckets.pop(bucket.index, None)
        if self._registry.outgrown:
            # The buffers are about to be replaced by larger ones: nothing may be writing to them.
            engine.wait()
        own = self.codec.at(self._iteration)
        plain = choice.codec == "none"
        owed = self._owed.intersection(p.known.ordinal for b in buckets for p in b.placed)
        same = first.buffer.dtype == torch.float32 or (plain and not own.momentum and not owed)
        made = bundle(buckets, not same)
        if own.momentum:
            velocity = self._registry.buffer("velocity", made.grad.device)
            accelerate(made, own, velocity, ranks)
        if plain:
            if owed:
                pay(made, self._registry.buffer("residual", made.grad.device), ranks)
                self._owed -= owed
            engine.submit_plain(self._exchange(made, 1))
        else:
            if self.error_feedback:
                self._owed.update(p.known.ordinal for p in made.placed)
            codec = own if choice.codec == self.codec.name else self._codecs[choice.codec]
            parts = self._layout(made, codec, choice.part_elements)
            exchange = self._exchange(made, len(parts))
            ring = self.strategy == "ring" or (self.strategy == "auto" and choice.ring)
            if ring and isinstance(engine, Engine):
                engine.submit_ring(exchange, parts)
            else:
                engine.submit(exchange, parts)
        self._planner.left()

    @property
    def _plain_sum(self) -> bool:
        return self.strategy not in ("ps", "ring") and self.codec.name == "none"

    def _exchange(self, made: Bundle, parts: int) -> Exchange:
        grad = made.grad
        residual = None
        if self.error_feedback and not grad.is_sparse:
            residual = self._registry.buffer("residual", grad.device)
        velocity = None
        if self.codec.momentum and not grad.is_sparse:
            velocity = self._registry.buffer("velocity", grad.device)
        return Exchange(
            made.index, self._iteration, grad, residual, velocity, parts, made.finish, made.futures
        )

    def _placed(self, bucket: GradBucket, buffer: torch.Tensor) -> tuple[Placed, ...]:
        return tuple(
            Placed(self._registry.lookup(p), int(g.storage_offset() - buffer.storage_offset()))
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)
        )

    def _layout(self, made: Bundle, codec: Codec, part_elements: int) -> list[Part]:
        assert self._engine is not None
        found = self._layouts.get(made.index)
        if found is None or found[0] != made.placed or found[1] is not codec:
            group = self._engine.first
            parts = build_parts(
                made.placed,
                codec,
                self._plain,
                self._min_elements,
                part_elements,
                group.size(),
                group.rank(),
                made.grad.device,
            )
            found = self._layouts[made.index] = (made.placed, codec, parts)
        return found[2]

    def _end_of_backward(self) -> None:
        assert self._engine is not None
        with self._recorder.timed("exposed", self._iteration, -1):
            self._engine.wait()
            self._settle()

    def _settings(self) -> str:
        return (
            f"codec={self.codec.fingerprint()} strategy={self.strategy} plan={self.plan!r} "
            f"seed={self.seed} error_feedback={self.error_feedback} "
            f"min_elements={self._min_elements} part_elements={self._part_elements} "
            f"rollback={self._rollback}"
        )

    def metrics(self) -> dict[str, Any]:
        """Returns what was sent and how long it took, as plain values.

        Returns:
            ``iterations``; ``bytes_sent`` and ``bytes_plain``: bytes this rank put on the wire,
            and what float32 ring all-reduce would have, both in all; ``ratio``: the second over
            the first; ``not_finite``: parts in which some rank had a value that was not finite;
            ``seconds`` of each stage in all (``exposed``: backward waiting for the rest of the
            exchange); ``backend``: what encodes and decodes; ``residual_bytes`` (velocities too)
            and ``message_bytes``: memory held between steps; ``codec``;
            ``plans_made_anew``: how often drift led to another measurement.
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
            "plans_made_anew": r.counts("plans_made_anew"),
            "residual_bytes": self._registry.bytes,
            "message_bytes": sum(
                p.bytes_held for _, _, parts in self._layouts.values() for p in parts
            ),
            "seconds": {s: r.seconds(s) for s in STAGES},
        }

    def explain(self) -> str:
        """Returns the plan as a table: what is done with each bucket, and what else would take.

        Buckets are those of the latest backward pass, small ones together; times are predictions in
        milliseconds, for a bucket alone. A choice may differ from the shortest of them where the
        bucket's exchange is hidden by the backward pass, or takes cores from it.
        """
        names = ["none", *self._codecs]
        rows = [["bucket", "elements", "codec", "part elements", *(f"{n} ms" for n in names)]]
        for index, (last, elements) in sorted(self._buckets.items()):
            choice = self._planner.choose(index, elements)
            predicted = dict(choice.candidates)
            times = [f"{predicted[n] * 1e3:.2f}" if n in predicted else "-" for n in names]
            part = str(min(elements, choice.part_elements))
            label = str(index) if last == index else f"{index}-{last}"
            rows.append([label, str(elements), choice.label, part, *times])
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
            "plan": self._planner.saved(),
        }

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
            self._planner.use(plan)
        self._owed = set(range(len(self._registry.known))) if kinds["residual"] else set()

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the latest stages of every bucket as a trace for Perfetto or chrome://tracing.

        Args:
            path: a JSON file; written beside and renamed.

        Raises:
            FileError: it cannot be written.
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

"""Which parameters a state knows, and the residual of each.

Residuals are keyed by parameter and not by bucket: DDP fills its buckets anew after the first
iteration and after a restart.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hipress_torch._errors import StateError


@dataclass(frozen=True)
class Known:
    """A parameter the state has met.

    Attributes:
        name: its name in the module, or ``parameter.<i>`` when the module is not known.
        ordinal: how many were met before it.
        key: a 64-bit number made of the name.
        count: its elements.
        shape: its shape.
        residual: where its place starts in every buffer.
    """

    name: str
    ordinal: int
    key: int
    count: int
    shape: tuple[int, ...]
    residual: int


class Registry:
    """Parameters in the order they were met, and float32 buffers with a place for each."""

    def __init__(self) -> None:
        self._by_tensor = WeakIdKeyDictionary()
        self.known: list[Known] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._size = 0
        # What was loaded for parameters that have not been met yet, by kind and name.
        self._loaded: dict[str, dict[str, torch.Tensor]] = {}

    def add_named(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes parameters with their names; those met before keep what they have."""
        for name, parameter in named:
            if parameter not in self._by_tensor:
                self._add(parameter, name)

    def lookup(self, parameter: torch.Tensor) -> Known:
        """Returns what is known of a parameter; one not met before is taken under a number."""
        found = self._by_tensor.get(parameter)  # type: ignore[no-untyped-call]
        if found is None:
            found = self._add(parameter, f"parameter.{len(self.known)}")
        assert isinstance(found, Known)
        return found

    def _add(self, parameter: torch.Tensor, name: str) -> Known:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        known = Known(
            name,
            len(self.known),
            # One bit less than 64, so that it is a plain int64 in the kernels' tables.
            int.from_bytes(digest, "little") >> 1,
            parameter.numel(),
            tuple(parameter.shape),
            self._size,
        )
        # Whole cache lines, so that no two residuals share one.
        self._size += -(-known.count // 16) * 16
        self.known.append(known)
        self._by_tensor[parameter] = known
        return known

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * 4 for b in self._buffers.values())

    @property
    def outgrown(self) -> bool:
        """Whether parameters were met that the buffers have no place for yet."""
        return any(b.numel() < self._size for b in self._buffers.values())

    def buffer(self, kind: str, device: torch.device) -> torch.Tensor:
        """Returns a float32 buffer with a place for every parameter, zeros for new ones.

        Args:
            kind: ``residual`` or ``velocity``.
            device: where it is to be; it moves there if it is elsewhere.
        """
        found = self._buffers.get(kind)
        if found is None or found.device != device or found.numel() < self._size:
            grown = torch.zeros(self._size, device=device)
            if found is not None:
                grown[: found.numel()] = found
            found = self._buffers[kind] = grown
        if self._loaded.get(kind):
            self._place(kind, found)
        return found

    def copies(self) -> dict[str, torch.Tensor]:
        """Returns a copy of every buffer, by kind."""
        return {kind: buffer.clone() for kind, buffer in self._buffers.items()}

    def put_back(self, copies: Mapping[str, torch.Tensor], where: torch.Tensor) -> None:
        """Puts back what :meth:`copies` returned; what had no place then becomes 0.

        Args:
            copies: the copies.
            where: a truth value; nothing changes where it is False. It may be on a GPU, which the
                host need not wait for.
        """
        for kind, buffer in self._buffers.items():
            before = torch.zeros_like(buffer)
            if kind in copies:
                before[: copies[kind].numel()] = copies[kind]
            buffer.copy_(torch.where(where.to(buffer.device), before, buffer))

    def save(self, kind: str) -> dict[str, torch.Tensor]:
        """Returns a copy of each parameter's share of a buffer on the CPU, by name."""
        buffer = self._buffers.get(kind)
        kept = dict(self._loaded.get(kind, {}))
        for known in self.known:
            end = known.residual + known.count
            if buffer is not None and end <= buffer.numel() and known.name not in kept:
                kept[known.name] = buffer[known.residual : end].view(known.shape).cpu().clone()
        return kept

    def check(self, kind: str, saved: Mapping[str, torch.Tensor]) -> None:
        """Checks the shapes of what :meth:`save` returned; changes nothing.

        Raises:
            StateError: a shape is not its parameter's.
        """
        shapes = {k.name: k.shape for k in self.known}
        for name, values in saved.items():
            if name in shapes:
                _check_shape(kind, name, tuple(values.shape), shapes[name])

    def load(self, kind: str, saved: Mapping[str, torch.Tensor]) -> None:
        """Takes what :meth:`save` returned; parameters that it does not name start with zeros.

        Raises:
            StateError: a shape is not its parameter's; nothing is changed then.
        """
        self.check(kind, saved)
        if kind in self._buffers:
            self._buffers[kind].zero_()
        self._loaded[kind] = {n: v.detach().to(torch.float32).clone() for n, v in saved.items()}

    def _place(self, kind: str, buffer: torch.Tensor) -> None:
        for known in self.known:
            values = self._loaded[kind].pop(known.name, None)
            if values is not None:
                _check_shape(kind, known.name, tuple(values.shape), known.shape)
                at = slice(known.residual, known.residual + known.count)
                buffer[at] = values.flatten().to(buffer.device)


def _check_shape(kind: str, name: str, got: tuple[int, ...], needed: tuple[int, ...]) -> None:
    if got != needed:
        raise StateError(
            f"{kind} of {name!r}: shape {got} in the state dict, {needed} in this model; load the "
            f"state of a run of the same model"
        )

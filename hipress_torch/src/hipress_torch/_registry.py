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
        residual: where its residual starts in the residual buffer.
    """

    name: str
    ordinal: int
    key: int
    count: int
    shape: tuple[int, ...]
    residual: int


class Registry:
    """Parameters in the order they were met, and one float32 buffer of all their residuals."""

    def __init__(self) -> None:
        self._by_tensor = WeakIdKeyDictionary()
        self.known: list[Known] = []
        self._residual: torch.Tensor | None = None
        self._size = 0
        # Loaded residuals of parameters that have not been met yet, by name.
        self._loaded: dict[str, torch.Tensor] = {}

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
        """Bytes of the residual buffer."""
        return 0 if self._residual is None else self._residual.numel() * 4

    def residual(self, device: torch.device) -> torch.Tensor:
        """Returns the residual buffer on that device, zeros for parameters that are new to it."""
        if self._residual is None or self._residual.device != device:
            self._residual = (
                torch.zeros(self._size, device=device)
                if self._residual is None
                else self._residual.to(device)
            )
        if self._residual.numel() < self._size:
            grown = torch.zeros(self._size, device=device)
            grown[: self._residual.numel()] = self._residual
            self._residual = grown
        if self._loaded:
            self._place(self._residual)
        return self._residual

    def save(self) -> dict[str, torch.Tensor]:
        """Returns a copy of each parameter's residual on the CPU, by name."""
        views = ((k.name, self.residual_of(k)) for k in self.known)
        kept = {name: view.detach().cpu().clone() for name, view in views if view is not None}
        return kept | self._loaded

    def load(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Takes saved residuals; parameters that they do not name start with none.

        Raises:
            StateError: a residual's shape is not its parameter's; nothing is changed then.
        """
        shapes = {k.name: k.shape for k in self.known}
        for name, residual in residuals.items():
            if name in shapes and tuple(residual.shape) != shapes[name]:
                raise StateError(
                    f"residual of {name!r}: shape {tuple(residual.shape)} in the state dict, "
                    f"{shapes[name]} in this model; load the state of a run of the same model"
                )
        if self._residual is not None:
            self._residual.zero_()
        self._loaded = {n: r.detach().to(torch.float32).clone() for n, r in residuals.items()}

    def _place(self, buffer: torch.Tensor) -> None:
        for known in self.known:
            residual = self._loaded.pop(known.name, None)
            if residual is None:
                continue
            if tuple(residual.shape) != known.shape:
                raise StateError(
                    f"residual of {known.name!r}: shape {tuple(residual.shape)} in the state dict, "
                    f"{known.shape} in this model; load the state of a run of the same model"
                )
            at = slice(known.residual, known.residual + known.count)
            buffer[at] = residual.flatten().to(buffer.device)

    def residual_of(self, known: Known) -> torch.Tensor | None:
        """Returns a view of one parameter's residual, or None while there is no residual."""
        if self._residual is None or self._residual.numel() < known.residual + known.count:
            return None
        return self._residual[known.residual : known.residual + known.count].view(known.shape)

"""Finds or builds the C kernels of a program and calls them through ctypes.

The built-in codecs' kernels come compiled with the wheel, once for each instruction set; the
machine's own is chosen when they are first needed. A codec from elsewhere is compiled when it is
first used, where there is a C compiler. Where there is neither, the reference runs.

ctypes releases the interpreter lock during a call, and the kernels use no torch headers: they work
with any torch.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from hipress_torch._codec import Batch
from hipress_torch._compll._emit_c import emit, symbol
from hipress_torch._compll._program import Program
from hipress_torch._native._toolchain import build, compiler, flags_of, suffix

HERE = Path(__file__).parent
_log = logging.getLogger(__name__)


class Kernels:
    """The two functions of one program.

    Attributes:
        instructions: the instruction set they were compiled for.
    """

    def __init__(self, library: ctypes.CDLL, stem: str, instructions: str) -> None:
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self.instructions = instructions
        self._encode = library[f"{stem}_encode"]
        self._encode.restype = None
        self._encode.argtypes = [
            pointer, pointer, ctypes.c_float, pointer, whole, whole, pointer, pointer, whole,
            pointer, ctypes.c_uint64, pointer,
        ]  # fmt: skip
        self._decode = library[f"{stem}_decode"]
        self._decode.restype = None
        self._decode.argtypes = [pointer, pointer, pointer, whole, pointer]

    def encode(
        self,
        batch: Batch,
        grad: torch.Tensor,
        scale: float,
        residual: torch.Tensor | None,
        incoming: torch.Tensor | None,
        wire: torch.Tensor,
        stream: int,
        options: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the flags of :meth:`hipress_torch.codecs.Codec.encode`."""
        bad = torch.zeros(len(batch.segments), dtype=torch.int32)
        self._encode(
            grad.data_ptr(),
            None if residual is None else residual.data_ptr(),
            scale,
            None if incoming is None else incoming.data_ptr(),
            0 if incoming is None else incoming.stride(0),
            0 if incoming is None else incoming.shape[0],
            wire.data_ptr(),
            batch.table.ctypes.data,
            len(batch.segments),
            options.data_ptr(),
            stream,
            bad.data_ptr(),
        )
        return bad

    def decode(
        self, batch: Batch, wire: torch.Tensor, out: torch.Tensor, options: torch.Tensor
    ) -> None:
        """Writes what the messages stand for into ``out``."""
        self._decode(
            wire.data_ptr(),
            out.data_ptr(),
            batch.table.ctypes.data,
            len(batch.segments),
            options.data_ptr(),
        )


def instruction_sets() -> tuple[str, ...]:
    """Returns what this machine can run, best first.

    ``HIPRESS_TORCH_KERNELS`` narrows it to one, and ``off`` to none.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        found: tuple[str, ...] = ("neon",)
    elif platform.machine().lower() in ("x86_64", "amd64"):
        level = torch.backends.cpu.get_cpu_capability()
        found = {"AVX512": ("avx512", "avx2", "plain"), "AVX2": ("avx2", "plain")}.get(
            level, ("plain",)
        )
    else:
        found = ("plain",)
    chosen = os.environ.get("HIPRESS_TORCH_KERNELS")
    return found if not chosen else tuple(f for f in found if f == chosen)


def find(program: Program) -> Kernels | None:
    """Returns the kernels for a program, or None where there are none to be had."""
    return _find(program, instruction_sets())


def shared(name: str) -> tuple[Any, str] | None:
    """Returns a function that was compiled with the wheel and its instruction set, or None."""
    return _shared(name, instruction_sets())


@functools.lru_cache(maxsize=64)
def _shared(name: str, sets: tuple[str, ...]) -> tuple[Any, str] | None:
    for instructions in sets:
        library = _library(str(HERE / f"kernels_{instructions}{suffix()}"))
        if library is not None and hasattr(library, name):
            return library[name], instructions
    return None


@functools.lru_cache(maxsize=256)
def _find(program: Program, sets: tuple[str, ...]) -> Kernels | None:
    for instructions in sets:
        library = _library(str(HERE / f"kernels_{instructions}{suffix()}"))
        if library is not None and hasattr(library, f"{symbol(program)}_encode"):
            return Kernels(library, symbol(program), instructions)
    return _compile(program, sets[0]) if sets else None


@functools.cache
def _library(path: str) -> ctypes.CDLL | None:
    if not os.path.exists(path):
        return None
    try:
        return ctypes.CDLL(path)
    except OSError as error:  # built for another system, say
        _log.warning("cannot load %s: %s", path, error)
        return None


def _compile(program: Program, instructions: str) -> Kernels | None:
    found = compiler()
    if found is None:
        return None
    source = '#include "support.h"\n\n' + emit(program)
    parts = [source, (HERE / "support.h").read_text(), found, *flags_of(instructions)]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        folder = _cache_folder()
        target = folder / f"{name}{suffix()}"
        if not target.exists():
            build(found, source, flags_of(instructions), target)
    except subprocess.CalledProcessError as error:
        told = error.stderr.decode(errors="replace").strip()[:500]
        _log.warning("codec %s runs without a compiled kernel: %s", program.name, told)
        return None
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("codec %s runs without a compiled kernel: %s", program.name, error)
        return None
    library = _library(str(target))
    return None if library is None else Kernels(library, symbol(program), instructions)


def _cache_folder() -> Path:
    """Returns the folder of kernels compiled on use; the user's own, as code is loaded from it."""
    chosen = os.environ.get("HIPRESS_TORCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(chosen) if chosen else Path(base) / "hipress_torch"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user")
    return folder

"""The C compiler and how it is called.

Imports nothing of this package and nothing that has to be installed: the wheel's build loads this
file by its path, where neither torch nor the package is there.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
_AVX2 = ("-mavx2", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
SETS = {"avx512": (*_AVX2, *_AVX512), "avx2": _AVX2, "plain": (), "neon": ()}


def sets_to_build() -> tuple[str, ...]:
    """Returns the instruction sets a wheel for this machine's architecture brings kernels for."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ("avx512", "avx2", "plain")
    return ("neon",) if machine in ("aarch64", "arm64") else ("plain",)


def flags_of(instructions: str) -> list[str]:
    """Returns the compiler's arguments for an instruction set."""
    return [*FLAGS, *SETS[instructions]]


def compiler() -> str | None:
    """Returns the path of the C compiler (``CC``, else cc, gcc or clang), or None."""
    if chosen := os.environ.get("CC"):
        return shutil.which(chosen)
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def suffix() -> str:
    """Returns how the name of a shared library ends here."""
    return {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


def build(cc: str, source: str, flags: list[str], target: Path) -> None:
    """Compiles C source into a shared library.

    Raises:
        OSError: a file cannot be written, or the compiler cannot be started.
        subprocess.SubprocessError: the compiler failed or took more than five minutes.
    """
    with tempfile.TemporaryDirectory(prefix="hipress-") as folder:
        file = Path(folder) / "kernels.c"
        file.write_text(source, encoding="utf-8")
        made = Path(folder) / target.name
        command = [cc, *flags, f"-I{HERE}", str(file), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        # Written beside the target first: another process may look for it meanwhile.
        beside = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(made, beside)
        os.replace(beside, target)

"""quantize_file on a file ten times larger than the memory it may use: seconds, MiB/s, memory.

Writes a float16 .npy of random rows into a temporary folder, then packs it in a process of its own
whose growth in resident memory (peak less start) is read from the system. The limit is 256 MiB by
default.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _measure import arguments, show

SPECS = {
    "4 bit": "SQ(4)",
    "1 bit": "SQ(1)",
    "paper log 4 bit": "paper.sq(4)",
    "VQ 8x256": "VQ(8, 256)",
    "VQ 32x256x4": "VQ(32, 256, stages=4)",
}

CHILD = """
import json, sys, time
import torch
torch.set_num_threads(1)
from bifeat_pyg import SQ, VQ, paper, quantize_file
def memory(line):
    # Not ru_maxrss: a process inherits that of the one that started it.
    with open("/proc/self/status") as file:
        return next(int(row.split()[1]) for row in file if row.startswith(line)) * 1024
before = memory("VmRSS")
wall, cpu = time.perf_counter(), time.process_time()
store = quantize_file(sys.argv[1], sys.argv[2], eval(sys.argv[3]))
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
peak = memory("VmHWM")
table = next(iter(store.report()))
print(json.dumps([wall, cpu, peak - before, table.ratio, table.error]))
"""


def main() -> int:
    """Prints the table."""
    options = arguments(__doc__, mib=2560, columns=128, limit_mib=256, first=0, last=len(SPECS))
    if not os.path.exists("/proc/self/status"):
        print("reads /proc; not on this system")
        return 0
    rows_total = (options.mib << 20) // (2 * options.columns)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "x.npy"
        generator = np.random.default_rng(0)
        shape = (rows_total, options.columns)
        made = np.lib.format.open_memmap(source, "w+", np.float16, shape)
        # Random rows again and again, each time moved: to make them takes longer than to pack them.
        block = generator.standard_normal((1 << 16, options.columns), np.float32)
        for start in range(0, rows_total, 1 << 16):
            size = min(1 << 16, rows_total - start)
            made[start : start + size] = block[:size] + generator.standard_normal() * 0.1
        made.flush()
        del made
        for label, spec in list(SPECS.items())[options.first : options.last]:
            out = Path(name) / f"out {label}"
            command = [sys.executable, "-c", CHILD, str(source), str(out), spec]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            wall, cpu, grown, ratio, error = json.loads(done.stdout)
            fits = "yes" if grown < options.limit_mib << 20 else "NO"
            rows.append(
                (label, f"{ratio:.1f}x", f"{error:.3f}", f"{wall:.1f}", f"{options.mib / wall:.0f}",
                 f"{options.mib / cpu:.0f}", f"{grown / 2**20:.0f}", fits)
            )  # fmt: skip
    head = ("quantizer", "smaller", "error", "seconds", "MiB/s", "MiB per CPU second",
            "memory grown, MiB", f"below {options.limit_mib}")  # fmt: skip
    show(f"{options.mib} MiB of float16, one thread", head, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

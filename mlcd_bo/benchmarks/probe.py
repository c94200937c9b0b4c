"""How exact short probes are, measured on a real DDP script.

    python3 -m ci bench mlcd_bo/probe

Each deployment is run once for long. Windows of each length are cut from it, as a probe of that
length would have seen them: the half-width that the profiler would have computed, and how far its
speed is from that of the whole run. The model takes each speed to be 3 % less certain than the
probe says. Start-up is what a trial pays before any of it.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _digits import ENV, SCRIPT, save_digits, space

from mlcd_bo._explain import Z95
from mlcd_bo._prior import MODEL_NOISE
from mlcd_bo._steady import steady_speed
from mlcd_bo.profilers._process import TorchrunProcess, thread_variables

LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)


def record(deployment, arguments: list[str], seconds: float):
    """Returns start-up seconds, step ends and samples of one long run."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        run = TorchrunProcess(
            Path(folder),
            deployment.count,
            [str(SCRIPT), *arguments],
            ["--standalone", "--local-addr=127.0.0.1"],
            {**thread_variables(deployment.instance_type.vcpus), **ENV},
            sys.executable,
        )
        try:
            first = None
            while first is None or time.monotonic() < first + seconds:
                time.sleep(0.1)
                if run.poll() is not None:
                    raise SystemExit(run.tail())
                if run.read() and first is None:
                    first = time.monotonic()
            times, samples = run.series("samples")
        finally:
            run.close()
    return first - began, times, samples


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25.0, help="length of the long runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(
        f"{args.seconds:g} s a deployment; {platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    print(
        "median 95 % half-width / median error / share of windows whose interval holds the truth, "
        "and whose interval as the model takes it does"
    )
    print("| | start-up | steps/s | " + " | ".join(f"{s:g} s" for s in LENGTHS) + " |")
    print("|---" * (3 + len(LENGTHS)) + "|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = save_digits(Path(folder))
        for deployment in space():
            startup, times, samples = record(deployment, arguments, args.seconds)
            steady = times > times[0] + 1.0
            times, samples = times[steady], samples[steady]
            truth = samples[1:].sum() / (times[-1] - times[0])
            cells = []
            for length in LENGTHS:
                found = []
                for start in np.arange(times[0], times[-1] - length, length / 2):
                    inside = (times >= start) & (times < start + length)
                    speed = steady_speed(times[inside], samples[inside], 1)
                    if speed is not None:
                        error = abs(speed.value / truth - 1)
                        wide = np.hypot(speed.half_width, Z95 * MODEL_NOISE)
                        held = (error <= speed.half_width, error <= wide)
                        found.append((speed.half_width, error, *held))
                half, error, *held = np.array(found, dtype=float).T if found else [[np.nan]] * 4
                shares = (float(np.mean(share)) for share in held)
                cells.append((float(np.median(half)), float(np.median(error)), *shares))
            rows.append((str(deployment), startup, cells))
            pace = (len(times) - 1) / (times[-1] - times[0])
            shown = " | ".join(f"{h:.1%} / {e:.1%} / {c:.0%}, {m:.0%}" for h, e, c, m in cells)
            print(f"| {deployment} | {startup:.1f} s | {pace:.0f} | {shown} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

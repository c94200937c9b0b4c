"""What a KubeRay job runs: profiles one deployment on its own cluster and prints what it saw.

``python -m mlcd_bo.profilers._ray_entry --count 3 --vcpus 4 --price 1.0 script.py [arguments]``
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict

from .._catalog import InstanceType
from .._space import Deployment
from .._trial import Limits
from ._ray import RayProfiler


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line ``mlcd-observation {...}``; returns 0 if it has a speed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", default="machine")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--price", type=float, required=True)
    parser.add_argument("--vcpus", type=float, default=1.0)
    parser.add_argument("--gpus", type=float, default=0.0)
    parser.add_argument("--unit", choices=("samples", "steps"), default="samples")
    parser.add_argument("--probe-s", type=float, default=60.0)
    parser.add_argument("--startup-s", type=float, default=120.0)
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    kind = InstanceType(args.type, args.price, vcpus=args.vcpus, gpus=args.gpus or None)
    profiler = RayProfiler(args.script, args.args, probe_s=args.probe_s, startup_s=args.startup_s)
    limits = Limits(seconds=args.probe_s + args.startup_s, unit=args.unit)
    seen = profiler.profile(Deployment(kind, args.count), limits)
    fields = {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in asdict(seen).items()
    }
    print(f"mlcd-observation {json.dumps(fields)}", flush=True)
    return 0 if seen.status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())

"""``python3 -m ci test``: the pure tests on all cores, then the tests that start clusters."""

import os
import sys
from collections.abc import Sequence

from ci import processes
from ci.layout import BUILD

# Ray, Flower and gloo tests run one at a time: side by side they would fight for the cores, and
# a timeout would then be the machine's fault and not the code's.
_STAGES = (
    ("pure", ["-m", "not cluster and not gpu", "-n", "2", "--dist", "loadfile"]),
    ("cluster", ["-m", "cluster and not gpu"]),
)
_NO_TESTS_COLLECTED = 5


def run_tests(arguments: Sequence[str], *, coverage: bool = False) -> int:
    """Runs the whole suite in its stages, or one pytest with the given arguments.

    Returns 0 if every test passed and no process was left behind.
    """
    stages = [("chosen", list(arguments))] if arguments else list(_STAGES)
    status = 0
    with processes.scratch() as env:
        if coverage:
            env["COVERAGE_FILE"] = str(BUILD / "coverage")
        for name, stage in stages:
            print(f"ci: tests, {name}: pytest {' '.join(stage)}", file=sys.stderr, flush=True)
            runner = ["coverage", "run", "--parallel-mode", "-m"] if coverage else []
            command = [sys.executable, "-m", *runner, "pytest", *stage]
            finished = processes.run(command, env=env)
            if finished.leftovers:
                print(f"ci: tests, {name}: left behind and killed:", file=sys.stderr)
                for line in finished.leftovers:
                    print(f"  {line}", file=sys.stderr)
                status = status or 1
            if finished.status == _NO_TESTS_COLLECTED and not arguments:
                print(f"ci: tests, {name}: no test was collected", file=sys.stderr)
            status = status or finished.status
        if coverage:
            for step in (["combine", "-q"], ["report", "--skip-covered"]):
                processes.run([sys.executable, "-m", "coverage", *step], env=env)
    return os.EX_SOFTWARE if status < 0 else status

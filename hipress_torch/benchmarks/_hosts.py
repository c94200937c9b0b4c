"""Hosts on one machine: network namespaces on a bridge, every link shaped. Linux and root."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUBNET = "10.203.77"


def possible() -> str | None:
    """Returns why hosts cannot be made here, or None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs the program {tool!r} (Debian: iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    return None


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int, megabits: int | None) -> Iterator[list[str]]:
    """Makes namespaces with an address each; ends them afterwards.

    Args:
        count: how many.
        megabits: rate of every link in each direction in Mbit/s; None leaves links unshaped.

    Yields:
        The namespaces' names. In each, the interface ``eth0`` has an address.
    """
    tag = f"hp{os.getpid() % 100000}"
    names = [f"{tag}-{i}" for i in range(count)]
    try:
        _run("ip", "netns", "add", f"{tag}-sw")
        switch = ("ip", "netns", "exec", f"{tag}-sw")
        _run(*switch, "ip", "link", "add", "br0", "type", "bridge")
        _run(*switch, "ip", "link", "set", "br0", "up")
        for i, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            _run("ip", "netns", "add", name)
            _run(
                "ip", "-n", name, "link", "add", "eth0", "type", "veth",
                "peer", "name", f"p{i}", "netns", f"{tag}-sw",
            )  # fmt: skip
            _run(*inside, "ip", "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "eth0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*switch, "ip", "link", "set", f"p{i}", "master", "br0", "up")
            if megabits is not None:
                # A tenth of a millisecond's worth at least, or the bucket itself is the limit.
                burst = max(64_000, megabits * 125)
                for place in ((*inside, "eth0"), (*switch, f"p{i}")):
                    _run(
                        *place[:-1], "tc", "qdisc", "add", "dev", place[-1], "root", "tbf",
                        "rate", f"{megabits}mbit", "burst", str(burst), "latency", "50ms",
                    )  # fmt: skip
        yield names
    finally:
        for name in (*names, f"{tag}-sw"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def launch(script: str, ranks: int, megabits: int | None, *arguments: object) -> Any:
    """Runs a script's ``--worker`` on hosts of their own; returns the JSON that rank 0 left.

    Args:
        script: given ``--worker`` and a JSON list: rank, ranks, a folder, and the arguments. Rank 0
            leaves ``out.json`` in the folder; a process group may meet at ``store`` in it.
        ranks: how many hosts.
        megabits: as in :func:`hosts`.
        arguments: what else the worker is given.
    """
    with tempfile.TemporaryDirectory(prefix="hipress-") as folder, hosts(ranks, megabits) as names:
        processes = []
        for rank, host in enumerate(names):
            command = [
                "ip", "netns", "exec", host, "env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1",
                sys.executable, script, "--worker", json.dumps([rank, ranks, folder, *arguments]),
            ]  # fmt: skip
            processes.append(subprocess.Popen(command))
        try:
            status = [p.wait(timeout=1800) for p in processes]
        finally:
            for p in processes:
                p.kill()
                p.wait()
        if any(status):
            raise RuntimeError(f"a rank failed: exit statuses {status}")
        return json.loads(Path(folder, "out.json").read_text(encoding="utf-8"))

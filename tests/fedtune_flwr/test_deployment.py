"""A real SuperLink with two SuperNodes on loopback, by TLS and with authentication."""

import contextlib
import datetime
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedtune_flwr._template import new_app

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

BIN = Path(sys.executable).parent
WAIT_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def started(tmp_path):
    """Starts commands whose process groups are ended, and checked to be gone, afterwards."""
    environment = {
        **os.environ,
        # Flower starts its helpers by name.
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    (tmp_path / "home").mkdir()
    running = []

    def start(name, *arguments, cwd=tmp_path):
        log = tmp_path / f"{name}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [str(BIN / arguments[0]), *arguments[1:]],
                stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
        running.append(process)
        return process, log

    yield start
    for process in reversed(running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in running:
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
    # Flower's helpers run in sessions of their own; they must have gone with their parents.
    mark = f"FLWR_HOME={tmp_path / 'home'}".encode()
    deadline = time.monotonic() + 20
    while (left := with_environment(mark)) and time.monotonic() < deadline:
        time.sleep(0.3)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"


def with_environment(mark: bytes) -> list[int]:
    """Processes whose environment holds an entry."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def tail(*logs: Path) -> str:
    return "\n".join(f"== {log.name}\n{log.read_text()[-2500:]}" for log in logs)


def pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def certificates(folder: Path) -> dict[str, Path]:
    """A certificate authority and a certificate of its for the loopback address."""
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("test", "localhost")
    ]
    made = {}
    for name, key, subject, authority in (
        ("ca", keys[0], names[0], True),
        ("server", keys[1], names[1], False),
    ):
        loopback = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(names[0])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(loopback), critical=False)
            .sign(keys[0], hashes.SHA256())
        )
        made[name] = folder / f"{name}.pem"
        made[name].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made["key"] = folder / "server.key"
    made["key"].write_bytes(pem(keys[1], serialization.PrivateFormat.PKCS8))
    return made


def node_key(folder: Path, k: int) -> tuple[Path, Path]:
    """A SuperNode's private and public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / f"node-{k}", folder / f"node-{k}.pub"
    private.write_bytes(pem(key, serialization.PrivateFormat.OpenSSH))
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return private, public


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for leftovers in /proc")
def test_two_supernodes_are_profiled_and_trained(started, tmp_path):
    app = new_app("loopback", tmp_path)
    files = certificates(tmp_path)
    api = free_port()
    home = tmp_path / "home"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "loop"\n[superlink.loop]\naddress = "127.0.0.1:{api}"\n'
        f'root-certificates = "{files["ca"]}"\n'
    )
    superlink, link_log = started(
        "superlink", "flower-superlink", "--ssl-ca-certfile", str(files["ca"]),
        "--ssl-certfile", str(files["server"]), "--ssl-keyfile", str(files["key"]),
        "--enable-supernode-auth", "--isolation", "subprocess",
        "--host", "127.0.0.1", "--port", str(api), "--disable-runtime-dependency-installation",
    )  # fmt: skip
    logs = [link_log]
    wait_for_port(api, superlink, link_log)
    for k in range(2):
        private, public = node_key(tmp_path, k)
        register, log = started(
            f"register-{k}", "flwr", "supernode", "register", str(public), "loop"
        )
        assert register.wait(timeout=WAIT_S) == 0, tail(log, *logs)
        _, log = started(
            f"supernode-{k}", "flower-supernode", "--root-certificates", str(files["ca"]),
            "--auth-supernode-private-key", str(private), "--superlink", f"127.0.0.1:{api}",
            "--isolation", "subprocess", "--port", str(free_port()),
            "--node-config", f"partition-id={k} num-partitions=2",
        )  # fmt: skip
        logs.append(log)
    run, run_log = started(
        "run", "flwr", "run", str(app), "loop", "--stream",
        "--run-config", "num-server-rounds=1 budget=12",
    )  # fmt: skip
    logs.append(run_log)
    deadline = time.monotonic() + WAIT_S
    while "origin:" not in run_log.read_text():
        assert time.monotonic() < deadline, tail(*logs)
        assert run.poll() in (None, 0), tail(*logs)
        time.sleep(0.5)
    text = run_log.read_text()
    assert "Received 2 results and 0 failures" in text, tail(*logs)
    assert re.search(r"evaluations in .* 2 clients", text), tail(*logs)
    assert re.search(r"'accuracy': '?[0-9.]+", text), tail(*logs)


def wait_for_port(port: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, tail(log)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.3)
    raise AssertionError(f"port {port} did not open\n{tail(log)}")

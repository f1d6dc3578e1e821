"""It starts without a network and without a place to write."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534
TO_START_S = 60.0
# The kernel counts each attempt to reach an address that no interface leads to, and each packet that leaves
# by one, so nothing that a library or native code tries goes unseen.
ISOLATED = """
import fcntl, json, re, socket, struct, subprocess, sys, urllib.request

LOOPBACK_UP = struct.pack("16sh14x", b"lo", 0x41)

def counted():
    rows = [line.split() for line in open("/proc/net/snmp")]
    pairs = dict(zip(map(tuple, rows[0::2]), rows[1::2]))
    found = {(k[0], n): int(v) for k, vs in pairs.items() for n, v in zip(k[1:], vs[1:])}
    six = dict(line.split() for line in open("/proc/net/snmp6"))
    return [found["Ip:", "OutNoRoutes"] + int(six["Ip6OutNoRoutes"]),
            found["Udp:", "OutDatagrams"] + int(six["Udp6OutDatagrams"]), found["Tcp:", "ActiveOpens"]]

with socket.socket() as some:
    fcntl.ioctl(some, 0x8914, LOOPBACK_UP)  # SIOCSIFFLAGS
server = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
try:
    lines = [server.stdout.readline()]
    while lines[-1] and "OPENAI_BASE_URL" not in lines[-1]:
        lines.append(server.stdout.readline())
    started = counted()
    url = re.search(r"http://[0-9.:]+", lines[0])[0]
    with urllib.request.urlopen(url + "/readyz", timeout=100) as answer:
        status = answer.status
    ready = counted()
finally:
    server.terminate()
    server.wait()
with socket.socket(type=socket.SOCK_DGRAM) as some:
    some.connect_ex(("192.0.2.1", 9))
print(json.dumps({"status": status, "started": started, "ready": ready, "after one attempt": counted()}))
"""


def serve() -> list[str]:
    return [sys.executable, "-m", "compaction_proxy", "serve", "--port", "0"]


def test_it_starts_without_a_network_and_does_not_try_to_reach_one(tmp_path: Path) -> None:
    isolating = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*isolating, "true"], check=False).returncode:
        pytest.skip("needs unshare and leave to make a network namespace")
    ended = subprocess.run(
        [*isolating, sys.executable, "-c", ISOLATED, *serve()],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=TO_START_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # Without a route, datagrams, connections; the one connection is the question whether it is ready.
    assert json.loads(ended.stdout) == {
        "status": 200,
        "started": [0, 0, 0],
        "ready": [0, 0, 1],
        "after one attempt": [1, 0, 1],
    }


def as_nobody() -> list[str]:
    """What to put before a command to run it as a user who owns nothing; nothing where we are no root.

    It may read what it likes, as Python may lie in somebody's home, but write nothing.
    """
    if os.getuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv where the tests are run by root, who may write everywhere")
    reading = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = [
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        "--bounding-set=-all,+dac_read_search",
    ]
    return ["setpriv", *user, *reading, "--no-new-privs"]


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write to."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


@contextmanager
def served_to_nobody(folder: Path, **more: str) -> Iterator[tuple[list[str], list[str]]]:
    """A server with nowhere to write; the lines it has said on stdout, and, behind the block, on stderr."""
    lines: list[str] = []
    errors: list[str] = []
    with subprocess.Popen(
        [*as_nobody(), *serve()],
        cwd=folder,
        env={"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines += [process.stdout.readline().rstrip("\n") for _ in range(5)]
        assert Path(f"/proc/{process.pid}").stat().st_uid == (NOBODY if os.getuid() == 0 else os.getuid())
        try:
            yield lines, errors
        finally:
            process.terminate()
            errors += process.communicate(timeout=TO_START_S)[1].splitlines()
    assert process.returncode == 0


def test_with_nowhere_to_write_it_serves_from_memory_and_says_so_in_one_line(closed: Path) -> None:
    with served_to_nobody(closed) as (lines, errors):
        url = lines[0].rpartition(" ")[2]
        ready = httpx.get(f"{url}/readyz", trust_env=False)
    assert (ready.status_code, ready.json()["store"]) == (200, "ok")
    assert "  store     memory://" in lines
    assert [line for line in errors if not line.startswith("{")] == [
        (
            "warning: store.url: memory:// loses all data when the process ends; "
            "set a file or a server to keep it"
        )
    ]
    assert list(closed.iterdir()) == []


def test_a_store_that_cannot_be_written_is_said_and_stops_nobody(closed: Path) -> None:
    store = f"sqlite:///{closed}/state.db"
    with served_to_nobody(closed, COMPACTION_PROXY__STORE__URL=store) as (lines, errors):
        url = lines[0].rpartition(" ")[2]
        ready = httpx.get(f"{url}/readyz", trust_env=False)
        admin = httpx.get(f"{url}/admin/v1/config", trust_env=False)
    assert ready.status_code == 200
    assert (admin.status_code, "server.admin_key" in admin.text, "Permission denied" in admin.text) == (
        403, True, True,
    )  # fmt: skip
    assert [event["level"] for event in map(json.loads, errors) if event["event"] == "admin.closed"] == [
        "warning"
    ]
    failed = [event for event in map(json.loads, errors) if event["event"] == "store.failed"]
    assert {event["level"] for event in failed} == {"warning"}
    assert [event["reason"] for event in failed][:1] == ["secret-unavailable"]
    assert {event["reason"] for event in failed} <= {"secret-unavailable", "store-unwritable"}
    assert list(closed.iterdir()) == []

"""What is shipped is what was locked; it starts without a network and without a place to write.

What the image does with the lock is in test_dockerfile.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
# What the image installs: `uv sync` in the Dockerfile has the same arguments.
SHIPPED = ("--frozen", "--no-dev", "--extra=crypto", "--extra=fast")
NOBODY = 65534
TO_START_S = 20.0
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
    with urllib.request.urlopen(url + "/readyz", timeout=10) as answer:
        status = answer.status
    ready = counted()
finally:
    server.terminate()
    server.wait()
with socket.socket(type=socket.SOCK_DGRAM) as some:
    some.connect_ex(("192.0.2.1", 9))
print(json.dumps({"status": status, "started": started, "ready": ready, "after one attempt": counted()}))
"""


def uv(
    *arguments: str, folder: Path = ROOT, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs uv, as everything in the repository does."""
    command = [str(ROOT / ".ci/uv"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False
    )


def locked() -> dict[str, str]:
    """Name and version of all that the image installs, as the lock says: nothing of it unhashed."""
    ended = uv("export", *SHIPPED, "--no-emit-project", "--format=requirements.txt")
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert [line for line in lines if "--hash=sha256:" not in line] == []
    return dict(line.split()[0].split("==") for line in lines)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """The wheel, built without a network where uv brings its own backend along."""
    folder = tmp_path_factory.mktemp("wheel")
    ended = uv("build", "--quiet", "--offline", "--wheel", "--out-dir", str(folder))
    if ended.returncode and "offline" in ended.stderr.lower():
        pytest.skip("this uv needs a network to build a wheel")
    assert ended.returncode == 0, ended.stderr
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


def test_the_wheel_holds_the_package_and_nothing_that_runs_by_itself(wheel: ZipFile) -> None:
    names = [name for name in wheel.namelist() if not name.endswith("/")]
    assert [name for name in names if Path(name).suffix in {".pth", ".so", ".pyd", ".dll", ".exe"}] == []
    tops = {name.partition("/")[0] for name in names}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert tops == {"proxy", f"compaction_proxy-{version}.dist-info"}


def test_the_wheel_asks_for_what_the_project_names(wheel: ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    wanted = re.findall(r"^Requires-Dist: ([\w-]+)", wheel.read(name).decode(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    named = [re.split(r"[^\w-]", each)[0] for each in project["dependencies"] + extras]
    assert sorted(wanted) == sorted(named)


def test_no_package_that_is_shipped_brings_a_pth() -> None:
    seen = {}
    for name in locked():
        try:
            files = metadata.files(name)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        assert files, name
        seen[name] = [str(file) for file in files if file.suffix == ".pth"]
    assert {"aiohttp", "fastapi", "redis", "tiktoken"} <= seen.keys()
    assert {name: files for name, files in seen.items() if files} == {}


def test_a_package_with_another_hash_than_the_lock_s_is_not_installed(tmp_path: Path) -> None:
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    start = text.index('\nname = "msgspec"\n')
    end = text.index("[[package]]", start)
    forged = re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", text[start:end])
    (tmp_path / "uv.lock").write_text(text[:start] + forged + text[end:], encoding="utf-8")
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv"), "UV_HTTP_RETRIES": "0"}
    environment.pop("VIRTUAL_ENV", None)
    ended = uv("sync", *SHIPPED, "--no-install-project", folder=tmp_path, environ=environment)
    if "error sending request" in ended.stderr or "network" in ended.stderr:
        pytest.skip("the package registry cannot be reached")
    assert ended.returncode != 0
    assert "Hash mismatch for `msgspec==" in ended.stderr
    assert list((tmp_path / "venv").glob("lib/python*/site-packages/*.dist-info")) == []


def test_the_bill_of_materials_is_the_lock_with_hashes(tmp_path: Path) -> None:
    made = tmp_path / "sbom.cdx.json"
    make = ["make", "--no-print-directory", "sbom", f"SBOM={made}"]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    bill = json.loads(made.read_text(encoding="utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert bill["metadata"]["component"]["name"] == "compaction-proxy"
    assert {part["name"]: part["version"] for part in bill["components"]} == locked()
    assert {part["purl"] for part in bill["components"]} == {
        f"pkg:pypi/{name}@{version}" for name, version in locked().items()
    }
    sources = [source for part in bill["components"] for source in part["externalReferences"]]
    assert [each for each in sources if each["type"] == "distribution" and not each["hashes"]] == []


@contextmanager
def advisories(*vulnerable: str) -> Iterator[str]:
    """A service that knows of one vulnerability in each of these packages; its URL."""

    class Known(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            found = [{"vulns": [known]} if each["package"]["name"] in vulnerable else {} for each in asked]
            self._answer({"results": found})

        def do_GET(self) -> None:
            self._answer({**known, "summary": "It leaks.", "affected": []})

        def _answer(self, said: dict[str, Any]) -> None:
            body = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    known = {"id": "OSV-TEST-1", "modified": "2026-01-01T00:00:00Z"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Known) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def audit(service: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The audit, asking this service."""
    environment = {**os.environ, "UV_HTTP_RETRIES": "0", "UV_CACHE_DIR": str(folder), "NO_PROXY": "*"}
    command = [str(ROOT / ".ci/audit"), "--service-url", service]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_the_audit_asks_of_every_locked_package_and_fails_for_a_vulnerable_one(tmp_path: Path) -> None:
    with advisories() as service:
        sound = audit(service, tmp_path / "sound")
    with advisories("idna") as service:
        unsound = audit(service, tmp_path / "unsound")
    assert (sound.returncode, unsound.returncode) == (0, 1), sound.stderr + unsound.stderr
    assert f"in {len(locked())} packages" in sound.stderr
    assert "OSV-TEST-1" in unsound.stdout


def test_the_audit_says_that_it_was_skipped_where_nobody_can_be_asked(tmp_path: Path) -> None:
    ended = audit("http://127.0.0.1:9", tmp_path)
    assert (ended.returncode, ended.stdout) == (
        0,
        "audit skipped: the service that knows of vulnerabilities cannot be reached\n",
    )


def serve() -> list[str]:
    return [sys.executable, "-m", "proxy", "serve", "--port", "0"]


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


def environment_in(folder: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **more}


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
        "warning: store.url: memory:// keeps nothing beyond the process; name a file or a server to keep more"
    ]
    assert list(closed.iterdir()) == []


def test_a_store_that_cannot_be_written_is_said_and_stops_nobody(closed: Path) -> None:
    store = f"sqlite:///{closed}/state.db"
    with served_to_nobody(closed, COMPACTION_PROXY__STORE__URL=store) as (lines, errors):
        url = lines[0].rpartition(" ")[2]
        ready = httpx.get(f"{url}/readyz", trust_env=False)
    assert ready.status_code == 200
    failed = [event for event in map(json.loads, errors) if event["event"] == "store.failed"]
    assert {event["level"] for event in failed} == {"warning"}
    assert [event["reason"] for event in failed][:1] == ["secret-unavailable"]
    assert {event["reason"] for event in failed} <= {"secret-unavailable", "store-unwritable"}
    assert list(closed.iterdir()) == []

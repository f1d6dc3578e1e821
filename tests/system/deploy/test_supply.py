"""What is shipped is what was locked, and the audit asks about all of it.

What the image does with the lock is in test_dockerfile.py.
"""

import json
import os
import re
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[3]
# What the image installs: `uv sync` in the Dockerfile has the same arguments.
SHIPPED = (
    "--frozen",
    "--no-dev",
    "--extra=crypto",
    "--extra=fast",
    "--extra=mcp",
    "--extra=otel",
    "--extra=redis",
)


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
    assert tops == {"compaction_proxy", f"compaction_proxy-{version}.dist-info"}


def test_the_wheel_asks_for_what_the_project_names(wheel: ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    wanted = re.findall(r"^Requires-Dist: ([\w-]+)", wheel.read(name).decode(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    named = [re.split(r"[^\w-]", each)[0] for each in project["dependencies"] + extras]
    assert sorted(wanted) == sorted(named)


# Dependencies that nothing of ours imports, and who does.
IMPORTED_ELSEWHERE = {"uvloop": "uvicorn, for loop='auto'", "hiredis": "redis", "crypto": "an empty extra"}


def test_every_dependency_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [
        each for extra in project["optional-dependencies"].values() for each in extra
    ]
    modules: dict[str, set[str]] = {}
    for module, owners in metadata.packages_distributions().items():
        for owner in owners:
            modules.setdefault(re.sub(r"[-_.]+", "-", owner).lower(), set()).add(module)
    package = ROOT / "proxy" / "compaction_proxy"
    code = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    used = set(re.findall(r"(?m)^\s*(?:from|import) (\w+)|\"(\w+):\w+\"|import_module\(\"(\w+)", code))
    names = {name for pair in used for name in pair if name}
    unused = []
    for each in wanted:
        name = re.split(r"[^\w-]", each)[0]
        if name in modules and name not in IMPORTED_ELSEWHERE and not modules[name] & names:
            unused.append(name)
    assert unused == []


def test_no_package_that_is_shipped_brings_a_pth() -> None:
    seen = {}
    for name in locked():
        try:
            files = metadata.files(name)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        assert files, name
        seen[name] = [str(file) for file in files if file.suffix == ".pth"]
    assert {"fastapi", "redis", "tiktoken"} <= seen.keys()
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

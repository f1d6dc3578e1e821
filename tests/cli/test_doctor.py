"""`doctor`: what it finds in sound and broken installations, and what it says mends it."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from compaction_proxy.cli import doctor
from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import ServerSection
from tests.helpers.scripted_admin import Scripted

Run = Callable[..., Result]
QUIET = {"COMPACTION_PROXY__SERVER__PORT": "0", "COMPACTION_PROXY__SUMMARY__MODEL": "cheap"}


def found(done: Result) -> dict[str, list[dict[str, Any]]]:
    """Findings by topic."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(done.stdout)["findings"]:
        topics.setdefault(each["topic"], []).append(each)
    return topics


@pytest.fixture
def upstream(script: Scripted) -> Scripted:
    """A provider with two models."""
    script.answers["GET", "/v1/models"] = (200, {"data": [{"id": "cheap"}, {"id": "dear"}]})
    return script


def test_a_sound_installation_has_no_error(upstream: Scripted, run: Run) -> None:
    done = run("doctor", "--json", **QUIET, COMPACTION_PROXY__UPSTREAM__BASE_URL=f"{upstream.url}/v1")
    topics = found(done)
    assert done.exit_code == 0, done.stdout
    assert [each["level"] for each in topics["tokenizer"] + topics["upstream"] + topics["store"]] == [
        "ok"
    ] * 3
    assert topics["upstream"][0]["what"].startswith(f"{upstream.url}/v1: 2 models in ")
    assert topics["summary model"][0]["what"] == "cheap: 128,000 tokens, assumed"
    assert [target for _, target, _, _ in upstream.asked][:2] == ["/v1/models", "/readyz"]
    assert [each["what"] for each in topics["window"]] == [
        f"{name}: the upstream reports no window, so 128,000 tokens are assumed" for name in ("cheap", "dear")
    ]


def test_what_is_broken_is_an_error_with_its_fix(upstream: Scripted, run: Run, tmp_path: Path) -> None:
    upstream.answers["GET", "/v1/models"] = (401, {"error": {"message": "no"}})
    (tmp_path / "state.db").write_bytes(b"this is no database, but long enough to look like one" * 99)
    environ = {
        **QUIET,
        "COMPACTION_PROXY__UPSTREAM__BASE_URL": f"{upstream.url}/v1",
        "COMPACTION_PROXY__UPSTREAM__API_KEY": "sk-hunter2",
        "COMPACTION_PROXY__STORE__URL": f"sqlite:///{tmp_path}/state.db",
    }
    done = run("doctor", "--json", **environ)
    errors = {topic: each for topic, all_ in found(done).items() for each in all_ if each["level"] == "error"}
    assert done.exit_code == 1
    assert errors["upstream"]["what"].endswith("rejects upstream.api_key (401)")
    assert sorted(errors) == ["store", "summary model", "upstream"]
    assert errors["summary model"]["fix"] == "set a valid key in upstream.api_key"
    assert all(each["fix"] for each in errors.values())
    assert "hunter2" not in done.output
    assert errors["store"]["fix"].startswith("restore the file from a backup")
    plain = run("doctor", **environ).stdout
    assert "; fix: set a valid key" in plain


def test_the_upstream_that_serve_was_told_is_the_one_that_is_asked(upstream: Scripted, run: Run) -> None:
    elsewhere = {**QUIET, "COMPACTION_PROXY__UPSTREAM__BASE_URL": "http://127.0.0.1:9/v1"}
    told = found(run("doctor", "--json", "--upstream", f"{upstream.url}/v1", **elsewhere))["upstream"]
    assert [(each["level"], each["what"].split(": ")[0]) for each in told] == [("ok", f"{upstream.url}/v1")]


def test_a_configuration_that_cannot_be_read_is_all_there_is_to_say(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("server: {prot: 1}\n")
    done = run("doctor")
    assert done.exit_code == 2
    assert "config.yaml:1:10: server.prot: unknown key, did you mean 'port'?" in done.stdout
    assert "fix:" in done.stdout


def test_the_file_that_was_read_is_named_in_full(upstream: Scripted, run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"upstream: {{base_url: '{upstream.url}/v1'}}\n")
    [told, *_] = found(run("doctor", "--json", **QUIET))["configuration"]
    assert told["what"].startswith(f"{tmp_path / 'config.yaml'}; a running proxy may have read another")


def test_an_upstream_that_is_away_or_ourselves_is_said(upstream: Scripted, run: Run) -> None:
    upstream.answers["GET", "/readyz"] = (200, {"ready": True, "store": "ok", "version": "0"})
    environ = {**QUIET, "COMPACTION_PROXY__UPSTREAM__BASE_URL": f"{upstream.url}/v1"}
    told = found(run("doctor", "--json", **environ))["upstream"]
    assert [each["level"] for each in told] == ["ok", "warning"]
    away = run(
        "doctor", "--json", **{**environ, "COMPACTION_PROXY__UPSTREAM__BASE_URL": "http://127.0.0.1:9/v1"}
    )
    assert (away.exit_code, found(away)["upstream"][0]["level"]) == (1, "error")


def test_a_taken_port_and_a_weak_key_are_found(script: Scripted) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerSection(port=taken.getsockname()[1])
        taken.close()
        with socket.create_server(("127.0.0.1", server.port)) as other:
            other.settimeout(0)
            port = int(script.url.rpartition(":")[2])
            assert doctor.check_address(ServerSection(port=port)).level == "error"
    script.answers["GET", "/readyz"] = (200, {"ready": True, "store": "ok", "version": "9.9"})
    assert doctor.check_address(ServerSection(port=port)).what.endswith(
        "compaction-proxy 9.9 is running there"
    )
    keys = {
        "none": "warning",
        "short": "warning",
        "aaaaaaaaaaaaaaaaaaaaaaaa": "warning",
        "f3a9c1d27b6e4805": "ok",
    }
    assert {
        key: doctor.check_admin_key(Config.model_validate({"server": {"admin_key": key}}), {}).level
        for key in keys
    } == keys


def test_a_running_proxy_with_another_upstream_is_told_before_that_one_is_asked(
    script: Scripted, run: Run
) -> None:
    script.answers["GET", "/readyz"] = (200, {"ready": True, "store": "ok", "version": "9.9"})
    environ = {
        "COMPACTION_PROXY__SERVER__PORT": script.url.rpartition(":")[2],
        "COMPACTION_PROXY__SERVER__ADMIN_KEY": "f3a9c1d27b6e4805",
    }
    own = "http://127.0.0.1:9/v1"

    def tell() -> dict[str, str]:
        findings = found(run("doctor", "--json", "--upstream", own, **environ))["upstream"]
        assert findings[-1]["level"] == "error"
        return findings[0]

    script.put("GET", "/config", {"values": [{"key": "upstream.base_url", "value": "http://10.0.0.9/v1"}]})
    assert tell() == {
        "level": "warning",
        "topic": "upstream",
        "what": f"the running proxy forwards to http://10.0.0.9/v1, but the checks below use {own}",
        "fix": "run doctor with the options, variables and --config of `serve`, such as --upstream http://10.0.0.9/v1",
    }
    assert script.asked[-1][1::2] == ("/admin/v1/config", "Bearer f3a9c1d27b6e4805")
    script.put("GET", "/config", {"values": [{"key": "upstream.base_url", "value": f"{own}/"}]})
    assert tell()["what"].startswith(f"{own} cannot be reached")
    script.put("GET", "/config", {"error": {"message": "no"}}, status=401)
    assert tell()["what"].startswith(
        "cannot read the upstream of the running proxy: the proxy rejects the admin key"
    )


def test_the_port_of_a_running_proxy_can_be_given(script: Scripted, run: Run) -> None:
    script.answers["GET", "/readyz"] = (200, {"ready": True, "store": "ok", "version": "9.9"})
    port = script.url.rpartition(":")[2]
    [address] = found(run("doctor", "--json", "--port", port, "--upstream", "http://127.0.0.1:9/v1"))[
        "address"
    ]
    assert address["what"] == f"127.0.0.1:{port}: compaction-proxy 9.9 is running there"


def test_an_extra_that_is_missing_is_told_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda module: False)
    told = {each.what: (each.level, each.fix) for each in doctor.check_extras(Config())}
    assert told["redis: optional, not installed"] == (
        "note",
        "if you need it, pip install 'compaction-proxy[redis]'",
    )
    traced = Config.model_validate({"observability": {"otlp_endpoint": "http://127.0.0.1:4318"}})
    [error] = [each for each in doctor.check_extras(traced) if each.level == "error"]
    assert error.fix == "pip install 'compaction-proxy[otel]'"


def test_an_admin_key_that_the_proxy_makes_is_told_with_its_file(tmp_path: Path) -> None:
    config = Config.model_validate({"store": {"url": f"sqlite:///{tmp_path}/state.db"}})
    path = tmp_path / "state.db.admin_key"
    assert doctor.check_admin_key(config, {})[:3] == (
        "ok",
        "admin key",
        f"will be generated at the first start in {path}",
    )
    assert not path.exists()
    path.write_text("ab" * 32)
    path.chmod(0o600)
    assert doctor.check_admin_key(config, {})[:3] == ("ok", "admin key", f"saved in {path}")
    path.chmod(0o644)
    found = doctor.check_admin_key(config, {})
    assert (found.level, "other users can read it" in found.what) == ("warning", True)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"server": {"host": "0.0.0.0"}}, "at this address"),
        ({"server": {"unix_socket": "/run/x.sock"}}, "at this address"),
        ({"store": {"url": "redis://localhost"}}, "replicas share the store"),
        ({"store": {"url": "memory://"}}, "no data folder"),
    ],
)
def test_an_admin_api_that_is_closed_is_found_with_the_reason(section: dict[str, Any], why: str) -> None:
    found = doctor.check_admin_key(Config.model_validate(section), {})
    assert found.level == "warning"
    assert why in found.what


def test_a_budget_that_is_too_small_for_the_largest_body_is_found() -> None:
    fits = doctor.check_body_memory(ServerSection(max_inflight_bytes=2_000_000, max_body_bytes=2_000_000))
    small = doctor.check_body_memory(ServerSection(max_inflight_bytes=2_000_000, max_body_bytes=3_000_000))
    assert (fits.level, small.level) == ("ok", "warning")
    assert small.what.endswith("less than server.max_body_bytes (3,000,000): larger requests fail with 413")
    assert small.fix


def test_a_store_that_others_may_read_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.touch()
    path.chmod(0o644)
    told = [each for each in doctor.check_disk(path) if each.topic == "store"]
    assert told == [
        doctor.Finding("warning", "store", f"{path}: other users can read the file", f"chmod 600 '{path}'")
    ]


def test_a_finding_is_one_line_whatever_it_says() -> None:
    lines = doctor.format_findings([doctor.Finding("error", "x", "a\nb\x1b", "c")], None)
    assert lines[1] == r"error   x      a\nb\x1b; fix: c"


def test_a_long_finding_is_wrapped_in_its_column() -> None:
    finding = doctor.Finding("warning", "store", "others may read it " * 3, "chmod 600 it")
    lines = doctor.format_findings([finding], 50)
    assert max(map(len, lines)) <= 50
    assert all(line.startswith(" " * 16) for line in lines[2:])
    assert (
        " ".join(" ".join(lines[1:]).split()) == f"warning store {finding.what.strip()} ; fix: chmod 600 it"
    )

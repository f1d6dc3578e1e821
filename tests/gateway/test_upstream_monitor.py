"""Failures of upstreams get a word from a closed list, a line a minute, and a line when they are over."""

import errno
import re
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from compaction_proxy.core.upstream_failure import CAUSES
from compaction_proxy.gateway.upstream import Upstream, UpstreamResponse, build_request, send_request
from compaction_proxy.gateway.upstream_monitor import UpstreamMonitor, find_cause
from tests.gateway.test_upstream import SCOPE, Engine, Reply

ROOT = Path(__file__).resolve().parents[2]
TARGET = "https://up.example:443"
REFUSED = OSError(errno.ECONNREFUSED, "refused")


def caused(error: httpx.TransportError, *causes: BaseException) -> httpx.TransportError:
    """An error with a chain of causes, the nearest first."""
    last: BaseException = error
    for cause in causes:
        last.__cause__ = cause
        last = cause
    return error


@pytest.mark.parametrize(
    ("error", "begun", "cause"),
    [
        (caused(httpx.ConnectError(""), REFUSED), False, "connection-refused"),
        (caused(httpx.ConnectError(""), OSError(0, "an engine's own"), REFUSED), False, "connection-refused"),
        (caused(httpx.ConnectError(""), socket.gaierror(-2, "unknown")), False, "name-not-resolved"),
        (caused(httpx.ConnectError(""), UnicodeError()), False, "name-not-resolved"),
        (caused(httpx.ConnectError(""), ssl.SSLCertVerificationError()), False, "tls-failed"),
        (caused(httpx.ConnectError(""), OSError(errno.EHOSTUNREACH, "")), False, "unreachable"),
        (caused(httpx.ConnectError(""), OSError(errno.ECONNRESET, "")), False, "connection-reset"),
        (caused(httpx.ConnectError(""), OSError(errno.EMFILE, "")), False, "out-of-sockets"),
        (httpx.ConnectError(""), False, "unreachable"),
        (httpx.ConnectTimeout(""), False, "connect-timeout"),
        (httpx.ReadTimeout(""), False, "answer-timeout"),
        (httpx.ReadTimeout(""), True, "answer-stalled"),
        (httpx.ProxyError(""), False, "proxy-failed"),
        (httpx.LocalProtocolError(""), False, "not-sendable"),
        (httpx.UnsupportedProtocol(""), False, "not-sendable"),
        (httpx.RemoteProtocolError(""), False, "invalid-answer"),
        (httpx.ReadError(""), False, "connection-reset"),
        (httpx.WriteError(""), False, "connection-reset"),
        (httpx.ReadError(""), True, "answer-cut"),
        (httpx.RemoteProtocolError(""), True, "answer-cut"),
    ],
)
def test_an_error_has_a_cause_from_the_list(error: httpx.TransportError, *, begun: bool, cause: str) -> None:
    assert find_cause(error, has_head=begun) == cause
    assert cause in CAUSES


def test_the_manual_lists_every_cause_and_no_other() -> None:
    manual = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    section = manual.partition("## Why a provider fails")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)
    assert sorted(rows) == sorted(CAUSES)


class Scene:
    """A monitor with a clock of its own, and what it has counted and kept."""

    def __init__(self) -> None:
        self.seconds = 1_000.0
        self.counted: list[str] = []
        self.kept: list[str] = []
        self.monitor = UpstreamMonitor(
            [lambda _, cause: self.counted.append(cause)],
            [lambda _, cause, __: self.kept.append(cause)],
            clock=lambda: self.seconds,
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_failure_is_logged_once_a_minute_with_the_number_left_out(scene: Scene) -> None:
    with capture_logs() as logged:
        for _ in range(130):  # one a second
            scene.monitor.record_missing_answer(TARGET, caused(httpx.ConnectError(""), REFUSED))
            scene.seconds += 1
    assert [(line["cause"], line.get("suppressed")) for line in logged] == [
        ("connection-refused", None),
        ("connection-refused", 59),
        ("connection-refused", 59),
    ]
    assert {(line["event"], line["log_level"], line["target"]) for line in logged} == {
        ("upstream.failed", "warning", TARGET)
    }
    assert len(scene.counted) == len(scene.kept) == 130


def test_recovery_is_logged_once_for_each_line_of_a_failure(scene: Scene) -> None:
    with capture_logs() as logged:
        for _ in range(50):  # every second request fails
            scene.monitor.record_status(TARGET, 503)
            assert scene.monitor.failure_counts == {TARGET: 1}
            scene.monitor.record_status(TARGET, 200)
            assert scene.monitor.failure_counts == {}
            scene.seconds += 1
    assert [line["event"] for line in logged] == ["upstream.failed", "upstream.recovered"]
    assert logged[1]["failures"] == 1


def test_a_refused_key_says_nothing_of_others_and_a_client_error_is_counted_only(scene: Scene) -> None:
    with capture_logs() as logged:
        for status in (401, 429, 400, 404):
            scene.monitor.record_status(TARGET, status)
        scene.monitor.record_cut(TARGET, httpx.ReadError(""))
    assert scene.monitor.failure_counts == {}
    assert scene.counted == ["http-401", "http-429", "http-400", "http-404", "answer-cut"]
    assert scene.kept == ["http-401", "http-429", "answer-cut"]
    assert [line["cause"] for line in logged] == scene.kept


def test_three_failures_in_a_row_are_a_problem_until_the_next_answer(scene: Scene) -> None:
    scene.monitor.record_status("https://other.example:443", 500)
    for failures in range(1, 5):
        scene.monitor.record_status(TARGET, 502)
        problems = scene.monitor.list_problems()
        assert [each.fix.split(".")[0] for each in problems] == (
            [f"{failures} requests in a row to https://up"] if failures >= 3 else []
        )
        assert not any("example" in each.what for each in problems)  # everybody may read it
    scene.monitor.record_status(TARGET, 404)
    assert scene.monitor.list_problems() == []


def test_what_is_wrong_here_is_no_state_of_the_upstream(scene: Scene) -> None:
    scene.monitor.record_missing_answer(TARGET, caused(httpx.ConnectError(""), OSError(errno.EMFILE, "")))
    scene.monitor.record_missing_answer(TARGET, httpx.LocalProtocolError(""))
    assert (scene.monitor.failure_counts, scene.kept) == ({}, ["out-of-sockets", "not-sendable"])


def test_targets_that_nobody_asks_any_more_are_forgotten(scene: Scene) -> None:
    scene.monitor.record_status(TARGET, 500)
    scene.monitor.record_status("https://other.example:443", 500)
    scene.monitor.forget_other_targets({"https://other.example:443"})
    assert scene.monitor.failure_counts == {"https://other.example:443": 1}


async def test_a_target_shows_no_credential_and_no_path() -> None:
    monitor = UpstreamMonitor()
    url = "http://name:password@up.example/secret/v1?key=secret"
    asked = Upstream(url, "", "0" * 16, Engine(Reply(503)), 1.0, 1.0, monitor=monitor)
    await (await send_request(asked, build_request(asked, SCOPE, b""))).aclose()
    assert monitor.failure_counts == {"http://up.example:80": 1}


async def test_a_cut_that_was_seen_early_and_relayed_later_is_reported_once(scene: Scene) -> None:
    asked = Upstream("https://up.example", "", "0" * 16, Engine(Reply(200)), 1.0, 1.0, monitor=scene.monitor)
    answer = UpstreamResponse(Reply(200, b"ab", httpx.ReadError("")), asked)
    assert await answer.peek(100) == b"ab"
    assert await answer.read() == b"ab"
    with pytest.raises(httpx.ReadError):
        await answer.read()
    assert scene.kept == ["answer-cut"]

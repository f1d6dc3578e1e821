"""The admin API under input of every kind that its own description allows, and of kinds that it does not."""

# ruff: noqa: E501 - one case a line

import json
from http.client import HTTPConnection
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.system.malformed.conftest import PATIENCE_S

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

# Hosts, origins and credentials that are none.
NAMES = [
    b"",
    b"[",
    b"[::1",
    b"a b",
    b"\xff",
    b"a:99999999",
    b"x@y",
    b"[v1.x]",
    b"127.0.0.1:0",
    b"http://",
    b"null",
    b"Bearer \xff",
]
PATHS = [
    b"/livez", b"/readyz", b"/health/zz", b"/ui/x", b"/mcp", b"/metrics", b"/v1/compact", b"/admin", b"/admin/v1/zz",
    b"/admin/v1/openapi.json", b"/admin/v1/conversations/%00/pins", b"/admin/v1/conversations/c_%ff/search?q=%22&limit=%00",
]  # fmt: skip
PIN = b"/admin/v1/conversations/%b/pins"


def _conversation(proxy: Any) -> str:
    """A conversation that has been compacted, so that there is something to be asked for."""
    said = [
        {"role": ("user", "assistant")[at % 2], "content": f"Part {at} reads its queue. " * 40}
        for at in range(9)
    ]
    body = json.dumps({"model": "m", "messages": said}).encode()
    _, head, _ = proxy.post("/v1/chat/completions", body, b"x-compaction: force", b"x-session-id: admin")
    return str(head.partition(b"x-compaction-session: ")[2].split(b"\r\n")[0], "ascii")


def _asked(case: Any, conversation: str | None) -> tuple[str, str, bytes | None, dict[str, str]]:
    """Method, target and body of what schemathesis wants to be sent; `conversation` replaces what it made up."""
    made = dict(case.path_parameters or {})
    if conversation is not None:
        made["conversation"] = conversation
    path = case.path
    for name, held in made.items():
        path = path.replace(f"{{{name}}}", quote(str(held), safe="", errors="surrogatepass"))
    pairs = [
        f"{quote(str(name), errors='surrogatepass')}={quote(str(held), errors='surrogatepass')}"
        for name, held in (case.query or {}).items()
    ]
    target = path + ("?" + "&".join(pairs) if pairs else "")
    absent = case.body is schemathesis.schemas.NOT_SET if hasattr(schemathesis.schemas, "NOT_SET") else False
    if absent or type(case.body).__name__ == "NotSet":
        return case.method.upper(), target, None, {}
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body, default=str).encode()
    return case.method.upper(), target, body, {"content-type": "application/json"}


@pytest.mark.timeout(1_200)  # with --runslow
def test_nothing_that_the_description_allows_or_forbids_is_a_fault_of_ours(
    proxy: Any, pytestconfig: pytest.Config, request: pytest.FixtureRequest
) -> None:
    n = 5_000 if pytestconfig.getoption("--runslow") else 500
    conversation = _conversation(proxy)
    client = HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE_S)
    request.addfinalizer(client.close)
    client.request("GET", "/admin/v1/openapi.json")
    described = schemathesis.openapi.from_dict(json.loads(client.getresponse().read()))
    operations = [found.ok() for found in described.get_all_operations()]
    operations = [each for each in operations if each.path.startswith("/admin")]
    statuses: dict[int, int] = {}
    for operation in operations:
        cases = st.one_of(
            *[operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]
        )

        @settings(
            max_examples=-(-n // len(operations)), deadline=None, database=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(cases, st.sampled_from([None, conversation]))
        def tried(case: Any, known: str | None) -> None:
            client.request(*_asked(case, known))
            answer = client.getresponse()
            if answer.headers.get_content_type() == "text/event-stream":  # it has no end
                client.close()
            else:
                answer.read()
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            assert answer.status < 500, (answer.status, case)

        tried()
    assert len(operations) >= 10
    assert sum(statuses.values()) >= n * 9 // 10, statuses
    assert {200, 404, 422} <= statuses.keys(), statuses


def test_no_host_origin_or_path_is_a_fault_of_ours_where_we_answer_ourselves(proxy: Any) -> None:
    wrong: list[str] = []
    for path in PATHS:
        for name in NAMES:
            for field in (
                b"host: " + name,
                b"host: a\r\norigin: " + name,
                b"host: a\r\nauthorization: " + name,
            ):
                for method in (b"GET", b"POST", b"DELETE"):
                    raw = method + b" " + path + b" HTTP/1.1\r\nconnection: close\r\n" + field + b"\r\n\r\n"
                    got = proxy.ask(raw)
                    if not 200 <= int(got[9:12]) < 500:
                        wrong.append(f"{raw!r} → {got[:200]!r}")
    assert not wrong, "\n".join(wrong[:8])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'{"text":7}', b'{"text":null}', b'{"text":"\\ud800"}', b'{"text":"\xff"}', b'{"text":"a\\nb"}',
        b'{"text":"\\u0000"}', b'{"text":"' + b"x" * 300_000 + b'"}', b"[" * 100_000, b'{"text":' + b"9" * 100_000 + b"}",
        b'{"text":NaN}', b'{"text":"a","text":7}', b'{"text":"\\u2028"}', b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"text":' + b"[" * 900 + b"]" * 900 + b"}", b'{"text":{"a":' + b"9" * 4_400 + b"}}", b'{"text":1e999}', b'{"text":[NaN,1e999]}',
    ],
)  # fmt: skip
def test_a_pin_that_is_none_is_refused(proxy: Any, body: bytes) -> None:
    conversation = _conversation(proxy).encode()
    status, _, answer = proxy.post((PIN % conversation).decode(), body, b"content-type: application/json")
    assert 400 <= status < 500, (status, answer[:300])

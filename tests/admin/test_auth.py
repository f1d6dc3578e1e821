"""Who may use the admin API: by key, or from this machine and no page of another origin."""

import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from compaction_proxy.admin.auth import AccessMiddleware, AccessPolicy, check_access

OPEN = AccessPolicy("127.0.0.1", "none")
KEYED = AccessPolicy("0.0.0.0", "secret")  # not bound, only compared
KEY = ("authorization", "Bearer secret")


def asked(*headers: tuple[str, str], peer: str | None = "127.0.0.1", path: str = "/admin/v1/x") -> Scope:
    fields = [(name.encode(), value.encode()) for name, value in headers]
    client = None if peer is None else (peer, 5)
    return {"type": "http", "method": "GET", "path": path, "headers": fields, "client": client}


def code(access: AccessPolicy, scope: Scope) -> str | None:
    """Why a request is refused, None if it is not."""
    refused = check_access(access, scope)
    return refused.code if refused else None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:4141", "localhost:4141", "LocalHost", "[::1]:80"])
def test_without_a_key_this_machine_is_answered_by_its_names(host: str) -> None:
    assert code(OPEN, asked(("host", host))) is None


def test_the_name_that_the_server_listens_on_is_one_of_them() -> None:
    assert code(AccessPolicy("localhost", "none"), asked(("host", "localhost"))) is None
    assert code(AccessPolicy("127.0.0.2", "none"), asked(("host", "127.0.0.2:1"))) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:4141", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example",
     "127.0.0.1@evil.example", "evil@localhost", "localhost/x", "localhost:x", "", "[::1"],
)  # fmt: skip
def test_without_a_key_a_name_that_is_not_this_machine_s_is_refused(host: str) -> None:
    assert code(OPEN, asked(("host", host))) == "host_not_allowed"


@pytest.mark.parametrize("access", [OPEN, KEYED])
def test_exactly_one_host_is_needed(access: AccessPolicy) -> None:
    assert code(access, asked(KEY)) == "host_not_allowed"
    assert code(access, asked(KEY, ("host", "localhost"), ("host", "evil.example"))) == "host_not_allowed"


@pytest.mark.parametrize("peer", ["10.0.0.7", "192.168.1.2", "", None])
def test_without_a_key_other_machines_are_refused(peer: str | None) -> None:
    assert code(OPEN, asked(("host", "localhost"), peer=peer)) == "admin_key_required"


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via", "x-real-ip"])
def test_without_a_key_what_comes_through_another_proxy_is_refused(header: str) -> None:
    assert code(OPEN, asked(("host", "localhost"), (header, "1.2.3.4"))) == "admin_key_required"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.1", "proxy.example"])
def test_without_a_key_a_server_that_others_reach_answers_nobody(host: str) -> None:
    for key in ("", "none"):
        assert code(AccessPolicy(host, key), asked(("host", "localhost"))) == "admin_key_required"


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7", None])
@pytest.mark.parametrize("host", ["proxy.example", "localhost", "10.1.1.1:4141"])
def test_the_key_opens_from_everywhere_under_every_name(host: str, peer: str | None) -> None:
    assert code(KEYED, asked(KEY, ("host", host), peer=peer)) is None


@pytest.mark.parametrize(
    "shown",
    ["Bearer wrong", "Bearer ", "Bearer", "secret", "Basic secret", "Bearer secretx", "Bearer sécret", ""],
)
@pytest.mark.parametrize("access", [KEYED, AccessPolicy("127.0.0.1", "secret")])
def test_without_the_right_key_nobody_is_answered_where_there_is_one(
    access: AccessPolicy, shown: str
) -> None:
    assert code(access, asked(("authorization", shown), ("host", "localhost"))) == "invalid_admin_key"


def test_the_word_bearer_may_be_written_in_any_case_and_the_key_in_any_alphabet() -> None:
    assert code(AccessPolicy("::", "ключ"), asked(("authorization", "bearer ключ"), ("host", "x"))) is None


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://localhost:4141", "localhost:4141", True),
        ("http://localhost", "localhost:80", True),
        ("https://localhost", "localhost", True),
        ("http://localhost:4141", "127.0.0.1:4141", False),
        ("http://localhost:3000", "localhost:4141", False),
        ("https://evil.example", "localhost:4141", False),
        ("null", "localhost", False),
        ("", "localhost", False),
        ("file://localhost", "localhost", False),
        ("http://", "localhost", False),
    ],
)
@pytest.mark.parametrize("access", [OPEN, KEYED])
def test_a_page_is_answered_only_if_it_is_ours(
    access: AccessPolicy, origin: str, host: str, *, allowed: bool
) -> None:
    found = code(access, asked(KEY, ("host", host), ("origin", origin)))
    assert found == (None if allowed else "origin_not_allowed")


@pytest.mark.parametrize(
    ("site", "mode", "destination", "method", "allowed"),
    [
        ("same-origin", "cors", "empty", "GET", True),
        ("none", "navigate", "document", "GET", True),  # typed into the address bar
        ("cross-site", "navigate", "document", "GET", True),  # a link
        ("cross-site", "no-cors", "image", "GET", False),
        ("same-site", "no-cors", "script", "GET", False),  # another port of this machine is the same site
        ("cross-site", "navigate", "iframe", "GET", False),
        ("cross-site", "navigate", "document", "POST", False),
        ("same-site", "cors", "empty", "GET", False),
    ],
)
@pytest.mark.parametrize("access", [OPEN, KEYED])
def test_another_site_can_only_link_to_the_admin_pages(
    access: AccessPolicy, site: str, mode: str, destination: str, method: str, *, allowed: bool
) -> None:
    fetch = [("sec-fetch-site", site), ("sec-fetch-mode", mode), ("sec-fetch-dest", destination)]
    scope = {**asked(KEY, ("host", "localhost"), *fetch), "method": method}
    assert code(access, scope) == (None if allowed else "origin_not_allowed")


async def answered(guard: AccessMiddleware, scope: Scope) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing of a refused request is read")

    async def send(message: Message) -> None:
        sent.append(message)

    await guard(scope, receive, send)
    return sent


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "let-in"})


async def serve_json(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("headers", [(KEY, ("host", "x")), (("host", "x"),)])
async def test_no_other_site_can_read_a_response_as_a_script_or_an_image(
    headers: tuple[tuple[str, str], ...],
) -> None:
    start, *_ = await answered(AccessMiddleware(serve_json, KEYED, "/admin"), asked(*headers))
    told = dict(start["headers"])
    assert (told[b"x-content-type-options"], told[b"cross-origin-resource-policy"]) == (
        b"nosniff", b"same-origin",
    )  # fmt: skip


@pytest.mark.parametrize("path", ["/admin", "/admin/", "/admin/v1/x"])
async def test_a_refused_request_is_answered_in_openai_s_shape_and_not_read(path: str) -> None:
    start, body = await answered(AccessMiddleware(inner, KEYED, "/admin"), asked(("host", "x"), path=path))
    told: dict[str, Any] = json.loads(body["body"])
    assert (start["status"], dict(start["headers"])[b"www-authenticate"]) == (401, b"Bearer")
    assert told == {
        "error": {
            "message": "Send `Authorization: Bearer` and the admin key.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_admin_key",
        }
    }


@pytest.mark.parametrize("path", ["/livez", "/administrator", "/metrics"])
async def test_what_is_not_guarded_goes_through(path: str) -> None:
    assert await answered(AccessMiddleware(inner, KEYED, "/admin"), asked(path=path)) == [{"type": "let-in"}]


async def test_who_shows_the_key_is_let_in() -> None:
    assert await answered(AccessMiddleware(inner, KEYED, "/admin"), asked(KEY, ("host", "x"))) == [
        {"type": "let-in"}
    ]

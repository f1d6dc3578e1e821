"""Links and sessions: signed with the admin key, for a time; a link is used once."""

import time

import pytest
from starlette.datastructures import Headers

from compaction_proxy.admin.browser_sessions import (
    build_cookie_name,
    build_link,
    create_token,
    has_session,
    is_valid_token,
    redeem_code,
)
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore

KEY = "an-admin-key"


def test_a_token_is_for_one_purpose_one_key_and_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    token = create_token(KEY, "link", 60)
    assert is_valid_token(KEY, "link", token)
    assert not is_valid_token(KEY, "session", token)
    assert not is_valid_token("another-key", "link", token)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert not is_valid_token(KEY, "link", token)


def test_a_link_of_a_clock_that_is_ahead_is_not_valid_before_its_last_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 300)
    link, session = create_token(KEY, "link", 60), create_token(KEY, "session", 60)
    monkeypatch.setattr(time, "time", lambda: now)
    # The mark that it was used lasts 60 s: it would open again.
    assert not is_valid_token(KEY, "link", link)
    assert is_valid_token(KEY, "session", session)  # replicas have clocks of their own
    monkeypatch.setattr(time, "time", lambda: now + 301)
    assert is_valid_token(KEY, "link", link)


@pytest.mark.parametrize(
    "damage",
    [
        lambda token: token[:-1],
        lambda token: "f" + token,  # expires later
        lambda token: token.replace(".", "", 1),
        lambda _: "",
        lambda _: "..",
        lambda _: "ü.\ud800.x",
    ],
)
def test_a_token_that_was_changed_is_not_valid(damage: object) -> None:
    assert callable(damage)
    assert not is_valid_token(KEY, "link", damage(create_token(KEY, "link", 60)))


def test_no_two_tokens_are_alike_and_none_holds_the_key() -> None:
    tokens = {create_token(KEY, "session", 60) for _ in range(10)}
    assert len(tokens) == 10
    assert not any(KEY in token for token in tokens)


def test_a_link_leads_below_the_dashboard() -> None:
    url, _, code = build_link("http://127.0.0.1:4141/own/ui", KEY).partition("?code=")
    assert url == "http://127.0.0.1:4141/own/ui/sign-in"
    assert is_valid_token(KEY, "link", code)


async def test_a_code_is_used_once() -> None:
    records = RecordStore(MemoryStore(), lambda _: None)
    assert [await redeem_code(records, code) for code in ("a", "a", "b")] == [True, False, True]


@pytest.mark.parametrize(
    ("scheme", "host", "port"),
    [
        ("http", "127.0.0.1:4141", "4141"),
        ("http", "localhost", "80"),
        ("https", "localhost", "443"),
        ("http", "[::1]:5", "5"),
        ("http", "", ""),
    ],
)
def test_the_cookie_is_called_by_the_port_that_the_browser_asks(scheme: str, host: str, port: str) -> None:
    assert build_cookie_name(scheme, host) == f"compaction-proxy-{port}"


def test_a_session_is_found_among_the_cookies_of_other_ports() -> None:
    session = create_token(KEY, "session", 60)
    cookies = f"a=b; compaction-proxy-80=planted; compaction-proxy-80={session}; c"
    assert has_session(KEY, "http", Headers({"host": "localhost", "cookie": cookies}))
    assert not has_session(KEY, "http", Headers({"host": "localhost:81", "cookie": cookies}))
    assert not has_session(KEY, "http", Headers({"host": "localhost"}))

"""Who may have requests relayed, where clients must show a key."""

import json
from typing import Any

import pytest

from compaction_proxy.gateway.client_auth import ClientAuthenticator

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
KNOWN = {"server": {"client_keys": ["ck-one", "ck-two"]}, "upstream": {"api_key": "sk-ours"}}
REFUSED = {
    "message": "Send a client key of this proxy (server.client_keys).",
    "type": "invalid_request_error",
    "param": None,
    "code": "invalid_api_key",
}


async def answer(exchange: Any) -> None:
    await exchange.send(OK)


@pytest.mark.parametrize(
    "shown",
    [
        "authorization: Bearer ck-one",
        "authorization: bearer  ck-two ",
        "x-api-key: ck-one",
        "api-key: ck-two",
    ],
)
async def test_a_key_that_is_known_opens_and_never_leaves(wire: Any, chat: Any, shown: str) -> None:
    async with (
        wire.running_upstream(answer) as upstream,
        wire.running_proxy(upstream.port, **KNOWN) as port,
    ):
        replies = [await wire.ask(port, chat(shown)), await wire.ask(port, wire.get("/v1/models", shown))]
    assert [reply.body for reply in replies] == [b"ok", b"ok"]
    assert [len(seen.fields) > 0 for seen in upstream.seen] == [True, True]
    sent = b"".join(name + held for seen in upstream.seen for name, held in seen.fields)
    assert sent.count(b"sk-ours") == 2
    assert b"ck-" not in sent


@pytest.mark.parametrize(
    "shown",
    [
        (),
        ("authorization: Bearer ck-on",),
        ("authorization: Basic ck-one",),
        ("x-other: ck-one",),
        ("api-key:",),
    ],
)
async def test_without_one_nothing_is_relayed_whatever_the_path(
    wire: Any, chat: Any, shown: tuple[str, ...]
) -> None:
    async with (
        wire.running_upstream(answer) as upstream,
        wire.running_proxy(upstream.port, **KNOWN) as port,
    ):
        replies = [await wire.ask(port, chat(*shown)), await wire.ask(port, wire.get("/v1/models", *shown))]
        health = await wire.ask(port, wire.get("/livez"))
    assert [(reply.status, json.loads(reply.body)["error"]) for reply in replies] == [(401, REFUSED)] * 2
    assert (health.status, upstream.seen) == (200, [])


async def test_clients_with_keys_of_their_own_are_tenants_of_their_own(wire: Any) -> None:
    said = wire.chat_body()
    async with (
        wire.running_upstream(answer) as upstream,
        wire.running_proxy(upstream.port, **KNOWN) as port,
    ):
        ids = [
            wire.status_of_ours(
                await wire.ask(
                    port,
                    wire.post(
                        "/v1/chat/completions",
                        said,
                        f"authorization: Bearer ck-{name}",
                        "x-session-id: s",
                        "x-compaction-trigger-tokens: 100000",
                    ),
                )
            )["session"]
            for name in ("one", "two", "one")
        ]
    assert ids[0] == ids[2] != ids[1]


async def test_a_client_is_the_same_tenant_however_it_shows_its_key_and_whatever_else(wire: Any) -> None:
    shown = [
        ["authorization: Bearer ck-one"],
        ["authorization: bearer   ck-one"],
        ["authorization: ck-one"],
        ["x-api-key: ck-one"],
        ["authorization: Bearer ck-one", "x-api-key: invented"],
        ["api-key: invented", "authorization: Bearer ck-one", "authorization: Bearer invented"],
    ]
    others = ("x-session-id: s", "x-compaction-trigger-tokens: 100000")
    async with (
        wire.running_upstream(answer) as upstream,
        wire.running_proxy(upstream.port, **KNOWN) as port,
    ):
        replies = [
            await wire.ask(port, wire.post("/v1/chat/completions", wire.chat_body(), *keys, *others))
            for keys in shown
        ]
    assert len({wire.status_of_ours(reply)["session"] for reply in replies}) == 1
    assert [dict(seen.fields).get(b"x-api-key") for seen in upstream.seen].count(b"sk-ours") == 1
    assert b"invented" not in b"".join(held for seen in upstream.seen for _, held in seen.fields)


async def test_where_another_header_names_tenants_it_does_so_for_known_clients_too(wire: Any) -> None:
    named = {**KNOWN, "session": {"tenant": "header:x-api-key"}}
    others = ("authorization: Bearer ck-one", "x-session-id: s", "x-compaction-trigger-tokens: 100000")
    async with (
        wire.running_upstream(answer) as upstream,
        wire.running_proxy(upstream.port, **named) as port,
    ):
        replies = [
            await wire.ask(
                port, wire.post("/v1/chat/completions", wire.chat_body(), f"x-api-key: {name}", *others)
            )
            for name in ("red", "blue", "red")
        ]
    red, blue, again = [wire.status_of_ours(reply)["session"] for reply in replies]
    assert red == again != blue


PAGES = [
    "https://evil.example",
    "http://127.0.0.1.evil.example",
    "null",
    "http://",
    "http://[::1",
    "https://10.0.0.7",
]
OURS = [
    "http://localhost:3000",
    "https://127.0.0.1",
    "http://[::1]:8080",
    "app://obsidian.md",
    "http://a.localhost",
]


PAYING = [{"upstream": {"api_key": "sk-ours"}}, {"summary": {"model": "none", "api_key": "sk-ours"}}]


@pytest.mark.parametrize("paying", PAYING)
async def test_a_page_of_another_machine_cannot_spend_the_proxy_s_key(
    wire: Any, chat: Any, paying: dict[str, Any]
) -> None:
    async with wire.running_upstream(answer) as upstream:
        async with wire.running_proxy(upstream.port, **paying) as port:
            refused = [await wire.ask(port, chat(f"origin: {page}")) for page in PAGES]
            refused.append(await wire.ask(port, chat("sec-fetch-site: cross-site")))  # an image or a link
            seen = len(upstream.seen)
            served = [await wire.ask(port, chat(f"origin: {page}")) for page in (OURS[0], OURS[-1])]
            served.append(await wire.ask(port, chat("sec-fetch-site: same-site")))
            # A desktop program, and a page of localhost that asks 127.0.0.1, are other sites for a browser.
            served.append(await wire.ask(port, chat("origin: app://a.md", "sec-fetch-site: cross-site")))
        async with wire.running_proxy(upstream.port) as port:  # the page would have to bring a key of its own
            relayed = await wire.ask(port, chat(f"origin: {PAGES[0]}"))
    codes = [(reply.status, json.loads(reply.body)["error"]["code"]) for reply in refused]
    assert (codes, seen) == ([(403, "origin_not_allowed")] * (len(PAGES) + 1), 0)
    assert [reply.body for reply in (*served, relayed)] == [b"ok"] * 5


REBOUND = [
    "evil.example",
    "evil.example:4141",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.example.",
]
NAMES = [
    "localhost:4141",
    "127.0.0.1:4141",
    "[::1]:4141",
    "10.0.0.7",
    "host.docker.internal:4141",
    "mac.local",
    "proxy",
]


async def test_a_page_whose_name_was_pointed_at_this_machine_reads_nothing(wire: Any) -> None:
    def asking(host: str) -> bytes:
        request: bytes = wire.get("/v1/files").replace(b"host: proxy", b"host: " + host.encode())
        return request

    async with (
        wire.running_upstream(answer) as upstream,
        wire.running_proxy(upstream.port, **PAYING[0]) as port,
    ):
        refused = [await wire.ask(port, asking(host)) for host in REBOUND]
        seen = len(upstream.seen)
        served = [await wire.ask(port, asking(host)) for host in NAMES]
    codes = [(reply.status, json.loads(reply.body)["error"]["code"]) for reply in refused]
    assert (codes, seen) == ([(403, "host_not_allowed")] * len(REBOUND), 0)
    assert [reply.body for reply in served] == [b"ok"] * len(NAMES)


def admitted(clients: ClientAuthenticator, *fields: tuple[bytes, bytes]) -> bool:
    """Whether a request with these fields passes, and as it is."""
    return clients.authorize_request(list(fields), dict(fields)) == list(fields)


def test_on_an_address_that_others_reach_the_proxy_may_have_any_name() -> None:
    assert admitted(ClientAuthenticator((), has_provider_key=True), (b"host", b"llm.example.com"))


@pytest.mark.parametrize("origin", OURS)
def test_pages_of_this_machine_and_programs_can(origin: str) -> None:
    assert admitted(ClientAuthenticator((), has_provider_key=True), (b"origin", origin.encode()))


def test_where_no_keys_are_named_everybody_is_served() -> None:
    assert admitted(ClientAuthenticator(()), (b"origin", b"https://evil.example"))

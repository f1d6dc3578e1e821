"""Nothing in a request, and nothing that an upstream answers, chooses where requests and keys go."""

import asyncio
import json
from contextlib import AsyncExitStack
from itertools import product
from typing import Any

import httpx

from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.discovery import HttpWindowDiscovery

CHAT = "/v1/chat/completions"
SUMMARY_MODEL = "summary-small"
CLIENT_KEY, OWN_KEY, SUMMARY_KEY = "the-client-s", "the-proxy-s", "the-summary-provider-s"
# Where a local model server is asked for its window.
LOCAL_PAGES = {b"/props", b"/api/v0/models", b"/api/ps"}
REDIRECTS = (b"301 Moved", b"302 Found", b"303 Other", b"307 Temp", b"308 Perm")


def hosts(port: int) -> list[str]:
    """Names of a place that this machine could reach, as people write them to get past checks."""
    return [
        f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", f"[::ffff:127.0.0.1]:{port}",
        f"0x7f.1:{port}", f"2130706433:{port}", f"0177.0.0.1:{port}", f"127.1:{port}", f"0:{port}",
        f"user@127.0.0.1:{port}", f"user:pass@127.0.0.1:{port}", f"api.openai.com@127.0.0.1:{port}",
        f"127.0.0.1:{port}#@api.openai.com", f"127.0.0.1:{port}?@api.openai.com", f"127.0.0.1.:{port}",
        "169.254.169.254", "metadata.google.internal", f"ⓛocalhost:{port}", f"xn--localhost:{port}",
    ]  # fmt: skip


FIELDS = (
    "host", "x-forwarded-host", "forwarded", "x-original-url", "x-rewrite-url", "x-upstream", "x-base-url",
    "openai-base-url", "x-compaction-upstream", "x-portkey-custom-host", "helicone-target-url",
    "x-forwarded-proto", "proxy-connection", "referer", "origin",
)  # fmt: skip
MEMBERS = ("api_base", "base_url", "custom_host", "endpoint", "host", "upstream", "url")


def tricks(isolation: Any, port: int) -> list[bytes]:
    """Requests that want to reach a port."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello."}]}).encode()
    chat = [f"{scheme}://{host}{CHAT}" for scheme, host in product(("http", "https", "HTTP"), hosts(port))]
    targets = [
        *chat, f"//127.0.0.1:{port}{CHAT}", f"/\\127.0.0.1:{port}{CHAT}", f"/v1/@127.0.0.1:{port}{CHAT}",
        f"@127.0.0.1:{port}{CHAT}", f":{port}{CHAT}", f"/http://127.0.0.1:{port}{CHAT}", f"127.0.0.1:{port}",
        f"{CHAT}?base_url=http://127.0.0.1:{port}", f"ftp://127.0.0.1:{port}{CHAT}",
        f"/..//127.0.0.1:{port}{CHAT}",
        f"/v1/%0d%0aHost:%20127.0.0.1:{port}{CHAT}", f"/%2f127.0.0.1:{port}{CHAT}",
        f";@127.0.0.1:{port}{CHAT}",
    ]  # fmt: skip
    made = [
        isolation.request("POST", target, f"authorization: Bearer {CLIENT_KEY}", body=body)
        for target in targets
    ]
    made.append(isolation.request("CONNECT", f"127.0.0.1:{port}"))
    for name in FIELDS:
        for value in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", f"host=127.0.0.1:{port}"):
            field = f"{name}: {value}"
            made.append(isolation.request("POST", CHAT, field, body=body))
            made.append(isolation.request("GET", "/v1/models", field))
    made.append(isolation.request("POST", CHAT, "host: a", f"host: 127.0.0.1:{port}", body=body))
    made.append(isolation.request("POST", CHAT, f"x-a: b\rhost: 127.0.0.1:{port}", body=body))
    made.append(isolation.request("POST", CHAT, f"x-a: b\nhost: 127.0.0.1:{port}", body=body))
    for name in MEMBERS:
        told = json.dumps({**json.loads(body), name: f"http://127.0.0.1:{port}/v1"}).encode()
        made.append(isolation.request("POST", CHAT, body=told))
    told = json.dumps({**json.loads(body), "model": f"@127.0.0.1:{port}/../x\r\nhost: y"}).encode()
    return [*made, isolation.request("POST", CHAT, "x-compaction-trigger-tokens: 1", body=told)]


def configured(url: str, **sections: Any) -> Any:
    given = {
        "upstream": {"base_url": f"{url}/v1"},
        "store": {"url": "memory://"},
        "summary": {"model": "none"},
        **sections,
    }
    return create_app(Config.model_validate(given))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_no_request_chooses_its_upstream(isolation: Any) -> None:
    async def ok(asked: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(isolation.answer(b"200 OK", b"{}"))

    async with (
        isolation.upstream(ok) as upstream,
        isolation.upstream(ok) as sentinel,
        serve_embedded(configured(upstream.url)) as url,
    ):
        sent = tricks(isolation, sentinel.port)
        replies = [await isolation.ask(port_of(url), raw) for raw in sent]
    statuses = {reply.status for reply in replies if reply is not None}
    assert len(sent) > 150
    assert (sentinel.connections, None in replies) == (0, False)
    assert statuses <= {200, 400, 404, 405, 426}, statuses
    # What went on went to the upstream, under its own name, and below its base.
    assert len(upstream.seen) > 50
    assert {asked.field(b"host") for asked in upstream.seen} == {f"127.0.0.1:{upstream.port}".encode()}
    paths = {asked.target.partition(b"?")[0] for asked in upstream.seen}
    assert {path for path in paths if path != b"/v1" and not path.startswith(b"/v1/")} <= LOCAL_PAGES
    assert all([name for name, _ in asked.fields].count(b"host") == 1 for asked in upstream.seen)


def long_body() -> bytes:
    said = [{"role": role, "content": f"{role} {n} says alpha beta gamma delta " * 8} for n in range(12)
            for role in ("user", "assistant")]  # fmt: skip
    asked = {"model": "small", "messages": [*said, {"role": "user", "content": "And now?"}]}
    return json.dumps(asked).encode()


async def test_no_redirect_is_followed_by_a_relayed_a_summary_or_a_discovery_call(isolation: Any) -> None:
    async def told(asked: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(isolation.answer(b"200 OK", b"{}"))

    async with isolation.upstream(told) as sentinel:

        async def away(asked: Any, writer: asyncio.StreamWriter) -> None:
            status = REDIRECTS[len(elsewhere.seen) % len(REDIRECTS)]
            where = f"location: {sentinel.url}/v1/chat/completions".encode()
            writer.write(isolation.answer(status, b"go", where, b"refresh: 0; url=" + sentinel.url.encode()))

        async with isolation.upstream(away) as elsewhere:
            summary = {"model": SUMMARY_MODEL}
            small = {"small": {"reserve_output": 100, "compaction": {"trigger": [{"tokens": 900}]}}}
            app = configured(elsewhere.url, summary=summary, models=small)
            async with serve_embedded(app) as url:
                fields = f"authorization: Bearer {CLIENT_KEY}"
                replies = [
                    await isolation.ask(
                        port_of(url),
                        isolation.request("POST", CHAT, fields, f"x-session-id: {n}", body=long_body()),
                    )
                    for n in range(6)
                ]
                replies += [
                    await isolation.ask(port_of(url), isolation.request(method, "/v1/models", fields))
                    for method in ("GET", "POST", "DELETE")
                ]
            engine = NativeEngine()
            discovery = HttpWindowDiscovery(EngineTransport(engine))
            found = await discovery.discover_window(
                f"{elsewhere.url}/v1", {"authorization": CLIENT_KEY}, "small"
            )
            await engine.aclose()

    assert (sentinel.connections, found) == (0, None)
    assert [reply.status // 100 for reply in replies if reply is not None] == [3] * len(replies)
    assert all(reply.body == b"go" and sentinel.url in reply.field("location") for reply in replies)
    # Each kind of call was really made, and really answered so.
    kinds = _kinds(elsewhere.seen)
    assert min(kinds.values()) >= 1, kinds


def _kinds(seen: list[Any]) -> dict[str, int]:
    """How many summary calls, discoveries and relayed requests there were."""
    return {
        "summary": sum(SUMMARY_MODEL.encode() in asked.body for asked in seen),
        "discovery": sum(asked.target.endswith(b"/models/small") for asked in seen),
        "relayed": sum(
            asked.target == CHAT.encode() and SUMMARY_MODEL.encode() not in asked.body for asked in seen
        ),
    }


async def test_each_key_goes_to_its_own_origin_only(isolation: Any) -> None:
    async def ok(asked: Any, writer: asyncio.StreamWriter) -> None:
        text = "They said alpha, beta, gamma and delta to one another, again and again."
        said = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
        writer.write(isolation.answer(b"200 OK", json.dumps(said).encode()))

    shown = [f"authorization: Bearer {CLIENT_KEY}", f"x-api-key: {CLIENT_KEY}", f"api-key: {CLIENT_KEY}",
             f"x-goog-api-key: {CLIENT_KEY}",
             f"openai-organization: {CLIENT_KEY}", f"cookie: {CLIENT_KEY}"]  # fmt: skip
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(isolation.upstream(ok))
        summaries = await stack.enter_async_context(isolation.upstream(ok))
        seen: dict[str, tuple[bytes, bytes]] = {}
        for own in ("", OWN_KEY):
            upstream.seen.clear()
            summaries.seen.clear()
            app = configured(
                upstream.url,
                upstream={"base_url": f"{upstream.url}/v1", "api_key": own},
                summary={"model": SUMMARY_MODEL, "base_url": f"{summaries.url}/v1", "api_key": SUMMARY_KEY},
                models={"small": {"window": 1_200}},
            )
            async with serve_embedded(app) as url:
                for n in range(4):
                    raw = isolation.request("POST", CHAT, *shown, f"x-session-id: {n}", body=long_body())
                    reply = await isolation.ask(port_of(url), raw)
                    assert (reply.status, reply.field("x-compaction-status")) == (
                        200,
                        "reused" if n else "applied",
                    )
                await isolation.ask(port_of(url), isolation.request("GET", "/v1/models", *shown))
            seen[own] = _shown(upstream.seen), _shown(summaries.seen)

    for own, (to_upstream, to_summaries) in seen.items():
        keys = {key for key in (CLIENT_KEY, OWN_KEY, SUMMARY_KEY) if key.encode() in to_summaries}
        assert keys == {SUMMARY_KEY}
        assert SUMMARY_KEY.encode() not in to_upstream
        assert (own or CLIENT_KEY).encode() in to_upstream


def _shown(seen: list[Any]) -> bytes:
    """Everything but the bodies of requests."""
    return b"\n".join(b"%b: %b" % field for asked in seen for field in asked.fields)


async def test_an_upstream_that_answers_with_an_address_of_its_own_gets_no_key_there(isolation: Any) -> None:
    """A summary provider elsewhere that sends the call on to the upstream, whose key it would like to see."""

    async def told(asked: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(isolation.answer(b"200 OK", b"{}"))

    async with isolation.upstream(told) as upstream:

        async def back(asked: Any, writer: asyncio.StreamWriter) -> None:
            writer.write(isolation.answer(b"307 Temp", b"", f"location: {upstream.url}{CHAT}".encode()))

        async with isolation.upstream(back) as summaries:
            summary = {"model": SUMMARY_MODEL, "base_url": f"{summaries.url}/v1", "api_key": SUMMARY_KEY}
            app = configured(upstream.url, summary=summary, models={"small": {"window": 1_200}})
            async with serve_embedded(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
                answer = await client.post(CHAT, content=long_body())
    assert (answer.status_code, len(upstream.seen), len(summaries.seen)) == (200, 1, len(summaries.seen))
    assert summaries.seen
    assert SUMMARY_KEY.encode() not in _shown(upstream.seen)

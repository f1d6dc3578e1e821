"""Fifty tenants under the same session ids: none ever meets a word that belongs to another.

A tenant's words stand in its messages, in what the provider answers it, and in what the summary model writes
for it. Half of the conversations are the same for all tenants, to the byte: there nothing but the credential
tells them apart.
"""

import asyncio
import json
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy.core.envelope import content
from tests.redis_servers import RedisServer

CHAT = "/v1/chat/completions"
SUMMARY_MODEL = "summary-small"
TENANTS, SESSIONS = 50, 20
# The last tenants show no key. They are one tenant to the proxy, with different conversations.
ANONYMOUS = range(TENANTS - 3, TENANTS)
AT_ONCE = 16
ADMIN_KEY = "an-admin-key"
SHOWN = f"authorization: Bearer {ADMIN_KEY}"
CANARY = re.compile(rb"kestrel(\d\d)q")
FILLER = "and then we looked at the ledger again, line by line, "


def canary(tenant: int) -> str:
    return f"kestrel{tenant:02d}q"


def credential(tenant: int) -> str | None:
    """Keys that share far more than their first 20 characters; some are equal but for their header."""
    name = "x-api-key" if tenant % 10 == 9 else "authorization"
    scheme = "" if name == "x-api-key" else "Bearer "
    number = tenant - tenant % 10 if tenant % 10 == 9 else tenant
    return None if tenant in ANONYMOUS else f"{name}: {scheme}sk-proj-{'0' * 24}{number:02d}"


def owner(tenant: int) -> int:
    """Whom the proxy takes it for: clients that show no key are one."""
    return min(tenant, ANONYMOUS.start)


def owners(data: bytes) -> set[int]:
    """Whose canaries stand in something."""
    return {owner(int(found)) for found in CANARY.findall(data)}


CREDENTIALS = {credential(tenant): tenant for tenant in range(TENANTS - len(ANONYMOUS))}


def messages(tenant: int, session: int, turns: int) -> list[dict[str, str]]:
    """A conversation of one tenant, or one that every tenant has; some are short enough to pass unread."""
    own = canary(tenant) if session % 2 or tenant in ANONYMOUS else "nothing"
    said = []
    for turn in range(turns):
        said.append({"role": "user", "content": f"Step {turn} of {session}: look for {own}. {FILLER * 3}"})
        said.append({"role": "assistant", "content": f"Step {turn}: I saw {own} in it. {FILLER * 3}"})
    return [*said, {"role": "user", "content": f"And what of {own}?"}]


@dataclass
class Provider:
    """Answers with a canary of whoever asks, whole or as a stream; so does its summary model.

    Attributes:
        foreign: Requests that held a canary of somebody else, with what they held.
        summaries: How many summary calls there were.
    """

    isolation: Any
    rng: random.Random
    foreign: list[tuple[int, str]] = field(default_factory=list)
    summaries: int = 0
    forwarded: int = 0

    def _whose(self, asked: Any, body: dict[str, Any]) -> int | None:
        """Who shows that credential; of anonymous clients the request tells, of their summaries nothing."""
        for name in ("authorization", "x-api-key"):
            shown = asked.field(name.encode()).decode()
            if shown:
                return CREDENTIALS[f"{name}: {shown}"]
        return int(body["user"].partition("-")[0]) if "user" in body else None

    async def __call__(self, asked: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(asked.body)
        tenant = self._whose(asked, body)
        met = {int(found) for found in CANARY.findall(asked.body)}
        allowed = 1 if tenant is None else len(met & {tenant})
        if len(met) > allowed:
            self.foreign.append((-1 if tenant is None else tenant, str(sorted(met))))
        await asyncio.sleep(self.rng.random() * 0.02)
        if body["model"] == SUMMARY_MODEL:
            self.summaries += 1
            text = "They looked at the ledger and found " + (canary(tenant) if tenant is not None else "it.")
            writer.write(self.isolation.answer(b"200 OK", said(text)))
            return
        self.forwarded += 1
        name = canary(tenant if tenant is not None else TENANTS)
        if not body.get("stream"):
            writer.write(self.isolation.answer(b"200 OK", said(f"{name} {body['user']}")))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for piece in (name, body["user"], "end"):
            event = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % piece.encode()
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.write(b"0\r\n\r\n")


def said(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


@dataclass
class Told:
    """What clients saw.

    Attributes:
        wrong: Answers that held somebody else's canary, or were to another request.
        conversations: Whose each conversation is that the proxy has named.
    """

    wrong: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    conversations: dict[str, int] = field(default_factory=dict)

    def saw(self, tenant: int, number: str, reply: Any) -> None:
        """An answer that one has got to the end."""
        met = {int(found) for found in CANARY.findall(reply.head + reply.body)}
        if reply.status != 200 or met != {tenant} or number.encode() not in reply.body:
            self.wrong.append(f"{number}: {reply.status} {sorted(met)}")
        status = reply.field("x-compaction-status")
        self.statuses[status] += 1
        name = reply.field("x-compaction-session")
        if not name:
            return
        known = self.conversations.pop(name, owner(tenant))
        if known != owner(tenant):
            self.wrong.append(f"{number}: {name} is also of {known}")
        self.conversations[name] = known  # the latest is the last


class Crowd:
    """All tenants, who ask at random and leave at random."""

    def __init__(self, isolation: Any, rng: random.Random) -> None:
        self._isolation = isolation
        self._rng = rng
        self._number = 0
        self.told = Told()
        self.left = 0
        self.lost = 0

    async def asks(self, ports: list[int], requests: int) -> None:
        """So many requests, some at once."""
        counter = iter(range(requests))

        async def one() -> None:
            for _ in counter:
                await self._ask(self._rng.choice(ports))

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    async def _ask(self, port: int) -> None:
        rng = self._rng
        self._number += 1
        tenant, session = rng.randrange(TENANTS), rng.randrange(SESSIONS)
        number = f"{tenant}-{self._number}-"
        turns = rng.choice((1, 9, 10, 11, 12, 14))
        model = ("plain", "anchored")[session % 4 // 2]
        body: dict[str, Any] = {"model": model, "user": number, "messages": messages(tenant, session, turns)}
        if rng.random() < 0.5:
            body["stream"] = True
        shown = credential(tenant)
        fields = [f"x-session-id: session-{session}", *([shown] if shown else [])]
        raw = self._isolation.request("POST", CHAT, *fields, body=json.dumps(body).encode())
        leaves = rng.random() * 0.06 if rng.random() < 0.2 else None
        reply = await self._isolation.ask(port, raw, leave_after_s=leaves)
        if leaves is not None:
            self.left += 1
        elif reply is None or not _whole(reply, number):
            self.lost += 1  # its proxy was ended
        else:
            self.told.saw(tenant, number, reply)


def _whole(reply: Any, number: str) -> bool:
    """Whether an answer has come to its end; one that was cut may lack what tells whose it is."""
    if "chunked" in reply.field("transfer-encoding"):
        return bool(reply.body.endswith(b"0\r\n\r\n"))
    return len(reply.body) == int(reply.field("content-length") or -1)


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[tuple[str, RedisServer | None]]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'state.db'}", None
        return
    with RedisServer(folder) as server:
        yield server.url, server


@asynccontextmanager
async def running(isolation: Any, provider: Provider, **settings: str) -> AsyncIterator[list[Any]]:
    """Two replicas before a provider."""
    models = {
        "plain": {"window": 2_000, "compaction": {"strategy": "chained", "keep": {"messages": 4}}},
        "anchored": {"window": 2_000},
    }
    async with (
        isolation.upstream(provider) as upstream,
        isolation.proxies(
            2,
            upstream__base_url=f"{upstream.url}/v1",
            summary__model=SUMMARY_MODEL,
            summary__calls_per_hour="0",
            server__admin_key=ADMIN_KEY,
            models=json.dumps(models),
            **settings,
        ) as proxies,
    ):
        yield proxies


async def admin_answers(isolation: Any, port: int, name: str) -> bytes:
    """Everything that the admin API tells of a conversation and of what rounds took out of it."""
    start = f"/admin/v1/conversations/{name}"
    found = b""
    for path in ("", "/events", "/pins", "/search?q=kestrel", "/search?q=ledger&limit=100"):
        reply = await isolation.ask(port, isolation.request("GET", start + path, SHOWN))
        assert reply is not None
        if reply.status == 404:
            return found  # what was stored before Redis was started again is gone
        assert reply.status == 200, (path, reply.body)
        found += reply.body
    for message in sorted(set(re.findall(rb'"message_id": "(m_\w+)"', found)))[:5]:
        path = f"{start}/messages/{message.decode()}"
        reply = await isolation.ask(port, isolation.request("GET", path, SHOWN))
        assert reply is not None
        found += reply.body
    return found


async def foreign_in_admin(isolation: Any, port: int, names: dict[str, int]) -> tuple[list[str], int]:
    """Conversations whose answers hold canaries of others, and how many hold one of their own."""
    foreign, own = [], 0
    for name, tenant in names.items():
        met = owners(await admin_answers(isolation, port, name))
        own += tenant in met
        if met - {tenant}:
            foreign.append(f"{name} of {tenant}: {sorted(met)}")
    return foreign, own


def foreign_in_store(url: str, isolation: Any) -> list[str]:
    """Records that hold canaries of several tenants, or keys that hold any."""
    found = []
    for key, values in isolation.stored(url).items():
        held = b"\n".join(content(value) or value for value in values)
        if len(owners(held)) > 1 or CANARY.search(key) or b"session-" in key or b"sk-" in key:
            found.append(key.decode())
    return found


@pytest.mark.timeout(600)  # with --runslow
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_fifty_tenants_under_the_same_session_ids_never_meet_each_other(
    isolation: Any, kind: str, pytestconfig: pytest.Config
) -> None:
    slow = pytestconfig.getoption("--runslow")
    requests, restarts = (5_000, 6) if slow else (500, 2)
    rng = random.Random(f"{kind} 6")
    provider, crowd = Provider(isolation, rng), Crowd(isolation, rng)
    with store_of(kind, isolation.folder) as (url, server):
        async with running(isolation, provider, store__url=url) as proxies:
            ports = [each.port for each in proxies]
            share = requests // (restarts + 1)
            for number in range(restarts):
                asking = asyncio.create_task(crowd.asks(ports, share))
                await asyncio.sleep(0.5 + rng.random() / 2)
                ended = proxies[number % 2]
                await ended.end(signal.SIGKILL if number % 2 else signal.SIGTERM)
                if server is not None and number % 2:
                    server.kill()
                    server.start()
                await ended.start()
                await asking
            await crowd.asks(ports, requests - restarts * share)
            names = dict(list(crowd.told.conversations.items())[-400 if slow else -25 :])
            foreign, own = await foreign_in_admin(isolation, ports[0], names)
            pages = [
                await isolation.ask(ports[0], isolation.request("GET", path))
                for path in ("/metrics", "/ui", "/readyz", "/admin/v1/openapi.json")
            ]
            mixed = foreign_in_store(url, isolation)
        output = b"".join(each.output.read_bytes() for each in proxies)

    assert (provider.foreign, crowd.told.wrong, foreign, mixed) == ([], [], [], [])
    assert CANARY.findall(output) == []
    assert not [page for page in pages if page is None or CANARY.search(page.body)]
    # All of this happened to conversations that were compacted, and found again.
    statuses = crowd.told.statuses
    assert provider.summaries > requests / 10, provider.summaries
    assert statuses["applied"] + statuses["reused"] > requests / 3, statuses
    assert own > len(names) / 4, own
    assert crowd.left > requests / 10
    assert crowd.lost < requests / 4, crowd.lost
    assert sum(statuses.values()) + crowd.left + crowd.lost == requests


async def test_clients_that_are_made_one_tenant_are_seen_to_share_a_summary(isolation: Any) -> None:
    """What the test above looks for is there to be seen, where the configuration lets tenants share."""
    rng = random.Random(6)
    provider, crowd = Provider(isolation, rng), Crowd(isolation, rng)
    settings = {"store__url": f"sqlite:///{isolation.folder / 'state.db'}", "session__tenant": "none"}
    async with running(isolation, provider, **settings) as proxies:
        await crowd.asks([each.port for each in proxies], 80)
    assert provider.foreign
    assert crowd.told.wrong

"""Fifty tenants who ask at random and leave at random, and a provider that knows whose words it is sent."""

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.summaries import put_as_asked

CHAT = "/v1/chat/completions"
SUMMARY_MODEL = "summary-small"
TENANTS, SESSIONS = 50, 20
# The last tenants show no key. They are one tenant to the proxy, with different conversations.
ANONYMOUS = range(TENANTS - 3, TENANTS)
AT_ONCE = 16
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
            writer.write(self.isolation.answer(b"200 OK", said(put_as_asked(text, asked.body.decode()))))
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

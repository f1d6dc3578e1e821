"""What clients send at once under one session id: agents, titles, retries, branches, two users with one key.

Every line holds a marker of its conversation. So a summary of one conversation in a request of another shows.
"""

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.summaries import put_as_asked

FILLER = "and then we looked at the ledger again, line by line, "
MARK = re.compile(rb"kestrel(\d+)q")
SUMMARY_MODEL = "summary-small"
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
TURNS = (6, 7, 9, 11)
COUNTED_LIMIT_S = 60.0
# Session, agent: two users, each with a main agent and two that it has called, and a client without ids.
LANES = [(session, agent) for session in ("s-0", "s-1") for agent in ("", "a-1", "a-2")] + [("", "")]


def said(number: int, turns: int, *, branch: int = 0) -> list[dict[str, str]]:
    """A conversation; its last two turns are of the branch."""
    made = []
    for turn in range(turns):
        mark = f"kestrel{number}q" + (f" of branch {branch}" if branch and turn >= turns - 2 else "")
        made.append({"role": "user", "content": f"Step {turn}: look for {mark}. {FILLER * 5}"})
        made.append({"role": "assistant", "content": f"Step {turn}: I saw {mark} in it. {FILLER * 5}"})
    return [*made, {"role": "user", "content": f"And what of kestrel{number}q?"}]


@dataclass
class Provider:
    """Knows by a request's number whose it is, and notes what else is in it."""

    isolation: Any
    foreign: list[tuple[int, set[int]]] = field(default_factory=list)

    async def __call__(self, asked: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(asked.body)
        met = {int(found) for found in MARK.findall(asked.body)}
        text = f"The matter is {' '.join(f'kestrel{each}q' for each in sorted(met))}, which was looked for."
        if body["model"] != SUMMARY_MODEL and met != {int(body["user"])}:
            self.foreign.append((int(body["user"]), met))
        message = {"role": "assistant", "content": put_as_asked(text, asked.body.decode())}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        writer.write(self.isolation.answer(b"200 OK", json.dumps({"choices": [choice]}).encode()))


async def requests_counted(isolation: Any, port: int) -> dict[str, int]:
    """Requests of each conversation that the admin API lists."""
    shown = isolation.request("GET", "/admin/v1/conversations", "authorization: Bearer an-admin-key")
    listed = json.loads((await isolation.ask(port, shown)).body)["conversations"]
    return {each["id"]: each["requests"] for each in listed}


async def test_nothing_of_one_conversation_is_applied_to_another_and_each_is_reused(isolation: Any) -> None:
    provider = Provider(isolation)
    statuses: Counter[str] = Counter()
    names: dict[int, set[str]] = {number: set() for number in range(len(LANES))}
    models = {"m": {"window": 2_000, "compaction": {"strategy": "chained", "keep": {"messages": 4}}}}

    async def ask(number: int, messages: list[dict[str, str]], *fields: str, **more: Any) -> str:
        session, agent = LANES[number]
        body = {"model": "m", "user": str(number), "messages": messages, **more}
        shown = [f"x-claude-code-session-id: {session}"] if session else []
        shown += [f"x-claude-code-agent-id: {agent}"] if agent else []
        key = "authorization: Bearer sk-shared"
        raw = isolation.request(
            "POST", "/v1/chat/completions", key, *shown, *fields, body=json.dumps(body).encode()
        )
        reply = await isolation.ask(port, raw)
        assert reply.status == 200
        if reply.field("x-compaction-session") and not fields:
            names[number].add(reply.field("x-compaction-session"))
        statuses[reply.field("x-compaction-status")] += 1
        return str(reply.field("x-compaction-status"))

    async def lives(number: int, rng: random.Random) -> None:
        title = [{"role": "user", "content": f"Name this: kestrel{number}q"}]
        for turns in TURNS:
            sent = said(number, turns)
            await ask(number, sent, tools=TOOLS)
            again = await ask(number, sent, "x-stainless-retry-count: 1", tools=TOOLS)
            assert again == "reused"
            await asyncio.sleep(rng.random() * 0.01)
            await ask(number, said(number, turns, branch=1 + rng.randrange(2)), tools=TOOLS)
            await ask(number, title)
            await ask(number, title, max_tokens=1)

    async with (
        isolation.upstream(provider) as upstream,
        isolation.proxies(
            1,
            upstream__base_url=f"{upstream.url}/v1",
            summary__model=SUMMARY_MODEL,
            summary__calls_per_hour="0",
            store__url="memory://",
            server__admin_key="an-admin-key",
            models=json.dumps(models),
        ) as proxies,
    ):
        port = proxies[0].port
        await asyncio.gather(*(lives(number, random.Random(number)) for number in range(len(LANES))))
        named = [next(iter(names[number])) for number in range(len(LANES) - 1)]
        own = dict.fromkeys(named, 3 * len(TURNS))  # without side calls
        async with asyncio.timeout(COUNTED_LIMIT_S):  # done behind the requests
            while (counted := await requests_counted(isolation, port)) | own != counted:  # noqa: ASYNC110 - a process
                await asyncio.sleep(0.1)

    assert provider.foreign == []
    assert [len(names[number]) for number in range(len(LANES) - 1)] == [1] * len(named)
    assert len(set(named)) == len(named)
    assert statuses == {name: statuses[name] for name in ("none", "reused", "applied")}
    assert statuses["reused"] > len(LANES) * len(TURNS)  # each retry, and most of the branches

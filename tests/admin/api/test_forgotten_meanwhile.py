"""What is deleted while a request of it is under way stays deleted."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from compaction_proxy.storage.memory import MemoryStore

FILLER = "and then we looked at the ledger once more, line by line. " * 4
LONG, LONGER = 61, 101
# What was learned of the model and what all have used belong to no conversation; some lists name ids
# until they expire, and nobody is shown one that was deleted.
OF_NOBODY = {"model", "hours", "writers", "recent", "compacted"}


class Kept(MemoryStore):
    """A store whose keys are seen, also when everything has ended."""

    async def close(self) -> None:
        """Nothing is forgotten."""

    def names(self) -> set[str]:
        """Kinds of what is stored of conversations, and of whoever they belong to."""
        return {key.partition("}:")[2].partition(":")[0] for key in self._items} - OF_NOBODY


class Held:
    """An upstream whose next call waits, once told to, until it may go on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.holds = False
        self.reached, self.may_go = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.holds:
            self.holds = False
            self.reached.set()
            await self.may_go.wait()
        await self._app(scope, receive, send)


@dataclass
class Scene:
    client: httpx.AsyncClient
    store: Kept
    upstream: Held

    async def ask(self, count: int, **more: str) -> httpx.Response:
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": next(roles), "content": f"{n}: /srv/a.py. {FILLER}"} for n in range(count)]
        body = {"model": "demo-agent", "messages": messages, "max_tokens": 16}
        headers = {"authorization": "Bearer k", "x-session-id": "s", **more}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def held(self, count: int, meanwhile: Awaitable[object]) -> str:
        """The status of a request during whose first call of the upstream something happens."""
        self.upstream.holds = True
        asking = asyncio.create_task(self.ask(count))
        await self.upstream.reached.wait()
        await meanwhile
        self.upstream.may_go.set()
        status: str = (await asking).headers["x-compaction-status"]
        return status

    async def delete(self, path: str) -> None:
        answer = await self.client.delete(f"/admin/v1/conversations/{path}")
        assert answer.status_code == 200, answer.text


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    upstream, store = Held(DemoProvider(DemoProviderSettings(CharacterCounter(), window=4_096))), Kept()
    async with serve_embedded(upstream) as url:
        config = Config.model_validate(
            {
                "server": {"admin_key": "none"},
                "upstream": {"base_url": f"{url}/v1"},
                "summary": {"model": "demo-summary"},
                "models": {"*": {"window": 4_096}},
            }
        )
        async with (
            serve_embedded(create_app(config, store=store)) as proxy,
            httpx.AsyncClient(base_url=proxy, timeout=100) as client,
        ):
            yield Scene(client, store, upstream)


@pytest.mark.parametrize("what", ["", "/tenant"], ids=["conversation", "tenant"])
@pytest.mark.parametrize("count", [3, LONG], ids=["whose answer comes", "whose round is made"])
async def test_a_request_under_way_writes_nothing_of_what_is_deleted(count: int, what: str) -> None:
    async with scene() as here:
        read = {"x-compaction": "shadow"}  # too short to be read otherwise
        session = (await here.ask(1, **read)).headers["x-compaction-session"]
        status = await here.held(count, here.delete(session + what))
        shown = await here.client.get(f"/admin/v1/conversations/{session}")
    # the proxy has ended and written all that waited
    assert (status, shown.status_code) == ("none" if count < LONG else "applied", 404)
    assert here.store.names() == set()


async def test_what_comes_after_a_deletion_is_kept_again() -> None:
    async with scene() as here:
        session = (await here.ask(LONG)).headers["x-compaction-session"]
        await here.held(LONGER, here.delete(session))
        statuses = [(await here.ask(count)).headers["x-compaction-status"] for count in (LONG, LONG)]
        told = (await here.client.get(f"/admin/v1/conversations/{session}")).json()

    assert statuses == ["applied", "reused"]
    assert len(told["rounds"]) == 1
    assert here.store.names() >= {"checkpoint", "checkpoints", "conversation", "archive", "roots", "tenant"}

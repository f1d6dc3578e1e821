"""`POST /admin/v1/replay` over real sockets."""

import json
import sys
from collections.abc import AsyncIterator
from functools import partial

import httpx
import pytest

from compaction_proxy.admin.api.overview import create_conversation_loader
from compaction_proxy.admin.api.routing import AdminApi
from compaction_proxy.admin.app import create_admin_app
from compaction_proxy.admin.auth import MAX_REPLAY_BYTES, AccessPolicy
from compaction_proxy.admin.health import Readiness
from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.jobs import ReplayJobRunner
from compaction_proxy.storage.memory import MemoryStore
from tests.helpers.watched import Watched

TALK = [
    {"role": role, "content": f"{role} {number}: " + "some words " * 120}
    for number in range(12)
    for role in ("user", "assistant")
]


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    # On a busy machine a rehearsal of a second takes longer than the 30 s that the admin API allows.
    patient = partial(ReplayJobRunner, timeout_s=100.0)
    monkeypatch.setattr("compaction_proxy.replay.jobs.ReplayJobRunner", patient)
    provider = DemoProvider(DemoProviderSettings(TiktokenCounter(lambda _: None), window=100_000))
    async with serve_embedded(provider) as upstream:
        config = Config.model_validate(
            {
                "server": {"admin_key": "none"},
                "upstream": {"base_url": f"{upstream}/v1"},
                "store": {"url": "memory://"},
                "summary": {"model": "demo-summary"},
                "compaction": {"trigger": [{"tokens": 1_500}]},
            }
        )
        async with (
            serve_embedded(create_app(config)) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            yield client


async def test_a_pasted_and_a_stored_conversation_are_played(client: httpx.AsyncClient) -> None:
    body = {"model": "demo-agent", "messages": TALK[:-1]}
    chat = await client.post("/v1/chat/completions", json=body, headers={"x-session-id": "talk"})
    conversation = chat.headers["x-compaction-session"]
    pasted = await client.post("/admin/v1/replay", json={**body, "strategies": ["prune", "full"]})
    stored = await client.post("/admin/v1/replay", json={"conversation": conversation, "window": 50_000})
    assert [chat.status_code, pasted.status_code, stored.status_code] == [200, 200, 200]
    told = [(each["strategy"], each["requests"], each["failed"]) for each in pasted.json()["results"]]
    assert told == [("prune", 12, 0), ("full", 12, 0)]
    [result] = stored.json()["results"]
    assert (result["model"], result["window"], result["requests"]) == ("demo-agent", 50_000, 12)
    assert result["sent_tokens"] == pasted.json()["results"][0]["sent_tokens"]


async def test_what_cannot_be_played_is_refused(client: httpx.AsyncClient) -> None:
    answers = [
        await client.post("/admin/v1/replay", content=content)
        for content in (
            b"no",
            b'{"conversation": "c_unknown"}',
            b" " * (MAX_REPLAY_BYTES + 1),
            b'{"messages": []}',
        )
    ]
    assert [each.status_code for each in answers] == [400, 404, 413, 400]
    assert {tuple(json.loads(each.content)) for each in answers} == {("error",)}


async def test_a_rehearsal_that_crashes_is_an_error_in_openai_s_shape() -> None:
    command = (sys.executable, "-c", "raise MemoryError('all of it')")
    here = Watched(MemoryStore(), 60.0)
    playing = ReplayJobRunner(Config(), create_conversation_loader(here.steering, here.watching), command)
    ready = Readiness(ready=True, store="ok", version="1")
    api = AdminApi(here.steering, here.watching, playing, AccessPolicy("127.0.0.1", "none"))
    async with (
        serve_embedded(create_admin_app(lambda: ready, "", api)) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        answer = await client.post("/admin/v1/replay", json={"messages": TALK})
    said = "The replay failed: MemoryError: all of it"
    told = {"message": said, "type": "server_error", "param": None, "code": "rehearsal_failed"}
    assert (answer.status_code, answer.json()) == (500, {"error": told})

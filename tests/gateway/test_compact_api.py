"""`POST /v1/compact` on a socket: what it answers, whom, and that nothing is kept of it."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import (
    AGENT_MODEL,
    SUMMARY_MODEL,
    DemoProvider,
    DemoProviderSettings,
)
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.compact_api import parse_compact_request
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.storage.memory import MemoryStore
from tests.doubles.faulty_provider import Fault, FaultyProvider

BROKEN_MODEL = "broken-summary"
PORT = "The port of part"
RULE = "Never restart the queue by hand."


class Watched(MemoryStore):
    """A store that remembers which keys were written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    async def commit(self, claim: Any, also: Any = (), *, lease: Any = None) -> bytes | None:
        self.written += [claim.key, *(each.key for each in also)]
        return await super().commit(claim, also, lease=lease)

    async def write(self, items: Any) -> None:
        self.written += [each.key for each in items]
        await super().write(items)


class Stack:
    """The proxy before a provider."""

    def __init__(self, url: str, store: Watched, provider: DemoProvider) -> None:
        self.url = url
        self.store = store
        self.provider = provider

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=100, trust_env=False)

    def post(self, body: Any, path: str = "/v1/compact", **headers: str) -> httpx.Response:
        shown = {
            "authorization": "Bearer sk-theirs",
            **{name.replace("_", "-"): headers[name] for name in headers},
        }
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=raw, headers=shown, timeout=100, trust_env=False)


@asynccontextmanager
async def running(**sections: Any) -> AsyncIterator[Stack]:
    counter, broken = TiktokenCounter(lambda _: None), {BROKEN_MODEL: Fault(status=400)}
    settings = DemoProviderSettings(counter, models=(AGENT_MODEL, SUMMARY_MODEL, BROKEN_MODEL))
    provider, store = FaultyProvider(settings, broken), Watched()
    async with serve_embedded(provider) as upstream:
        given = {
            "upstream": {"base_url": f"{upstream}/v1", **sections.pop("upstream", {})},
            "store": {"url": "memory://"},
            "summary": {"model": SUMMARY_MODEL},
            "models": {"broken": {"summary": {"model": BROKEN_MODEL}}},
            **sections,
        }
        async with serve_embedded(create_app(Config.model_validate(given), store=store)) as url:
            yield Stack(url, store, provider)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running()) as made:
        yield made


def said(turns: int = 20) -> list[dict[str, Any]]:
    """A conversation with privileged messages, a rule and tool calls; every byte of it is a client's."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{RULE} {PORT} {turn} is {4000 + turn}. " * 6})
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append(
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": f"Part {turn} waits. " * 60}
        )
        messages.append({"role": "assistant", "content": f"Part {turn} is read. " * 20, "x_extra": [turn]})
    return [
        *messages,
        {"role": "developer", "content": "Use metric units."},
        {"role": "user", "content": "Next?"},
    ]


def asked(model: str = AGENT_MODEL, **wishes: Any) -> dict[str, Any]:
    return {"model": model, "messages": said(), **wishes}


def is_sound(messages: list[dict[str, Any]]) -> bool:
    """Whether every call is answered by what follows it, and nothing else answers one."""
    open_calls: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                return False
            open_calls.remove(message["tool_call_id"])
        elif open_calls:
            return False
        open_calls |= {call["id"] for call in message.get("tool_calls") or ()}
    return not open_calls


def privileged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in messages if each["role"] in {"system", "developer"}]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_list_comes_back_shorter_and_valid(stack: Stack, strategy: str) -> None:
    answer = stack.post(asked(strategy=strategy, target_tokens=3_000))
    told = answer.json()
    assert (answer.status_code, set(told), told["object"]) == (
        200,
        {"object", "messages", "report"},
        "compaction",
    )
    report, messages = told["report"], told["messages"]
    assert (report["status"], report["strategy"]) == ("applied", strategy)
    assert report["tokens_after"] <= 3_000 < report["tokens_before"]
    assert (report["messages_before"], report["messages_after"]) == (len(said()), len(messages))
    assert is_sound(messages)
    assert [each for each in privileged(messages) if each in said()] == privileged(said())
    assert len(privileged(messages)) == 2 + (strategy == "split")  # whose summary stands among them
    assert "Next?" in messages[-1]["content"] if strategy == "full" else messages[-1] == said()[-1]


def test_the_caller_s_key_pays_for_the_summary_and_nothing_is_kept(stack: Stack) -> None:
    before, seen = list(stack.store.written), len(stack.provider.log)
    report = stack.post(asked(trigger_tokens=4_000)).json()["report"]
    assert (report["summary_model"], report["reason"]) == (SUMMARY_MODEL, None)
    calls = stack.provider.log[seen:]
    assert {dict(call.headers)["authorization"] for call in calls} == {"Bearer sk-theirs"}
    assert {call.path for call in calls} == {"/v1/chat/completions"}
    # But for what the summary took, which the statistics of the hour may tell by now.
    kinds = {key.partition("}:")[2].partition(":")[0] for key in stack.store.written[len(before) :]}
    assert kinds <= {"hours", "writers"}


@pytest.mark.parametrize("strategy", ["anchored", "full", "iterations", "chained"])
def test_without_a_summary_a_text_without_a_model_stands_in_and_the_report_says_why(
    stack: Stack, strategy: str
) -> None:
    told = stack.post(asked("broken", strategy=strategy, trigger_tokens=4_000)).json()
    report = told["report"]
    assert (report["status"], report["reason"], report["summary_model"]) == ("applied", "http-400", None)
    assert report["tokens_after"] < report["tokens_before"]
    assert is_sound(told["messages"])


def test_what_cannot_come_under_the_target_is_said_to_be_over_it(stack: Stack) -> None:
    report = stack.post(asked(target_tokens=20)).json()["report"]
    assert (report["status"], report["tokens_after"] > 20) == ("over-limit", True)


def test_a_list_that_is_under_its_target_comes_back_as_it_is_and_costs_nothing(stack: Stack) -> None:
    seen = len(stack.provider.log)
    told = stack.post(asked(target_tokens=10**8)).json()
    assert told["messages"] == said()
    assert (told["report"]["status"], told["report"]["summary_model"]) == ("none", None)
    assert len(stack.provider.log) == seen


def test_a_list_with_nothing_to_take_comes_back_byte_for_byte(stack: Stack) -> None:
    messages = b'[ {"role":"user", "content":"\\u0048i", "n":1e3} ]'
    answer = stack.post(b'{"model":"m","messages":' + messages + b"}")
    assert messages in answer.content
    report = answer.json()["report"]
    assert (report["status"], report["reason"]) == ("none", "nothing-to-take")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "not_json"),
        (b'{"model": "m"}', "no_messages"),
        (b'{"model": "m", "messages": [1]}', "no_messages"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model_required"),
        (asked(strategy="shorter"), "unknown_strategy"),
        (asked(strategy={"a": 1}), "unknown_strategy"),
        (asked(target_tokens=0), "invalid_tokens"),
        (asked(target_tokens=True), "invalid_tokens"),
        (asked(trigger_tokens="9" * 5_000), "invalid_tokens"),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": %s}]}' % (b"[" * 200 + b"]" * 200),
            "too_deep",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_the_provider_s_shape(stack: Stack, body: Any, code: str) -> None:
    answer = stack.post(body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", code)


def test_only_a_plain_post_is_answered(stack: Stack) -> None:
    got = httpx.get(f"{stack.url}/v1/compact", trust_env=False)
    encoded = stack.post(asked(), content_encoding="gzip")  # it is not
    assert (got.status_code, encoded.status_code) == (405, 415)
    assert got.headers["allow"] == "POST"


async def test_it_lives_below_the_base_path_and_is_for_known_clients_and_no_pages() -> None:
    server = {"base_path": "/ours", "client_keys": ["sk-theirs"], "max_body_bytes": 50_000}
    async with running(server=server) as stack, stack.client() as client:
        post = partial(client.post, json=asked(target_tokens=3_000))
        known = {"authorization": "Bearer sk-theirs"}
        statuses = [
            (await post("/ours/v1/compact", headers=known)).status_code,
            (await post("/ours/v1/compact")).status_code,
            (await client.post("/ours/v1/compact", headers=known, content=b" " * 50_001)).status_code,
        ]
    assert statuses == [200, 401, 413]


async def test_a_page_spends_no_key_of_the_proxy() -> None:
    async with (
        running(summary={"model": SUMMARY_MODEL, "api_key": "sk-ours"}) as stack,
        stack.client() as client,
    ):
        page = await client.post("/v1/compact", json=asked(), headers={"origin": "https://evil.example"})
        public = await client.post("/v1/compact", json=asked(), headers={"host": "evil.example"})
    assert (page.status_code, public.status_code, stack.provider.log) == (403, 403, ())


async def test_a_proxy_that_is_told_to_make_compaction_items_does_not_ask_the_upstream_for_them() -> None:
    body = {"model": AGENT_MODEL, "input": [*said(1)[:2], {"type": "compaction_trigger"}]}
    async with running(upstream={"responses_compact": "answer"}) as stack, stack.client() as client:
        answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200  # the provider knows no such path
    assert [item["type"] for item in answer.json()["output"]] == ["compaction"]


def test_members_that_are_not_ours_are_let_pass() -> None:
    wants = parse_compact_request(
        json.dumps(asked(temperature=0.2, tools=[{"type": "function"}], target_tokens=9)).encode()
    )
    assert (wants.strategy, wants.trigger_tokens, wants.target_tokens) == (None, None, 9)
    assert wants.body.prompt_members == ('[{"type": "function"}]',)
    with pytest.raises(RequestRefusedError):
        parse_compact_request(b"[]")

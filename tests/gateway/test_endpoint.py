"""The endpoint of the compacted paths over real sockets, with the demo's provider behind it."""

import gzip
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import structlog

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import (
    AGENT_MODEL,
    DemoProvider,
    DemoProviderSettings,
)
from compaction_proxy.cli.demo.run import WINDOW_TOKENS, build_demo_config
from compaction_proxy.cli.demo.validation import OVERFLOW
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter

PATH = "/v1/chat/completions"
BODY = json.dumps({"model": AGENT_MODEL, "messages": [{"role": "user", "content": "Hello"}]}).encode()


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> DemoProvider:
    """A provider whose window has as many tokens as the parameter says."""
    window = getattr(request, "param", WINDOW_TOKENS)
    return DemoProvider(DemoProviderSettings(CharacterCounter(), window=window))


@pytest.fixture
async def client(provider: DemoProvider) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_embedded(provider) as provider_url,
        serve_embedded(create_app(build_demo_config(provider_url))) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as made,
    ):
        yield made


def ours(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("x-compaction")}


async def test_a_request_that_passes_the_gate_carries_its_status_its_reason_and_its_session(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post(PATH, content=BODY)
    said = ours(answer)
    assert answer.status_code == 200
    assert (said.pop("x-compaction-status"), said.pop("x-compaction-reason")) == ("none", "small")
    assert list(said) == ["x-compaction-session"]


async def test_a_body_that_cannot_be_decoded_is_relayed_as_it_came_and_says_why(
    client: httpx.AsyncClient, provider: DemoProvider
) -> None:
    packed = gzip.compress(BODY)[:-1]
    answer = await client.post(PATH, content=packed, headers={"content-encoding": "gzip"})
    assert ours(answer) == {"x-compaction-status": "none", "x-compaction-reason": "encoded"}
    assert provider.log[-1].body == packed


async def test_a_path_outside_the_base_is_refused_before_any_work_for_it(
    client: httpx.AsyncClient, provider: DemoProvider
) -> None:
    messages = [{"role": role, "content": "one word " * 200} for role in ("user", "assistant") * 4]
    body = {"model": AGENT_MODEL, "messages": [*messages, {"role": "user", "content": "Hello"}]}
    with structlog.testing.capture_logs() as logged:
        answer = await client.post(
            "/v1/%2e%2e/chat/completions", json=body, headers={"x-compaction": "force"}
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_path")
    assert [line for line in logged if line["log_level"] == "error"] == []
    assert not provider.log


@pytest.mark.parametrize("given", ["a", "a b", "x" * 129, ""])
async def test_the_provider_gets_the_request_id_that_the_client_is_told(
    client: httpx.AsyncClient, provider: DemoProvider, given: str
) -> None:
    answer = await client.post(PATH, content=BODY, headers={"x-request-id": given, "x-compaction": "shadow"})
    told = answer.headers["x-compaction-request-id"]
    assert (told == given) == (given == "a")
    fields = provider.log[-1].headers
    assert [value for name, value in fields if name == "x-request-id"] == [told]


async def test_a_header_of_ours_that_makes_no_sense_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, content=BODY, headers={"x-compaction-trigger-tokens": "9" * 5_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_compaction_header")


@pytest.mark.parametrize("provider", [3_000], indirect=True)
async def test_a_request_that_the_upstream_refuses_as_too_long_is_sent_again_shorter(
    client: httpx.AsyncClient, provider: DemoProvider
) -> None:
    messages = [{"role": role, "content": "one word " * 200} for role in ("user", "assistant") * 4]
    body = {"model": AGENT_MODEL, "messages": [*messages, {"role": "user", "content": "Hello"}]}
    answer = await client.post(PATH, json=body)
    assert (answer.status_code, ours(answer)["x-compaction-status"]) == (200, "applied")
    told = [(seen.status, seen.code) for seen in provider.log if seen.model == AGENT_MODEL]
    assert told == [(400, OVERFLOW), (200, "")]

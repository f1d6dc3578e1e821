"""openai-python through the proxy: paths that are relayed blind, Azure's, and a base URL without /v1."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from compaction_proxy.config.sections import UpstreamSection

HELLO: Any = [{"role": "user", "content": "Hello"}]
ECHO = 'You said "Hello". I was sent 1 messages.'


def test_models_are_listed(client: openai.OpenAI) -> None:
    models = client.models.list()
    assert "demo-agent" in [model.id for model in models]
    assert models.data[0].owned_by == "demo"


async def test_embeddings_arrive(client: openai.OpenAI, aclient: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "embedder", "input": ["Grüße"]}
    blocking = client.embeddings.create(**asked)
    awaited = await aclient.embeddings.create(**asked)
    assert [made.data[0].embedding for made in (blocking, awaited)] == [[0.5, -1.0], [0.5, -1.0]]


@pytest.mark.parametrize("size", [1_000, 2_000_000])
def test_a_file_is_uploaded_in_parts(client: openai.OpenAI, stack: Any, key: str, size: int) -> None:
    content = bytes(range(256)) * (size // 256)
    stored = client.files.create(file=("notes.jsonl", content), purpose="batch")
    [seen] = stack.seen(key)
    assert content in seen.body
    assert stored.bytes == len(seen.body) > len(content)
    assert seen.all("content-type")[0].startswith("multipart/form-data; boundary=")


async def test_a_file_is_downloaded(aclient: openai.AsyncOpenAI) -> None:
    content = await aclient.files.content("file-1")
    assert content.content == b"{}\n" * 20_000


def test_other_paths_get_no_header_of_ours(client: openai.OpenAI) -> None:
    fields = client.models.with_raw_response.list().headers
    assert [name for name in fields if name.startswith("x-compaction")] == []


def test_a_base_url_without_v1_works(client: openai.OpenAI, stack: Any, key: str) -> None:
    client.base_url = stack.root
    answer = client.chat.completions.create(model="demo-agent", messages=HELLO)
    client.models.list()
    assert answer.choices[0].message.content == ECHO
    assert [seen.target for seen in stack.seen(key)] == ["/v1/chat/completions", "/v1/models"]


@pytest.fixture(scope="module")
def azure_stack(stacks: Any) -> Iterator[Any]:
    with stacks(lambda url: UpstreamSection(base_url=url)) as stack:
        yield stack


@pytest.fixture
def azure(azure_stack: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.AzureOpenAI]:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with openai.AzureOpenAI(
        azure_endpoint=azure_stack.root,
        api_key=key,
        api_version="2024-10-21",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as made:
        yield made


AZURE_TARGET = "/openai/deployments/demo-agent/chat/completions?api-version=2024-10-21"


@pytest.mark.parametrize("stream", [False, True])
def test_azure_s_path_key_and_query_go_on(
    azure: openai.AzureOpenAI, azure_stack: Any, key: str, *, stream: bool
) -> None:
    raw: Any = azure.chat.completions.with_raw_response.create(
        model="demo-agent", messages=HELLO, stream=stream
    )
    came = list(raw.parse()) if stream else [raw.parse()]
    [seen] = azure_stack.seen(key)
    assert (seen.target, seen.all("api-key"), raw.headers["x-compaction-status"]) == (
        AZURE_TARGET,
        [key],
        "none",
    )
    assert came[-1].choices[0].finish_reason == "stop"


def test_azure_s_deployment_tells_the_model(
    azure: openai.AzureOpenAI, azure_stack: Any, key: str, conversation: Any
) -> None:
    raw = azure.chat.completions.with_raw_response.create(model="demo-agent", messages=conversation(20))
    assert (raw.headers["x-compaction-status"], raw.headers["x-compaction-round"]) == ("applied", "1")
    summary, chat = azure_stack.seen(key)
    assert summary.json()["model"] == "demo-summary"
    assert summary.target == AZURE_TARGET.replace("demo-agent", "demo-summary")
    assert chat.target == AZURE_TARGET

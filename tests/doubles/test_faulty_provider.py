import asyncio
from collections.abc import Mapping

import httpx
import pytest

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.types import TokenCounter
from tests.doubles.faulty_provider import Fault, FaultyProvider, parse_fault

BODY: JsonObject = {"model": "demo-agent", "messages": [{"role": "user", "content": "hello there " * 20}]}
STREAM = {**BODY, "stream": True}


async def ask(
    provider: DemoProvider, body: Mapping[str, object], fault: str, timeout_s: float = 5
) -> httpx.Response:
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False, timeout=timeout_s) as http:
        path = f"{url}/v1/chat/completions"
        return await http.post(path, json=body, headers={"x-demo-fault": fault} if fault else {})


def test_words_add_up_on_top_of_a_base() -> None:
    base = Fault(first_byte_s=0.5)
    assert parse_fault("cut, delay=0.25", base) == Fault(cut_after=3, first_byte_s=0.5, chunk_s=0.25)
    assert parse_fault("hang,garbage,empty,slow=1,cut=7,status=500") == Fault(
        status=500, hang=True, cut_after=7, garbage=True, empty=True, first_byte_s=1.0
    )


@pytest.mark.parametrize("text", ["nonsense", "status=ten", "slow"])
def test_an_unknown_word_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_fault(text)


async def test_a_status_is_answered_in_the_error_shape(words: TokenCounter) -> None:
    answer = await ask(FaultyProvider(DemoProviderSettings(words)), BODY, "status=503")
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(("body", "fault"), [(STREAM, "cut=2"), (BODY, "cut")])
async def test_a_cut_answer_stays_unfinished(words: TokenCounter, body: JsonObject, fault: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await ask(FaultyProvider(DemoProviderSettings(words)), body, fault)


async def test_a_hang_ends_when_the_client_leaves(words: TokenCounter) -> None:
    provider = FaultyProvider(DemoProviderSettings(words))
    with pytest.raises(httpx.ReadTimeout):
        await ask(provider, BODY, "hang", timeout_s=0.1)
    assert (provider.departure_count, provider.log[0].status) == (1, 0)


async def test_a_client_that_leaves_mid_stream_ends_the_stream(words: TokenCounter) -> None:
    provider = FaultyProvider(DemoProviderSettings(words), {"*": Fault(chunk_s=0.05)})
    async with serve_embedded(provider) as url, httpx.AsyncClient(trust_env=False) as http:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as answer:
            await anext(answer.aiter_raw())
        for _ in range(200):
            if provider.departure_count:
                break
            await asyncio.sleep(0.01)
    assert provider.departure_count == 1


async def test_garbage_is_no_json(words: TokenCounter) -> None:
    answer = await ask(FaultyProvider(DemoProviderSettings(words)), BODY, "garbage")
    assert answer.status_code == 200
    with pytest.raises(ValueError):
        answer.json()


async def test_an_empty_stream_has_only_its_end(words: TokenCounter) -> None:
    answer = await ask(FaultyProvider(DemoProviderSettings(words)), STREAM, "empty")
    assert answer.content == b"data: [DONE]\n\n"


async def test_a_fault_may_concern_one_model_only(words: TokenCounter) -> None:
    settings, faults = DemoProviderSettings(words), {"demo-summary": Fault(status=500)}
    assert (await ask(FaultyProvider(settings, faults), BODY, "")).status_code == 200
    summary = {**BODY, "model": "demo-summary"}
    assert (await ask(FaultyProvider(settings, faults), summary, "")).status_code == 500


async def test_a_fault_that_does_not_exist_is_refused(words: TokenCounter) -> None:
    answer = await ask(FaultyProvider(DemoProviderSettings(words)), BODY, "nonsense")
    assert answer.json()["error"]["message"] == "Invalid x-demo-fault: no such fault: nonsense"

"""openai-python through the proxy: errors, refusals, cuts and time limits come out as the SDK knows them."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from compaction_proxy.config.sections import UpstreamSection
from compaction_proxy.core.strategies import STRATEGIES

HELLO: Any = [{"role": "user", "content": "Hello"}]


def told(status: int, code: str | None) -> dict[str, Any]:
    return {"message": f"Scripted {status}.", "type": "scripted", "param": "messages", "code": code}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "kind", "body"),
    [
        ("bad-request", openai.BadRequestError, told(400, "scripted_code")),
        ("unauthorized", openai.AuthenticationError, told(401, "invalid_api_key")),
        ("not-found", openai.NotFoundError, told(404, "model_not_found")),
        ("limited", openai.RateLimitError, told(429, "rate_limit_exceeded")),
        ("server-error", openai.InternalServerError, told(500, None)),
    ],
)
async def test_an_upstream_error_arrives_as_it_is(
    sdk: Any, answer: str, kind: type[openai.APIStatusError], body: dict[str, Any], *, stream: bool
) -> None:
    with pytest.raises(kind) as raised:
        await (sdk.stream if stream else sdk.create)(messages=HELLO, extra_headers={"x-answer": answer})
    assert raised.value.body == body
    assert raised.value.response.headers["x-compaction-status"] == "none"


async def test_headers_of_an_error_survive(sdk: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await sdk.create(messages=HELLO, extra_headers={"x-answer": "bad-request"})
    assert raised.value.request_id == "req_400"
    with pytest.raises(openai.AuthenticationError) as refused:
        await sdk.create(messages=HELLO, extra_headers={"x-answer": "unauthorized"})
    assert refused.value.response.headers["www-authenticate"] == "Bearer"


async def test_an_error_that_is_no_json_arrives_as_it_is(sdk: Any) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        await sdk.create(messages=HELLO, extra_headers={"x-answer": "not-json"})
    assert (raised.value.status_code, raised.value.response.text) == (503, "<h1>Down</h1>")


async def test_an_unknown_model_is_the_upstream_s_404(sdk: Any) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        await sdk.create(messages=HELLO, model="nobody")
    assert raised.value.code == "model_not_found"


async def test_invalid_messages_are_the_upstream_s_400(sdk: Any) -> None:
    orphan = [*HELLO, {"role": "tool", "tool_call_id": "call_1", "content": "alone"}]
    with pytest.raises(openai.BadRequestError) as raised:
        await sdk.create(messages=orphan)
    assert raised.value.param == "messages.[1].role"


def test_a_retry_waits_as_long_as_the_upstream_says(client: openai.OpenAI, stack: Any, key: str) -> None:
    started = time.monotonic()
    answer = client.with_options(max_retries=2).chat.completions.create(
        model="demo-agent", messages=HELLO, extra_headers={"x-answer": "limited-once"}
    )
    assert time.monotonic() - started >= 1
    assert answer.choices[0].finish_reason == "stop"
    assert [seen.all("x-stainless-retry-count") for seen in stack.seen(key)] == [["0"], ["1"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_never_fit_is_the_upstream_s_refusal(sdk: Any, *, stream: bool) -> None:
    rules = {"role": "system", "content": "Never forget this rule. " * 2_500}
    with pytest.raises(openai.BadRequestError) as raised:
        await (sdk.stream if stream else sdk.create)(messages=[rules, *HELLO])
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.response.headers["x-compaction-status"] == "over-limit"
    assert raised.value.response.headers["x-compaction-context-limit"] == "8192"


async def test_a_cut_stream_raises_after_what_had_come(aclient: openai.AsyncOpenAI, greeting: str) -> None:
    stream = await aclient.chat.completions.create(
        model="demo-agent", messages=HELLO, stream=True, extra_headers={"x-answer": "cut-stream"}
    )
    came = [await anext(stream) for _ in range(3)]
    with pytest.raises(openai.APIError):
        await anext(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in came)
    assert text == greeting[: len(text)] != ""


async def test_a_cut_body_raises(sdk: Any) -> None:
    with pytest.raises(openai.APIConnectionError):
        await sdk.create(messages=HELLO, extra_headers={"x-answer": "cut"})


async def test_an_error_within_a_stream_raises_with_the_upstream_s_words(sdk: Any) -> None:
    with pytest.raises(openai.APIError, match="Scripted trouble") as raised:
        await sdk.stream(messages=HELLO, extra_headers={"x-answer": "error-frame"})
    assert raised.value.code == "overloaded"


@pytest.mark.parametrize("model", ["demo-agent", "unknown"])
async def test_the_sdk_s_own_time_limit_ends_the_upstream_call(
    sdk: Any, stack: Any, key: str, until: Any, model: str
) -> None:
    with pytest.raises(openai.APITimeoutError):
        await sdk.create(messages=HELLO, model=model, timeout=2, extra_headers={"x-answer": "hang"})
    [seen] = stack.seen(key)
    await until(lambda: seen.ended)
    assert seen.departed


@pytest.fixture(scope="module")
def impatient(stacks: Any) -> Iterator[Any]:
    with stacks(lambda url: UpstreamSection(base_url=f"{url}/v1", timeout_s=0.2)) as stack:
        yield stack


OUR_ERRORS = {
    "upstream_timeout": (504, "The upstream did not answer in time."),
    "upstream_unreachable": (502, "The upstream cannot be reached."),
}


@pytest.mark.parametrize(
    ("name", "code"), [("impatient", "upstream_timeout"), ("unreachable", "upstream_unreachable")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_trouble_on_the_way_is_an_error_in_openai_s_shape(
    sdk: Any, request: pytest.FixtureRequest, name: str, code: str, *, stream: bool
) -> None:
    status, message = OUR_ERRORS[code]
    url = request.getfixturevalue(name).url
    sdk.client.base_url = sdk.aclient.base_url = url
    with pytest.raises(openai.InternalServerError) as raised:
        await (sdk.stream if stream else sdk.create)(messages=HELLO, extra_headers={"x-answer": "hang"})
    body = {"message": message, "type": "upstream_error", "param": None, "code": code}
    assert (raised.value.status_code, raised.value.body) == (status, body)
    assert raised.value.response.headers["x-compaction-status"] == "none"


async def test_an_unreachable_upstream_of_a_relayed_path_is_an_error_in_openai_s_shape(
    client: openai.OpenAI, unreachable: Any
) -> None:
    client.base_url = unreachable.url
    with pytest.raises(openai.InternalServerError) as raised:
        client.models.list()
    assert (raised.value.status_code, raised.value.code) == (502, "upstream_unreachable")


@pytest.mark.parametrize("leave", ["close", "cancel"])
async def test_leaving_a_stream_ends_the_upstream_call(
    aclient: openai.AsyncOpenAI, stack: Any, key: str, until: Any, leave: str
) -> None:
    first = asyncio.Event()

    async def read() -> None:
        stream = await aclient.chat.completions.create(
            model="demo-agent", messages=HELLO, stream=True, extra_headers={"x-answer": "forever"}
        )
        async with stream:
            async for _ in stream:
                first.set()
                if leave == "close":
                    return

    reading = asyncio.create_task(read())
    await first.wait()
    if leave == "cancel":
        reading.cancel()
    await asyncio.wait({reading})
    [seen] = stack.seen(key)
    await until(lambda: seen.ended)
    assert seen.departed


async def test_cancelling_before_the_first_byte_ends_the_upstream_call(
    aclient: openai.AsyncOpenAI, stack: Any, key: str, until: Any
) -> None:
    asked = aclient.chat.completions.create(
        model="demo-agent", messages=HELLO, extra_headers={"x-answer": "hang"}
    )
    asking = asyncio.create_task(asked)
    await until(lambda: stack.seen(key))
    asking.cancel()
    await asyncio.wait({asking})
    [seen] = stack.seen(key)
    await until(lambda: seen.ended)
    assert seen.departed


def test_leaving_a_blocking_stream_ends_the_upstream_call(
    client: openai.OpenAI, stack: Any, key: str
) -> None:
    with client.chat.completions.create(
        model="demo-agent", messages=HELLO, stream=True, extra_headers={"x-answer": "forever"}
    ) as stream:
        next(stream)
    [seen] = stack.seen(key)
    deadline = time.monotonic() + 30  # only a hang takes as long
    while not seen.ended and time.monotonic() < deadline:
        time.sleep(0.005)
    assert seen.departed


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({"x-compaction": "off"}, "force, bypass or shadow"),
        ({"x-compaction-trigger-tokens": "-5"}, "a whole number of tokens above 0"),
        ({"x-compaction-trigger-tokens": "many"}, "a whole number of tokens above 0"),
        ({"x-compaction-strategy": "magic"}, f"one of {', '.join(sorted(STRATEGIES))}"),
    ],
)
async def test_a_header_of_ours_that_makes_no_sense_is_a_bad_request(
    sdk: Any, stack: Any, key: str, headers: dict[str, str], wanted: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await sdk.create(messages=HELLO, extra_headers=headers)
    [name] = headers
    assert json.loads(raised.value.response.text) == {
        "error": {
            "message": f"The header {name} must be {wanted}.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_compaction_header",
        }
    }
    assert stack.seen(key) == []

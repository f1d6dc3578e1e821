"""openai-python through the proxy: what a client sees of compaction, and what it never sees."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from compaction_proxy.cli.demo import replies as script
from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.config.sections import UpstreamSection

ALWAYS = {
    "status", "session", "strategy", "messages-before", "messages-after", "tokens-before", "tokens-after",
    "tokens-saved", "context-limit", "until-trigger-percent", "overhead-ms", "request-id",
}  # fmt: skip
SUMMARISER = "demo-summary"


def ours(fields: Any) -> dict[str, str]:
    """Our header fields, without their prefix."""
    pairs = dict(fields)
    return {
        name.removeprefix("x-compaction-"): pairs[name] for name in pairs if name.startswith("x-compaction")
    }


def session(name: str, **fields: str) -> dict[str, str]:
    return {"x-session-id": name, **fields}


def models(seen: list[Any]) -> list[str]:
    return [each.json()["model"] for each in seen]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_compacted_answer_carries_the_whole_report(
    sdk: Any, stack: Any, key: str, conversation: Any, *, stream: bool
) -> None:
    _, fields = await sdk.fields(messages=conversation(20), stream=stream, extra_headers=session("one"))
    report = ours(fields)
    assert set(report) == ALWAYS | {"round"}
    expected = {
        "status": "applied",
        "strategy": "anchored",
        "round": "1",
        "messages-before": "21",
        "messages-after": str(len(stack.seen(key)[-1].json()["messages"])),
        "context-limit": "8192",
    }
    assert {name: report[name] for name in expected} == expected
    assert int(report["messages-after"]) < 11
    before, after, saved = (int(report[f"tokens-{name}"]) for name in ("before", "after", "saved"))
    assert 0 < saved == before - after
    assert models(stack.seen(key)) == [SUMMARISER, "demo-agent"]


async def test_the_next_request_reuses_the_round_byte_for_byte(
    sdk: Any, stack: Any, key: str, conversation: Any
) -> None:
    asked = conversation(20)
    _, first = await sdk.fields(messages=asked)
    more = [*asked, {"role": "assistant", "content": "Go on."}, {"role": "user", "content": "And then?"}]
    _, second = await sdk.fields(messages=more)
    assert (ours(second)["status"], ours(second)["round"]) == ("reused", "1")
    assert ours(first)["session"] == ours(second)["session"]  # none was given: one was made
    assert models(stack.seen(key)) == [SUMMARISER, "demo-agent", "demo-agent"]
    _, sent, again = (seen.json()["messages"] for seen in stack.seen(key))
    assert again[: len(sent)] == sent


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("server-error", openai.InternalServerError), ("limited", openai.RateLimitError)],
)
async def test_an_upstream_s_error_carries_the_whole_report(
    sdk: Any, conversation: Any, answer: str, kind: type[openai.APIStatusError]
) -> None:
    with pytest.raises(kind) as raised:
        await sdk.create(messages=conversation(20), extra_headers=session("one", **{"x-answer": answer}))
    assert set(ours(raised.value.response.headers.multi_items())) == ALWAYS | {"round"}


@pytest.fixture(scope="module")
def silent(stacks: Any) -> Iterator[Any]:
    with stacks(lambda url: UpstreamSection(base_url=f"{url}/v1", timeout_s=0.3)) as stack:
        yield stack


async def test_an_error_of_ours_carries_the_whole_report(sdk: Any, silent: Any, conversation: Any) -> None:
    sdk.client.base_url = sdk.aclient.base_url = silent.url
    with pytest.raises(openai.InternalServerError) as raised:
        await sdk.create(messages=conversation(20), extra_headers=session("one", **{"x-answer": "hang"}))
    assert set(ours(raised.value.response.headers.multi_items())) == ALWAYS | {"round"}


async def test_bypass_sends_the_request_as_it_is(sdk: Any, stack: Any, key: str, conversation: Any) -> None:
    asked = conversation(20)
    _, fields = await sdk.fields(messages=asked, extra_headers={"x-compaction": "bypass"})
    assert ours(fields)["status"] == "bypassed"
    [seen] = stack.seen(key)
    assert seen.json()["messages"] == asked


async def test_force_compacts_a_short_conversation(sdk: Any, stack: Any, key: str, conversation: Any) -> None:
    _, fields = await sdk.fields(messages=conversation(13, 100), extra_headers={"x-compaction": "force"})
    assert (ours(fields)["status"], ours(fields)["round"]) == ("applied", "1")
    assert models(stack.seen(key)) == [SUMMARISER, "demo-agent"]


async def test_force_with_nothing_to_take_sends_the_request_as_it_is(
    sdk: Any, stack: Any, key: str, conversation: Any
) -> None:
    asked = conversation(0)
    _, fields = await sdk.fields(messages=asked, extra_headers={"x-compaction": "force"})
    assert (ours(fields)["status"], ours(fields)["reason"]) == ("none", "nothing-to-take")
    assert [seen.json()["messages"] for seen in stack.seen(key)] == [asked]


@pytest.mark.parametrize(
    ("model", "headers"), [("demo-agent", {"x-compaction": "shadow"}), ("shadow-agent", {})]
)
async def test_shadow_reports_and_changes_nothing(
    sdk: Any, stack: Any, key: str, conversation: Any, model: str, headers: dict[str, str]
) -> None:
    asked = conversation(20)
    _, fields = await sdk.fields(model=model, messages=asked, extra_headers=headers)
    report = ours(fields)
    assert (report["status"], report["messages-after"], report["reason"]) == ("shadow", "21", "percent")
    assert report["until-trigger-percent"] == "0"
    assert [seen.json()["messages"] for seen in stack.seen(key)] == [asked]


async def test_a_client_may_lower_the_trigger(sdk: Any, stack: Any, key: str, conversation: Any) -> None:
    asked = conversation(20, 150)
    _, usual = await sdk.fields(messages=asked)
    _, lowered = await sdk.fields(messages=asked, extra_headers={"x-compaction-trigger-tokens": "2000"})
    assert (ours(usual)["status"], ours(lowered)["status"]) == ("none", "applied")


async def test_our_headers_end_here_and_session_headers_go_on(
    sdk: Any, stack: Any, key: str, conversation: Any
) -> None:
    sent = {
        "x-compaction": "force",
        "x-compaction-trigger-tokens": "2000",
        "x-compaction-strategy": "chained",
        "x-compaction-pin": "note",
        "x-session-id": "one",
        "x-conversation-id": "two",
    }
    await sdk.create(messages=conversation(20), extra_headers=sent)
    summary, chat = stack.seen(key)
    names = {name for seen in (summary, chat) for name, _ in seen.fields}
    # The hop mark is how a proxy notices that its upstream leads back to itself.
    assert {name for name in names if name.startswith("x-compaction")} == {"x-compaction-hop"}
    assert (chat.all("x-session-id"), chat.all("x-conversation-id")) == (["one"], ["two"])
    assert chat.all("authorization") == [f"Bearer {key}"]


async def test_one_key_never_gets_the_round_of_another(
    sdk: Any, stack: Any, key: str, conversation: Any
) -> None:
    asked = conversation(20)
    await sdk.create(messages=asked, extra_headers=session("shared"))
    sdk.client.api_key = sdk.aclient.api_key = other = f"{key}-other"
    _, fields = await sdk.fields(messages=asked, extra_headers=session("shared"))
    assert ours(fields)["status"] == "applied"
    assert models(stack.seen(other)) == [SUMMARISER, "demo-agent"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("anchored", ("applied", "1", "deadline")),  # with a text that took no model
        ("chained", ("failed-open", None, "deadline")),  # as it came: it fits
    ],
)
async def test_a_summary_that_outlasts_the_client_s_patience_is_not_waited_for(
    sdk: Any, stack: Any, key: str, conversation: Any, strategy: str, expected: tuple[str | None, ...]
) -> None:
    answer, fields = await sdk.fields(
        model="finish-agent",
        messages=conversation(20, 250),
        timeout=8,
        extra_headers={"x-compaction-strategy": strategy},
    )
    assert answer.choices[0].finish_reason == "stop"
    report = ours(fields)
    assert (report["status"], report.get("round"), report.get("reason")) == expected
    assert [seen.ended for seen in stack.seen(key)] == [False, True]
    stack.upstream.released.add(f"Bearer {key}")


async def left_during_the_summary(
    aclient: openai.AsyncOpenAI, stack: Any, key: str, until: Any, **options: Any
) -> Any:
    """The summary call that was under way when the client left."""
    asking = asyncio.create_task(aclient.chat.completions.create(**options))
    await until(lambda: stack.seen(key))
    asking.cancel()
    await asyncio.wait({asking})
    [summary] = stack.seen(key)
    assert summary.json()["model"] == "held-summary"
    return summary


@pytest.mark.parametrize("stream", [False, True])
async def test_a_summary_whose_client_left_is_finished_and_used(
    aclient: openai.AsyncOpenAI, stack: Any, key: str, until: Any, conversation: Any, *, stream: bool
) -> None:
    options = {"model": "finish-agent", "messages": conversation(20), "stream": stream}
    summary = await left_during_the_summary(aclient, stack, key, until, **options)
    await asyncio.sleep(0.2)  # were the upstream called, or the summary hung up on, it would be by now
    assert (stack.seen(key), summary.ended) == ([summary], False)
    stack.upstream.released.add(f"Bearer {key}")
    await until(lambda: summary.ended)
    raw: Any = await aclient.chat.completions.with_raw_response.create(**options)
    assert (ours(raw.headers)["status"] in {"reused", "applied"}, ours(raw.headers)["round"]) == (True, "1")
    assert models(stack.seen(key)) == ["held-summary", "finish-agent"]
    if stream:
        assert [chunk async for chunk in raw.parse()][-1].choices[0].finish_reason == "stop"


async def test_a_summary_whose_client_left_is_ended_where_that_is_configured(
    aclient: openai.AsyncOpenAI, stack: Any, key: str, until: Any, conversation: Any
) -> None:
    options = {"model": "cancel-agent", "messages": conversation(20)}
    summary = await left_during_the_summary(aclient, stack, key, until, **options)
    await until(lambda: summary.ended)
    assert (stack.seen(key), summary.departed) == ([summary], True)
    stack.upstream.released.add(f"Bearer {key}")
    raw: Any = await aclient.chat.completions.with_raw_response.create(**options)
    assert (ours(raw.headers)["status"], ours(raw.headers)["round"]) == ("applied", "1")


def streamed(client: openai.OpenAI, history: list[Any]) -> tuple[JsonObject, list[Any], str]:
    """The assistant message as the SDK puts it together, the chunks less what is always new, the status."""
    options: Any = {
        "model": "demo-agent",
        "messages": history,
        "tools": script.load_script().tools,
        "max_tokens": 512,
    }
    asked = client.chat.completions.with_streaming_response.create(**options, stream=True)
    state = ChatCompletionStreamState()
    chunks = []
    with asked as response:
        for chunk in response.parse():
            state.handle_chunk(chunk)
            chunks.append(chunk.model_dump(exclude={"id", "created"}))
        status = response.headers.get("x-compaction-status", "")
    message = state.get_final_completion().choices[0].message
    return message.model_dump(exclude_none=True, exclude={"parsed"}), chunks, status


def played(client: openai.OpenAI) -> tuple[list[Any], list[Any], set[str]]:
    """The scripted conversation: the client's history, every chunk, the statuses."""
    told = script.load_script()
    history: list[Any] = [{"role": "system", "content": told.system}]
    chunks, statuses = [], set()
    for turn in told.turns:
        history.append({"role": "user", "content": turn.user})
        calls: Any = True
        while calls:
            message, came, status = streamed(client, history)
            chunks.append(came)
            statuses.add(status)
            history.append(message)
            calls = message.get("tool_calls", ())
            results = [(call["id"], told.results[call["id"]]) for call in calls]
            history += [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
    return history, chunks, statuses


def bare(history: list[Any]) -> list[Any]:
    """A history without the `index` that the SDK leaves in tool calls."""
    for call in (call for message in history for call in message.get("tool_calls", ())):
        call.pop("index", None)
    return history


def test_a_conversation_that_outgrows_the_window_looks_as_if_the_window_were_endless(
    client: openai.OpenAI, stacks: Any, whole_history: list[JsonObject]
) -> None:
    history, chunks, statuses = played(client)
    with stacks(lambda url: UpstreamSection(base_url=url), window=1_000_000) as endless:
        client.base_url = f"{endless.direct}/v1"
        _, chunks_without_us, _ = played(client)
    assert bare(history) == whole_history
    assert chunks == chunks_without_us
    assert statuses == {"none", "scheduled", "applied", "reused"}

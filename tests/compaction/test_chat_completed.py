"""What providers have added to chat completions, while rounds are made: begun answers, signatures, ids."""

import itertools
import json
from typing import Any

import pytest

from compaction_proxy.compaction.types import CompactionMode, CompactionStatus
from compaction_proxy.core.message import iter_units
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.messages import PARSER, shorten_message
from compaction_proxy.wires.chat.wire import CHAT
from tests.helpers.compaction_bench import JsonObject, bench, called, forwarded, loop, says, talk, user

LONG = "please look again " * 200


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_answer_that_is_begun_stays_last_and_as_it_is(strategy: str) -> None:
    """As DeepSeek and Mistral mark it, and Kimi; vLLM needs no mark."""
    begun = {"role": "assistant", "content": '{"verdict":', "prefix": True, "partial": True}
    messages = [*talk(110), begun]
    async with bench(strategy=strategy) as made:
        fit = await made.fit(messages, mode=CompactionMode.FORCE)
        strict = await made.fit(messages, mode=CompactionMode.FORCE, model={"alternation": "strict"})
    assert fit.report.status is CompactionStatus.APPLIED
    assert forwarded(fit)[-1] == forwarded(strict)[-1] == begun
    assert len(fit.raw) < len(json.dumps(messages))


async def test_mistral_gets_user_and_assistant_in_turn_even_behind_results() -> None:
    messages = [
        user("Begin."),
        *[each for step in range(60) for each in called(step, f"{step} " + LONG[:500])],
    ]
    messages += [user("And now?"), user("Well?")]
    async with bench() as made:
        kept = forwarded(await made.fit(messages, mode=CompactionMode.FORCE, model={"alternation": "strict"}))
    roles = [each["role"] for each in kept]
    pairs = set(itertools.pairwise(roles))
    assert pairs.isdisjoint({("tool", "user"), ("user", "user"), ("assistant", "assistant")})
    ids = [each["tool_call_id"] for each in kept if each["role"] == "tool"]
    assert set(ids) <= {"call_0", "call_1", "call_2"}  # none is invented: some providers want nine characters
    assert kept[-1] == messages[-1]


async def test_every_other_member_of_a_request_goes_on_as_it_came() -> None:
    members: JsonObject = {
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav"},
        "functions": [{"name": "read", "parameters": {}}],
        "function_call": "auto",
        "provider": {"order": ["x"]},
        "reasoning": {"effort": "low"},
        "extra_body": {"google": {"thinking_config": {"include_thoughts": True}}},
    }
    async with bench() as made:
        fit = await made.fit(talk(110), body=members)
    told = json.loads(fit.raw)
    assert fit.report.status is CompactionStatus.APPLIED
    assert {name: held for name, held in told.items() if name in members} == members


async def test_audio_by_its_id_stays_with_its_answer_and_is_known_by_it() -> None:
    spoken = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    heard = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}
    messages = [*talk(110), spoken, {"role": "user", "content": [heard]}]
    async with bench() as made:
        fit = await made.fit(messages)
    assert fit.report.status is CompactionStatus.APPLIED
    assert forwarded(fit)[-2:] == messages[-2:]
    other = {**spoken, "audio": {"id": "audio_2"}}
    assert (
        PARSER.parse_message(json.dumps(spoken).encode()).digest
        != PARSER.parse_message(json.dumps(other).encode()).digest
    )


SIGNED: dict[str, JsonObject] = {
    "openrouter": {"reasoning_details": [{"type": "reasoning.encrypted", "data": "SEALED"}]},
    "litellm": {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "SEALED"}]},
    "gemini": {"extra_content": {"google": {"thought_signature": "SEALED"}}},
    "content": {
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "SEALED"},
            {"type": "text", "text": LONG},
        ]
    },
}


def calling(*, of_call: JsonObject | None = None, **fields: Any) -> JsonObject:
    function = {"name": "write", "arguments": json.dumps({"text": LONG})}
    call = {"id": "call_1", "type": "function", "function": function, **(of_call or {})}
    return {"role": "assistant", "content": LONG, "tool_calls": [call], **fields}


def record(fields: JsonObject) -> Any:
    return PARSER.parse_message(json.dumps(fields).encode())


@pytest.mark.parametrize("sign", SIGNED.values(), ids=SIGNED)
def test_calls_that_are_signed_are_never_shortened_and_say_the_same_unsigned(sign: JsonObject) -> None:
    signed, plain = record(calling(**sign)), record(calling())
    assert (signed.has_signed_reasoning, plain.has_signed_reasoning) == (True, False)
    assert signed.digest == plain.digest
    assert shorten_message(signed, 0.1, "m_1") is signed
    assert len(shorten_message(plain, 0.1, "m_1").raw) < len(plain.raw) / 2


def test_a_signature_on_a_call_signs_its_message() -> None:
    assert record(calling(of_call=SIGNED["gemini"])).has_signed_reasoning
    assert not record(calling(extra_content={}, reasoning_content="unsigned")).has_signed_reasoning


@pytest.mark.parametrize("sign", SIGNED.values(), ids=SIGNED)
def test_an_answer_that_is_shortened_loses_its_signature(sign: JsonObject) -> None:
    answer = record({"role": "assistant", "content": LONG, "name": "a", "reasoning_content": LONG, **sign})
    shorter = shorten_message(answer, 0.1, "m_1").raw
    assert (b"SEALED" in shorter, b"reasoning_content" in shorter, b'"name":"a"' in shorter) == (
        False,
        False,
        True,
    )


def test_what_deepseek_thought_stays_with_the_calls_that_came_of_it() -> None:
    assert (
        json.loads(shorten_message(record(calling(reasoning_content="hm")), 0.1, "m_1").raw)[
            "reasoning_content"
        ]
        == "hm"
    )


def test_calls_stand_or_fall_with_the_signed_ones_that_they_follow() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
    signed = calling(**SIGNED["litellm"])
    messages = [user("Go."), signed, result, calling(), result, says("Done."), calling(), result]
    records = parse_body(json.dumps({"messages": messages}).encode(), CHAT)
    held = [PARSER.parse_message(each) for each in records.messages]
    assert [(each.start, each.stop) for each in iter_units(held)] == [(0, 1), (1, 5), (5, 6), (6, 8)]


async def test_an_agent_whose_every_step_is_signed_is_compacted_step_by_step() -> None:
    messages = loop(80)
    for at, each in enumerate(messages):
        if "tool_calls" in each:
            each["tool_calls"][0]["extra_content"] = {"google": {"thought_signature": f"S{at}"}}
    async with bench() as made:
        fit = await made.fit(messages, mode=CompactionMode.FORCE)
    kept = forwarded(fit)
    assert fit.report.status is CompactionStatus.APPLIED
    assert len(kept) < len(messages)
    assert all(each in messages for each in kept if "tool_calls" in each)

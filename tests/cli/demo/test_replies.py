from typing import Any

import pytest

from compaction_proxy.cli.demo import replies as brain
from compaction_proxy.cli.demo.chat import JsonObject, Reply, ToolCall, build_message
from compaction_proxy.cli.demo.run import build_opening, build_tool_message

SCRIPT = brain.load_script()


def asked(*messages: JsonObject, **more: object) -> dict[str, Any]:
    return {"model": "demo-agent", "messages": list(messages), **more}


def said(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def test_a_scripted_message_gets_the_scripted_step() -> None:
    first = SCRIPT.turns[0]
    step = first.steps[0]
    expected = Reply(step.text, step.calls, "tool_calls")
    assert brain.compose_reply(asked(*build_opening(SCRIPT), said(first.user)), SCRIPT) == expected


def test_the_place_is_found_when_everything_earlier_is_missing() -> None:
    for turn in SCRIPT.turns[:-2]:
        messages = [said("(a summary of what was before)"), said(turn.user)]
        for step in turn.steps:
            reply = brain.compose_reply(asked(*messages), SCRIPT)
            assert (reply.text, reply.calls) == (step.text, step.calls)
            messages += [build_message(reply), *(build_tool_message(call.id, SCRIPT) for call in reply.calls)]


def test_the_place_is_found_when_a_tool_result_was_shortened() -> None:
    turn = SCRIPT.turns[6]
    call = turn.steps[0].calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "[…]"}
    assert brain.compose_reply(asked(result), SCRIPT).text == turn.steps[1].text


def test_a_fact_is_named_only_if_it_was_sent() -> None:
    question = SCRIPT.turns[-1]
    held = f"Case {SCRIPT.facts['case']} is open."
    reply = brain.compose_reply(asked(said(held), said(question.user)), SCRIPT)
    assert SCRIPT.facts["case"] in reply.text
    assert SCRIPT.facts["amount"] not in reply.text
    assert brain.FORGOTTEN.format(name="amount") in reply.text


def test_another_conversation_is_echoed() -> None:
    reply = brain.compose_reply(asked(said("Nice \n weather")), SCRIPT)
    assert reply == Reply('You said "Nice weather". I was sent 1 messages.')


def test_calls_asked_for_are_made_if_the_tool_is_offered() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "find")]
    text = 'Please\ncall look {"at": 1}\ncall find\ncall steal {}'
    reply = brain.compose_reply(asked(said(text), tools=tools), SCRIPT, 7)
    calls = (
        ToolCall("call_demo_0007_0", "look", '{"at": 1}'),
        ToolCall("call_demo_0007_1", "find", "{}"),
    )
    assert reply == Reply(calls=calls, finish_reason="tool_calls")


def test_the_result_of_a_tool_may_ask_for_the_next_call() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    result = {"role": "tool", "tool_call_id": "a", "content": 'Half of it.\ncall look {"from": 50}'}
    replies = [brain.compose_reply(asked(result, tools=tools), SCRIPT, number) for number in (1, 2)]
    assert [reply.calls for reply in replies] == [
        (ToolCall(f"call_demo_000{number}_0", "look", '{"from": 50}'),) for number in (1, 2)
    ]


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_any_last_message_gets_an_answer(role: str) -> None:
    assert brain.compose_reply(asked({"role": role, "content": "so"}), SCRIPT).text.startswith(
        'You said "so"'
    )

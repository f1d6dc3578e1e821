"""A fact that compaction has removed is asked for; the model searches for it and answers with it."""

import json
from typing import Any

import pytest

FACT = "the caretaker keeps the spare key under the blue flowerpot"
FILLER = "The sun went down behind the hills and the shepherds drove their flocks home. " * 12


def conversation(turns: int = 30, filler: str = FILLER) -> list[dict[str, Any]]:
    """A talk about a house; what is asked for stands in an early result of a tool, and nowhere else."""
    told: list[dict[str, Any]] = [{"role": "system", "content": "You help."}]
    for number in range(turns):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "open", "arguments": "{}"}}
        found = FACT if number == 2 else "nothing of note"
        told += [
            {"role": "user", "content": f"Read page {number}."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"{filler}{found}. {filler}"},
            {"role": "assistant", "content": f"I have read page {number}."},
        ]
    return [*told, {"role": "user", "content": "Where is the spare key?"}]


def model(s: Any) -> Any:
    """A model that searches before it answers, and says only what it was told."""

    def reply(body: Any) -> Any:
        last = body["messages"][-1]
        if last["role"] != "tool":
            return s.said("Let me look. ", s.recall(1, '{"query":"where is the spare key"}'))
        return s.said("It is under the blue flowerpot." if FACT in last["content"] else "I do not know.")

    return reply


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_removed_is_found_again_in_the_middle_of_an_answer(
    stack: Any, s: Any, *, stream: bool
) -> None:
    stack.script(model(s))
    for again in (False, True):
        got = await stack.post(model="inject", messages=conversation(), stream=stream)
        first, later = stack.asked[-2:]
        assert (got.headers["x-compaction-round"], FACT.encode() in first.raw) == ("1", False)
        assert got.headers["x-compaction-status"] == ("reused" if again else "applied")
        assert (first.tools, len(later.messages)) == (["open", "memory_search"], len(first.messages) + 2)
        assert "flowerpot" in later.messages[-1]["content"]
        assert said_in(got) == "Let me look. It is under the blue flowerpot."
    bodies = [asked.raw for asked in stack.asked]
    assert bodies[0] == bodies[2]  # the same bytes each time, so that the provider's cache keeps hitting


async def test_what_was_only_masked_is_found_again_too(stack: Any, s: Any) -> None:
    stack.script(model(s))
    for _ in range(2):
        got = await stack.post(model="inject", messages=conversation(8, FILLER * 4))
        first = stack.asked[-2]
        assert "x-compaction-round" not in got.headers  # no summary was needed
        assert b"memory_search id m_" in first.raw
        assert (FACT.encode() in first.raw, first.tools) == (False, ["open", "memory_search"])
        assert said_in(got) == "Let me look. It is under the blue flowerpot."


def said_in(answer: Any) -> str:
    if "json" in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["message"]["content"])
    lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for line in lines for choice in line["choices"])


async def test_nothing_is_offered_before_anything_was_removed(stack: Any, s: Any) -> None:
    stack.script(s.said("Hello."))
    await stack.post(model="inject", messages=[{"role": "user", "content": "Hello."}])
    assert stack.asked[0].tools == ["open"]


async def test_recalled_text_is_nothing_that_later_rounds_could_see(stack: Any, s: Any) -> None:
    """The client's list never holds a search, so that no request after it does."""
    stack.script(model(s))
    await stack.post(model="inject", messages=conversation())
    told = [*conversation(), {"role": "assistant", "content": "It is under the pot."}]
    await stack.post(model="inject", messages=[*told, {"role": "user", "content": "Which pot?"}])
    assert b"memory_search" not in b"".join(
        json.dumps(message["tool_calls"]).encode()
        for message in stack.asked[2].messages
        if message.get("tool_calls")
    )


async def test_a_conversation_that_names_itself_by_nothing_is_searched_by_its_content(
    new_stack: Any, s: Any
) -> None:
    stack = new_stack()
    stack.session = ""
    stack.script(model(s))
    got = await stack.post(model="inject", messages=conversation())
    assert said_in(got) == "Let me look. It is under the blue flowerpot."


async def test_another_key_finds_nothing_of_it(new_stack: Any, s: Any) -> None:
    mine, other = new_stack(), new_stack()
    other.session = mine.key
    mine.script(model(s))
    await mine.post(model="inject", messages=conversation())
    other.script(model(s))
    got = await other.post(model="always", messages=[{"role": "user", "content": "Where is the spare key?"}])
    assert said_in(got) == "Let me look. I do not know."

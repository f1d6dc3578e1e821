"""Auto-recall on the wire: what was removed stands before the latest user message, whatever follows that."""

from itertools import pairwise
from typing import Any

import pytest

from compaction_proxy.compaction.auto_recall import HEADING
from compaction_proxy.core.search_tool import TOOL_NAME

FACT = "the caretaker keeps the spare key under the blue flowerpot"
FILLER = "The sun went down behind the hills and the shepherds drove their flocks home. " * 12
QUESTION = {"role": "user", "content": "Where does the caretaker keep the spare key?"}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a search is waited for."""
    monkeypatch.setattr("compaction_proxy.compaction.auto_recall.DEADLINE_S", 10.0)


def call(number: int, found: str) -> list[dict[str, Any]]:
    made = {"id": f"c{number}", "type": "function", "function": {"name": "open", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": found},
    ]


def conversation(turns: int = 30) -> list[dict[str, Any]]:
    """A talk whose answer stands in an early result of a tool, and nowhere else."""
    told: list[dict[str, Any]] = [{"role": "system", "content": "You help."}]
    for number in range(turns):
        told.append({"role": "user", "content": f"Read page {number}."})
        told += call(number, f"{FILLER}{FACT if number == 2 else 'nothing of note'}. {FILLER}")
        told.append({"role": "assistant", "content": f"I have read page {number}."})
    return [*told, QUESTION]


@pytest.mark.parametrize("stream", [False, True])
async def test_it_stands_right_before_the_latest_user_message_on_every_request_of_the_turn(
    stack: Any, s: Any, *, stream: bool
) -> None:
    stack.script(s.said("Yes."))
    messages = conversation()
    for step in range(3):
        await stack.post(model="reminded", messages=messages, stream=stream)
        messages = [*messages, *call(step, "fine")]
    asked = stack.asked
    sent = [each.messages for each in asked]
    places = [each.index(QUESTION) for each in sent]
    ours = [each[place - 1] for each, place in zip(sent, places, strict=True)]
    assert len(set(places)) == 1
    assert all(each == {"role": "user", "content": ours[0]["content"]} for each in ours)
    assert ours[0]["content"].startswith(HEADING)
    assert FACT in ours[0]["content"]
    assert [len(each) - place for each, place in zip(sent, places, strict=True)] == [1, 3, 5]
    for before, after in pairwise(asked):
        assert after.raw.startswith(before.raw[: before.raw.rindex(b'"}]') + 2])
    assert TOOL_NAME.encode() not in asked[-1].raw


async def test_a_session_that_only_reuses_another_s_compaction_is_reminded_too(stack: Any, s: Any) -> None:
    stack.script(s.said("Yes."))
    names = set()
    for name in ("first", "second"):
        stack.session = name
        answer = await stack.post(model="reminded", messages=conversation())
        names.add(answer.headers["x-compaction-session"])
        assert FACT in stack.asked[-1].raw.decode()
    assert (len(names), answer.headers["x-compaction-status"]) == (2, "reused")


async def test_the_next_turn_knows_nothing_of_it(stack: Any, s: Any) -> None:
    stack.script(s.said("Yes."))
    await stack.post(model="reminded", messages=conversation())
    await stack.post(model="reminded", messages=conversation())
    then = [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "Thank you."}]
    await stack.post(model="reminded", messages=[*conversation(), *then])
    assert HEADING.encode() not in stack.asked[-1].raw
    assert stack.asked[-1].messages[-3:] == [QUESTION, *then]

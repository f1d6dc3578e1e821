"""What of a request becomes the title of its conversation."""

import json
from typing import Any

import pytest

from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.messages.wire import MESSAGES
from compaction_proxy.wires.titles import MAX_MESSAGES, MAX_TITLE_CHARACTERS, find_title
from compaction_proxy.wires.wire import Wire


def find(*messages: dict[str, Any], wire: Wire = CHAT) -> str:
    return find_title(parse_body(json.dumps({"model": "m", "messages": messages}).encode(), wire))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("  Mend\n the   parser. ", "Mend the parser."),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * (MAX_TITLE_CHARACTERS - 1) + "…"),
        ("<system-reminder>\nBe brief.\n</system-reminder>\nMend it.", "Mend it."),
        ("Mend the <div> of <b>this</b> page.", "Mend the <div> of <b>this</b> page."),
        ("<user_instructions>" + "x" * 9_000 + "</user_instructions> Mend it.", "Before."),
        (" \n", "Before."),
    ],
)
def test_a_title_is_the_beginning_of_what_the_user_said_last(text: str, title: str) -> None:
    assert find(user("Before."), {"role": "assistant", "content": "I see."}, user(text)) == title


def test_results_of_tools_are_no_title() -> None:
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "the file"}
    talk = (user("Read it."), {"role": "assistant", "content": [call]}, user([result]))
    assert find(*talk, wire=MESSAGES) == "Read it."


def test_only_the_last_messages_are_searched() -> None:
    later = [{"role": "assistant", "content": "…"}] * MAX_MESSAGES
    assert find(user("Mend it."), *later[1:]) == "Mend it."
    assert find(user("Mend it."), *later) == ""

"""Chat completions as clients write them, and what providers refuse there."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import singledispatch

from tests.helpers.wires.talks import (
    INSTRUCTIONS,
    PICTURE,
    Answered,
    Asked,
    Made,
    Moment,
    Returned,
    Talk,
    Told,
)
from tests.helpers.wires.wire import JsonObject, Wire, parts_of

READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def _elements(talk: Talk, held: Sequence[Moment]) -> list[JsonObject]:
    made = [each for moment in held for each in _written(moment, talk)]
    return [{"role": "system", "content": INSTRUCTIONS}, *made]


def _id(call: Made, talk: Talk) -> str:
    return call.reused if talk.reused else call.id


@singledispatch
def _written(moment: Moment, talk: Talk) -> list[JsonObject]:
    """The messages of a moment."""
    assert isinstance(moment, Told)
    return [{"role": "developer", "content": moment.text}]


@_written.register
def _(moment: Asked, talk: Talk) -> list[JsonObject]:
    if not moment.pictured:
        return [{"role": "user", "content": moment.text}]
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    return [{"role": "user", "content": [{"type": "text", "text": moment.text}, picture]}]


@_written.register
def _(moment: Answered, talk: Talk) -> list[JsonObject]:
    thought = {"reasoning_content": moment.thought} if moment.thought else {}
    calls = [_call(each, talk) for each in moment.calls]
    made = {"tool_calls": calls} if calls else {}
    return [{"role": "assistant", "content": moment.text or None, **thought, **made, "refusal": None}]


def _call(call: Made, talk: Talk) -> JsonObject:
    if call.use.custom:
        return {"id": _id(call, talk), "type": "custom", "custom": {"name": "look", "input": call.path}}
    function = {"name": "read", "arguments": f'{{"path": "{call.path}"}}'}
    return {"id": _id(call, talk), "type": "function", "function": function}


@_written.register
def _(moment: Returned, talk: Talk) -> list[JsonObject]:
    return [
        {"role": "tool", "tool_call_id": _id(each, talk), "content": each.result} for each in moment.calls
    ]


def _wrongs(body: JsonObject) -> Iterator[str]:
    open_calls: Counter[str] = Counter()
    for at, each in enumerate(body["messages"]):
        role, calls = each["role"], each.get("tool_calls") or []
        if role == "tool":
            if not open_calls[each["tool_call_id"]]:
                yield f"{at}: a result of no call"
            open_calls[each["tool_call_id"]] -= 1
            continue
        if +open_calls:
            yield f"{at}: calls without a result before it"
        open_calls = Counter(call["id"] for call in calls)
        if role not in {"system", "developer", "user", "assistant"}:
            yield f"{at}: role {role}"
        if role == "assistant" and not each.get("content") and not calls:
            yield f"{at}: says nothing"
    if +open_calls:
        yield "calls without a result at the end"


def _user_texts(messages: list[JsonObject]) -> list[str]:
    parts = [part for each in messages if each["role"] == "user" for part in parts_of(each["content"])]
    return [part["text"] for part in parts if part["type"] == "text"]


def _privileged(messages: list[JsonObject]) -> list[JsonObject]:
    return [each for each in messages if each["role"] in {"system", "developer"}]


CHAT = Wire(
    name="chat",
    elements=_elements,
    before={"model": "gpt-x", "temperature": 1.0},
    behind={"tools": [READ], "seed": 7, "x-unknown": [1e-7, "ö"]},
    array="messages",
    output="max_completion_tokens",
    wrongs=_wrongs,
    user_texts=_user_texts,
    privileged=_privileged,
    signs=False,
)

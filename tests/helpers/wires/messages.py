"""Messages as agents write them, with marks of what is to be cached, and what the provider refuses there."""

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

MARK = {"cache_control": {"type": "ephemeral"}}
MOST_MARKS = 4
READ = {"name": "read", "input_schema": {"type": "object"}, **MARK}
SHOWN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
# Messages of the user's that have a mark: the last ones, so that marks move as the conversation grows.
MARKED = 2


def _elements(_: Talk, held: Sequence[Moment]) -> list[JsonObject]:
    made: list[JsonObject] = []
    for moment in held:
        if isinstance(moment, Told):  # instructions stand beside the list
            continue
        role = "assistant" if isinstance(moment, Answered) else "user"
        content = _written(moment)
        if made and made[-1]["role"] == role:
            made[-1]["content"] = [*parts_of(made[-1]["content"]), *parts_of(content)]
        else:
            made.append({"role": role, "content": content})
    users = [each for each in made if each["role"] == "user"][-MARKED:]
    for each in users:
        blocks = parts_of(each["content"])
        each["content"] = [*blocks[:-1], {**blocks[-1], **MARK}]
    return made


@singledispatch
def _written(moment: Moment) -> str | list[JsonObject]:
    """The content of a moment."""
    assert isinstance(moment, Asked)
    return [SHOWN, {"type": "text", "text": moment.text}] if moment.pictured else moment.text


@_written.register
def _(moment: Answered) -> str | list[JsonObject]:
    made: list[JsonObject] = []
    if moment.begun:
        return moment.text
    if moment.thought:
        made.append({"type": "thinking", "thinking": "Let me see.", "signature": moment.thought})
    if moment.searched:
        query = {"query": moment.searched}
        made.append({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": query})
        made.append({"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []})
    if moment.text:
        made.append({"type": "text", "text": moment.text})
    return [*made, *map(_call, moment.calls)]


def _call(call: Made) -> JsonObject:
    return {"type": "tool_use", "id": call.id, "name": "read", "input": {"path": call.path}}


@_written.register
def _(moment: Returned) -> str | list[JsonObject]:
    return [
        {
            "type": "tool_result",
            "tool_use_id": each.id,
            "content": [{"type": "text", "text": each.result or "-"}, SHOWN]
            if each.use.pictured
            else each.result,
        }
        for each in moment.calls
    ]


def _wrongs(body: JsonObject) -> Iterator[str]:
    called: list[str] = []
    before = "assistant"
    for at, each in enumerate(body["messages"]):
        role, blocks = each["role"], parts_of(each["content"])
        if role == before or role not in {"user", "assistant"}:
            yield f"{at}: {role} after {before}"
        before = role
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if sorted(results) != sorted(called):
            yield f"{at}: results {results} for calls {called}"
        called = [block["id"] for block in blocks if block["type"] == "tool_use"]
        yield from (f"{at}: {wrong}" for wrong in _misplaced(role, blocks))
    if called:
        yield "calls without a result at the end"
    if (marks := _marks(body)) > MOST_MARKS:
        yield f"{marks} marks"


def _misplaced(role: str, blocks: list[JsonObject]) -> Iterator[str]:
    kinds = [block["type"] for block in blocks]
    if "tool_result" in kinds[kinds.count("tool_result") :]:
        yield "results are not first"
    if not blocks or any(block["type"] == "text" and not block["text"] for block in blocks):
        yield "says nothing"
    if role == "user" and {"tool_use", "thinking"} & set(kinds):
        yield "blocks that are no user's"
    if "thinking" in kinds and kinds[0] != "thinking":
        yield "thoughts are not first"


def _marks(value: object) -> int:
    if isinstance(value, dict):
        return ("cache_control" in value) + sum(map(_marks, value.values()))
    return sum(map(_marks, value)) if isinstance(value, list) else 0


def _user_texts(messages: list[JsonObject]) -> list[str]:
    parts = [part for each in messages if each["role"] == "user" for part in parts_of(each["content"])]
    return [part["text"] for part in parts if part["type"] == "text"]


def _privileged(_: list[JsonObject]) -> list[JsonObject]:
    return []


MESSAGES = Wire(
    name="messages",
    elements=_elements,
    before={"system": [{"type": "text", "text": INSTRUCTIONS, **MARK}]},
    behind={"model": "gpt-x", "tools": [READ], "x-unknown": [1e-7, "ö"]},
    array="messages",
    output="max_tokens",
    wrongs=_wrongs,
    user_texts=_user_texts,
    privileged=_privileged,
    signs=False,
    marked=True,
)

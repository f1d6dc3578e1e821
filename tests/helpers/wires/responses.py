"""Responses as stateless clients write them, and what the provider refuses there."""

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
from tests.helpers.wires.wire import JsonObject, Wire

READ = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
OUTPUTS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}
SHOWN = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "low"}


def _elements(talk: Talk, held: Sequence[Moment]) -> list[JsonObject]:
    return [each for moment in held for each in _written(moment, talk)]


def _id(call: Made, talk: Talk) -> str:
    return call.reused if talk.reused else call.id


@singledispatch
def _written(moment: Moment, talk: Talk) -> list[JsonObject]:
    """The items of a moment."""
    assert isinstance(moment, Told)
    text = {"type": "input_text", "text": moment.text}
    return [{"type": "message", "role": "developer", "content": [text]}]


@_written.register
def _(moment: Asked, talk: Talk) -> list[JsonObject]:
    if not moment.pictured:
        return [{"role": "user", "content": moment.text}]
    text = {"type": "input_text", "text": moment.text}
    return [{"type": "message", "role": "user", "content": [text, SHOWN]}]


@_written.register
def _(moment: Answered, talk: Talk) -> list[JsonObject]:
    made: list[JsonObject] = []
    if moment.thought:
        sealed = {"encrypted_content": moment.thought, "id": f"rs_{len(moment.thought)}"}
        made.append({"type": "reasoning", "summary": [], **sealed})
    if moment.searched:
        action = {"type": "search", "query": moment.searched}
        made.append({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": action})
    if moment.text:
        content = [{"type": "output_text", "text": moment.text, "annotations": []}]
        said = {"type": "message", "role": "assistant", "content": content}
        made.append(said if moment.begun else {"id": "msg_1", "status": "completed", **said})
    return [*made, *(_call(each, talk) for each in moment.calls)]


def _call(call: Made, talk: Talk) -> JsonObject:
    known = {"call_id": _id(call, talk), "id": f"fc_{call.id}", "status": "completed"}
    if call.use.custom:
        return {"type": "custom_tool_call", "name": "look", "input": call.path, **known}
    return {"type": "function_call", "name": "read", "arguments": f'{{"path": "{call.path}"}}', **known}


@_written.register
def _(moment: Returned, talk: Talk) -> list[JsonObject]:
    return [_output(each, talk) for each in moment.calls]


def _output(call: Made, talk: Talk) -> JsonObject:
    kind = "custom_tool_call_output" if call.use.custom else "function_call_output"
    content = [{"type": "input_text", "text": call.result}, SHOWN]
    output = content if call.use.pictured and not call.use.custom else call.result
    return {"type": kind, "call_id": _id(call, talk), "output": output}


def _kind(item: JsonObject) -> str:
    return str(item.get("type") or "message")


def _mine(item: JsonObject) -> bool:
    """Whether the model has made it."""
    return _kind(item) not in OUTPUTS and item.get("role", "assistant") == "assistant"


def _wrongs(body: JsonObject) -> Iterator[str]:
    yield from _unpaired(body["input"])
    yield from _incomplete(body["input"])


def _unpaired(items: list[JsonObject]) -> Iterator[str]:
    open_calls: Counter[tuple[str, str]] = Counter()
    for at, each in enumerate(items):
        kind = _kind(each)
        if kind in OUTPUTS:
            call = (OUTPUTS[kind], each["call_id"])
            if not open_calls[call]:
                yield f"{at}: a result of no call"
            open_calls[call] -= 1
        elif kind in OUTPUTS.values():
            open_calls[kind, each["call_id"]] += 1
        elif +open_calls and not _mine(each):
            yield f"{at}: calls without a result before it"
            open_calls.clear()
    if +open_calls:
        yield "calls without a result at the end"


def _incomplete(items: list[JsonObject]) -> Iterator[str]:
    for at, each in enumerate(items):
        kind = _kind(each)
        if kind == "message" and not each["content"]:
            yield f"{at}: says nothing"
        if kind == "reasoning" and not (at + 1 < len(items) and _mine(items[at + 1])):
            yield f"{at}: reasoning without the item that came of it"


def _user_texts(items: list[JsonObject]) -> list[str]:
    texts: list[str] = []
    for each in items:
        if each.get("role") == "user":
            content = each["content"]
            plain = isinstance(content, str)
            texts += [content] if plain else [part["text"] for part in content if "text" in part]
    return texts


def _privileged(items: list[JsonObject]) -> list[JsonObject]:
    return [each for each in items if each.get("role") in {"system", "developer"}]


RESPONSES = Wire(
    name="responses",
    elements=_elements,
    before={"model": "gpt-x", "instructions": INSTRUCTIONS, "store": False},
    behind={"tools": [READ], "include": ["reasoning.encrypted_content"], "x-unknown": [1e-7, "ö"]},
    array="input",
    output="max_output_tokens",
    wrongs=_wrongs,
    user_texts=_user_texts,
    privileged=_privileged,
    signs=True,
)

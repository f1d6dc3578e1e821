"""Implements the Responses wire: `POST …/responses`, streamed or not."""

import json
from collections.abc import Iterator

from compaction_proxy.cli.demo.chat import (
    ARGUMENT_PIECE_CHARACTERS,
    JsonObject,
    ToolCall,
    split_words,
)
from compaction_proxy.cli.demo.validation import OVERFLOW, Refusal
from compaction_proxy.wires.json.values import encode_json
from tests.doubles import responses_request as reading
from tests.doubles import responses_validation
from tests.doubles.provider_wire import ProviderWire, WireAnswer
from tests.doubles.thought_signature import seal_thought

Events = Iterator[tuple[str, JsonObject]]

# By the type of the called tool: the type of the call's item, and the prefix of the item's id.
_ITEMS = {
    "custom": ("custom_tool_call", "ctc"),
    "local_shell": ("local_shell_call", "lsh"),
    "shell": ("shell_call", "sh"),
    "apply_patch": ("apply_patch_call", "apc"),
}
_FUNCTION = ("function_call", "fc")
_STREAMED = {
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


def _build_usage(answer: WireAnswer) -> JsonObject:
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def format_response_id(answer: WireAnswer) -> str:
    """Returns the response id of an answer."""
    return f"resp_{answer.number:048d}"


def _build_response(answer: WireAnswer, status: str, **fields: object) -> JsonObject:
    """Builds a response object with the given status."""
    body = answer.request.body
    return {
        "id": format_response_id(answer),
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": None,
        "model": answer.model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": body.get("store", True),
        "temperature": body.get("temperature", 1.0),
        "text": {"format": {"type": "text"}, "verbosity": "medium", **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_logprobs": 0,
        "top_p": body.get("top_p", 1.0),
        "truncation": body.get("truncation", "disabled"),
        "usage": None,
        "user": body.get("user"),
        "metadata": body.get("metadata") or {},
        **fields,
    }


def _build_finished_response(answer: WireAnswer) -> JsonObject:
    is_cut = answer.reply.finish_reason == "length"
    reason = {"reason": "max_output_tokens"} if is_cut else None
    status = "incomplete" if is_cut else "completed"
    items = list(iter_output_items(answer))
    return _build_response(
        answer, status, output=items, usage=_build_usage(answer), incomplete_details=reason
    )


def _parse_arguments(arguments: str) -> JsonObject:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _build_call_item(call: ToolCall, answer: WireAnswer, mark: str, index: int) -> JsonObject:
    """Builds the item of a tool call. Its type depends on the type of the tool."""
    offered = {
        reading.get_tool_name(tool): tool.get("type") for tool in answer.request.body.get("tools") or ()
    }
    name, prefix = _ITEMS.get(str(offered.get(call.name)), _FUNCTION)
    head = {"id": f"{prefix}_{mark}_{index}", "type": name, "status": "completed", "call_id": call.id}
    match name:
        case "function_call":
            return {**head, "name": call.name, "arguments": call.arguments}
        case "custom_tool_call":
            return {**head, "name": call.name, "input": call.arguments}
        case "local_shell_call":
            return {
                **head,
                "action": {"type": "exec", "command": [], "env": {}, **_parse_arguments(call.arguments)},
            }
        case "shell_call":
            return {**head, "action": {"commands": [], **_parse_arguments(call.arguments)}}
    return {**head, "operation": _parse_arguments(call.arguments)}


def iter_output_items(answer: WireAnswer) -> Iterator[JsonObject]:
    """Yields the output items of an answer.

    If the first item is a reasoning item, the ids of the others contain its mark, because the API requires
    that they are sent back together.
    """
    reply = answer.reply
    mark = f"r{answer.prompt_mark}" if reply.thought else answer.prompt_mark
    if reply.thought:
        summary_mode = (answer.request.body.get("reasoning") or {}).get("summary")
        summary = [{"type": "summary_text", "text": reply.thought}] if summary_mode else []
        seal = seal_thought(reply.thought)
        yield {"id": f"rs_{mark}", "type": "reasoning", "summary": summary, "encrypted_content": seal}
    if reply.text or not reply.calls:
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": reply.text}
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        head = {"id": f"msg_{mark}_0", "type": "message", "status": status}
        yield {**head, "role": "assistant", "content": [part]}
    for index, call in enumerate(reply.calls, 1):
        yield _build_call_item(call, answer, mark, index)


def _iter_text_events(item: JsonObject) -> Events:
    part = item["content"][0]
    where = {"item_id": item["id"], "content_index": 0}
    yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
    for piece in split_words(part["text"]):
        yield "response.output_text.delta", {**where, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**where, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**where, "part": part}


def _iter_summary_events(item: JsonObject) -> Events:
    for index, part in enumerate(item["summary"]):
        where = {"item_id": item["id"], "summary_index": index}
        yield "response.reasoning_summary_part.added", {**where, "part": {**part, "text": ""}}
        for piece in split_words(part["text"]):
            yield "response.reasoning_summary_text.delta", {**where, "delta": piece}
        yield "response.reasoning_summary_text.done", {**where, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**where, "part": part}


def _iter_call_events(item: JsonObject) -> Events:
    name, key = _STREAMED[item["type"]], reading.CALL_TYPES[item["type"]][1]
    value = item[key]
    for start in range(0, len(value), ARGUMENT_PIECE_CHARACTERS):
        yield (
            f"{name}.delta",
            {"item_id": item["id"], "delta": value[start : start + ARGUMENT_PIECE_CHARACTERS]},
        )
    yield f"{name}.done", {"item_id": item["id"], "name": item["name"], key: value}


def _iter_item_events(item: JsonObject) -> Events:
    """Yields the events of an item. The first one shows the item without content, the last one in full."""
    opening = {**item, "status": "in_progress"}
    inner_events: Events = iter(())
    if item["type"] == "message":
        opening["content"], inner_events = [], _iter_text_events(item)
    elif item["type"] == "reasoning":
        opening = {**item, "summary": [], "encrypted_content": ""}
        inner_events = _iter_summary_events(item)
    elif item["type"] in _STREAMED:
        opening[reading.CALL_TYPES[item["type"]][1]], inner_events = "", _iter_call_events(item)
    yield "response.output_item.added", {"item": opening}
    yield from inner_events
    yield "response.output_item.done", {"item": item}


def _iter_events(answer: WireAnswer) -> Events:
    response = _build_response(answer, "in_progress")
    yield "response.created", {"response": response}
    yield "response.in_progress", {"response": response}
    finished = _build_finished_response(answer)
    for index, item in enumerate(finished["output"]):
        for name, fields in _iter_item_events(item):
            yield name, {"output_index": index, **fields}
    yield f"response.{finished['status']}", {"response": finished}


def _encode_events(answer: WireAnswer) -> Iterator[bytes]:
    for number, (name, fields) in enumerate(_iter_events(answer)):
        data = encode_json({"type": name, "sequence_number": number, **fields})
        yield b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def check_overflow(window: int, prompt: int, output: int) -> Refusal | None:
    """Returns a refusal if `prompt` plus the requested `output`, in tokens, exceed the context window.

    As with OpenAI, the error message contains no sizes.
    """
    if prompt + output <= window:
        return None
    text = "Your input exceeds the context window of this model. Please adjust your input and try again."
    return Refusal(text, "input", OVERFLOW)


RESPONSES = ProviderWire(
    validate=responses_validation.validate_request,
    read_request=reading.read_request,
    check_overflow=check_overflow,
    encode_answer=lambda answer: encode_json(_build_finished_response(answer)),
    encode_events=_encode_events,
    encode_refusal=lambda wrong, _number: wrong.to_bytes(),
    build_headers=lambda _number: ((b"openai-version", b"2020-10-01"),),
)

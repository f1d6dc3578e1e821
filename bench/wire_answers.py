"""What the upstream of the bench answers on the wires other than chat: as long as there, in their shapes."""

import functools
import json
from typing import Any, Final

PATHS: Final = {b"/responses": "responses", b"/messages": "messages"}
BYTES_PER_TOKEN = 4
OUTPUT_TOKENS = 128

Fields = dict[str, Any]


def wire_of(request_line: bytes) -> str:
    """The wire of a request, by its path."""
    path = request_line.split(b" ", 2)[1].partition(b"?")[0]
    return next((wire for ending, wire in PATHS.items() if path.endswith(ending)), "chat")


def _usage(request_bytes: int) -> dict[str, int]:
    return {"input_tokens": request_bytes // BYTES_PER_TOKEN, "output_tokens": OUTPUT_TOKENS}


def _response(text: str, request_bytes: int) -> Fields:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    usage = _usage(request_bytes)
    usage["total_tokens"] = sum(usage.values())
    told = {"id": "resp_1", "object": "response", "created_at": 1_790_000_000, "status": "completed"}
    return {**told, "model": "bench", "output": [item], "usage": usage}


def _message(text: str, request_bytes: int) -> Fields:
    told = {"id": "msg_1", "type": "message", "role": "assistant", "model": "bench"}
    ended = {"stop_reason": "end_turn", "stop_sequence": None, "usage": _usage(request_bytes)}
    return {**told, "content": [{"type": "text", "text": text}], **ended}


@functools.lru_cache(maxsize=1024)
def whole(wire: str, text: str, request_bytes: int) -> bytes:
    """The body of an answer that is no stream, to a request of so many bytes."""
    made = _response(text, request_bytes) if wire == "responses" else _message(text, request_bytes)
    return json.dumps(made, separators=(",", ":")).encode()


@functools.lru_cache(maxsize=1024)
def events(wire: str, chunks: int, request_bytes: int) -> tuple[bytes, ...]:
    """A stream of so many events."""
    if wire == "responses":
        created = {"id": "resp_1", "object": "response", "status": "in_progress", "output": []}
        texts: list[Fields] = [
            {"item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": f" {number}"}
            for number in range(chunks - 2)
        ]
        told = [
            ("response.created", {"response": created}),
            *(("response.output_text.delta", each) for each in texts),
            ("response.completed", {"response": _response("", request_bytes)}),
        ]
        return tuple(
            _event(kind, {**each, "sequence_number": number}) for number, (kind, each) in enumerate(told)
        )
    begun = {**_message("", request_bytes), "content": [], "stop_reason": None}
    deltas = (
        {"index": 0, "delta": {"type": "text_delta", "text": f" {number}"}} for number in range(chunks - 4)
    )
    ended = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": OUTPUT_TOKENS}}
    return (
        _event("message_start", {"message": begun}),
        _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        *(_event("content_block_delta", each) for each in deltas),
        _event("message_delta", ended),
        _event("message_stop", {}),
    )


def _event(kind: str, fields: Fields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        json.dumps({"type": kind, **fields}, separators=(",", ":")).encode(),
    )

"""Hides calls of the proxy's tool in an answer that is not a stream (see `intercept_stream`)."""

from collections.abc import Mapping
from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.chat.continuation import (
    AnswerContent,
    add_usage,
    choose_text_separator,
    encode_ascii_json,
)
from compaction_proxy.wires.chat.intercept_calls import (
    CUT_OFF_REASONS,
    STOP,
    TOOL_CALLS,
    JsonObject,
    PartialToolCall,
    ToolCallFilter,
)
from compaction_proxy.wires.chat.intercept_stream import ENVELOPE
from compaction_proxy.wires.json import large

_CALL_MARKER: Final = b'"tool_calls"'


class ChatAnswerJoiner:
    """Joins one or more answers of the upstream into one answer for the client.

    Args:
        name: The name of the proxy's tool.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_first_answer = True
        self._envelope: JsonObject = {}
        self._previous_text = ""
        self._previous_logprobs: list[Any] = []
        self._previous_usage: JsonObject = {}
        self._message: JsonObject = {}
        self._calls = ToolCallFilter(name)

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns the body for the client, or None if the proxy must answer calls of its tool first.

        A first answer without calls of the proxy's tool is returned unchanged. The result is empty if a later
        answer is not a JSON object.

        Args:
            body: The upstream's answer.
            may_answer_calls: Whether the proxy may answer calls of its tool in this answer. If False, this is
                the last answer, and these calls are removed from it.
        """
        if self._is_first_answer and _CALL_MARKER not in body:
            return body
        payload = _decode_object(body)
        choice, message = _get_choice(payload)
        self._calls = ToolCallFilter(self._name)
        pieces = message.get(TOOL_CALLS)
        shown = self._calls.filter_pieces(pieces if isinstance(pieces, list) else [])
        shown += self._calls.release_unnamed()
        if self._is_first_answer and not self._calls.own_calls:
            return body
        reason = choice.get("finish_reason")
        if may_answer_calls and not shown and self._calls.own_calls and reason not in CUT_OFF_REASONS:
            self._record_answer(payload, choice, message)
            return None
        if self._calls.own_calls:
            _remove_own_calls(choice, message, shown)
        if message:
            return self._build_last_answer(payload, choice, message)
        return body if payload else b""  # a body without a message may be an error for the client

    @property
    def calls(self) -> tuple[PartialToolCall, ...]:
        """The calls that the proxy must answer after `join_answer` has returned None."""
        return tuple(self._calls.own_calls)

    def get_assistant_message(self) -> JsonObject:
        """Returns the assistant message of the answer for which `join_answer` returned None."""
        return self._message

    def _record_answer(self, payload: JsonObject, choice: JsonObject, message: JsonObject) -> None:
        content = AnswerContent()
        content.add_delta(message)
        self._message = content.build_message(self._calls.own_calls)
        self._previous_text += choose_text_separator(self._previous_text, content.text) + content.text
        self._previous_logprobs += _get_logprobs(choice)
        self._previous_usage = add_usage(self._previous_usage, _get_usage(payload))
        if self._is_first_answer:
            self._envelope = {key: payload[key] for key in ENVELOPE if key in payload}
        self._is_first_answer = False

    def _build_last_answer(self, payload: JsonObject, choice: JsonObject, message: JsonObject) -> bytes:
        payload.update(self._envelope)
        content = message.get("content")
        if isinstance(content, list) and self._previous_text:
            message["content"] = [{"type": "text", "text": self._previous_text}, *content]
        elif self._previous_text:
            text = content if isinstance(content, str) else ""
            message["content"] = self._previous_text + choose_text_separator(self._previous_text, text) + text
        if self._previous_logprobs and _get_logprobs(choice):
            choice["logprobs"]["content"] = [*self._previous_logprobs, *_get_logprobs(choice)]
        if _get_usage(payload):
            payload["usage"] = add_usage(self._previous_usage, _get_usage(payload))
        return encode_ascii_json(payload)


def _remove_own_calls(choice: JsonObject, message: JsonObject, shown: list[Any]) -> None:
    """Replaces the calls of an answer by `shown`, the calls for the client, and adapts the finish reason."""
    message[TOOL_CALLS] = shown
    if not shown:
        del message[TOOL_CALLS]
        if choice.get("finish_reason") == TOOL_CALLS:
            choice["finish_reason"] = STOP


def _decode_object(body: bytes) -> JsonObject:
    try:
        payload = large.decode_value(body.strip())
    except UnreadableBodyError:
        return {}
    return payload if isinstance(payload, dict) else {}


def _get_choice(payload: Mapping[str, Any]) -> tuple[JsonObject, JsonObject]:
    """Returns an answer's first choice and the message of this choice; empty if they are missing."""
    choices = payload.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    choice = first if isinstance(first, dict) else {}
    message = choice.get("message")
    return choice, message if isinstance(message, dict) else {}


def _get_usage(payload: Mapping[str, Any]) -> JsonObject:
    usage = payload.get("usage")
    return usage if isinstance(usage, dict) else {}


def _get_logprobs(choice: Mapping[str, Any]) -> list[Any]:
    """Returns the log probabilities of the tokens; empty if the client has not asked for them."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return content if isinstance(content, list) else []

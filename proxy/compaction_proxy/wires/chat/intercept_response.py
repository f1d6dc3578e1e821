"""An answer that is no stream, in which calls of a tool of ours are hidden (see `intercept_stream`)."""

from collections.abc import Mapping
from typing import Any, Final

from compaction_proxy.core.errors import Unreadable
from compaction_proxy.wires.chat.continuation import Said, added, break_between, dumped
from compaction_proxy.wires.chat.intercept_calls import CUT_OFF, STOP, TOOL_CALLS, Call, Calls, JsonObject
from compaction_proxy.wires.chat.intercept_stream import ENVELOPE
from compaction_proxy.wires.json import large

_CALLING: Final = b'"tool_calls"'


class HiddenAnswer:
    """One answer as the client sees it, whatever number of answers it is made of.

    Args:
        name: Of the tool of ours.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = True
        self._envelope: JsonObject = {}
        self._text = ""
        self._odds: list[Any] = []
        self._spent: JsonObject = {}
        self._message: JsonObject = {}
        self._calls = Calls(name)

    def take(self, body: bytes, *, hidden: bool) -> bytes | None:
        """What the client gets where this is the last answer; None: calls of ours are to be answered first.

        A first answer without them is given back as it is; of a later one that is no JSON nothing is given.

        Args:
            body: The upstream's answer.
            hidden: Whether calls in it may be answered. Else they are left out.
        """
        if self._first and _CALLING not in body:
            return body
        payload = _object(body)
        choice, message = _choice(payload)
        self._calls = Calls(self._name)
        listed = message.get(TOOL_CALLS)
        shown = self._calls.take(listed if isinstance(listed, list) else [])
        shown += self._calls.settle()
        if self._first and not self._calls.mine:
            return body
        reason = choice.get("finish_reason")
        if hidden and not shown and self._calls.mine and reason not in CUT_OFF:
            self._note(payload, choice, message)
            return None
        if self._calls.mine:
            _left_out(choice, message, shown)
        if message:
            return self._joined(payload, choice, message)
        return body if payload else b""  # perhaps an error

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls to be answered, once `take` has given nothing."""
        return tuple(self._calls.mine)

    def go_on(self) -> JsonObject:
        """The assistant message that the answer was which `take` gave nothing for."""
        return self._message

    def _note(self, payload: JsonObject, choice: JsonObject, message: JsonObject) -> None:
        said = Said()
        said.add(message)
        self._message = said.message(self._calls.mine)
        self._text += break_between(self._text, said.text) + said.text
        self._odds += _odds(choice)
        self._spent = added(self._spent, _usage(payload))
        if self._first:
            self._envelope = {key: payload[key] for key in ENVELOPE if key in payload}
        self._first = False

    def _joined(self, payload: JsonObject, choice: JsonObject, message: JsonObject) -> bytes:
        payload.update(self._envelope)
        content = message.get("content")
        if isinstance(content, list) and self._text:
            message["content"] = [{"type": "text", "text": self._text}, *content]
        elif self._text:
            more = content if isinstance(content, str) else ""
            message["content"] = self._text + break_between(self._text, more) + more
        if self._odds and _odds(choice):
            choice["logprobs"]["content"] = [*self._odds, *_odds(choice)]
        if _usage(payload):
            payload["usage"] = added(self._spent, _usage(payload))
        return dumped(payload)


def _left_out(choice: JsonObject, message: JsonObject, shown: list[Any]) -> None:
    """Leave calls of ours out of an answer that the client gets."""
    message[TOOL_CALLS] = shown
    if not shown:
        del message[TOOL_CALLS]
        if choice.get("finish_reason") == TOOL_CALLS:
            choice["finish_reason"] = STOP


def _object(body: bytes) -> JsonObject:
    try:
        payload = large.value(body.strip())
    except Unreadable:
        return {}
    return payload if isinstance(payload, dict) else {}


def _choice(payload: Mapping[str, Any]) -> tuple[JsonObject, JsonObject]:
    """The first choice and its message; empty where there is none."""
    choices = payload.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    choice = first if isinstance(first, dict) else {}
    message = choice.get("message")
    return choice, message if isinstance(message, dict) else {}


def _usage(payload: Mapping[str, Any]) -> JsonObject:
    held = payload.get("usage")
    return held if isinstance(held, dict) else {}


def _odds(choice: Mapping[str, Any]) -> list[Any]:
    """Logarithms of probabilities, token by token, if they were asked for."""
    held = choice.get("logprobs")
    content = held.get("content") if isinstance(held, dict) else None
    return content if isinstance(content, list) else []

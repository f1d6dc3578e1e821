"""Calls of our own on the chat completions wire: a summary request's body, and what its answer says."""

import json
import re
from collections.abc import Mapping
from typing import Any

from proxy.errors import SummaryFailed
from proxy.ports import SummaryAnswer, SummaryCall

# Models that think before they answer: they take no temperature and name their output limit differently, and
# what they think counts towards it.
_REASONING = re.compile(r"(?:^|/)(?:o\d|gpt-5(?!.*chat)|gpt-[6-9])", re.IGNORECASE)
REASONING_ALLOWANCE_TOKENS = 2_000


def request_body(call: SummaryCall, refused: frozenset[str] = frozenset()) -> bytes:
    """The body of a summary call, without the members that the provider has refused before."""
    reasoning = _REASONING.search(call.model) is not None
    limit = call.max_tokens + (REASONING_ALLOWANCE_TOKENS if reasoning else 0)
    fields: dict[str, Any] = {
        "model": call.model,
        "messages": [
            {"role": "system", "content": call.system},
            {"role": "user", "content": call.prompt},
        ],
    }
    named = "max_completion_tokens" if reasoning or "max_tokens" in refused else "max_tokens"
    fields[named] = limit
    if reasoning:
        fields["reasoning_effort"] = "low"
    elif call.temperature is not None:
        fields["temperature"] = call.temperature
    return json.dumps({key: fields[key] for key in fields if key not in refused}).encode()


def refused_member(body: bytes) -> str | None:
    """The member of our request that a 400 says it does not take, or None."""
    error = _mapping(_json(body)).get("error")
    param = _mapping(error).get("param")
    known = {"temperature", "max_tokens", "reasoning_effort"}
    if isinstance(param, str) and param in known:
        return param
    message = str(_mapping(error).get("message", error))
    return next((each for each in sorted(known) if each in message), None)


def answer(body: bytes) -> SummaryAnswer:
    """What a chat completion says.

    Raises:
        SummaryFailed: `garbage`; the body is none.
    """
    completion = _mapping(_json(body))
    choices = completion.get("choices")
    choice = _mapping(choices[0]) if isinstance(choices, list) and choices else None
    if not choice or not isinstance(choice.get("message"), Mapping):
        raise SummaryFailed("garbage")
    said = choice["message"]
    usage = _mapping(completion.get("usage"))
    return SummaryAnswer(
        text=_text(said.get("content")),
        finish_reason=str(choice.get("finish_reason") or ""),
        called_tools=bool(said.get("tool_calls") or said.get("function_call")),
        refused=bool(said.get("refusal")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
    )


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = (_mapping(each).get("text") for each in content)
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0

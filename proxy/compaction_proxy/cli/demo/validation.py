"""Validates requests to the demo provider.

The error messages have OpenAI's wording, because clients and proxies recognise errors by the wording.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.wires.json.values import encode_json

OVERFLOW = "context_length_exceeded"
ROLES = ("system", "assistant", "user", "function", "tool", "developer")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error response of the provider.

    Attributes:
        message: Text of the error.
        param: Name of the invalid parameter, or None.
        code: Error code, or None.
        status: HTTP status.
        kind: Value of the error's field `type`.
    """

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    kind: str = "invalid_request_error"

    def to_bytes(self) -> bytes:
        """Encodes the body of the response in OpenAI's error format."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return encode_json({"error": error})


UNPARSED = Refusal(
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP "
    "library correctly. The OpenAI API expects a JSON payload, but what was sent was not valid JSON.)"
)


def refuse_unknown_model(model: str) -> Refusal:
    """Returns a refusal with status 404 for a model that the provider does not offer."""
    message = f"The model `{model}` does not exist or you do not have access to it."
    return Refusal(message, code="model_not_found", status=404)


def check_overflow(window: int, prompt: int, output: int) -> Refusal | None:
    """Returns a refusal if the sum of prompt and requested output exceeds the context window.

    Otherwise returns None. All arguments are in tokens.
    """
    if prompt > window:
        detail = f"your messages resulted in {prompt} tokens. Please reduce the length of the messages."
    elif prompt + output > window:
        detail = (
            f"you requested {prompt + output} tokens ({prompt} in the messages, {output} in the completion). "
            "Please reduce the length of the messages or completion."
        )
    else:
        return None
    message = f"This model's maximum context length is {window} tokens. However, {detail}"
    return Refusal(message, param="messages", code=OVERFLOW)


def _refuse_empty_array(param: str) -> Refusal:
    message = (
        f"Invalid '{param}': empty array. Expected an array with minimum length 1, "
        "but got an empty array instead."
    )
    return Refusal(message, param=param, code="empty_array")


def _refuse_unanswered(pending: list[str], index: int) -> Refusal:
    message = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
        "'tool_call_id'. The following tool_call_ids did not have response messages: " + ", ".join(pending)
    )
    return Refusal(message, param=f"messages.[{index}].role")


def _check_shape(message: object, index: int) -> Refusal | None:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        kind = type(message).__name__
        return Refusal(
            f"Invalid type for '{where}': expected an object, but got {kind} instead.", where, "invalid_type"
        )
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(f"'{name}'" for name in ROLES[:-1])
        text = f"Invalid value: '{role}'. Supported values are: {known}, and '{ROLES[-1]}'."
        return Refusal(text, f"{where}.role", "invalid_value")
    return _check_content(message, where)


def _check_content(message: JsonObject, where: str) -> Refusal | None:
    content, calls = message.get("content"), message.get("tool_calls")
    if message["role"] == "assistant":
        if calls == []:
            return _refuse_empty_array(f"{where}.tool_calls")
        if calls or message.get("function_call") or message.get("refusal"):
            return None
    if content == []:
        return _refuse_empty_array(f"{where}.content")
    if content is None or not isinstance(content, str | list):
        actual = "null" if content is None else type(content).__name__
        text = f"Invalid value for 'content': expected a string, got {actual}."
        return Refusal(text, f"messages.[{where[9:-1]}].content")
    return None


def _check_tool_result(
    message: JsonObject, index: int, open_ids: list[str], call_ids: list[str] | None
) -> Refusal | None:
    """Checks a tool result, and removes its call id from `open_ids`.

    Returns the refusal if the tool result is invalid, else None.

    Args:
        message: The tool result.
        index: Index of the message in the request.
        open_ids: Ids of the calls that still need a result.
        call_ids: Ids of all calls of the assistant message before the result; None if that message has no
            calls.
    """
    if call_ids is None:
        text = (
            "Invalid parameter: messages with role 'tool' must be a response to a preceeding message "
            "with 'tool_calls'."
        )
        return Refusal(text, f"messages.[{index}].role")
    call_id = message.get("tool_call_id")
    if call_id not in call_ids:
        text = (
            f"Invalid parameter: 'tool_call_id' of '{call_id}' not found in 'tool_calls' of previous message."
        )
        return Refusal(text, f"messages.[{index}].tool_call_id")
    if call_id in open_ids:
        open_ids.remove(call_id)
    return None


def _check_pairing(messages: list[JsonObject]) -> Iterator[Refusal]:
    pending: list[str] = []
    call_ids: list[str] | None = None
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            refusal = _check_tool_result(message, index, pending, call_ids)
            if refusal:
                yield refusal
            continue
        if pending:
            yield _refuse_unanswered(pending, index)
        call_ids = [str(call.get("id")) for call in message.get("tool_calls") or ()] or None
        pending = list(call_ids or ())
    if pending:
        yield _refuse_unanswered(pending, len(messages))


def validate_request(body: JsonObject) -> Refusal | None:
    """Returns the refusal for the first error in a request, or None if the request is valid."""
    if not isinstance(body.get("model"), str):
        return Refusal("you must provide a model parameter")
    messages = body.get("messages")
    if messages is None:
        return Refusal("Missing required parameter: 'messages'.", "messages", "missing_required_parameter")
    if not isinstance(messages, list):
        return Refusal(
            "Invalid type for 'messages': expected an array of objects.", "messages", "invalid_type"
        )
    if not messages:
        return _refuse_empty_array("messages")
    shapes = (_check_shape(message, index) for index, message in enumerate(messages))
    return next(filter(None, shapes), None) or next(_check_pairing(messages), None)

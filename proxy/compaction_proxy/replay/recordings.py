"""Parses recorded conversations, and derives from their messages which requests the client sent."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.wires.json.values import encode_json

# Maximum bytes of a file, and of one request in a file. A larger file or request is refused. The second limit
# equals the default of `server.max_body_bytes`.
MAX_FILE_BYTES = 200 * 1024 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
# Members of a request, besides `model` and `messages`, that affect how much fits the context window: they are
# part of the prompt, or limit the output, for which room is reserved.
SHAPING_MEMBERS = ("tools", "functions", "response_format", "max_tokens", "max_completion_tokens")
# Roles of messages with which a request may end. An assistant message after such a message is the reply to a
# request.
_ASKING = frozenset({"user", "tool", "function"})
# Types of content blocks that only Anthropic's Messages wire has. A recording with such a block is refused,
# because a parser for Chat Completions would take the block for empty.
_MESSAGES_BLOCKS = frozenset({"thinking", "redacted_thinking", "tool_use", "tool_result"})
# Model for recordings that name no model, unless the options of the replay name one.
DEFAULT_MODEL = "gpt-4o"


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded conversation: all its messages, and how many of them each request had.

    Attributes:
        name: Name of the conversation in reports.
        model: Requested model; empty if the recording names none.
        messages: Messages as compact JSON.
        lengths: The number of messages in each request, in order. A request with n messages has the first n
            messages of the conversation.
        members: Members that every request has besides model and messages, by name, each value as JSON.
    """

    name: str
    model: str
    messages: tuple[bytes, ...] = field(repr=False)
    lengths: tuple[int, ...] = field(repr=False)
    members: Mapping[str, bytes] = field(repr=False)

    def get_answer(self, length: int) -> bytes:
        """Returns the reply to the request with `length` messages; empty if the reply was not recorded."""
        return self.messages[length] if length < len(self.messages) else b""

    def build_body(self, length: int, model: str) -> bytes:
        """Builds the request body with the first `length` messages, as a client would send it to `model`."""
        messages = b"[" + b",".join(self.messages[:length]) + b"]"
        members = {"model": encode_json(model), "messages": messages, **self.members}
        return b"{" + b",".join(b'"%b":%b' % (key.encode(), value) for key, value in members.items()) + b"}"


def parse_recording(value: object, name: str) -> Recording:
    """Parses a conversation from a JSON value: a request body, or a list of messages.

    `name` is the name of the conversation.

    Raises:
        RequestRefusedError: If the value is not a conversation of the Chat Completions wire, or if it
            contains no message that a model would reply to.
    """
    body: Mapping[str, Any] = value if isinstance(value, dict) else {"messages": value}
    messages = body.get("messages")
    if wire := _detect_other_wire(body, messages):
        raise _build_refusal(f"{name}: of the {wire} wire; only chat completions can be replayed")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise _build_refusal(f"{name}: neither a request body nor a list of messages")
    roles = [each["role"] for each in messages]
    lengths = tuple(n for n in range(1, len(roles) + 1) if _is_request(roles, n))
    if not lengths:
        raise _build_refusal(f"{name}: the request has no message for a model to answer")
    model = body.get("model")
    return Recording(
        name=name,
        model=model if isinstance(model, str) else "",
        messages=tuple(map(encode_json, messages)),
        lengths=lengths,
        members={key: encode_json(body[key]) for key in SHAPING_MEMBERS if body.get(key)},
    )


def read_recordings(path: Path) -> Iterator[Recording]:
    """Yields the conversations in a file.

    The file contains one request body or one array of messages as JSON, or one of these in each line.

    Raises:
        RequestRefusedError: If the file cannot be read, is not a regular file or is too large, or if one of
            its JSON values is not a conversation.
    """
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):  # a pipe or device cannot be read twice, and may never end
            raise _build_refusal(f"{path}: not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise _build_refusal(f"{path}: the file is larger than {MAX_FILE_BYTES // 1024**2} MiB")
        if (whole := _read_single_value(path)) is not None:
            yield parse_recording(whole, _choose_name(whole, path.name))
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    value = _parse_json(line, f"{path}:{number}")
                    yield parse_recording(value, _choose_name(value, f"{path.name}:{number}"))
    except OSError as error:
        raise _build_refusal(f"{path}: {error.strerror}") from None
    except ValueError:  # such as NaN, which Python reads but JSON does not have
        raise _build_refusal(f"{path}: not JSON") from None


def select_lengths(recording: Recording, interval: int) -> tuple[int, ...]:
    """Returns every `interval`-th of the recording's `lengths`, in order. The last one is always included."""
    return tuple(reversed(recording.lengths[::-1][::interval]))


def _read_single_value(path: Path) -> object | None:
    """Returns the JSON value of a file that contains a single value, on one or on several lines.

    Returns None if the file has several lines that are not blank, and the first of them is a JSON value by
    itself. Each line then has a value of its own.

    Raises:
        RequestRefusedError: If the single value has more than `MAX_BODY_BYTES` bytes or is not JSON.
    """
    with path.open("rb") as file:
        lines = filter(bytes.strip, iter(lambda: file.readline(MAX_BODY_BYTES + 1), b""))
        first, rest = next(lines, b""), next(lines, b"")
    if rest and _is_json(first):
        return None
    if path.stat().st_size > MAX_BODY_BYTES:
        raise _build_refusal(f"{path}: a request is larger than {MAX_BODY_BYTES // 1024**2} MiB")
    return _parse_json(path.read_bytes(), str(path))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_json(raw: bytes, where: str) -> object:
    if len(raw) > MAX_BODY_BYTES:
        raise _build_refusal(f"{where}: a request is larger than {MAX_BODY_BYTES // 1024**2} MiB")
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        raise _build_refusal(f"{where}: not JSON") from None
    return value


def _choose_name(value: object, default: str) -> str:
    """Returns the member `id` of `value` if it is printable text of 1 to 80 characters, else `default`."""
    name = value.get("id") if isinstance(value, dict) else None
    return name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 80 else default


def _detect_other_wire(body: Mapping[str, Any], messages: object) -> str:
    """Returns `Responses` or `Messages` if a body seems to be a request of that wire, else an empty text."""
    listed = messages if isinstance(messages, list) else []
    items = [each for each in listed if isinstance(each, dict)]
    if ("input" in body and not listed) or any("type" in item and "role" not in item for item in items):
        return "Responses"
    contents = (item.get("content") for item in items)
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    has_blocks = any(isinstance(block, dict) and block.get("type") in _MESSAGES_BLOCKS for block in blocks)
    return "Messages" if has_blocks or "system" in body else ""


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _is_request(roles: list[str], length: int) -> bool:
    """Returns whether the first `length` messages may have been a request.

    The last of these messages must have a role in `_ASKING`. In the recording, either no message or an
    assistant message must follow.
    """
    follows = length == len(roles) or roles[length] == "assistant"
    return follows and roles[length - 1] in _ASKING


def _build_refusal(message: str) -> RequestRefusedError:
    return RequestRefusedError(400, message, "not_a_conversation")

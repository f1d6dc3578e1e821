"""Recorded conversations: read from a file or a request, and cut into the requests that they grew by."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

from compaction_proxy.core.errors import RequestRefusedError

# Larger files are no transcript; of one, a line or a body may hold as much as the proxy reads of a request.
MAX_FILE_BYTES = 200 * 1024 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
# What of a request shapes what is forwarded, or how large it may be.
SHAPING = ("tools", "functions", "response_format", "max_tokens", "max_completion_tokens")
# A client asks after these; an assistant message behind one is the answer to a request.
_ASKING = frozenset({"user", "tool", "function"})
# Blocks that only Anthropic's format has; read as chat, they would be counted as nothing.
_MESSAGES_BLOCKS = frozenset({"thinking", "redacted_thinking", "tool_use", "tool_result"})
# What a model is called where nobody says it.
DEFAULT_MODEL = "gpt-4o"


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation as its client has it.

    Attributes:
        name: What to call it.
        model: The model that it asks; empty if it does not say.
        messages: Each as compact JSON.
        lengths: How many of them each request holds, in order.
        members: What the requests say beside model and messages, each value as JSON.
    """

    name: str
    model: str
    messages: tuple[bytes, ...] = field(repr=False)
    lengths: tuple[int, ...] = field(repr=False)
    members: Mapping[str, bytes] = field(repr=False)

    def get_answer(self, length: int) -> bytes:
        """The assistant message behind so many messages; empty where it is not known."""
        return self.messages[length] if length < len(self.messages) else b""

    def build_body(self, length: int, model: str) -> bytes:
        """The request that holds so many messages, as a client would send it to `model`."""
        messages = b"[" + b",".join(self.messages[:length]) + b"]"
        members = {"model": dump_json(model), "messages": messages, **self.members}
        return b"{" + b",".join(b'"%b":%b' % (key.encode(), value) for key, value in members.items()) + b"}"


def dump_json(value: object) -> bytes:
    """Compact JSON in UTF-8. A lone surrogate, which a client may send escaped, stays escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def parse_recording(value: object, name: str) -> Recording:
    """The conversation that a JSON value holds: a request body, or a list of messages.

    Raises:
        RequestRefused: It holds none.
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
        raise _build_refusal(f"{name}: no message that a model would answer")
    model = body.get("model")
    return Recording(
        name=name,
        model=model if isinstance(model, str) else "",
        messages=tuple(map(dump_json, messages)),
        lengths=lengths,
        members={key: dump_json(body[key]) for key in SHAPING if body.get(key)},
    )


def read_recordings(path: Path) -> Iterator[Recording]:
    """The conversations in a file: a JSON request body or array of messages, or a line for each.

    Raises:
        RequestRefused: The file cannot be read, is no regular one, is too large, or a line of it is no
            conversation.
    """
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode):  # it is read more than once, and a pipe or a device may never end
            raise _build_refusal(f"{path}: no regular file")
        if found.st_size > MAX_FILE_BYTES:
            raise _build_refusal(f"{path}: larger than {MAX_FILE_BYTES // 1024**2} MiB")
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


def select_lengths(recording: Recording, every: int) -> tuple[int, ...]:
    """The lengths of every so many requests, the last among them."""
    return tuple(reversed(recording.lengths[::-1][::every]))


def _read_single_value(path: Path) -> object | None:
    """The value of a file that is one JSON text, over several lines or alone on one; None for lines."""
    with path.open("rb") as file:
        first = file.readline(MAX_BODY_BYTES + 1)
        rest = file.readline(MAX_BODY_BYTES + 1)
        while rest and not rest.strip():
            rest = file.readline(MAX_BODY_BYTES + 1)
    if rest and _is_json(first):
        return None
    if path.stat().st_size > MAX_BODY_BYTES:
        raise _build_refusal(f"{path}: a request larger than {MAX_BODY_BYTES // 1024**2} MiB")
    return _parse_json(path.read_bytes(), str(path))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_json(raw: bytes, where: str) -> object:
    if len(raw) > MAX_BODY_BYTES:
        raise _build_refusal(f"{where}: a request larger than {MAX_BODY_BYTES // 1024**2} MiB")
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        raise _build_refusal(f"{where}: not JSON") from None
    return value


def _choose_name(value: object, default: str) -> str:
    """What a line calls its conversation."""
    named = value.get("id") if isinstance(value, dict) else None
    return named if isinstance(named, str) and named.isprintable() and 0 < len(named) <= 80 else default


def _detect_other_wire(body: Mapping[str, Any], messages: object) -> str:
    """The wire of a conversation that is none of chat completions; empty where nothing speaks for one."""
    listed = messages if isinstance(messages, list) else []
    items = [each for each in listed if isinstance(each, dict)]
    if ("input" in body and not listed) or any("type" in item and "role" not in item for item in items):
        return "Responses"
    contents = (item.get("content") for item in items)
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    of_messages = any(isinstance(block, dict) and block.get("type") in _MESSAGES_BLOCKS for block in blocks)
    return "Messages" if of_messages or "system" in body else ""


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _is_request(roles: list[str], length: int) -> bool:
    """Whether a client would ask with so many messages: what follows is an answer, or nothing yet."""
    follows = length == len(roles) or roles[length] == "assistant"
    return follows and roles[length - 1] in _ASKING


def _build_refusal(message: str) -> RequestRefusedError:
    return RequestRefusedError(400, message, "not_a_conversation")

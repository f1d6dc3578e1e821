"""Messages of a conversation, and the units and spans that they form.

The code of each wire builds these objects from the bytes of a request, so the core does not depend on the
schema of a provider. Indices are positions in the list that a function receives. Every range is half-open.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Some clients write each parallel tool call as an assistant message of its own, followed by its result. So
# one reply of the model may appear as several assistant messages. The proxy treats at most this many of them,
# with their results, as one unit. The messages after them form further units.
MAX_EXCHANGES_PER_ANSWER = 16
PRIVILEGED_ROLES = frozenset({"system", "developer"})


class Span(NamedTuple):
    """A half-open range `[start, stop)` of message indices."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MessageToolCall:
    """A tool call of an assistant message.

    Attributes:
        id: The call's id as sent; empty for the legacy `function_call`. Ids may be reused in a conversation.
        name: The tool's name.
        arguments: The arguments as sent, usually JSON text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Content that is not text: an image, audio, a file, or content of an unknown kind.

    Attributes:
        kind: The wire's name for the kind, such as `image_url`.
        payload_digest: SHA-256 of the content, which the digest of the message includes.
        text_offset: Position of the content in the message's text, in characters from its beginning.
    """

    kind: str
    payload_digest: bytes
    text_offset: int


class Instruction(NamedTuple):
    """The origin of project instructions, which a client program puts before its user's words.

    Attributes:
        client: Name of the client program, such as `claude-code`.
        kind: `instructions`, `memory` or `environment`.
        path: The file, or another name that distinguishes two instructions of one kind; empty if there is
            only one.
    """

    client: str
    kind: str
    path: str = ""


class SourceMessage(NamedTuple):
    """A message of the client that the proxy divided into several messages.

    Attributes:
        raw: Bytes of the client's message.
        part_count: Number of messages into which it was divided.
    """

    raw: bytes
    part_count: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: The role as sent.
        text: All text content, joined; empty if there is none.
        parts: Content that is not text, in order.
        refusal: An assistant's refusal text.
        name: The optional participant name.
        calls: Tool calls of the message, in order.
        answered_call_ids: Ids of the calls whose results this message contains. A `tool` message of Chat
            Completions has one id; a message without results has none.
        raw: The message as bytes, unchanged if the client sent it; empty for a message of the proxy that is
            not yet encoded for a wire.
        digest: Canonical SHA-256 of the content (`core.digest`), 32 bytes; empty until computed.
        tokens: Estimated size in tokens before calibration, including the tokens that the chat format adds to
            a message.
        has_signed_reasoning: Whether the message contains reasoning of the model with a provider's signature.
            Such reasoning belongs to all calls of the same reply. The digest does not cover the reasoning.
        instruction: The origin of the text if it is project instructions, which a client program has written;
            else None. The digest does not cover this field.
        source: The client's message of which this message is a part; None if the client sent this message
            undivided.
    """

    role: str
    text: str = ""
    parts: tuple[ContentPart, ...] = ()
    refusal: str = ""
    name: str = ""
    calls: tuple[MessageToolCall, ...] = ()
    answered_call_ids: tuple[str, ...] = ()
    raw: bytes = b""
    digest: bytes = b""
    tokens: int = 0
    has_signed_reasoning: bool = False
    instruction: Instruction | None = None
    source: SourceMessage | None = None

    @property
    def is_privileged(self) -> bool:
        """Whether the role is privileged. A privileged message is never covered, summarised or stored."""
        return self.role in PRIVILEGED_ROLES

    @property
    def is_fixed(self) -> bool:
        """Whether no compaction removes the message: it is privileged or holds project instructions."""
        return self.instruction is not None or self.role in PRIVILEGED_ROLES

    @property
    def continues_reply(self) -> bool:
        """Whether the message begins with a result of the provider's own tool, such as a web search.

        The call is at the end of the message before it, because the provider paused its reply there.
        """
        parts = self.parts
        return bool(parts) and self.role == "assistant" and parts[0].kind.endswith("_tool_result")

    def with_digest_and_tokens(self, digest: bytes, tokens: int) -> "Message":
        """Returns a copy of the message with another digest and another size in tokens.

        This method is much faster than `dataclasses.replace`.
        """
        return Message(
            self.role,
            self.text,
            self.parts,
            self.refusal,
            self.name,
            self.calls,
            self.answered_call_ids,
            self.raw,
            digest,
            tokens,
            self.has_signed_reasoning,
            self.instruction,
            self.source,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the message has no text, parts, refusal or calls.

        Most providers refuse an empty assistant message.
        """
        return not (self.text or self.parts or self.refusal or self.calls)


def iter_tool_exchanges(messages: Sequence[Message]) -> Iterator[Span]:
    """Yields the tool exchanges of a list, in order. Together, the exchanges cover the whole list.

    A tool exchange is one plain message, or a message with calls and the results that directly follow it. A
    message that continues the reply before it (`Message.continues_reply`) belongs to the same exchange.
    """
    return _iter_spans(messages, _find_tool_exchange_stop)


def iter_units(messages: Sequence[Message]) -> Iterator[Span]:
    """Yields the units of a list, in order. Together, the units cover the whole list.

    A unit is the smallest run of messages without which providers still accept the list. It is one tool
    exchange (`iter_tool_exchanges`). If the calling message has signed reasoning, the unit also includes the
    following exchanges whose calling messages have no signed reasoning, because they may come from the same
    reply of the model. A unit has at most `MAX_EXCHANGES_PER_ANSWER` exchanges.
    """
    return _iter_spans(messages, _find_unit_stop)


def _iter_spans(
    messages: Sequence[Message], find_stop: Callable[[Sequence[Message], int], int]
) -> Iterator[Span]:
    start = 0
    while start < len(messages):
        stop = find_stop(messages, start)
        yield Span(start, stop)
        start = stop


def _find_unit_stop(messages: Sequence[Message], start: int) -> int:
    """Returns the end of the unit that begins at `start`: the index after its last message.

    `iter_units` says what a unit is.
    """
    stop = _find_tool_exchange_stop(messages, start)
    if messages[start].calls and messages[start].has_signed_reasoning:
        for _ in range(MAX_EXCHANGES_PER_ANSWER - 1):
            if stop == len(messages) or not messages[stop].calls or messages[stop].has_signed_reasoning:
                break
            stop = _find_tool_exchange_stop(messages, stop)
    return stop


def find_unit_start(messages: Sequence[Message], message_index: int) -> int:
    """Returns the start of the unit that contains the message at `message_index`.

    The function reads only messages near this message, and not the whole list.
    """
    exchange_start = start = _find_tool_exchange_start(messages, message_index)
    for _ in range(MAX_EXCHANGES_PER_ANSWER - 1):
        if not start or not messages[start].calls or messages[start].has_signed_reasoning:
            break
        start = _find_tool_exchange_start(messages, start - 1)
    return start if messages[start].calls and messages[start].has_signed_reasoning else exchange_start


def _find_tool_exchange_stop(messages: Sequence[Message], start: int) -> int:
    stop, has_calls = start + 1, bool(messages[start].calls)
    while stop < len(messages):
        message = messages[stop]
        if message.continues_reply:
            has_calls = bool(message.calls)
        elif not (has_calls and message.answered_call_ids):
            break
        stop += 1
    return stop


def _find_tool_exchange_start(messages: Sequence[Message], message_index: int) -> int:
    start = _find_call(messages, message_index)
    while start and messages[start].continues_reply:
        start = _find_call(messages, start - 1)
    return start


def _find_call(messages: Sequence[Message], message_index: int) -> int:
    """Returns the index of the message with the calls that the message at `message_index` answers.

    Consecutive results belong to the message directly before them if that message has calls. Otherwise each
    result is an exchange of its own, and its own index is returned.
    """
    start = message_index
    while start > 0 and messages[start].answered_call_ids:
        start -= 1
    return (
        next((index for index in range(start, message_index) if messages[index].calls), message_index)
        if start < message_index
        else message_index
    )


def find_latest_user_message(messages: Sequence[Message]) -> int | None:
    """Returns the index of the last user message, or None if there is none.

    Messages in the role `user` that only return results of calls do not count, and neither do project
    instructions.
    """
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.role == "user" and not message.answered_call_ids and message.instruction is None:
            return index
    return None

"""Defines the class `Wire`. A `Wire` object has a function for each operation that differs between formats.

The package `compaction` does not depend on a format. Each `RequestBody` refers to its `Wire`, and code that
reads or writes bytes calls the functions of this object.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from compaction_proxy.core.errors import ClientFacingError
from compaction_proxy.core.message import Message
from compaction_proxy.wires.content import UncountedMessage
from compaction_proxy.wires.search_tool import SearchTool
from compaction_proxy.wires.summary_call import SummaryCallFormat
from compaction_proxy.wires.usage import UsageFormat, UsageTap


class MemberNames(NamedTuple):
    """The names of the body members that the proxy reads.

    Attributes:
        messages: The member that contains the messages.
        output_limits: Members that limit the output, in tokens. The first one that sets a limit counts.
        prompt_members: The members whose content counts as prompt tokens, such as tools, without `messages`.
        skip_indicators: Members that show whether the body must be left unchanged (`Wire.find_skip_reason`).
        thinking_budgets: Where a body sets budgets for thinking, in tokens. Each pair consists of the name of
            a member and the key of a budget in this member. The output limit must exceed the budget.
    """

    messages: str
    output_limits: tuple[str, ...]
    prompt_members: tuple[str, ...]
    skip_indicators: tuple[str, ...] = ()
    thinking_budgets: tuple[tuple[str, str], ...] = ()


class AdaptedMessages(NamedTuple):
    """The messages to forward, in a form that the provider accepts.

    Attributes:
        messages: The messages.
        members: The new JSON of other members of the body that must change together with the messages, by
            name.
    """

    messages: Sequence[Message]
    members: Mapping[str, bytes] = MappingProxyType({})


def _never_drop_content(_: bytes, __: bytes) -> None:
    return None


def _keep_messages(_: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    return AdaptedMessages(messages)


def _never_regroups_previous(_: tuple[bytes, ...]) -> bool:
    return False


def _never_continues_piece(_: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)  # each wire exists only once, so it is compared by identity
class Wire:
    """One wire format.

    A *piece* is the JSON of one `Message`. It is one element of the client's array, several elements that
    belong together (with the commas between them), or a part of an element that becomes a separate message.

    Attributes:
        name: `chat`, `responses` or `messages`. It never changes, because stored compactions depend on it.
        path_suffix: The end of the paths to which clients post conversations.
        digest_seed: Bytes that are hashed first for each prefix digest. Each wire has a different seed, so
            that requests of one wire never match the compactions of another wire.
        member_names: The names of the body members that the proxy reads.
        split_message_list: Splits the value of `member_names.messages` into elements. Raises
            `UnreadableBodyError` if the proxy cannot handle the value.
        find_skip_reason: Returns why the proxy must not change a body; empty if the proxy may change it. The
            argument is the JSON of those `member_names.skip_indicators` that the body has, by name.
        group_into_pieces: Groups the elements into pieces.
        may_continue_piece: Returns whether the next element may belong to the same piece as this element.
        parse_uncounted: Parses a piece, and estimates the tokens of its parts that are not text, for a given
            model. Raises `UnreadableBodyError` if the bytes are not a valid piece.
        estimate_nontext_tokens: Estimates the tokens of a piece's parts that are not text, for a given model;
            0 if the bytes are not a valid piece.
        parse_message: Parses a piece, and computes the digest of the message. Raises `UnreadableBodyError` if
            the bytes are not a valid piece.
        encode_message: Returns the piece for a message that the proxy has written itself.
        attach_parts: Adds all parts of a client's message that are not text to a message that the proxy has
            written. The arguments are the proxy's message and the client's message.
        shorten_message: Shortens the text of a message to about the given share (0..1) of its length. A
            notice in the text says that something is missing, and contains the given handle of the message.
            Returns the same object if the result would not be shorter.
        join_messages: Encodes messages as the bytes between the brackets of the array of messages.
        summary_call_format: The format of the proxy's own summary calls.
        usage_format: Describes where responses report their usage.
        may_hold_back_stream: Returns whether the first bytes of a stream contain no part of the reply, so
            that an error may still follow. While the result is True, the proxy does not forward the bytes. It
            calls the function again when more bytes have arrived.
        encode_error: Encodes an error of the proxy as a body in this format.
        api_key_header: The header field in which providers expect the proxy's own key. If it is empty, the
            proxy uses the field in which the client sends its key.
        regroups_previous: Returns whether new elements change how the elements before them are grouped into
            pieces.
        adapt_for_provider: Adapts messages so that the provider accepts them. The arguments are the client's
            body and the messages that replace the client's messages.
        search_tool: The tool with which the model searches messages that compactions have removed. None if
            the proxy does not offer this tool on this wire.
        drop_refused_content: Returns a body without the content that the provider has refused, or None if no
            such content can be removed. The arguments are the refused body and the body of the error.
    """

    name: str
    path_suffix: bytes
    digest_seed: bytes
    member_names: MemberNames
    split_message_list: Callable[[memoryview], tuple[bytes, ...]]
    find_skip_reason: Callable[[Mapping[str, bytes]], str]
    group_into_pieces: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]
    parse_uncounted: Callable[[bytes, str], UncountedMessage]
    estimate_nontext_tokens: Callable[[bytes, str], int]
    parse_message: Callable[[bytes], Message]
    encode_message: Callable[[Message], bytes]
    attach_parts: Callable[[Message, Message], Message]
    shorten_message: Callable[[Message, float, str], Message]
    join_messages: Callable[[Sequence[Message]], bytes]
    summary_call_format: SummaryCallFormat
    usage_format: UsageFormat
    may_hold_back_stream: Callable[[bytes], bool]
    encode_error: Callable[[ClientFacingError], bytes]
    api_key_header: bytes = b""
    may_continue_piece: Callable[[bytes], bool] = _never_continues_piece
    regroups_previous: Callable[[tuple[bytes, ...]], bool] = _never_regroups_previous
    adapt_for_provider: Callable[[bytes, Sequence[Message]], AdaptedMessages] = _keep_messages
    drop_refused_content: Callable[[bytes, bytes], bytes | None] = _never_drop_content
    search_tool: SearchTool | None = None

    def open_tap(self, content_type: str, content_encoding: str = "") -> UsageTap:
        """Returns a new `UsageTap`, which reads the usage in one response."""
        return UsageTap(self.usage_format, content_type, content_encoding)

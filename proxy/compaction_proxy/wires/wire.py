"""Defines `Wire`: a record of functions, one for each thing that differs between wire formats.

The compaction engine does not depend on a format. A `RequestBody` carries its wire, and code that reads or
writes bytes calls the wire's functions.
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
        messages: The member that holds the conversation.
        output_limits: Members that limit the output, in tokens. The first one with a limit counts.
        prompt_members: Members other than the conversation that count as prompt tokens.
        skip_indicators: Members that tell whether the body must be left unchanged (`Wire.find_skip_reason`).
        thinking_budgets: Pairs of a member and the key in it that holds a thinking budget, in tokens. The
            output limit must exceed this budget.
    """

    messages: str
    output_limits: tuple[str, ...]
    prompt_members: tuple[str, ...]
    skip_indicators: tuple[str, ...] = ()
    thinking_budgets: tuple[tuple[str, str], ...] = ()


class AdaptedMessages(NamedTuple):
    """The message list to forward, in a form that the provider accepts.

    Attributes:
        messages: The list of messages.
        members: Other members of the body that must change together with the list: their new JSON by name.
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


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: each wire exists once and is a key
class Wire:
    """One wire format.

    A *piece* is the JSON of one core message: one element of the client's array, several elements that belong
    together (with the commas between them), or a part of an element that becomes a message of its own.

    Attributes:
        name: `chat`, `responses` or `messages`. It is part of what identifies stored compactions, so it never
            changes.
        path_suffix: The end of the paths to which clients post conversations.
        digest_seed: The first bytes of the input of prefix digests. Each wire has its own seed, so one wire
            never finds the compactions of another.
        member_names: The names of body members.
        split_message_list: Splits the value of `member_names.messages` into elements. Raises
            `UnreadableBodyError` if the proxy cannot handle the value.
        find_skip_reason: Returns why a body with these members (`member_names.skip_indicators`, by name) must
            stay unchanged; empty if it may change.
        group_into_pieces: Groups the elements into pieces.
        may_continue_piece: Tells whether a list that ends in this element may continue within the same piece.
        parse_uncounted: Parses a piece, and estimates the tokens of its parts that are not text for a given
            model. Raises `UnreadableBodyError`.
        estimate_nontext_tokens: Estimates the tokens of a piece's parts that are not text, for a given model;
            0 if the bytes are not a piece.
        parse_message: Parses a piece into its record with its digest. Raises `UnreadableBodyError`.
        encode_message: Encodes as a piece the record of a message that the proxy has written itself.
        attach_parts: Adds all parts of a client's message that are not text to a message that the proxy has
            written. The arguments are the records of the proxy's message and of the client's message.
        shorten_message: Given a record, a share (0..1) and a handle, returns the record with about this share
            of its text. The text says that something is missing, and names the message by the handle. The
            same record is returned if the result would not be shorter.
        join_messages: Encodes a list of records as the text between the brackets of the array.
        summary_call_format: The format of the proxy's own summary calls.
        usage_format: Where answers report their usage.
        may_hold_back_stream: Tells whether the first bytes of a stream may be held back, because they hold no
            part of the answer and an error may follow. Callers ask again with more bytes as long as the
            result is True.
        encode_error: Encodes an error of the proxy as a body in this wire's shape.
        api_key_header: The header field in which providers expect the proxy's own key. Empty means the field
            in which the client sends its key.
        regroups_previous: Tells whether new elements change how the elements before them are grouped into
            pieces.
        adapt_for_provider: Given a client's body and the messages that replace its own, adapts these messages
            so that the provider accepts them.
        search_tool: The tool with which the model searches removed messages. None if the wire does not offer
            it.
        drop_refused_content: Returns a body without the content that the provider has refused, given the
            error's body; None if nothing can be left out.
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
        """Returns a new reader of the usage in one answer."""
        return UsageTap(self.usage_format, content_type, content_encoding)

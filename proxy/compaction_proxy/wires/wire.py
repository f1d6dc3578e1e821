"""Defines `Wire`: a record of functions, one for each thing that differs between wire formats.

The compaction engine does not depend on a format. A `RequestBody` carries its wire, and code that reads or
writes bytes calls the wire's functions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from compaction_proxy.core.errors import ClientFacingError
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.json.slices import Slice


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


class UncountedMessage(NamedTuple):
    """A message whose tokens are not counted yet.

    Attributes:
        record: The message's core record, in which the digest and the tokens are not set.
        digest: The message's digest.
        nontext_tokens: An estimate of the tokens of all parts that are not text. It is not calibrated.
    """

    record: Message
    digest: bytes
    nontext_tokens: int


class TokenUsage(NamedTuple):
    """The token counts of a response.

    Attributes:
        prompt_tokens: Tokens of the input, including cached tokens.
        completion_tokens: Tokens of the output; 0 if the response does not say.
        cached_tokens: Tokens of the input that came from the provider's cache; 0 if the response does not
            say.
        finish_reason: Why the answer ended, in the provider's words. Empty if the response does not say, or
            if finding the reason would be costly.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""


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


class ResponseTap(Protocol):
    """Reads the token usage in one response body as it passes, without delaying or changing a byte."""

    def feed(self, chunk: bytes) -> None:
        """Records the next bytes of the body, as the upstream sent them. Never fails."""
        ...

    def result(self) -> TokenUsage | None:
        """Returns the usage; None if the response has no credible counts.

        To be called when the response has ended or was cut off.
        """
        ...


@dataclass(frozen=True, slots=True)
class SummaryCallFormat:
    """The format of the proxy's own summary calls on a wire.

    Attributes:
        path: The path to append to a provider's base URL, such as `/chat/completions`.
        get_thinking_allowance: Returns how many tokens a model may use for thinking, in addition to the limit
            of its answer, given its name and the conversation that the call continues, if any.
        build_own_members: Builds the members of a call's body that some providers refuse. Omits those that
            this provider has already refused, which are the second argument.
        build_request: Builds the body of a call from the call and the result of `build_own_members`.
        parse_answer: Parses the body of a successful response. Raises `SummaryError` (`garbage`) if the body
            is not an answer.
        headers: Headers that a call needs in addition to the credential. A header is not added if the
            client's own request has it.
    """

    path: str
    get_thinking_allowance: Callable[[str, ContinuedConversation | None], int]
    build_own_members: Callable[[SummaryCall, frozenset[str]], dict[str, Any]]
    build_request: Callable[[SummaryCall, Mapping[str, Any]], bytes]
    parse_answer: Callable[[bytes], SummaryAnswer]
    headers: Mapping[str, str] = field(default_factory=dict)


class ToolSupport(NamedTuple):
    """A request body, and whether the proxy can add its search tool to it.

    Attributes:
        raw: The body.
        member_slices: The positions of the body's members, by name.
        has_tools: Whether the client's body already has tools.
        can_add_tool: Whether the proxy can add its tool to the body, and answer the model's calls of the
            tool.
    """

    raw: bytes
    member_slices: Mapping[str, Slice]
    has_tools: bool
    can_add_tool: bool


class SearchCall(Protocol):
    """A call of the search tool."""

    @property
    def arguments(self) -> str:
        """The arguments as the model wrote them."""
        ...


class StreamJoiner(Protocol):
    """Joins one or more upstream streams into one stream for the client. Hides calls of the search tool.

    Attributes:
        is_done: Whether the upstream has signalled the end of the current answer.
    """

    is_done: bool

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes of the current answer that `start_next_answer` will read again."""
        ...

    @property
    def calls(self) -> Sequence[SearchCall]:
        """The calls that the proxy must answer before the answer continues; empty if it does not continue."""
        ...

    def feed(self, chunk: bytes) -> bytes:
        """Returns the bytes to send to the client when this chunk arrives."""
        ...

    def flush_rest(self) -> bytes:
        """Returns the last bytes for the client. To be called when the upstream's answer ended normally."""
        ...

    def start_next_answer(self, *, may_answer_calls: bool) -> dict[str, Any]:
        """Prepares for the next answer. Returns the current answer's message for `SearchTool.build_turn`.

        Args:
            may_answer_calls: Whether the proxy may answer calls of its tool in the next answer as well. If
                False, that is the last answer, and these calls are removed from it.
        """
        ...

    def encode_error_event(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client.

        Args:
            body: The body of the error in this wire's format.
        """
        ...


class AnswerJoiner(Protocol):
    """Joins one or more upstream answers that are not streams, and hides the calls of the search tool."""

    @property
    def calls(self) -> Sequence[SearchCall]:
        """The calls that the proxy must answer after `join_answer` has returned None."""
        ...

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns the body for the client, or None if the proxy must answer calls of its tool first.

        A first answer without calls of the tool is returned as the same object. The result is empty if a
        later answer is not JSON.

        Args:
            body: The upstream's answer.
            may_answer_calls: Whether the proxy may answer calls of its tool in this answer. If False, this is
                the last answer, and these calls are removed from it.
        """
        ...

    def get_assistant_message(self) -> dict[str, Any]:
        """Returns the message of the answer for which `join_answer` returned None.

        The message is an argument for `SearchTool.build_turn`.
        """
        ...


def _never_requires_same_tools(_: Sequence[Mapping[str, Any]]) -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class SearchTool:
    """The functions with which the proxy offers its search tool on one wire, and answers calls of the tool.

    With this tool, a model searches the messages that compactions have removed.

    Attributes:
        definition_json: The tool's definition as JSON.
        inspect_tool_support: Tells whether a tool of a given name can be added to a body. Raises
            `UnreadableBodyError` if the body is not a request.
        forbid_calls: Returns a body with a tool choice that forbids all calls. In the given body, the tool
            choice is absent or null.
        continue_request: Returns a body with more elements added at the end of its list of messages. Raises
            `UnreadableBodyError` if the body has no messages.
        build_turn: Builds the elements to add to the next request: the message that the joiner returned, and
            the results of its calls, in order.
        open_stream_joiner: Returns a new joiner for streams, given the tool's name.
        open_answer_joiner: Returns a new joiner for answers that are not streams, given the tool's name.
        requires_same_tools: Tells whether a provider accepts these elements only in a request that has the
            same tools as the request that they answer.
    """

    definition_json: bytes
    inspect_tool_support: Callable[[bytes, str], ToolSupport]
    forbid_calls: Callable[[bytes], bytes]
    continue_request: Callable[[bytes, Sequence[Mapping[str, Any]]], bytes]
    build_turn: Callable[[dict[str, Any], Iterable[str]], list[dict[str, Any]]]
    open_stream_joiner: Callable[[str], StreamJoiner]
    open_answer_joiner: Callable[[str], AnswerJoiner]
    requires_same_tools: Callable[[Sequence[Mapping[str, Any]]], bool] = _never_requires_same_tools


def _never_regroups_previous(_: tuple[bytes, ...]) -> bool:
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
        parse_uncounted: Parses a piece, given the model, which decides the tokens of parts that are not text.
            Raises `UnreadableBodyError`.
        estimate_nontext_tokens: Estimates the tokens of a piece's parts that are not text, for a given model;
            0 if the bytes are not a piece.
        parse_message: Parses a piece into its record with its digest. Raises `UnreadableBodyError`.
        encode_message: Encodes as a piece the record of a message that the proxy has written itself.
        attach_parts: Given the record of a message that the proxy has written, and that of a client's
            message, returns the first with all parts of the second that are not text. The parts stay
            unchanged.
        shorten_message: Given a record, a share (0..1) and a handle, returns the record with about this share
            of its text. The text says that something is missing, and names the message by the handle. The
            same record is returned if the result would not be shorter.
        join_messages: Encodes a list of records as the text between the brackets of the array.
        summary_call_format: The format of the proxy's own summary calls.
        open_tap: Returns a new reader of the usage in one answer, given its content type and content
            encoding.
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
    may_continue_piece: Callable[[bytes], bool]
    parse_uncounted: Callable[[bytes, str], UncountedMessage]
    estimate_nontext_tokens: Callable[[bytes, str], int]
    parse_message: Callable[[bytes], Message]
    encode_message: Callable[[Message], bytes]
    attach_parts: Callable[[Message, Message], Message]
    shorten_message: Callable[[Message, float, str], Message]
    join_messages: Callable[[Sequence[Message]], bytes]
    summary_call_format: SummaryCallFormat
    open_tap: Callable[[str, str], ResponseTap]
    may_hold_back_stream: Callable[[bytes], bool]
    encode_error: Callable[[ClientFacingError], bytes]
    api_key_header: bytes = b""
    regroups_previous: Callable[[tuple[bytes, ...]], bool] = _never_regroups_previous
    adapt_for_provider: Callable[[bytes, Sequence[Message]], AdaptedMessages] = _keep_messages
    drop_refused_content: Callable[[bytes, bytes], bytes | None] = _never_drop_content
    search_tool: SearchTool | None = None

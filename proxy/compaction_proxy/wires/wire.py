"""Defines `Wire`: a record of functions, one for each thing that differs between wire formats.

The engine knows no formats. A request body carries its wire, and code that reads or writes bytes calls the
wire's functions.
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
        output: Members that limit the output, in tokens. The first one with a limit counts.
        prompt: Members that add prompt tokens beside the conversation.
        skip_indicators: Members that tell whether the body must be left unchanged (`Wire.find_skip_reason`).
        thinking_budgets: Pairs of a member and the key in it that holds a thinking budget, in tokens. The
            output limit must exceed this budget.
    """

    messages: str
    output: tuple[str, ...]
    prompt: tuple[str, ...]
    skip_indicators: tuple[str, ...] = ()
    thinking_budgets: tuple[tuple[str, str], ...] = ()


class UncountedMessage(NamedTuple):
    """A message whose tokens are not counted yet.

    Attributes:
        record: Its core record, without digest and tokens.
        digest: Its digest.
        part_tokens: Tokens of all its parts that are not text, before calibration.
    """

    record: Message
    digest: bytes
    part_tokens: int


class TokenUsage(NamedTuple):
    """The token counts of a response.

    Attributes:
        prompt_tokens: Tokens of the input, including cached tokens.
        completion_tokens: Tokens of the output; 0 if the response does not say.
        cached_tokens: Tokens of the input that came from the provider's cache; 0 if the response does not
            say.
        finish_reason: The reason in the provider's words. Empty if there is none, or if finding it would be
            costly.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""


class AdaptedMessages(NamedTuple):
    """The message list to forward, in a form that the provider accepts.

    Attributes:
        messages: The list.
        members: Body members that must change together with the list, as JSON by name.
    """

    messages: Sequence[Message]
    members: Mapping[str, bytes] = MappingProxyType({})


def _drop_nothing(_: bytes, __: bytes) -> None:
    return None


def _keep_messages(_: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    return AdaptedMessages(messages)


class Tap(Protocol):
    """Watches one response body without delaying or changing a byte."""

    def feed(self, chunk: bytes) -> None:
        """Records the next bytes of the body as sent. Never fails."""
        ...

    def result(self) -> TokenUsage | None:
        """Returns the usage once the response has ended or was cut off; None if it has no credible counts."""
        ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of the proxy's own summary calls on a wire.

    Attributes:
        path: The path behind a provider's base URL, such as `/chat/completions`.
        get_thinking_allowance: Returns the tokens that a model may think, on top of the limit of its answer.
        build_own_members: Builds the members of a call that a provider may refuse, without those that it has
            refused already.
        build_request: Builds the body of a call from the call and its own members.
        parse_answer: Reads a successful answer. Raises `SummaryError` (`garbage`) if there is nothing to
            read.
        headers: Headers that a call needs beside the credential, unless the client's own request has them.
    """

    path: str
    get_thinking_allowance: Callable[[str, ContinuedConversation | None], int]
    build_own_members: Callable[[SummaryCall, frozenset[str]], dict[str, Any]]
    build_request: Callable[[SummaryCall, Mapping[str, Any]], bytes]
    parse_answer: Callable[[bytes], SummaryAnswer]
    headers: Mapping[str, str] = field(default_factory=dict)


class ToolSupport(NamedTuple):
    """What a request body says about tools.

    Attributes:
        raw: The body.
        places: The positions of its members.
        has_tools: Whether the body brings tools.
        can_add_tool: Whether the proxy can add its tool and answer its calls.
    """

    raw: bytes
    places: Mapping[str, Slice]
    has_tools: bool
    can_add_tool: bool


class SearchCall(Protocol):
    """A call of the search tool."""

    @property
    def arguments(self) -> str:
        """The arguments as the model wrote them."""
        ...


class StreamJoiner(Protocol):
    """Joins one or more upstream streams into one for the client, and hides the calls of the search tool.

    Attributes:
        done: Whether the upstream has signalled the end of the current answer.
    """

    done: bool

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the current answer that `start_next_answer` reads again."""
        ...

    @property
    def calls(self) -> Sequence[SearchCall]:
        """The calls to answer before the answer continues; empty if it does not continue."""
        ...

    def feed(self, chunk: bytes) -> bytes:
        """Returns the bytes to send to the client when this chunk arrives."""
        ...

    def flush_rest(self) -> bytes:
        """Returns the bytes left for the client when the upstream's answer has ended without a cut."""
        ...

    def start_next_answer(self, *, may_answer_calls: bool) -> dict[str, Any]:
        """Prepares for the next answer, and returns the current one's message for `SearchTool.build_turn`.

        Args:
            may_answer_calls: Whether calls in the next answer may be answered as well. If False, they are
                left out.
        """
        ...

    def write_error(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client; `body` is an error in this wire's shape."""
        ...


class AnswerJoiner(Protocol):
    """Joins one or more upstream answers that are not streams, and hides the calls of the search tool."""

    @property
    def calls(self) -> Sequence[SearchCall]:
        """The calls to answer, once `join_answer` has returned None."""
        ...

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns the client's body if this answer is the last; None if its calls must be answered first.

        A first answer without calls is returned as the same object. The result is empty if a later answer is
        not JSON.

        Args:
            body: The upstream's answer.
            may_answer_calls: Whether calls in this answer may be answered. If False, they are left out.
        """
        ...

    def get_assistant_message(self) -> dict[str, Any]:
        """Returns the message for which `join_answer` returned None, for `SearchTool.build_turn`."""
        ...


def _binds_nothing(_: Sequence[Mapping[str, Any]]) -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class SearchTool:
    """Offers models on a wire the search of removed messages, and answers its calls.

    Attributes:
        json: The tool's definition.
        inspect_tools: Tells whether a tool of a given name can be added to a body. Raises
            `UnreadableBodyError` if the body is not a request.
        forbid_calls: Returns a body that forbids every call. The given body has no tool choice, or null for
            it.
        continue_request: Returns a body with more elements behind its own. Raises `UnreadableBodyError` if it
            has none.
        build_turn: Builds the elements with which the upstream continues: the message that the joiner
            returned, and a result for each of its calls, in order.
        open_stream: Opens a joiner of streams, given the tool's name.
        open_answer: Opens a joiner of answers that are not streams, given the tool's name.
        binds_tools: Tells whether elements may stand only in a request with the same tools as the one that
            they answer.
    """

    json: bytes
    inspect_tools: Callable[[bytes, str], ToolSupport]
    forbid_calls: Callable[[bytes], bytes]
    continue_request: Callable[[bytes, Sequence[Mapping[str, Any]]], bytes]
    build_turn: Callable[[dict[str, Any], Iterable[str]], list[dict[str, Any]]]
    open_stream: Callable[[str], StreamJoiner]
    open_answer: Callable[[str], AnswerJoiner]
    binds_tools: Callable[[Sequence[Mapping[str, Any]]], bool] = _binds_nothing


def _regroups_nothing(_: tuple[bytes, ...]) -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: each wire exists once and is a key
class Wire:
    """One wire format.

    A *piece* is the JSON of one core message: one element of the client's array, several that belong together
    (with the commas between them), or a part of an element that becomes a message of its own.

    Attributes:
        name: `chat`, `responses` or `messages`. It is part of what identifies stored compactions, so it never
            changes.
        path_suffix: The end of the paths to which clients post conversations.
        digest_seed: The first bytes of prefix digests. They differ, so one wire never finds the compactions
            of another.
        member_names: The names of body members.
        parse_items: Splits the value of `member_names.messages` into elements. Raises `UnreadableBodyError`
            if the proxy cannot handle it.
        find_skip_reason: Returns why a body with these members (`member_names.skip_indicators`, by name) must
            stay unchanged; empty if it may change.
        to_pieces: Groups the elements into pieces.
        may_continue: Tells whether a list that ends in this element may continue within the same piece.
        parse_uncounted: Parses a piece into its record and the tokens of its parts that are not text, for a
            given model. Raises `UnreadableBodyError`.
        estimate_part_tokens: Estimates only those tokens; 0 if the bytes are not a piece.
        parse_message: Parses a piece into its record with its digest. Raises `UnreadableBodyError`.
        encode_message: Writes a record of the proxy's own as a piece.
        attach_parts: Returns a record of the proxy's own together with those parts of another record that are
            not text, unchanged.
        shorten_message: Returns a record with about a share (0..1) of its text. The handle names the message
            in the notice of what is missing. The result is never longer: where nothing can be saved, it is
            the record itself.
        join_messages: Writes a list of records as the text between the brackets of the array.
        call_format: The format of the proxy's own summary calls.
        open_tap: Opens a tap on an answer, given its content type and content encoding.
        may_hold_back: Tells whether the bytes of a stream so far may be held back, because they hold nothing
            of the answer and an error may follow. Callers ask again as long as the result is True.
        encode_error: Encodes an error of the proxy as a body in this wire's shape.
        key_field: The header field in which providers expect the proxy's own key. Empty means the field in
            which the client sends its key.
        regroups_previous: Tells whether new elements change how the ones before them form pieces.
        adapt_for_provider: Adapts the list that replaces the one in a client's body, so that the provider
            accepts it.
        search_tool: The search of removed messages. None means that the wire does not offer it.
        drop_refused: Returns a body without what the provider has refused in it, given the error's body; None
            if nothing can be left out.
    """

    name: str
    path_suffix: bytes
    digest_seed: bytes
    member_names: MemberNames
    parse_items: Callable[[memoryview], tuple[bytes, ...]]
    find_skip_reason: Callable[[Mapping[str, bytes]], str]
    to_pieces: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]
    may_continue: Callable[[bytes], bool]
    parse_uncounted: Callable[[bytes, str], UncountedMessage]
    estimate_part_tokens: Callable[[bytes, str], int]
    parse_message: Callable[[bytes], Message]
    encode_message: Callable[[Message], bytes]
    attach_parts: Callable[[Message, Message], Message]
    shorten_message: Callable[[Message, float, str], Message]
    join_messages: Callable[[Sequence[Message]], bytes]
    call_format: CallFormat
    open_tap: Callable[[str, str], Tap]
    may_hold_back: Callable[[bytes], bool]
    encode_error: Callable[[ClientFacingError], bytes]
    key_field: bytes = b""
    regroups_previous: Callable[[tuple[bytes, ...]], bool] = _regroups_nothing
    adapt_for_provider: Callable[[bytes, Sequence[Message]], AdaptedMessages] = _keep_messages
    drop_refused: Callable[[bytes, bytes], bytes | None] = _drop_nothing
    search_tool: SearchTool | None = None

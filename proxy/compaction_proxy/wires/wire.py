"""What a wire format is to the rest of us: a record of functions, one for each thing that differs.

The engine knows nothing of formats. A request's body carries its dialect along, and whoever has bytes to read
or to write asks that.
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
    """The names of a body's members that matter to us.

    Attributes:
        messages: Holds the conversation.
        output: Say how long an answer may be, in tokens; the first that says so decides.
        prompt: Become prompt tokens beside the conversation.
        skip_indicators: Tell whether the body is to be left as it is (`Wire.left`).
        thinking_budgets: Hold a budget of thinking, in tokens, which the output must exceed; each with the
            name of the budget in it.
    """

    messages: str
    output: tuple[str, ...]
    prompt: tuple[str, ...]
    skip_indicators: tuple[str, ...] = ()
    thinking_budgets: tuple[tuple[str, str], ...] = ()


class UncountedMessage(NamedTuple):
    """A message that is yet to be counted.

    Attributes:
        record: Its core record, without digest and tokens.
        digest: Its digest.
        part_tokens: Tokens of all its parts that are not text, before calibration.
    """

    record: Message
    digest: bytes
    part_tokens: int


class TokenUsage(NamedTuple):
    """What a response says about its size.

    Attributes:
        prompt_tokens: Tokens of the input, cached ones included.
        completion_tokens: Tokens of the output; 0 if it does not say.
        cached_tokens: Tokens of the input that the provider's cache held; 0 if it does not say.
        finish_reason: As the provider named it; empty if it did not, or if that would be costly to find.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""


class AdaptedMessages(NamedTuple):
    """What goes on in place of a client's list, as its provider takes it.

    Attributes:
        messages: The list.
        members: Members of the body that must change with it, as JSON by name.
    """

    messages: Sequence[Message]
    members: Mapping[str, bytes] = MappingProxyType({})


def _drop_nothing(_: bytes, __: bytes) -> None:
    return None


def _keep_messages(_: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    return AdaptedMessages(messages)


class Tap(Protocol):
    """Watches one response body, without delaying or altering a byte."""

    def feed(self, chunk: bytes) -> None:
        """Take note of the next bytes as sent. Never fails."""
        ...

    def result(self) -> TokenUsage | None:
        """What the response said, once it has ended or been cut; None if nothing that can be believed."""
        ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls of our own on this wire, which ask for summaries.

    Attributes:
        path: What follows a provider's base URL, such as `/chat/completions`.
        get_thinking_allowance: Tokens that a model may think before its answer, on top of what the answer may
            take.
        build_own_members: The members of a call that a provider may refuse, without those that it has
            refused.
        build_request: A call's body, given its own members.
        parse_answer: What a success says; raises `SummaryError` (`garbage`) where that is nothing.
        headers: What a call needs beside a credential, unless the client's own request says it.
    """

    path: str
    get_thinking_allowance: Callable[[str, ContinuedConversation | None], int]
    build_own_members: Callable[[SummaryCall, frozenset[str]], dict[str, Any]]
    build_request: Callable[[SummaryCall, Mapping[str, Any]], bytes]
    parse_answer: Callable[[bytes], SummaryAnswer]
    headers: Mapping[str, str] = field(default_factory=dict)


class ToolSupport(NamedTuple):
    """A request body as it stands to tools.

    Attributes:
        raw: The body.
        places: Where its members stand.
        has_tools: Whether it brings tools.
        can_add_tool: Whether a tool of ours can be put among them, and its calls be answered.
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
    """Makes one stream for the client of one or several of the upstream, and hides calls of the search tool.

    Attributes:
        done: Whether the upstream has said that the present answer is at its end.
    """

    done: bool

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the present answer that `go_on` reads again."""
        ...

    @property
    def calls(self) -> Sequence[SearchCall]:
        """Calls to answer before the answer goes on; none where it does not go on."""
        ...

    def feed(self, chunk: bytes) -> bytes:
        """Returns what the client gets when these bytes come."""
        ...

    def flush_rest(self) -> bytes:
        """Returns what the client gets when the upstream's answer is at its end, not cut."""
        ...

    def start_next_answer(self, *, may_answer_calls: bool) -> dict[str, Any]:
        """Expects the next answer, and returns what the present one said, for `SearchTool.build_turn`.

        Args:
            may_answer_calls: Whether calls in the next answer may be answered, too. Else they are left out.
        """
        ...

    def write_error(self, body: bytes) -> bytes:
        """Returns the event that tells the client of an error, given the body of one in this wire's shape."""
        ...


class AnswerJoiner(Protocol):
    """Makes one answer of one or several of the upstream that are no streams; hides calls likewise."""

    @property
    def calls(self) -> Sequence[SearchCall]:
        """Calls to answer, once `join_answer` has returned None."""
        ...

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns what the client gets if this is the last answer; None if calls are to be answered first.

        A first answer without calls is returned as the same object. Empty: a later one is no JSON.

        Args:
            body: The upstream's answer.
            may_answer_calls: Whether calls in it may be answered. Else they are left out.
        """
        ...

    def get_assistant_message(self) -> dict[str, Any]:
        """Returns what the answer said that `join_answer` returned None for, for `SearchTool.build_turn`."""
        ...


def _binds_nothing(_: Sequence[Mapping[str, Any]]) -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class SearchTool:
    """How models of this wire are offered the search of removed messages, and how its calls are answered.

    Attributes:
        json: The tool's definition.
        inspect_tools: How a body stands to a tool of this name; raises `UnreadableBodyError` where it is no
            request.
        forbid_calls: A body without tool choice of its own, or with null for one, that forbids every call.
        continue_request: A body with more elements behind its own; raises `UnreadableBodyError` where it has
            none.
        build_turn: The elements behind which the upstream goes on: what `go_on` returned, and a result for
            each call in it, in their order.
        open_stream: Joins streams, given the tool's name.
        open_answer: Joins answers that are no streams, given the tool's name.
        binds_tools: Whether elements may stand only in a request with the tools that they came of.
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


@dataclass(frozen=True, slots=True, eq=False)  # there is one of each: compared by identity, as they are keys
class Wire:
    """One wire format.

    A *piece* is the JSON of one core message: an element of the client's array, several that belong together
    (with the commas between them), or a part of one that stands for itself.

    Attributes:
        name: `chat`, `responses` or `messages`; part of what names stored rounds, so it never changes.
        path_suffix: How paths end to which conversations are posted.
        digest_seed: What prefix digests begin with, so that no wire's rounds are found by another.
        member_names: Names of the members of a body.
        parse_items: The elements of the value of `members.messages`. Raises `UnreadableBodyError` where it is
            none of ours.
        find_skip_reason: Why a body with these members (`members.telling`, by name) is left as it is; empty:
            it is not.
        to_pieces: The elements as pieces.
        may_continue: Whether a list that ends in this element may go on within the same piece.
        parse_uncounted: A piece's record, and what its parts that are no text weigh for a model. Raises
            `UnreadableBodyError`.
        estimate_part_tokens: The latter by itself; 0 where the piece is none.
        parse_message: A piece's record with its digest; raises `UnreadableBodyError`.
        encode_message: A piece for a record of ours.
        attach_parts: A record of ours that also carries the parts of another's that are no text, as they
            came.
        shorten_message: A record with about a share (0..1) of its text; the handle names it in the notice of
            what is missing. Never longer: where nothing can be won it is the record itself.
        join_messages: What stands between the brackets of the array, for a list of records.
        call_format: Calls of our own.
        open_tap: Watches an answer, given its content type and content encoding.
        may_hold_back: Whether what has come of a stream may be held back, because nothing of the answer is in
            it and an error may follow; asked as long as it says so.
        encode_error: An error of ours as a body in this wire's shape.
        key_field: The header field that shows our key to its providers; empty: as the client shows its own.
        regroups_previous: Whether elements change what pieces the ones before them are.
        adapt_for_provider: What goes on in place of the list in a client's body, as its provider takes it.
        search_tool: How models search what was removed; None: they are not offered that.
        drop_refused: A body without what the provider has refused in it, given the error's body; None: there
            is nothing that could be left out.
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

"""The chat completions wire as a dialect."""

from collections.abc import Mapping, Sequence

from compaction_proxy.core.digest import VERSION
from compaction_proxy.core.errors import Unreadable, openai_error
from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import are_objects
from compaction_proxy.wires.chat.continuation import TOOL_JSON, answered, gone_on, offering, without_choice
from compaction_proxy.wires.chat.intercept_response import HiddenAnswer
from compaction_proxy.wires.chat.intercept_stream import HiddenStream
from compaction_proxy.wires.chat.messages import compose, message, part_tokens, shortened, weighed, with_parts
from compaction_proxy.wires.chat.summary_call import allowance_tokens, answer, own_members, request_body
from compaction_proxy.wires.chat.usage import usage_tap
from compaction_proxy.wires.json.slices import elements
from compaction_proxy.wires.project_instructions import join_sources
from compaction_proxy.wires.wire import Asking, Dialect, Members, SearchTool


def _listed(value: memoryview) -> tuple[bytes, ...]:
    listed = elements(value)
    if not are_objects(listed):
        raise Unreadable("no-messages")
    return listed


def _never_left(_: Mapping[str, bytes]) -> str:
    return ""


def _pieces(listed: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Every element is a message."""
    return listed


def _ended(_: bytes) -> bool:
    return False


def _joined(messages: Sequence[Message]) -> bytes:
    return b",".join([each.raw or compose(each) for each in join_sources(messages)])


def _opening(seen: bytes) -> bool:
    """The first chunk tells."""
    return not seen


CHAT = Dialect(
    name="chat",
    ending=b"/chat/completions",
    seed=VERSION,
    members=Members(
        messages="messages",
        output=("max_completion_tokens", "max_tokens"),
        prompt=("tools", "functions", "response_format"),
        thinking=(("thinking", "budget_tokens"), ("reasoning", "max_tokens")),
    ),
    listed=_listed,
    left=_never_left,
    pieces=_pieces,
    unended=_ended,
    weighed=weighed,
    part_tokens=part_tokens,
    message=message,
    compose=compose,
    with_parts=with_parts,
    shortened=shortened,
    joined=_joined,
    asking=Asking("/chat/completions", allowance_tokens, own_members, request_body, answer),
    tap=usage_tap,
    opening=_opening,
    error=openai_error,
    search_tool=SearchTool(
        TOOL_JSON, offering, without_choice, gone_on, answered, HiddenStream, HiddenAnswer
    ),
)

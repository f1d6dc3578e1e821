"""The Messages format as a `Wire`."""

import json
import re
from collections.abc import Mapping
from typing import Final

from compaction_proxy.core.digest import DIGEST_VERSION
from compaction_proxy.core.errors import ClientFacingError, UnreadableBodyError
from compaction_proxy.wires.body import are_objects, decode_small_json, parse_body, splice_messages
from compaction_proxy.wires.chat.continuation import continue_request
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.messages.alternation import join_messages
from compaction_proxy.wires.messages.blocks import PROVIDER_COMPACTS, group_into_pieces, read_kind
from compaction_proxy.wires.messages.intercept_response import MessagesAnswerJoiner
from compaction_proxy.wires.messages.intercept_stream import MessagesStreamJoiner
from compaction_proxy.wires.messages.messages import (
    attach_parts,
    encode_message,
    estimate_nontext_tokens,
    parse_message,
    parse_uncounted,
)
from compaction_proxy.wires.messages.search_tool import (
    TOOL_JSON,
    build_turn,
    forbid_calls,
    inspect_tool_support,
    requires_same_tools,
)
from compaction_proxy.wires.messages.shorten import shorten_message
from compaction_proxy.wires.messages.summary_call import (
    build_own_members,
    build_request_body,
    get_thinking_allowance,
    parse_answer,
)
from compaction_proxy.wires.messages.thinking import adapt_for_provider, drop_thoughts
from compaction_proxy.wires.messages.usage import open_usage_tap
from compaction_proxy.wires.sse import EventSplitter, read_data
from compaction_proxy.wires.wire import MemberNames, SearchTool, SummaryCallFormat, Wire

# Types of events that come before the content of an answer.
_OPENING_EVENTS: Final = frozenset({"message_start", "ping"})
# The header that Anthropic requires in every request.
_VERSION_HEADER: Final = {"anthropic-version": "2023-06-01"}
_ERROR_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Matches errors about thinking that was made for other messages, is missing, or was changed.
_THINKING_REFUSAL: Final = re.compile(
    rb"bound to a different conversation|Invalid `signature` in `thinking`"
    rb"|must start with a thinking block|`redacted_thinking` blocks in the latest assistant message"
)
_FIRST_SERVER_ERROR_STATUS: Final = 500


def _parse_items(value: memoryview) -> tuple[bytes, ...]:
    elements = split_elements(value)
    if not are_objects(elements):
        raise UnreadableBodyError("no-messages")
    return elements


def _find_skip_reason(indicators: Mapping[str, bytes]) -> str:
    """Returns why a request must stay unchanged; empty if it may change.

    It must stay unchanged if the provider stores the conversation, or compacts it itself.
    """
    values = {name: decode_small_json(raw) for name, raw in indicators.items()}
    if values.get("thread"):
        return "stateful"
    context_management = values.get("context_management")
    edits = context_management.get("edits") if isinstance(context_management, dict) else None
    edit_list = edits if isinstance(edits, list) else ()
    kinds = [str(each.get("type")) for each in edit_list if isinstance(each, dict)]
    compacts = values.get("compaction") or any(kind.startswith("compact") for kind in kinds)
    return PROVIDER_COMPACTS if compacts else ""


def _may_continue_piece(_: bytes) -> bool:
    return False


def _may_hold_back_stream(seen: bytes) -> bool:
    """Returns whether the bytes of a stream so far hold neither content of the answer nor an error."""
    if seen.lstrip().startswith((b"{", b"[")):
        return False
    payloads = filter(None, map(read_data, EventSplitter().feed(seen)))
    return all(_is_opening_event(each) for each in payloads)


def _is_opening_event(data: bytes) -> bool:
    try:
        return read_kind(data) in _OPENING_EVENTS
    except UnreadableBodyError:
        return False


def _encode_error(error: ClientFacingError) -> bytes:
    default_kind = "api_error" if error.status >= _FIRST_SERVER_ERROR_STATUS else "invalid_request_error"
    kind = _ERROR_KINDS.get(error.status, default_kind)
    fields = {"type": kind, "message": str(error)}
    return json.dumps({"type": "error", "error": fields, "request_id": None}).encode()


def _drop_refused_content(raw: bytes, refusal: bytes) -> bytes | None:
    """Returns the body without thinking if the provider has refused the thinking, else None.

    The provider refuses thinking that follows other messages than those for which it was made. This happens
    if the thinking was made after a compaction that was then undone or has expired: the client's own list is
    now forwarded unchanged.
    """
    if _THINKING_REFUSAL.search(refusal) is None:
        return None
    try:
        body = parse_body(raw, MESSAGES)
        records = [parse_message(each) for each in body.messages]
        adapted = drop_thoughts(raw, records)
        if adapted.messages is records:  # the list holds nothing but thinking
            return None
        changed = splice_messages(body, adapted)
    except UnreadableBodyError:
        return None
    return changed if len(changed) < len(raw) else None


MESSAGES = Wire(
    name="messages",
    path_suffix=b"/v1/messages",
    digest_seed=DIGEST_VERSION + b"messages",
    member_names=MemberNames(
        messages="messages",
        output_limits=("max_tokens",),
        prompt_members=("system", "tools"),
        skip_indicators=("context_management", "compaction", "thread"),
        thinking_budgets=(("thinking", "budget_tokens"),),
    ),
    split_message_list=_parse_items,
    find_skip_reason=_find_skip_reason,
    group_into_pieces=group_into_pieces,
    may_continue_piece=_may_continue_piece,
    parse_uncounted=parse_uncounted,
    estimate_nontext_tokens=estimate_nontext_tokens,
    parse_message=parse_message,
    encode_message=encode_message,
    attach_parts=attach_parts,
    shorten_message=shorten_message,
    join_messages=join_messages,
    summary_call_format=SummaryCallFormat(
        "/messages",
        get_thinking_allowance,
        build_own_members,
        build_request_body,
        parse_answer,
        _VERSION_HEADER,
    ),
    open_tap=open_usage_tap,
    may_hold_back_stream=_may_hold_back_stream,
    encode_error=_encode_error,
    api_key_header=b"x-api-key",
    adapt_for_provider=adapt_for_provider,
    drop_refused_content=_drop_refused_content,
    search_tool=SearchTool(
        TOOL_JSON,
        inspect_tool_support,
        forbid_calls,
        continue_request,
        build_turn,
        MessagesStreamJoiner,
        MessagesAnswerJoiner,
        requires_same_tools,
    ),
)

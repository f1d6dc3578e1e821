"""The Messages format as a `Wire`."""

import json
import re
from collections.abc import Mapping
from typing import Final

from compaction_proxy.core.digest import VERSION
from compaction_proxy.core.errors import ClientFacingError, UnreadableBodyError
from compaction_proxy.wires.body import are_objects, decode_small, parse_body, splice_messages
from compaction_proxy.wires.chat.continuation import continue_request
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.messages.alternation import join_messages
from compaction_proxy.wires.messages.blocks import PROVIDER_COMPACTS, read_kind, to_pieces
from compaction_proxy.wires.messages.intercept_response import MessagesAnswerJoiner
from compaction_proxy.wires.messages.intercept_stream import MessagesStreamJoiner
from compaction_proxy.wires.messages.messages import (
    attach_parts,
    encode_message,
    estimate_part_tokens,
    parse_message,
    parse_uncounted,
)
from compaction_proxy.wires.messages.search_tool import (
    TOOL_JSON,
    binds_tools,
    build_turn,
    forbid_calls,
    inspect_tools,
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
from compaction_proxy.wires.wire import CallFormat, MemberNames, SearchTool, Wire

# Types of events that come before the content of an answer.
_BEFORE: Final = frozenset({"message_start", "ping"})
# A header that Anthropic requires in every request.
_VERSION: Final = {"anthropic-version": "2023-06-01"}
_ERROR_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Matches errors about thinking that belongs to other messages, that is missing, or that was changed.
_REFUSES_THOUGHTS: Final = re.compile(
    rb"bound to a different conversation|Invalid `signature` in `thinking`"
    rb"|must start with a thinking block|`redacted_thinking` blocks in the latest assistant message"
)
_FIRST_OF_OURS: Final = 500


def _parse_items(value: memoryview) -> tuple[bytes, ...]:
    elements = split_elements(value)
    if not are_objects(elements):
        raise UnreadableBodyError("no-messages")
    return elements


def _find_skip_reason(indicators: Mapping[str, bytes]) -> str:
    """Returns why a request must stay unchanged; empty if it may change.

    It must stay unchanged if the provider stores the conversation, or compacts it itself.
    """
    values = {name: decode_small(raw) for name, raw in indicators.items()}
    if values.get("thread"):
        return "stateful"
    context_management = values.get("context_management")
    edits = context_management.get("edits") if isinstance(context_management, dict) else None
    edit_list = edits if isinstance(edits, list) else ()
    kinds = [str(each.get("type")) for each in edit_list if isinstance(each, dict)]
    compacts = values.get("compaction") or any(kind.startswith("compact") for kind in kinds)
    return PROVIDER_COMPACTS if compacts else ""


def _may_continue(_: bytes) -> bool:
    return False


def _may_hold_back(seen: bytes) -> bool:
    """Returns whether the bytes of a stream so far hold neither content of the answer nor an error."""
    if seen.lstrip().startswith((b"{", b"[")):
        return False
    payloads = filter(None, map(read_data, EventSplitter().feed(seen)))
    return all(_is_before(each) for each in payloads)


def _is_before(data: bytes) -> bool:
    try:
        return read_kind(data) in _BEFORE
    except UnreadableBodyError:
        return False


def _encode_error(error: ClientFacingError) -> bytes:
    default_kind = "api_error" if error.status >= _FIRST_OF_OURS else "invalid_request_error"
    kind = _ERROR_KINDS.get(error.status, default_kind)
    fields = {"type": kind, "message": str(error)}
    return json.dumps({"type": "error", "error": fields, "request_id": None}).encode()


def _drop_refused(raw: bytes, refusal: bytes) -> bytes | None:
    """Returns the body without thinking if the provider has refused the thinking, else None.

    The model may have made the thinking for a list of messages that the proxy had rewritten. The client sends
    it back with its own list. If that list is forwarded unchanged, because the compaction was undone or has
    expired, the provider refuses the thinking.
    """
    if _REFUSES_THOUGHTS.search(refusal) is None:
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
    digest_seed=VERSION + b"messages",
    member_names=MemberNames(
        messages="messages",
        output=("max_tokens",),
        prompt=("system", "tools"),
        skip_indicators=("context_management", "compaction", "thread"),
        thinking_budgets=(("thinking", "budget_tokens"),),
    ),
    parse_items=_parse_items,
    find_skip_reason=_find_skip_reason,
    to_pieces=to_pieces,
    may_continue=_may_continue,
    parse_uncounted=parse_uncounted,
    estimate_part_tokens=estimate_part_tokens,
    parse_message=parse_message,
    encode_message=encode_message,
    attach_parts=attach_parts,
    shorten_message=shorten_message,
    join_messages=join_messages,
    call_format=CallFormat(
        "/messages", get_thinking_allowance, build_own_members, build_request_body, parse_answer, _VERSION
    ),
    open_tap=open_usage_tap,
    may_hold_back=_may_hold_back,
    encode_error=_encode_error,
    key_field=b"x-api-key",
    adapt_for_provider=adapt_for_provider,
    drop_refused=_drop_refused,
    search_tool=SearchTool(
        TOOL_JSON,
        inspect_tools,
        forbid_calls,
        continue_request,
        build_turn,
        MessagesStreamJoiner,
        MessagesAnswerJoiner,
        binds_tools,
    ),
)

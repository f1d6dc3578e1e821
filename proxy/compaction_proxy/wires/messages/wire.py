"""The Messages wire as a dialect."""

import json
import re
from collections.abc import Mapping
from typing import Final

from compaction_proxy.core.digest import VERSION
from compaction_proxy.core.errors import Shown, Unreadable
from compaction_proxy.wires.body import are_objects, read, small, spliced
from compaction_proxy.wires.chat.continuation import gone_on
from compaction_proxy.wires.json.slices import elements
from compaction_proxy.wires.messages.alternation import joined
from compaction_proxy.wires.messages.blocks import PROVIDER_COMPACTS, kind_of, pieces
from compaction_proxy.wires.messages.intercept_response import BlockAnswer
from compaction_proxy.wires.messages.intercept_stream import BlockStream
from compaction_proxy.wires.messages.messages import compose, message, part_tokens, weighed, with_parts
from compaction_proxy.wires.messages.search_tool import (
    TOOL_JSON,
    binds_tools,
    build_turn,
    find_place,
    forbid_calls,
)
from compaction_proxy.wires.messages.shorten import shortened
from compaction_proxy.wires.messages.summary_call import allowance_tokens, answer, own_members, request_body
from compaction_proxy.wires.messages.thinking import suited, without_thoughts
from compaction_proxy.wires.messages.usage import usage_tap
from compaction_proxy.wires.sse import Events, data_of
from compaction_proxy.wires.wire import Asking, Dialect, Members, SearchTool

# Events before the answer's first.
_BEFORE: Final = frozenset({"message_start", "ping"})
# What Anthropic wants of every request.
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
# Said of a thought that is bound to another list, of one that is missing, and of one that was changed.
_REFUSES_THOUGHTS: Final = re.compile(
    rb"bound to a different conversation|Invalid `signature` in `thinking`"
    rb"|must start with a thinking block|`redacted_thinking` blocks in the latest assistant message"
)
_FIRST_OF_OURS: Final = 500


def _listed(value: memoryview) -> tuple[bytes, ...]:
    listed = elements(value)
    if not are_objects(listed):
        raise Unreadable("no-messages")
    return listed


def _left(telling: Mapping[str, bytes]) -> str:
    """Why a request is left alone: the provider holds the conversation, or compacts it itself."""
    told = {name: small(raw) for name, raw in telling.items()}
    if told.get("thread"):
        return "stateful"
    managed = told.get("context_management")
    edits = managed.get("edits") if isinstance(managed, dict) else None
    listed = edits if isinstance(edits, list) else ()
    kinds = [str(each.get("type")) for each in listed if isinstance(each, dict)]
    compacts = told.get("compaction") or any(kind.startswith("compact") for kind in kinds)
    return PROVIDER_COMPACTS if compacts else ""


def _ended(_: bytes) -> bool:
    return False


def _opening(seen: bytes) -> bool:
    """Until the answer's first content, or an error in its place."""
    if seen.lstrip().startswith((b"{", b"[")):
        return False
    told = filter(None, map(data_of, Events().feed(seen)))
    return all(_is_before(each) for each in told)


def _is_before(data: bytes) -> bool:
    try:
        return kind_of(data) in _BEFORE
    except Unreadable:
        return False


def _error(error: Shown) -> bytes:
    unknown = "api_error" if error.status >= _FIRST_OF_OURS else "invalid_request_error"
    kind = _ERROR_KINDS.get(error.status, unknown)
    told = {"type": kind, "message": str(error)}
    return json.dumps({"type": "error", "error": told, "request_id": None}).encode()


def _mended(raw: bytes, refusal: bytes) -> bytes | None:
    """The body without thoughts, if they are what was refused.

    A client sends back what was thought behind a list that we had rewritten. Where such a request goes on as
    it came, because a round was undone or has expired, its thoughts fit no more.
    """
    if _REFUSES_THOUGHTS.search(refusal) is None:
        return None
    try:
        body = read(raw, MESSAGES)
        records = [message(each) for each in body.messages]
        mended = without_thoughts(raw, records)
        if mended.messages is records:  # there is nothing but thoughts
            return None
        made = spliced(body, mended)
    except Unreadable:
        return None
    return made if len(made) < len(raw) else None


MESSAGES = Dialect(
    name="messages",
    ending=b"/v1/messages",
    seed=VERSION + b"messages",
    members=Members(
        messages="messages",
        output=("max_tokens",),
        prompt=("system", "tools"),
        telling=("context_management", "compaction", "thread"),
        thinking=(("thinking", "budget_tokens"),),
    ),
    listed=_listed,
    left=_left,
    pieces=pieces,
    unended=_ended,
    weighed=weighed,
    part_tokens=part_tokens,
    message=message,
    compose=compose,
    with_parts=with_parts,
    shortened=shortened,
    joined=joined,
    asking=Asking("/messages", allowance_tokens, own_members, request_body, answer, _VERSION),
    tap=usage_tap,
    opening=_opening,
    error=_error,
    key_field=b"x-api-key",
    suited=suited,
    mended=_mended,
    search_tool=SearchTool(
        TOOL_JSON, find_place, forbid_calls, gone_on, build_turn, BlockStream, BlockAnswer, binds_tools
    ),
)

"""Finds the conversations of small requests that are forwarded unread and whose clients send no id.

The proxy parses such a request only when the upstream begins to answer, so that the client does not wait.
Parsing takes more processor time than relaying. So a busy process parses only some of these requests. It
records the figures of the others without a conversation. Later requests of the same conversation can still be
recognised.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog

from compaction_proxy.compaction.conversation_index import ConversationIndex
from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import RESPONSE_NOT_OBSERVED
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.project_instructions import (
    drop_instructions,
    find_client_by_members,
    find_client_by_messages,
)
from compaction_proxy.wires.wire import Wire

# Larger requests are not searched. Such a conversation soon grows too large for the gate, so that the proxy
# parses its requests anyway.
MAX_BYTES = 786_432
# Bytes of request bodies that may be parsed per second in the long run, and bytes that may be parsed at once
# after a pause. `REQUEST_BYTES` is added to the size of each request, for the fixed cost of parsing one.
BYTES_PER_S = 524_288
BURST_BYTES = 1_048_576
REQUEST_BYTES = 4_096
# Number of messages that are parsed before the event loop may turn to other requests.
MESSAGES_AT_ONCE = 64
TOOLS = b'"tools"'

_log = structlog.get_logger()


class UnreadConversationFinder:
    """Finds the conversations of requests on one wire, on one event loop.

    Args:
        wire: The wire of the requests.
        conversation_index: Finds conversations by their messages.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        wire: Wire,
        conversation_index: ConversationIndex,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wire = wire
        self._conversations = conversation_index
        self._clock = clock
        self._left_bytes = float(BURST_BYTES)
        self._at = clock()
        self._searches: set[asyncio.Task[str | None]] = set()

    def start_search(self, tenant: str, raw: bytes, client: str) -> asyncio.Task[str | None] | None:
        """Starts to search for the conversation of a request, and returns the task that does so.

        Returns None, and starts no task, if the request is larger than `MAX_BYTES`, or if too many bytes have
        been parsed in the last seconds (`BYTES_PER_S`). The task's result is the id of the conversation. It
        is None if the request belongs to no conversation or the search fails.

        Args:
            tenant: The tenant that sent the request.
            raw: The request body.
            client: The name of the client program, found in the header fields; empty if they do not show it.
        """
        now, size = self._clock(), len(raw) + REQUEST_BYTES
        self._left_bytes = min(BURST_BYTES, self._left_bytes + (now - self._at) * BYTES_PER_S)
        self._at = now
        if len(raw) > MAX_BYTES or size > self._left_bytes:
            return None
        self._left_bytes -= size
        search = asyncio.create_task(self._search_safely(tenant, raw, client))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        return search

    async def _search_safely(self, tenant: str, raw: bytes, client: str) -> str | None:
        with suppress_and_report(_log_not_found):
            return await self._find_conversation(tenant, raw, client)
        return None

    async def _find_conversation(self, tenant: str, raw: bytes, client: str) -> str | None:
        wire, body = self._wire, parse_body(raw, self._wire)
        records: list[Any] = []
        for start in range(0, len(body.messages), MESSAGES_AT_ONCE):
            records += map(wire.parse_message, body.messages[start : start + MESSAGES_AT_ONCE])
            await asyncio.sleep(0)
        messages = tuple(records)
        client = find_client_by_members(body.prompt_members) or find_client_by_messages(messages) or client
        if client:
            messages = drop_instructions(messages, client, wire.parse_message)
        messages = tuple(each for each in messages if not each.is_privileged)
        if not messages:
            return None
        prefixes = compute_prefix_digests(messages, wire.digest_seed)
        return await self._conversations.find_conversation(tenant, messages, prefixes, has_tools=TOOLS in raw)


def _log_not_found(error: BaseException) -> None:
    if not isinstance(error, UnreadableBodyError):
        _log.warning(RESPONSE_NOT_OBSERVED, error=type(error).__name__)

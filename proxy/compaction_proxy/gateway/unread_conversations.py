"""Finds the conversations of small requests that the proxy forwards unparsed and that name no conversation.

The proxy parses such a request while the upstream works on it, so that the client does not wait and the
response can name the conversation. Parsing takes more processor time than relaying. So a busy process parses
only some of these requests. The responses to the others name no conversation, and the proxy records their
figures without one. It can still recognise later requests of the same conversation.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from compaction_proxy.compaction.conversation_index import ConversationIndex
from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.support.log_events import RESPONSE_NOT_OBSERVED
from compaction_proxy.support.offload import run_in_worker_if_large
from compaction_proxy.telemetry.logs import suppress_and_log
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.project_instructions import (
    drop_instructions,
    find_client_by_members,
    find_client_by_messages,
)
from compaction_proxy.wires.wire import Wire

# The finder starts no search for a body with more bytes than this. Such a body is too large to pass the gate,
# so the proxy parses it anyway.
MAX_BYTES = 786_432
# The most bytes of request bodies that the process parses per second, on average over a long time. For
# further requests, it starts no search.
BYTES_PER_S = 524_288
# The most bytes of request bodies that the process may parse within a short time, after it has parsed nothing
# for some seconds.
BURST_BYTES = 1_048_576
# The number of bytes that is added to the size of each request, for the part of the work that is the same for
# small and large requests.
REQUEST_BYTES = 4_096
TOOLS = b'"tools"'


class UnreadConversationFinder:
    """Finds the conversations of requests on one wire. It must be used on one event loop only.

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
        self._conversation_index = conversation_index
        self._clock = clock
        self._left_bytes = float(BURST_BYTES)
        self._at = clock()
        self._searches: set[asyncio.Task[str | None]] = set()

    def start_search(self, tenant: str, raw: bytes, client: str) -> asyncio.Task[str | None] | None:
        """Starts to search for the conversation of a request, and returns the task that does so.

        The task's result is the id of the conversation. The result is None if the request belongs to no known
        conversation or the search fails. If the request is larger than `MAX_BYTES`, or too many bytes have
        been parsed in the last seconds (`BYTES_PER_S`), the method starts no task and returns None.

        Args:
            tenant: The tenant that sent the request.
            raw: The request body.
            client: The name of the client program according to the header fields; empty if it is unknown.
        """
        now, size = self._clock(), len(raw) + REQUEST_BYTES
        self._left_bytes = min(BURST_BYTES, self._left_bytes + (now - self._at) * BYTES_PER_S)
        self._at = now
        if len(raw) > MAX_BYTES or size > self._left_bytes:
            return None
        self._left_bytes -= size
        search = asyncio.create_task(self._find_conversation(tenant, raw, client))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        return search

    async def _find_conversation(self, tenant: str, raw: bytes, client: str) -> str | None:
        with suppress_and_log(RESPONSE_NOT_OBSERVED), suppress(UnreadableBodyError):
            messages = await run_in_worker_if_large(len(raw), partial(self._read_messages, raw, client))
            if messages:
                prefixes = compute_prefix_digests(messages, self._wire.digest_seed)
                return await self._conversation_index.find_conversation(
                    tenant, messages, prefixes, has_tools=raw.find(TOOLS) >= 0
                )
        return None

    def _read_messages(self, raw: bytes, client: str) -> tuple[Message, ...]:
        """Returns the messages of a request, without privileged messages and project instructions.

        Raises:
            UnreadableBodyError: If the body is not a request of this wire.
        """
        wire, body = self._wire, parse_body(raw, self._wire)
        messages = tuple(map(wire.parse_message, body.messages))
        client = find_client_by_members(body.prompt_members) or find_client_by_messages(messages) or client
        if client:
            messages = drop_instructions(messages, client, wire.parse_message)
        return tuple(each for each in messages if not each.is_privileged)

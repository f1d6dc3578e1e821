"""Remembers the ends of previous requests to recognise clients that move messages (`core.mover`).

The memory belongs to one process. After a restart, nothing is known of a client until its second request.
"""

from collections.abc import Sequence
from typing import NamedTuple

from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.core.ledger.client_forms import find_files_message
from compaction_proxy.core.message import Message
from compaction_proxy.core.mover import RequestEnd, build_request_end, find_moving_start, is_followed
from compaction_proxy.support.lru import LruCache

MAX_HELD_BYTES = 4 * 1024 * 1024
# Memory in bytes that the end of a request takes for each of its prefixes.
PREFIX_BYTES = 400


class _RequestBeginning(NamedTuple):
    """The end of a request, remembered under a prefix of that request.

    Attributes:
        end: The last messages of the request.
        length: Number of messages in the prefix.
    """

    end: RequestEnd
    length: int


class PreviousRequests:
    """Remembers the ends of requests by the prefixes before them, on one event loop.

    Args:
        max_held_bytes: Size of the memory, in bytes.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._beginnings: LruCache[tuple[str, bytes], _RequestBeginning] = LruCache(max_held_bytes)

    def count_moving_messages(
        self, scope: str, messages: Sequence[Message], prefixes: Sequence[bytes], seed: bytes
    ) -> int:
        """Returns how many of the last messages the client of a request moves, and remembers the request.

        Args:
            scope: Tenant of the request, and its conversation if the client names it.
            messages: The messages of the request that are not fixed.
            prefixes: Prefix digests of these messages.
            seed: The digest with which prefix digests of this wire begin.
        """
        if not messages:
            return 0
        previous, files_index = self._find_longest_prefix(scope, prefixes), find_files_message(messages)
        moving_from = len(messages) if files_index is None else files_index
        if previous is not None and is_followed(previous.end, messages, previous.length):
            moving_from = min(moving_from, find_moving_start(messages, previous.end, previous.length))
        end = build_request_end(messages, moving_from)
        for length in range(max(1, end.start), end.message_count + 1):
            self._put_beginning(scope, prefixes[length - 1], _RequestBeginning(end, length))
        if end.start == 0:  # the next request may begin with the last message of this one
            [first] = compute_prefix_digests(messages[-1:], seed)
            if self._beginnings.get((scope, first)) is None:
                self._put_beginning(scope, first, _RequestBeginning(end, 0))
        return len(messages) - moving_from

    def _find_longest_prefix(self, scope: str, prefixes: Sequence[bytes]) -> _RequestBeginning | None:
        """Returns the request with the longest common prefix; the latest if there are several."""
        for prefix in reversed(prefixes):
            beginning = self._beginnings.get((scope, prefix))
            if beginning is not None:
                return beginning
        return None

    def _put_beginning(self, scope: str, prefix: bytes, beginning: _RequestBeginning) -> None:
        self._beginnings.put((scope, prefix), beginning, PREFIX_BYTES)

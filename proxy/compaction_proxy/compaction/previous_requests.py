"""Remembers the last messages of earlier requests, to recognise which messages a mover moves (`core.mover`).

The last messages of a request are called its end. The ends are kept in the memory of one process. After a
restart, a mover is recognised at its second request at the earliest, because there is no earlier request with
which the first one can be compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.core.ledger.client_forms import find_shown_files_message
from compaction_proxy.core.message import Message
from compaction_proxy.core.mover import RequestEnd, build_request_end, find_moving_start, is_continuation
from compaction_proxy.support.lru import LruCache

# If all remembered ends together exceed this size, in bytes, the least recently used ones are dropped.
MAX_HELD_BYTES = 4 * 1024 * 1024
# The end of a request is stored under several prefix digests of the request. Each of these entries counts as
# this many bytes of memory.
PREFIX_BYTES = 400


class _StoredRequestEnd(NamedTuple):
    """The end of a request, stored under one prefix digest of the request.

    Attributes:
        end: The last messages of the request.
        length: Number of messages that the prefix digest covers.
    """

    end: RequestEnd
    length: int


class PreviousRequests:
    """Remembers the last messages of requests, to recognise which messages a mover moves.

    An earlier request is found by the prefix digests that a new request shares with it. Use it on one event
    loop only.

    Args:
        max_held_bytes: Largest size of all remembered ends together, in bytes.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._beginnings: LruCache[tuple[str, bytes], _StoredRequestEnd] = LruCache(max_held_bytes)

    def record_and_count_moving_messages(
        self, scope: str, messages: Sequence[Message], prefixes: Sequence[bytes], seed: bytes
    ) -> int:
        """Returns how many of a request's last messages its client moves, and remembers the request's end.

        Args:
            scope: Key made from the tenant, and from the conversation id if the client gave one. The request
                is compared only with requests of the same scope.
            messages: The messages of the request that are not fixed.
            prefixes: Prefix digests of these messages.
            seed: The digest from which the chain of prefix digests starts on this wire.
        """
        if not messages:
            return 0
        previous, files_index = self._find_longest_prefix(scope, prefixes), find_shown_files_message(messages)
        moving_from = len(messages) if files_index is None else files_index
        if previous is not None and is_continuation(previous.end, messages, previous.length):
            moving_from = min(moving_from, find_moving_start(messages, previous.end, previous.length))
        end = build_request_end(messages, moving_from)
        for length in range(max(1, end.start_index), end.message_count + 1):
            self._put_beginning(scope, prefixes[length - 1], _StoredRequestEnd(end, length))
        if (
            end.start_index == 0
        ):  # all messages may move, so the last one may be the first of the next request
            [first] = compute_prefix_digests(messages[-1:], seed)
            if self._beginnings.get((scope, first)) is None:
                self._put_beginning(scope, first, _StoredRequestEnd(end, 0))
        return len(messages) - moving_from

    def _find_longest_prefix(self, scope: str, prefixes: Sequence[bytes]) -> _StoredRequestEnd | None:
        """Returns the entry for the longest prefix that this request shares with an earlier one.

        If several earlier requests share this prefix, returns the entry of the latest one. Returns None if no
        prefix is shared.
        """
        for prefix in reversed(prefixes):
            beginning = self._beginnings.get((scope, prefix))
            if beginning is not None:
                return beginning
        return None

    def _put_beginning(self, scope: str, prefix: bytes, beginning: _StoredRequestEnd) -> None:
        self._beginnings.put((scope, prefix), beginning, PREFIX_BYTES)

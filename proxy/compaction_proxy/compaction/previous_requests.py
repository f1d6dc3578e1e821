"""The requests that came before, so that clients are known that move messages (`core.mover`).

They are known to the process that has seen them and to no other. After a restart nothing is known of a
client until its second request.
"""

from collections.abc import Sequence
from typing import NamedTuple

from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.core.ledger.client_forms import find_files_message
from compaction_proxy.core.message import Message
from compaction_proxy.core.mover import RequestEnd, build_request_end, find_moving_start, is_followed
from compaction_proxy.support.lru import LruCache

MAX_HELD_BYTES = 4 * 1024 * 1024
# What holding the end of a request takes for each of its prefixes.
PREFIX_BYTES = 400


class _RequestBeginning(NamedTuple):
    """A request that begins in a certain way.

    Attributes:
        end: Its last messages.
        length: Number of messages that it begins with.
    """

    end: RequestEnd
    length: int


class PreviousRequests:
    """Remembers the ends of requests by what stood before them, on one event loop.

    Args:
        max_held_bytes: Size of the memory.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._beginnings: LruCache[tuple[str, bytes], _RequestBeginning] = LruCache(max_held_bytes)

    def count_moving_messages(
        self, scope: str, messages: Sequence[Message], prefixes: Sequence[bytes], seed: bytes
    ) -> int:
        """Returns how many of its last messages the client of a request moves, and remembers the request.

        Args:
            scope: Whose request it is, and of which conversation if the client names it.
            messages: Its non-privileged messages.
            prefixes: Their prefix digests.
            seed: What the prefix digests of its wire begin with.
        """
        if not messages:
            return 0
        before, files = self._find_longest_prefix(scope, prefixes), find_files_message(messages)
        moving_from = len(messages) if files is None else files
        if before is not None and is_followed(before.end, messages, before.length):
            moving_from = min(moving_from, find_moving_start(messages, before.end, before.length))
        end = build_request_end(messages, moving_from)
        for length in range(max(1, end.start), end.message_count + 1):
            self._put_beginning(scope, prefixes[length - 1], _RequestBeginning(end, length))
        if end.start == 0:  # the next request may begin with the last message of this one
            [first] = compute_prefix_digests(messages[-1:], seed)
            if self._beginnings.get((scope, first)) is None:
                self._put_beginning(scope, first, _RequestBeginning(end, 0))
        return len(messages) - moving_from

    def _find_longest_prefix(self, scope: str, prefixes: Sequence[bytes]) -> _RequestBeginning | None:
        """The request with the longest common prefix; of several the last."""
        for prefix in reversed(prefixes):
            found = self._beginnings.get((scope, prefix))
            if found is not None:
                return found
        return None

    def _put_beginning(self, scope: str, prefix: bytes, beginning: _RequestBeginning) -> None:
        self._beginnings.put((scope, prefix), beginning, PREFIX_BYTES)

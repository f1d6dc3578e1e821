"""The requests that came before, so that clients are known that move messages (`core.mover`).

They are known to the process that has seen them and to no other. After a restart nothing is known of a
client until its second request.
"""

from collections.abc import Sequence
from typing import NamedTuple

from compaction_proxy.core.digest import prefix_digests
from compaction_proxy.core.ledger.client_forms import find_files
from compaction_proxy.core.message import Message
from compaction_proxy.core.mover import RequestEnd, find_moving, is_followed, take_end
from compaction_proxy.support.lru import Lru

MAX_HELD_BYTES = 4 * 1024 * 1024
# What holding the end of a request takes for each of its prefixes.
PREFIX_BYTES = 400


class _Beginning(NamedTuple):
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
        self._beginnings: Lru[tuple[str, bytes], _Beginning] = Lru(max_held_bytes)

    def count_moving(
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
        before, files = self._find(scope, prefixes), find_files(messages)
        moving_from = len(messages) if files is None else files
        if before is not None and is_followed(before.end, messages, before.length):
            moving_from = min(moving_from, find_moving(messages, before.end, before.length))
        end = take_end(messages, moving_from)
        for length in range(max(1, end.start), end.length + 1):
            self._put(scope, prefixes[length - 1], _Beginning(end, length))
        if end.start == 0:  # the next request may begin with the last message of this one
            [first] = prefix_digests(messages[-1:], seed)
            if self._beginnings.get((scope, first)) is None:
                self._put(scope, first, _Beginning(end, 0))
        return len(messages) - moving_from

    def _find(self, scope: str, prefixes: Sequence[bytes]) -> _Beginning | None:
        """The request with the longest common prefix; of several the last."""
        for prefix in reversed(prefixes):
            found = self._beginnings.get((scope, prefix))
            if found is not None:
                return found
        return None

    def _put(self, scope: str, prefix: bytes, beginning: _Beginning) -> None:
        self._beginnings.put((scope, prefix), beginning, PREFIX_BYTES)

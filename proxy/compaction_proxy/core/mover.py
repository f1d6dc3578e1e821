"""Clients that move messages: which of the last messages of a request will stand elsewhere in the next one.

aider sends its files behind what is done and before the current turn, so they move with each turn. A round
that covered them would hold for no later request. What a client does is seen by comparing a request with the
one before it; all indices count non-privileged messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from compaction_proxy.core.message import Message, find_unit_start

# What stood behind the common beginning of two requests has moved if it was so little; else the client has
# edited its list, or begun another branch.
MAX_MOVED_MESSAGES = 8
MAX_MOVED_UNITS = 2
# Two units may have many results; more than so many messages are not remembered.
MAX_END_MESSAGES = 64
# Conversations may begin alike. With fewer common messages, the last one must be found again to be sure that
# one request follows the other.
LEAST_COMMON_MESSAGES = 4


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The last messages of a request, as the next one is compared with them.

    Attributes:
        start: Index of the first of them.
        digests: Their canonical digests, in order.
        moving_from: Index from which the client moves messages; the length of the list if it moves none.
    """

    start: int
    digests: tuple[bytes, ...]
    moving_from: int

    @property
    def message_count(self) -> int:
        """Number of messages of the request."""
        return self.start + len(self.digests)


def build_request_end(messages: Sequence[Message], moving_from: int) -> RequestEnd:
    """Returns the end of a request: as much as may be found moved in the next one."""
    start = max(_find_movable_start(messages), len(messages) - MAX_END_MESSAGES)
    return RequestEnd(start, tuple(each.digest for each in messages[start:]), moving_from)


def is_followed(previous: RequestEnd, messages: Sequence[Message], common: int) -> bool:
    """Returns whether a request with `common` messages in common goes on where the one before ended."""
    if common >= min(LEAST_COMMON_MESSAGES, previous.message_count):
        return True
    found = previous.digests[-1] in {
        each.digest for each in messages[common : common + previous.message_count]
    }
    return found and len(messages) > previous.message_count


def find_moving_start(messages: Sequence[Message], previous: RequestEnd, common: int) -> int:
    """Returns the index from which the client of a request moves messages; their number if it moves none.

    Args:
        messages: Of the request.
        previous: The request before it.
        common: Number of messages that both begin with, by their outlines; not below `before.start`.
    """
    known = range(previous.start, min(common, previous.message_count))
    common = next((k for k in known if messages[k].digest != previous.digests[k - previous.start]), common)
    if common == len(messages) == previous.message_count:
        return previous.moving_from
    starts = [len(messages) - (previous.message_count - common)]  # so many may move again
    end = _find_movable_start(messages)
    if end <= common and _is_rewritten(messages, previous, common):
        starts.append(common)
    if end <= previous.moving_from < common:  # nothing of what was going to move has moved yet
        starts.append(previous.moving_from)
    return max(0, min(starts))


def _is_rewritten(messages: Sequence[Message], previous: RequestEnd, common: int) -> bool:
    """Whether messages behind the first that differs stand where they stood before."""
    behind = range(common + 1, min(previous.message_count, len(messages)))
    return any(messages[k].digest == previous.digests[k - previous.start] for k in behind)


def _find_movable_start(messages: Sequence[Message]) -> int:
    """Where the last messages begin that are few enough to be moved."""
    start = len(messages)
    for _ in range(MAX_MOVED_UNITS):
        start = find_unit_start(messages, start - 1) if start else 0
    return min(start, max(0, len(messages) - MAX_MOVED_MESSAGES))

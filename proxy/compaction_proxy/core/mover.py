"""Detects movers: clients that send some of their last messages at another place in the next request.

For example, aider puts its files after the finished turns and before the current turn, so the files move with
each turn. If a compaction covered these messages, its checkpoint would match no later request. A client is
recognised as a mover by comparing a request with the previous one. All indices count only messages that are
not fixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from compaction_proxy.core.message import Message, find_unit_start

# The last messages of a request count as moved only if they are at most this many messages, or at most this
# many units. If more of them differ, the client is assumed to have edited its list or begun another branch.
MAX_MOVED_MESSAGES = 8
MAX_MOVED_UNITS = 2
# The proxy remembers the last messages of a request, because the client may move them. It remembers at most
# this many, because even `MAX_MOVED_UNITS` units may contain many tool results.
MAX_END_MESSAGES = 64
# Different conversations may begin with the same messages. Suppose that two requests begin with fewer equal
# messages than this number, and that the earlier request also has other messages. Then the later request
# continues the earlier one only if it is longer and contains the last message of the earlier one.
LEAST_COMMON_MESSAGES = 4


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The last messages of a request, with which the next request is compared.

    Attributes:
        start_index: Index of the first of these messages.
        digests: Canonical digests of the messages, in order.
        moving_from: Index from which the client moves messages; the number of messages in the request if it
            moves none.
    """

    start_index: int
    digests: tuple[bytes, ...]
    moving_from: int

    @property
    def message_count(self) -> int:
        """Number of messages in the request."""
        return self.start_index + len(self.digests)


def build_request_end(messages: Sequence[Message], moving_from: int) -> RequestEnd:
    """Builds the end of a request from the last messages, which the client may move in the next request."""
    start = max(_find_movable_start(messages), len(messages) - MAX_END_MESSAGES)
    return RequestEnd(start, tuple(each.digest for each in messages[start:]), moving_from)


def is_continuation(previous: RequestEnd, messages: Sequence[Message], common_count: int) -> bool:
    """Returns whether a request continues the previous one.

    A request continues the previous one if both begin with at least `LEAST_COMMON_MESSAGES` equal messages,
    or if it begins with all messages of the previous request. A request also continues the previous one if it
    is longer and contains the last message of the previous one. `common_count` is the number of equal
    messages with which both requests begin.
    """
    if common_count >= min(LEAST_COMMON_MESSAGES, previous.message_count):
        return True
    has_last_message = previous.digests[-1] in {
        each.digest for each in messages[common_count : common_count + previous.message_count]
    }
    return has_last_message and len(messages) > previous.message_count


def find_moving_start(messages: Sequence[Message], previous: RequestEnd, common_count: int) -> int:
    """Returns the index from which the client moves messages; the length of the list if it moves none.

    Args:
        messages: Messages of the request.
        previous: End of the previous request.
        common_count: Number of messages at the beginning that are equal in both requests if their `name`
            members and the content of tool results are disregarded; at least `previous.start_index`.
    """
    shared = range(previous.start_index, min(common_count, previous.message_count))
    common_count = next(
        (k for k in shared if messages[k].digest != previous.digests[k - previous.start_index]), common_count
    )
    if common_count == len(messages) == previous.message_count:
        return previous.moving_from
    # The client is expected to move as many messages in the next request as it has moved in this one.
    starts = [len(messages) - (previous.message_count - common_count)]
    end = _find_movable_start(messages)
    if end <= common_count and _is_rewritten(messages, previous, common_count):
        starts.append(common_count)
    if end <= previous.moving_from < common_count:  # the messages expected to move are still in place
        starts.append(previous.moving_from)
    return max(0, min(starts))


def _is_rewritten(messages: Sequence[Message], previous: RequestEnd, common_count: int) -> bool:
    """Returns whether a message after the first difference is the same, and at the same place, as before.

    If so, the client has changed a message in place. In the next request, the client may again change
    messages from the first difference on.
    """
    later = range(common_count + 1, min(previous.message_count, len(messages)))
    return any(messages[k].digest == previous.digests[k - previous.start_index] for k in later)


def _find_movable_start(messages: Sequence[Message]) -> int:
    """Returns the index of the first message that the client may move.

    A client may move at most `MAX_MOVED_UNITS` units and at most `MAX_MOVED_MESSAGES` messages.
    """
    start = len(messages)
    for _ in range(MAX_MOVED_UNITS):
        start = find_unit_start(messages, start - 1) if start else 0
    return min(start, max(0, len(messages) - MAX_MOVED_MESSAGES))

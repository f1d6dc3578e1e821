"""What is noted of an exchange in the way of its request, and how that is parted behind it."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from proxy.core.alike import Alike
from proxy.core.economics import Saving
from proxy.core.exchange import Exchange

# The status of what passed the gate, and of what was read and left as it was.
UNREAD = "none"

_T = TypeVar("_T")


class Noted(NamedTuple):
    """An exchange, and whose it was.

    Attributes:
        tenant: Whose.
        conversation: Of which conversation, if that is known.
        origin: Of the upstream.
        exchange: Its figures.
        prefixes: Prefix digests of the client's non-privileged messages; empty where it was not read.
        counted: Tokens that the client sent and that were forwarded, uncalibrated; zeros if not read.
        begun: When its request began (`storage.outdated`).
    """

    tenant: str
    conversation: str | None
    origin: str
    exchange: Exchange
    prefixes: tuple[bytes, ...] = ()
    counted: tuple[int, int] = (0, 0)
    begun: int | None = None


class Entry(NamedTuple):
    """What was noted, and what it saved; None where that is not known."""

    noted: Noted
    saving: Saving | None


# Given exchanges, some at a time, behind their requests, on the event loop; must not wait.
# Those that were not read come added up.
Listener = Callable[[Sequence[Entry], Sequence[Alike]], None]


class Note(Protocol):
    """Notes an exchange (`Journal.note`)."""

    def __call__(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        exchange: Exchange,
        prefixes: tuple[bytes, ...] = (),
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Note one exchange, whose fields `Noted` tells."""
        ...


# What is noted, as `Noted` has it; a plain tuple, because most of it never becomes one.
Raw = tuple[str, str | None, str, Exchange, tuple[bytes, ...], tuple[int, int], int | None]
# Tenant, conversation, origin, when it began (`storage.outdated`), model, status code.
Key = tuple[str, str | None, str, int | None, str, int]
Groups = dict[Key, list[Exchange]]


def parted(noted: Sequence[Raw], groups: Groups, read: set[tuple[str, str | None]]) -> list[Raw]:
    """Put those that were not read into groups; gives the rest, which are to be told after them.

    Args:
        noted: What was noted, oldest first.
        groups: Of those that were not read.
        read: Conversations that have any of the rest, each after its tenant: what comes later of them is of
            the rest, too, so that a conversation's exchanges stay in their order.
    """
    rest: list[Raw] = []
    for each in noted:
        exchange = each[3]
        if exchange.tokens_before is None and exchange.status == UNREAD and each[:2] not in read:
            key = (each[0], each[1], each[2], each[6], exchange.model, exchange.code)
            group = groups.get(key)
            if group is None:
                group = groups[key] = []
            group.append(exchange)
        else:
            rest.append(each)
            if each[1] is not None:
                read.add(each[:2])
    return rest


def slices(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    """So many items at a time."""
    return (items[start : start + length] for start in range(0, len(items), length))

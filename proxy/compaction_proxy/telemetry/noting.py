"""What is noted of an exchange in the way of its request, and who is told of it behind it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from compaction_proxy.core.exchange import Exchange, Unread
from compaction_proxy.telemetry.entry import Entry
from compaction_proxy.telemetry.exchange_batch import Alike

_T = TypeVar("_T")


# Given exchanges, some at a time, behind their requests, on the event loop; must not wait.
# Those that were not read come added up.
Listener = Callable[[Sequence[Entry], Sequence[Alike]], None]


class Notes(Protocol):
    """Notes exchanges (`Journal`)."""

    def note(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        exchange: Exchange,
        prefixes: tuple[bytes, ...] = (),
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Note one exchange.

        Args:
            tenant: Whose it was.
            conversation: Of which conversation, if that is known.
            origin: Of the upstream.
            exchange: Its figures.
            prefixes: Prefix digests of the client's non-privileged messages; empty where it was not read.
            counted: Tokens that the client sent and that were forwarded, uncalibrated; zeros if not read.
        """
        ...

    def note_unread(
        self, tenant: str, conversation: str | None, origin: str, model: str, code: int, unread: Unread
    ) -> None:
        """Note one whose request was not read."""
        ...


# What exchanges that are added up have in common: tenant, conversation, origin, when their requests began
# (`storage.deletions`), model, status code.
Key = tuple[str, str | None, str, int | None, str, int]


def grouped(noted: Sequence[tuple[Key, Unread]]) -> dict[Key, list[Unread]]:
    """Those that are alike, in their order."""
    groups: dict[Key, list[Unread]] = {}
    for key, unread in noted:
        group = groups.get(key)
        if group is None:
            group = groups[key] = []
        group.append(unread)
    return groups


def slices(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    """So many items at a time."""
    return (items[start : start + length] for start in range(0, len(items), length))

"""What is kept in a store, before it is sealed: records, and lines of lists."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compaction_proxy.core.errors import StoreUnavailable
from compaction_proxy.storage import envelope
from compaction_proxy.storage.store import Entry, Record

Fields = Mapping[str, Any]
"""What a record says: JSON values under names. Records that come back are shared; do not change them."""


@dataclass(frozen=True, slots=True)
class Item:
    """A record to be saved beside another.

    Attributes:
        key: From `storage.keys`.
        fields: What it says.
        ttl_s: Seconds until it is forgotten.
    """

    key: str
    fields: Fields
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Line:
    """A line to be added to a list.

    Attributes:
        key: From `storage.keys`.
        fields: What it says.
        ttl_s: Seconds until the list is forgotten, counted from its newest line.
        keep: Number of newest lines that stay.
    """

    key: str
    fields: Fields
    ttl_s: float
    keep: int


def packed(fields: Fields) -> bytes:
    """The fields in an envelope.

    Raises:
        StoreUnavailable: They are too large, or no JSON values.
    """
    try:
        return envelope.pack(fields)
    except ValueError as error:
        raise StoreUnavailable("record-unfit", str(error)) from error


def sealed(item: Item | Line) -> Record | Entry:
    """As a store takes it.

    Raises:
        StoreUnavailable: As with `packed`.
    """
    value = packed(item.fields)
    if isinstance(item, Line):
        return Entry(item.key, value, item.ttl_s, item.keep)
    return Record(item.key, value, item.ttl_s)


def size_of(value: bytes) -> int:
    """Bytes of the JSON in an envelope: what holding it in memory is about."""
    return len(envelope.content(value) or b"")

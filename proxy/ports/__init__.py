"""What the use cases ask of the outside world.

Adapters implement these; one contract suite runs on every adapter of a port.
"""

from proxy.ports.full_text import Found, FullText, Passage, TextIndex
from proxy.ports.http import HttpEngine, HttpRequest, HttpResponse
from proxy.ports.models import (
    Discovery,
    Prices,
    SummaryModel,
    TokenCounter,
)
from proxy.ports.store import Entry, Lease, Record, Store

__all__ = [
    "Discovery",
    "Entry",
    "Found",
    "FullText",
    "HttpEngine",
    "HttpRequest",
    "HttpResponse",
    "Lease",
    "Passage",
    "Prices",
    "Record",
    "Store",
    "SummaryModel",
    "TextIndex",
    "TokenCounter",
]

"""Entries: exchanges as the books have them, with what each has saved."""

from typing import NamedTuple

from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.exchange import Exchange


class Entry(NamedTuple):
    """An exchange, and what it saved.

    Attributes:
        tenant: Whose it was.
        conversation: Of which conversation; None where that is not known.
        exchange: Its figures.
        saving: What it saved; None where that is not known.
    """

    tenant: str
    conversation: str | None
    exchange: Exchange
    saving: Saving | None

"""What exchanges have saved, worked out conversation by conversation as they come.

Most exchanges went on as they came and saved nothing. Of these the last few of a conversation are put aside:
what they say of the provider's cache is worked out when a later one has something to be compared with.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from compaction_proxy.core.cost.price import Price
from compaction_proxy.core.cost.savings import FEW_MESSAGES, UNHEARD, Saving, Standing, saving_of, unchanged
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.storage.keys import conversation_key

# Conversations of which it is remembered what the provider has read.
MAX_STANDING = 1_000
# Exchanges of a conversation that are put aside.
MAX_ASIDE = 4

# An exchange, the newest prefix digests of its list, and our own counts.
_Aside = tuple[Exchange, Sequence[bytes], tuple[int, int]]


class _Known(NamedTuple):
    """What is known of a conversation: of what was worked through, and what was put aside since."""

    standing: Standing
    aside: deque[_Aside]


class Savings:
    """Remembers what providers have read. For use on one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def of(
        self,
        tenant: str,
        conversation: str | None,
        exchange: Exchange,
        price: Price | None,
        prefixes: Sequence[bytes] = (),
        counted: tuple[int, int] = (0, 0),
    ) -> Saving | None:
        """What an exchange has saved; None where that is not known. To be told of exchanges in their order.

        Args:
            tenant: Whose it is.
            conversation: Of which conversation; None: nothing is known of it.
            exchange: The exchange.
            price: Of the model that was asked; None if that is not known.
            prefixes: Prefix digests of the client's non-privileged messages; empty if it was not read.
            counted: Tokens that the client sent and that were forwarded, uncalibrated; zeros if not read.
        """
        sent, left = counted
        whole = sent == left and exchange.tokens_before == exchange.tokens_after and not exchange.recalls
        if conversation is None:
            return (
                unchanged(exchange, price)
                if whole
                else saving_of(exchange, prefixes, None, price, counted)[0]
            )
        key = conversation_key(tenant, conversation)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(UNHEARD, deque(maxlen=MAX_ASIDE))
            if len(self._known) > MAX_STANDING:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if whole:
            known.aside.append((exchange, prefixes[-FEW_MESSAGES:], counted))
            return unchanged(exchange, price)
        standing = known.standing
        for earlier, its_prefixes, its_counts in known.aside:
            standing = saving_of(earlier, its_prefixes, standing, None, its_counts)[1]
        made, standing = saving_of(exchange, prefixes, standing, price, counted)
        self._known[key] = _Known(standing, deque(maxlen=MAX_ASIDE))
        return made

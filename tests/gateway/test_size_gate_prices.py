"""What passes the gate where the trigger is about money: never more than the least that it may come to."""

from typing import Any

import pytest

from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.gateway.size_gate import SizeGate
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.pricing import PriceBook
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore

PRICES = {"input": 1.0, "output": 2.0, "surcharge": {"above_tokens": 100_000, "input": 2.0}}
KEPT_S = 60.0


def ignored(_: StoreUnavailableError) -> None:
    """A memory store does not fail."""


async def largest(row: dict[str, Any], prices: dict[str, Any] | None) -> int:
    """Bytes of the largest body that passes."""
    trigger = {"strategy": "chained", "trigger": [row]}
    model = {"window": 1_000_000, "prices": prices}
    config = Config.model_validate({"compaction": trigger, "models": {"*": model}})
    records = RecordStore(MemoryStore(), ignored)
    pricing = PriceBook(config)
    learning = ModelLimits(records)
    gate = SizeGate(
        config,
        learning,
        DirectiveStore(records, KEPT_S),
        CompactedConversations(records, KEPT_S),
        "https://up.test:443",
        pricing=pricing,
    )
    passed, refused = 0, 140_000
    while refused - passed > 1:
        size = (passed + refused) // 2
        raw = b'{"model":"m"}'.ljust(size)
        if size >= 13 and not gate.can_pass(raw, {"m"}, "t", None):
            refused = size
        else:
            passed = size
    await learning.close()
    await records.close()
    return passed


@pytest.mark.parametrize(
    ("row", "prices", "least"),
    [
        ({"price_tier": True}, PRICES, 90_000),
        ({"price_tier": True}, None, 131_073),  # as large as the gate looks at
        ({"cost_optimal": True}, PRICES, 32_000),
        ({"cost_optimal": True, "tokens": 50_000}, PRICES, 50_000),
    ],
)
async def test_no_body_passes_that_may_be_due(
    row: dict[str, Any], prices: dict[str, Any] | None, least: int
) -> None:
    """Nothing is calibrated yet, so a byte may be a token, and some more."""
    passed = await largest(row, prices)

    assert 0.5 * least < passed < least

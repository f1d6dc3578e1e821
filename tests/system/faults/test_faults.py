"""A store or a summary model in any kind of trouble costs no answer, and little time."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.store import Lease, ListEntry, Record, Store
from tests.doubles.faulty_provider import Fault, FaultyProvider

WINDOW = 2_000
MODEL = "demo-agent"
SUMMARY = "demo-summary"
TURNS = 12
TEXT = "The build of module %d failed with exit code 3 in src/app_%d.py, line 47. " * 12
SUMMARY_TIMEOUT_S = 5.0
STORE_DEADLINE_S = 0.25


async def gone() -> None:
    raise StoreUnavailableError("gone")


async def never() -> None:
    await asyncio.Event().wait()


@dataclass
class Troubled:
    """A store whose every call but `close` meets its trouble."""

    trouble: Callable[[], Awaitable[None]]

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        await self.trouble()
        return []

    async def commit(
        self, claim: Record, also: Sequence[Record | ListEntry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        await self.trouble()
        return None

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        await self.trouble()

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        await self.trouble()
        return []

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        await self.trouble()
        return None

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        await self.trouble()
        return False

    async def release_lease(self, lease: Lease) -> None:
        await self.trouble()

    async def delete_prefix(self, prefix: str) -> int:
        await self.trouble()
        return 0

    async def publish(self, channel: str, message: bytes) -> None:
        await self.trouble()

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        await self.trouble()
        yield None

    async def close(self) -> None:
        return


STORES: dict[str, Callable[[], Store]] = {
    "healthy": MemoryStore,
    "raising": lambda: Troubled(gone),
    "hanging": lambda: Troubled(never),
}
SUMMARY_FAULTS = {
    "well": Fault(),
    "500": Fault(status=500),
    "hanging": Fault(hang=True),
    "garbage": Fault(garbage=True),
    "empty": Fault(empty=True),
    "cut": Fault(cut_after=1),
}


@pytest.fixture(scope="module")
def counter() -> TiktokenCounter:
    return TiktokenCounter(print)


def conversation() -> list[dict[str, str]]:
    """A task and turns, twice the window and more."""
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Find out why the nightly build fails."},
    ]
    for turn in range(TURNS):
        messages += [
            {"role": "assistant", "content": TEXT % ((turn, turn) * 12)},
            {"role": "user", "content": f"And then, in step {turn}?"},
        ]
    return messages


async def grown(client: Any, provider: DemoProvider) -> list[float]:
    """Asks after each turn; seconds of each answer by the loop's clock, all of which must be 200."""
    took: list[float] = []
    clock = asyncio.get_running_loop().time
    messages = conversation()
    for turn in range(TURNS + 1):
        asked = messages[: 2 + 2 * turn]
        started_s = clock()
        answer = await client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": asked, "stream": turn % 2 == 1, "max_tokens": 32},
        )
        took.append(clock() - started_s)
        assert answer.status_code == 200, answer.text[:200]
        [*_, last] = [seen for seen in provider.log if seen.model == MODEL and seen.status == 200]
        sent = json.loads(last.body)["messages"]
        assert (sent[0], sent[-1]) == (asked[0], asked[-1])
        assert any(messages[1]["content"] in each["content"] for each in sent)
        assert last.prompt_tokens + 32 <= WINDOW
    assert len(sent) < len(asked)
    return took


@pytest.mark.virtual_time
@pytest.mark.parametrize("summary", SUMMARY_FAULTS)
@pytest.mark.parametrize("store", STORES)
async def test_every_request_is_answered_within_the_window(
    store: str, summary: str, counter: TiktokenCounter, proxied: Any
) -> None:
    provider = FaultyProvider(DemoProviderSettings(counter, WINDOW), {SUMMARY: SUMMARY_FAULTS[summary]})
    options = {"summary": {"model": SUMMARY, "timeout_s": SUMMARY_TIMEOUT_S}, "store": STORES[store]()}
    models = {MODEL: {"window": WINDOW}}
    async with serve_embedded(provider) as upstream, proxied(upstream, models=models, **options) as client:
        took = await grown(client, provider)
    slow = sorted(took)[-3:]
    # A hanging summary model costs its patience once, a hanging store its deadline now and then.
    assert sum(seconds > SUMMARY_TIMEOUT_S for seconds in took) <= 1, slow
    assert sum(seconds > STORE_DEADLINE_S for seconds in took) <= 3, slow


@pytest.mark.parametrize(
    "trouble",
    [{"summary": each} for each in ("empty", "longer", "refuse", "inject", "truncated", "toolcall", "echo")]
    + [{"fail": each} for each in ("429", "502", "reset", "cut", "badjson", "html", "hangmid")],
    ids=lambda trouble: "-".join(trouble.values()),
)
async def test_no_answer_of_a_summary_model_costs_one_of_ours(
    trouble: dict[str, str], scripted: Any, proxied: Any
) -> None:
    scripted.control(context_limit=WINDOW, summary={"context_limit": 0, **trouble})
    messages = conversation()
    options = {"summary": {"model": "summary-small", "timeout_s": 2.0}}
    async with proxied(scripted.url, **options) as client:
        statuses = [
            (
                await client.post(
                    "/v1/chat/completions",
                    json={"model": "gpt-4o", "messages": messages[: 2 + 2 * turn], "stream": turn % 2 == 1},
                )
            ).status_code
            for turn in range(TURNS + 1)
        ]
    assert statuses == [200] * (TURNS + 1)
    assert scripted.log("summary-small")
    [*_, last] = scripted.log("gpt-4o")
    assert last["prompt_tokens"] <= WINDOW
    assert last["body"]["messages"][0] == messages[0]
    assert last["body"]["messages"][-1] == messages[-1]

"""It does not show which replica a request went to: what is forwarded is what one alone would forward."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

TURNS = 100
# How far a kept ratio may lie behind, as a share.
KEPT_STEP_SHARE = 0.02


async def forwarded(replicated: Any, upstream: Any, replicas: Sequence[Any]) -> list[bytes]:
    """What reached the provider of a conversation whose turns go to one replica after the other."""
    before = len(upstream.log)
    for turn in range(TURNS):
        messages = replicated.conversation("c", 2 * turn + 1)
        answer = await replicas[turn % len(replicas)].ask(
            replicated.body(messages, stream=turn % 3 == 0), **{"x-session-id": "s"}
        )
        assert answer.status_code == 200
    return [seen.body for seen in upstream.log[before:]]


def head(forwarded_body: bytes) -> bytes:
    """The first messages as they were sent, which a provider's prompt cache knows again."""
    return json.dumps(json.loads(forwarded_body)["messages"][:2]).encode()


@pytest.mark.parametrize("strategy", ["anchored", "chained"])
async def test_a_conversation_that_alternates_is_forwarded_as_by_one_replica_alone(
    replicated: Any, strategy: str
) -> None:
    # What is made ahead of need depends on how soon the next request comes.
    settings = {
        "COMPACTION_PROXY__COMPACTION__STRATEGY": strategy,
        "COMPACTION_PROXY__COMPACTION__BACKGROUND": "false",
    }
    async with replicated.scene() as (upstream, url, replicas, server):
        another = server.url.removesuffix("/0") + "/1"
        pair, single = await asyncio.gather(
            replicas.pair(url, server.url, **settings), replicas.start(url, another, **settings)
        )
        alternating = await forwarded(replicated, upstream, pair)
        rounds = upstream.summaries
        alone = await forwarded(replicated, upstream, [single])

    replicated.note(f"\n{TURNS} turns, {rounds} rounds")
    assert len(alternating) == TURNS
    assert alternating == alone
    assert upstream.summaries == 2 * rounds
    assert 4 <= rounds <= TURNS / 10
    if strategy == "chained":  # each round takes the place of the one before
        assert len({head(each) for each in alone[1:]}) == rounds + 1


async def test_what_one_replica_has_learned_another_knows_after_its_restart(replicated: Any) -> None:
    async with replicated.scene() as (upstream, url, replicas, server):
        first, second = await replicas.pair(url, server.url, window=None)
        await replicas.end(second)
        learning = await first.ask(replicated.body(replicated.conversation("one", 101)))
        refused = [seen.status for seen in upstream.log].count(400)
        known = await first.ask(replicated.body(replicated.conversation("two", 101)))
        again = await replicas.start(url, server.url, window=None)
        for _ in range(2):  # behind the first request it looks for what is known of the model
            assert (await again.ask(replicated.body(replicated.conversation("small", 1)))).status_code == 200
        learned = await again.ask(replicated.body(replicated.conversation("two", 103)))
        sized = await first.ask(replicated.body(replicated.conversation("two", 103)))

    assert [answer.status_code for answer in (learning, known, learned, sized)] == [200] * 4
    assert refused >= 1
    assert [seen.status for seen in upstream.log].count(400) == refused
    limits = {answer.headers["x-compaction-context-limit"] for answer in (known, learned)}
    assert limits == {"4096"}
    sizes = [int(answer.headers["x-compaction-tokens-before"]) for answer in (learned, sized)]
    assert abs(sizes[0] / sizes[1] - 1) <= KEPT_STEP_SHARE


async def test_two_workers_use_one_summary_and_one_set_of_bytes(replicated: Any) -> None:
    async with replicated.scene(numbered=True) as (upstream, url, replicas, server):
        workers = await replicas.start(url, server.url, "--workers", "2")
        content = replicated.body(replicated.conversation("c"))
        # Each request on a connection of its own, which the kernel gives to either.
        answers = [await workers.ask(content, connection="close") for _ in range(16)]
        await replicas.end(workers)

    statuses = [answer.headers["x-compaction-status"] for answer in answers]
    assert statuses == ["applied", *["reused"] * 15]
    assert upstream.summaries == 1
    assert len({seen.body for seen in upstream.log}) == 1

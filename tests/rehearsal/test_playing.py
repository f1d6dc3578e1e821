"""A rehearsal does what the proxy does, request for request."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import AGENT_MODEL, SUMMARY_MODEL, Provider, Settings, create_provider
from compaction_proxy.cli.demo.run import _expected_history, _until_quiet
from compaction_proxy.cli.demo.script import load
from compaction_proxy.cli.replay_worker import staged
from compaction_proxy.compaction.types import Ask, Fit
from compaction_proxy.config.config import Config
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.server import served
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.recordings import Recording, recorded, recordings, thinned
from compaction_proxy.replay.runner import Wanted, play

WINDOW_TOKENS = 8_192
# Of the requests of the conversation; all of them take longer, and say no more.
EVERY = 2
# Of the processor, for a strategy on the largest conversation: ten times what is promised.
MOST_S = 100.0


def recording() -> Recording:
    script = load()
    messages = _expected_history(script)
    return recorded({"model": AGENT_MODEL, "messages": messages, "tools": script.tools}, "demo")


def config(upstream: str, strategy: str = "anchored") -> Config:
    return Config.model_validate(
        {
            "server": {"secret": "rehearsal"},
            "upstream": {"base_url": f"{upstream}/v1"},
            "store": {"url": "memory://"},
            "summary": {"model": SUMMARY_MODEL},
            "compaction": {"strategy": strategy, "trigger": [{"tokens": 4_000}]},
            "models": {"demo-*": {"window": WINDOW_TOKENS}},
        }
    )


async def lived(strategy: str) -> tuple[list[tuple[int, int, int]], list[str]]:
    """Of each request that the provider was sent: its bytes, tokens and cached tokens; and the rounds."""
    provider: Provider = create_provider(Settings(TiktokenCounter(print), window=WINDOW_TOKENS))
    rounds = []
    async with (
        served(provider) as upstream,
        served(create_app(config(upstream, strategy))) as url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        headers = {"content-type": "application/json", "x-compaction-strategy": strategy}
        known = asyncio.all_tasks()
        played = recording()
        for length in thinned(played, EVERY):
            body = played.body(length, AGENT_MODEL)
            answer = await client.post(f"{url}/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            rounds.append(answer.headers.get("x-compaction-round", ""))
            await _until_quiet(known)
    seen = [each for each in provider.log if each.model == AGENT_MODEL]
    return [(len(each.body), each.prompt_tokens, each.cached_tokens) for each in seen], rounds


class Watched:
    """A compactor, and what it has made of requests."""

    def __init__(self, compactor: Any) -> None:
        self._compactor = compactor
        self.fits: list[Fit] = []

    async def fit(self, ask: Ask) -> Fit:
        self.fits.append(await self._compactor.fit(ask))
        return self.fits[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compactor, name)


@pytest.mark.parametrize("strategy", ["anchored", "full"])
async def test_the_provider_is_sent_the_same_as_through_the_proxy(strategy: str) -> None:
    real, rounds = await lived(strategy)
    async with staged(config("http://127.0.0.1:1", strategy)) as stage:
        watched = Watched(stage.compactor)
        result = await play(
            replace(stage, compactor=cast("Any", watched)), recording(), strategy, Wanted(every=EVERY)
        )
    rehearsed = [
        (len(fit.raw), point.after, point.cached)
        for fit, point in zip(watched.fits, result.points, strict=True)
    ]
    assert rehearsed == real
    assert [str(each.report.round or "") for each in watched.fits] == rounds
    assert (result.rounds > 0, result.failed) == (True, 0)


async def test_each_overriding_wish_is_played() -> None:
    wanted = Wanted(model="gpt-5.4", trigger_tokens=5_000, window=9_000, every=5)
    async with staged(config("http://127.0.0.1:1")) as stage:
        told: list[tuple[int, int]] = []
        result = await play(
            stage, recording(), "full", wanted, lambda done, total: told.append((done, total))
        )
    requests = -(-len(recording().lengths) // 5)
    assert (result.model, result.trigger, result.window, result.requests) == (
        "gpt-5.4",
        5_000,
        9_000,
        requests,
    )
    assert told == [(done, requests) for done in range(1, requests + 1)]


async def test_a_window_that_the_requests_outgrow_is_kept() -> None:
    async with staged(Config()) as stage:
        result = await play(
            stage, recording(), "anchored", Wanted(window=6_000, trigger_tokens=100_000, every=2)
        )
    assert result.over_without > 0
    assert (result.failed, result.largest_tokens <= 6_000) == (0, True)


async def test_every_strategy_can_be_played_with_its_own_trigger() -> None:
    async with staged(Config.model_validate({"models": {"*": {"window": WINDOW_TOKENS}}})) as stage:
        results = [await play(stage, recording(), name, Wanted(every=20)) for name in STRATEGIES]
    assert {each.strategy: each.failed for each in results} == dict.fromkeys(STRATEGIES, 0)


async def test_the_largest_conversation_is_played_in_time(shared: Path) -> None:
    largest = max(recordings(shared / "data" / "conversations" / "coding_aider.jsonl"), key=_size)
    async with staged(Config()) as stage:
        before = time.process_time()
        result = await play(stage, largest, "anchored", Wanted(window=100_000))
        spent_s = time.process_time() - before
    assert (result.rounds > 0, result.failed, spent_s <= MOST_S) == (True, 0, True), spent_s


def _size(recording: Recording) -> int:
    return sum(map(len, recording.messages))

"""A rehearsal does what the proxy does, request for request."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import (
    AGENT_MODEL,
    SUMMARY_MODEL,
    DemoProvider,
    DemoProviderSettings,
)
from compaction_proxy.cli.demo.replies import load_script
from compaction_proxy.cli.demo.run import _build_expected_history, _wait_until_quiet
from compaction_proxy.cli.replay_worker import open_components
from compaction_proxy.compaction.types import FitRequest, FitResult
from compaction_proxy.config.config import Config
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.recordings import Recording, parse_recording, read_recordings, select_lengths
from compaction_proxy.replay.runner import ReplayOptions, replay_recording

WINDOW_TOKENS = 8_192
# Of the requests of the conversation; all of them take longer, and say no more.
EVERY = 2
# Of the processor, for a strategy on the largest conversation: ten times what is promised.
MOST_S = 100.0
# A busy machine must not let a request go on without its summary.
LONG_S = 100.0


def recording() -> Recording:
    script = load_script()
    messages = _build_expected_history(script)
    return parse_recording({"model": AGENT_MODEL, "messages": messages, "tools": script.tools}, "demo")


def config(upstream: str, strategy: str = "anchored") -> Config:
    return Config.model_validate(
        {
            "server": {"secret": "rehearsal"},
            "upstream": {"base_url": f"{upstream}/v1"},
            "store": {"url": "memory://"},
            "summary": {"model": SUMMARY_MODEL, "timeout_s": LONG_S},
            "compaction": {"strategy": strategy, "trigger": [{"tokens": 4_000}], "max_block_s": LONG_S},
            "models": {"demo-*": {"window": WINDOW_TOKENS}},
        }
    )


async def lived(strategy: str) -> tuple[list[tuple[int, int, int]], list[str]]:
    """Of each request that the provider was sent: its bytes, tokens and cached tokens; and the rounds."""
    provider: DemoProvider = DemoProvider(DemoProviderSettings(TiktokenCounter(print), window=WINDOW_TOKENS))
    rounds = []
    async with (
        serve_embedded(provider) as upstream,
        serve_embedded(create_app(config(upstream, strategy))) as url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        headers = {"content-type": "application/json", "x-compaction-strategy": strategy}
        known = asyncio.all_tasks()
        played = recording()
        for length in select_lengths(played, EVERY):
            body = played.build_body(length, AGENT_MODEL)
            answer = await client.post(f"{url}/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            rounds.append(answer.headers.get("x-compaction-round", ""))
            await _wait_until_quiet(known)
    seen = [each for each in provider.log if each.model == AGENT_MODEL]
    return [(len(each.body), each.prompt_tokens, each.cached_tokens) for each in seen], rounds


class Watched:
    """A compactor, and what it has made of requests."""

    def __init__(self, compactor: Any) -> None:
        self._compactor = compactor
        self.fits: list[FitResult] = []

    async def fit_request(self, ask: FitRequest) -> FitResult:
        self.fits.append(await self._compactor.fit_request(ask))
        return self.fits[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compactor, name)


@pytest.mark.parametrize("strategy", ["anchored", "full"])
async def test_the_provider_is_sent_the_same_as_through_the_proxy(strategy: str) -> None:
    real, rounds = await lived(strategy)
    async with open_components(config("http://127.0.0.1:1", strategy)) as stage:
        watched = Watched(stage.compactor)
        result = await replay_recording(
            replace(stage, compactor=cast("Any", watched)), recording(), strategy, ReplayOptions(every=EVERY)
        )
    rehearsed = [
        (len(fit.raw), point.after, point.cached)
        for fit, point in zip(watched.fits, result.points, strict=True)
    ]
    assert rehearsed == real
    assert [str(each.report.round or "") for each in watched.fits] == rounds
    assert (result.rounds > 0, result.failed) == (True, 0)


async def test_each_overriding_wish_is_played() -> None:
    wanted = ReplayOptions(model="gpt-5.4", trigger_tokens=5_000, window=9_000, every=5)
    async with open_components(config("http://127.0.0.1:1")) as stage:
        told: list[tuple[int, int]] = []
        result = await replay_recording(
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
    async with open_components(Config()) as stage:
        result = await replay_recording(
            stage, recording(), "anchored", ReplayOptions(window=6_000, trigger_tokens=100_000, every=2)
        )
    assert result.over_without > 0
    assert (result.failed, result.largest_tokens <= 6_000) == (0, True)


async def test_every_strategy_can_be_played_with_its_own_trigger() -> None:
    async with open_components(Config.model_validate({"models": {"*": {"window": WINDOW_TOKENS}}})) as stage:
        results = [
            await replay_recording(stage, recording(), name, ReplayOptions(every=20)) for name in STRATEGIES
        ]
    assert {each.strategy: each.failed for each in results} == dict.fromkeys(STRATEGIES, 0)


async def test_the_largest_conversation_is_played_in_time(shared: Path) -> None:
    largest = max(read_recordings(shared / "data" / "conversations" / "coding_aider.jsonl"), key=_size)
    async with open_components(Config()) as stage:
        before = time.process_time()
        result = await replay_recording(stage, largest, "anchored", ReplayOptions(window=100_000))
        spent_s = time.process_time() - before
    assert (result.rounds > 0, result.failed, spent_s <= MOST_S) == (True, 0, True), spent_s


def _size(recording: Recording) -> int:
    return sum(map(len, recording.messages))

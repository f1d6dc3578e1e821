"""`compaction-proxy demo`: a long conversation, first without the proxy, then through it, on real sockets."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import httpx
from pydantic import SecretStr

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.agent import Agent, Exchange, opening, tool_message
from compaction_proxy.cli.demo.chat import JsonObject, Reply, message_json
from compaction_proxy.cli.demo.provider import AGENT_MODEL, SUMMARY_MODEL, Provider, Settings, create_provider
from compaction_proxy.cli.demo.replies import recalled
from compaction_proxy.cli.demo.script import Script, load
from compaction_proxy.cli.demo.seen import Seen
from compaction_proxy.cli.demo.table import HEAD, Check, Row, note
from compaction_proxy.config import Config
from compaction_proxy.config.sections import (
    ModelSection,
    ServerSection,
    StoreSection,
    SummarySection,
    UpstreamSection,
)
from compaction_proxy.gateway.server import served
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.prompt_size import text_of
from compaction_proxy.telemetry import logs

WINDOW_TOKENS = 8192
# Nobody reads an answer faster; what is done behind answers is done by then, in seconds.
LONGEST_PAUSE_S = 5.0
POLL_S = 0.001
OVERFLOW = "context_length_exceeded"

Say = Callable[[str], None]


@dataclass(slots=True)
class Played:
    """What came of the conversation through the proxy."""

    agent: Agent
    exchanges: list[Exchange] = field(default_factory=list)
    client_tokens: int = 0


def demo_config(provider_url: str) -> Config:
    """A proxy in front of the demo provider that keeps everything in memory."""
    return Config(
        server=ServerSection(port=0, secret=SecretStr("demo")),
        upstream=UpstreamSection(base_url=f"{provider_url}/v1"),
        store=StoreSection(url="memory://"),
        summary=SummarySection(model=SUMMARY_MODEL),
        models={"demo-*": ModelSection(window=WINDOW_TOKENS)},
    )


async def _until_quiet(known: set[asyncio.Task[object]]) -> None:
    """Wait until the proxy has done what it does behind an answer, so that the demo always runs alike."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_PAUSE_S):
            while asyncio.all_tasks() - known:  # noqa: ASYNC110 - tasks of others are no event of ours
                await asyncio.sleep(POLL_S)


async def _direct(agent: Agent, say: Say) -> Check:
    """Play without the proxy until the provider refuses."""
    for number, turn in enumerate(agent.script.turns, 1):
        last = (await agent.turn(turn.user))[-1]
        if last.status != 200:
            say(f"Sent directly, turn {number} is refused: {last.status} {last.code}.")
            held = (last.status, last.code) == (400, OVERFLOW)
            return Check(held, f"sent directly, the conversation ends at turn {number}: {last.code}")
    return Check(held=False, text="sent directly, the conversation never met the window")


async def _proxied(agent: Agent, provider: Provider, say: Say) -> Played:
    """Play through the proxy, printing each turn."""
    played = Played(agent)
    say(HEAD)
    for number, turn in enumerate(agent.script.turns, 1):
        exchanges = await agent.turn(turn.user)
        played.exchanges += exchanges
        counted = [provider.meter.prompt(exchange.body) for exchange in exchanges]
        played.client_tokens += sum(counted)
        seen = next(seen for seen in reversed(provider.log) if seen.model == AGENT_MODEL)
        say(Row(number, counted[-1], seen.prompt_tokens, note(exchanges)).text())
        if exchanges[-1].status != 200:
            break
    return played


def _expected_history(script: Script) -> list[JsonObject]:
    """The whole conversation, as a client has it whose model forgets nothing."""
    history = opening(script)
    for turn in script.turns:
        history.append({"role": "user", "content": turn.user})
        for step in turn.steps:
            text = recalled(step.text, history, script.facts)
            history.append(message_json(Reply(text, step.calls)))
            history += [tool_message(call.id, script) for call in step.calls]
    return history


def _first_question(script: Script) -> str:
    """The user message from which on the conversation asks about the planted facts."""
    return next(turn.user for turn in script.turns if any("{" in step.text for step in turn.steps))


def _facts(script: Script, last: Seen) -> Check:
    """Look for the facts in the last request, before the questions about them and the answers."""
    texts = [text_of(message) for message in last.messages()]
    question = _first_question(script)
    before = texts[: texts.index(question)] if question in texts else texts[:-1]
    lost = [name for name, fact in script.facts.items() if not any(fact in text for text in before)]
    if lost:
        return Check(held=False, text=f"lost on the way: {', '.join(lost)}")
    names = ", ".join(script.facts)
    return Check(held=True, text=f"the model still sees what was said in turns 1 to 3: {names}")


def _answered(played: Played) -> Check:
    turns = len(played.agent.script.turns)
    asked = sum(message["role"] == "user" for message in played.agent.history)
    held = asked == turns and all(exchange.status == 200 for exchange in played.exchanges)
    statuses = ", ".join(str(status) for status in sorted({each.status for each in played.exchanges}))
    requests = f"{len(played.exchanges)} requests, status {statuses}"
    return Check(held, f"through the proxy, {asked} of {turns} turns were answered ({requests})")


def _within_window(log: list[Seen]) -> Check:
    largest = max(log, key=lambda seen: seen.prompt_tokens + seen.output_tokens)
    size = largest.prompt_tokens + largest.output_tokens
    held = size <= WINDOW_TOKENS and all(seen.code != OVERFLOW for seen in log)
    text = f"nothing went over the window of {WINDOW_TOKENS:,} tokens (largest: {size:,}, answer included)"
    return Check(held, text)


def _checks(direct: Check, played: Played, log: list[Seen]) -> list[Check]:
    script = played.agent.script
    last = [seen for seen in log if seen.model == AGENT_MODEL][-1]
    whole = played.agent.history == _expected_history(script)
    return [
        direct,
        _answered(played),
        _facts(script, last),
        _within_window(log),
        Check(
            whole, f"the client's own history is whole and unchanged ({len(played.agent.history)} messages)"
        ),
    ]


def _total(played: Played, log: list[Seen]) -> str:
    read = sum(seen.prompt_tokens for seen in log)
    summaries = sum(seen.model == SUMMARY_MODEL for seen in log)
    saved = 1 - read / played.client_tokens
    return (
        f"In all the client sent {played.client_tokens:,} tokens and the provider read {read:,} "
        f"({saved:.0%} less), {summaries} summary calls included."
    )


async def _play(provider: Provider, direct_url: str, proxy_url: str, say: Say) -> bool:
    script = load()
    say(f"A conversation of {len(script.turns)} turns for a model with a window of {WINDOW_TOKENS:,} tokens.")
    say("")
    async with httpx.AsyncClient(trust_env=False) as http:
        direct = await _direct(Agent(http, direct_url, script, opening(script)), say)
        asked_directly = len(provider.log)
        say("The same through the proxy:")
        say("")
        quiet = partial(_until_quiet, asyncio.all_tasks())
        played = await _proxied(Agent(http, proxy_url, script, opening(script), quiet), provider, say)
    log = list(provider.log[asked_directly:])
    say("")
    say(_total(played, log))
    say("")
    checks = _checks(direct, played, log)
    for check in checks:
        say(check.line())
    return all(check.held for check in checks)


async def _wait_for_ever(provider_url: str, proxy_url: str) -> None:
    print(f"\nStill running; Ctrl-C ends it.\nprovider: {provider_url}/v1\nproxy:    {proxy_url}/v1\n")
    print(f"export OPENAI_BASE_URL={proxy_url}/v1 OPENAI_API_KEY=demo\n")
    body = f'{{"model":"{AGENT_MODEL}","messages":[{{"role":"user","content":"Hello"}}]}}'
    kind = "content-type: application/json"
    print(f"curl {proxy_url}/v1/chat/completions -H '{kind}' -d '{body}'", flush=True)
    await asyncio.Event().wait()


async def run(say: Say, *, keep: bool = False) -> bool:
    """Run the demo, handing each line to `say`; whether everything held. `keep` waits for a cancellation."""
    provider = create_provider(Settings(TiktokenCounter(say), window=WINDOW_TOKENS))
    async with served(provider) as provider_url, served(create_app(demo_config(provider_url))) as proxy_url:
        held = await _play(provider, provider_url, proxy_url, say)
        if keep:
            with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is how this ends
                await _wait_for_ever(provider_url, proxy_url)
    return held


def table_text() -> str:
    """Everything that the demo prints, as README shows it."""
    lines: list[str] = []
    asyncio.run(run(lines.append))
    return "\n".join(lines) + "\n"


def main(keep: bool = False) -> int:
    """Run the demo on stdout.

    Returns:
        0 if everything held, else 1; 130 if it was interrupted before the end. With `keep`, Ctrl-C ends it.
    """
    logs.configure("console", logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        return 0 if asyncio.run(run(lambda line: print(line, flush=True), keep=keep)) else 1
    return 130

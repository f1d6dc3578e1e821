"""Runs `compaction-proxy demo`: a long conversation, first without the proxy, then through the proxy.

The client of the demo is an agent that sends its whole history with each request. The agent runs no real
tools. The results of its tool calls come from the script.
"""

import asyncio
import contextlib
import copy
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpx
from pydantic import SecretStr

from compaction_proxy.app import create_app
from compaction_proxy.cli.admin_key import add_admin_key
from compaction_proxy.cli.demo.chat import JsonObject, Reply, build_message
from compaction_proxy.cli.demo.provider import (
    AGENT_MODEL,
    SUMMARY_MODEL,
    DemoProvider,
    DemoProviderSettings,
    SeenRequest,
)
from compaction_proxy.cli.demo.replies import DemoScript, fill_in_facts, load_script
from compaction_proxy.cli.demo.validation import OVERFLOW
from compaction_proxy.cli.serve import describe_dashboard
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.config.sections import (
    ModelSection,
    ServerSection,
    StoreSection,
    SummarySection,
    UpstreamSection,
)
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.provider import ProviderPrompt, extract_text
from compaction_proxy.telemetry import logs

WINDOW_TOKENS = 8192
# Longest time, in seconds, for which the demo waits for the proxy's background work after a reply. A real
# user would take at least as long to read the reply. After this time, the demo continues. Until then, it
# checks every `POLL_S` seconds whether the work has ended.
LONGEST_PAUSE_S = 5.0
POLL_S = 0.001

HEAD = f"{'turn':>4}  {'client sent':>11}  {'sent on':>7}  {'saved':>5}  what happened"

OUTPUT_TOKENS = 512
TIMEOUT_S = 20
SESSION = "demo"
DATA = "data: "
DONE = "data: [DONE]"

Say = Callable[[str], None]
# The result of a check: whether the check passed, and a text for people.
Check = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class AgentExchange:
    """A request of the agent and its response.

    Attributes:
        body: The request body.
        status: Status of the response.
        headers: Headers of the response, with names in lower case.
        message: The assistant message, assembled from the stream. None for an error response.
        code: Error code of the response. Empty without an error.
    """

    body: JsonObject
    status: int
    headers: Mapping[str, str]
    message: JsonObject | None = None
    code: str = ""


async def skip_pause() -> None:
    """Does nothing. With this default value of `DemoAgent.pause`, the agent does not wait."""


@dataclass(slots=True)
class DemoAgent:
    """An agent that sends the user messages and the tool results of a script to a base URL.

    Attributes:
        http_client: The HTTP client.
        base_url: Base URL of the proxy or the provider, without `/v1`.
        script: The scripted user messages and tool results.
        history: All messages so far. The agent only appends to this list.
        pause: Called and awaited after each response. It simulates the time in which a user reads the reply
            or a tool runs.
    """

    http_client: httpx.AsyncClient
    base_url: str
    script: DemoScript
    history: list[JsonObject] = field(default_factory=list)
    pause: Callable[[], Awaitable[None]] = skip_pause

    async def play_turn(self, text: str) -> list[AgentExchange]:
        """Sends a user message, and then tool results as long as the model calls tools.

        The turn ends with a reply without tool calls, or with an error.

        Returns:
            The exchanges of the turn, in order.
        """
        self.history.append({"role": "user", "content": text})
        exchanges = []
        while True:
            exchange = await self._send_request()
            exchanges.append(exchange)
            await self.pause()
            if exchange.message is None:
                return exchanges
            self.history.append(exchange.message)
            calls = exchange.message.get("tool_calls", ())
            self.history += [build_tool_message(call["id"], self.script) for call in calls]
            if not calls:
                return exchanges

    async def _send_request(self) -> AgentExchange:
        body = {
            "model": AGENT_MODEL,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": OUTPUT_TOKENS,
            "tools": self.script.tools,
            "messages": copy.deepcopy(self.history),
        }
        url = f"{self.base_url}/v1/chat/completions"
        headers = {"x-session-id": SESSION, "authorization": "Bearer demo"}
        async with self.http_client.stream(
            "POST", url, json=body, headers=headers, timeout=TIMEOUT_S
        ) as answer:
            if answer.status_code != 200:
                error = json.loads(await answer.aread()).get("error") or {}
                return AgentExchange(body, answer.status_code, answer.headers, code=str(error.get("code")))
            return AgentExchange(body, 200, answer.headers, await _read_message(answer))


def build_tool_message(call_id: str, script: DemoScript) -> JsonObject:
    """Builds the message with the scripted result of a tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": script.results[call_id]}


def build_opening(script: DemoScript) -> list[JsonObject]:
    """Builds the history before the first turn, which is only the system prompt."""
    return [{"role": "system", "content": script.system}]


async def _read_message(answer: httpx.Response) -> JsonObject:
    """Assembles the assistant message from a streamed response.

    Raises:
        httpx.RemoteProtocolError: If the stream ends before `[DONE]`.
    """
    text = ""
    calls: dict[int, JsonObject] = {}
    async for line in answer.aiter_lines():
        if line == DONE:
            message: JsonObject = {"role": "assistant", "content": text or None}
            return {**message, "tool_calls": [calls[index] for index in sorted(calls)]} if calls else message
        if not line.startswith(DATA):
            continue
        for choice in json.loads(line.removeprefix(DATA))["choices"]:
            text += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", ()):
                _append_call_piece(calls, piece)
    raise httpx.RemoteProtocolError("the stream ended before [DONE]")


def _append_call_piece(calls: dict[int, JsonObject], piece: JsonObject) -> None:
    """Adds a streamed piece of a tool call to the pieces that were received before. Changes `calls`."""
    index, function = piece["index"], piece["function"]
    if index in calls:
        calls[index]["function"]["arguments"] += function["arguments"]
    else:
        calls[index] = {"id": piece["id"], "type": "function", "function": dict(function)}


def build_demo_config(provider_url: str) -> Config:
    """Builds the configuration of a proxy with the demo provider as its upstream and a store in memory."""
    return Config(
        server=ServerSection(port=0, secret=SecretStr("demo")),
        upstream=UpstreamSection(base_url=f"{provider_url}/v1"),
        store=StoreSection(url="memory://"),
        summary=SummarySection(model=SUMMARY_MODEL),
        models={"demo-*": ModelSection(window=WINDOW_TOKENS)},
    )


async def _wait_until_quiet(known: set[asyncio.Task[object]]) -> None:
    """Waits until the proxy has finished its background work, so that every demo gives the same output.

    Waits at most `LONGEST_PAUSE_S` seconds. Does not wait for the tasks in `known`, which ran before the
    conversation.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_PAUSE_S):
            while asyncio.all_tasks() - known:  # noqa: ASYNC110 - no event reports the end of the proxy's tasks
                await asyncio.sleep(POLL_S)


async def _play_directly(agent: DemoAgent, say: Say) -> Check:
    """Plays the conversation without the proxy until an error. Returns the result of a check.

    The check passes if the provider refuses a request because it exceeds the context window.
    """
    for number, turn in enumerate(agent.script.turns, 1):
        last = (await agent.play_turn(turn.user))[-1]
        if last.status != 200:
            say(f"Without the proxy, the provider refuses turn {number}: {last.status} {last.code}.")
            is_expected = (last.status, last.code) == (400, OVERFLOW)
            return is_expected, f"without the proxy, the conversation fails at turn {number}: {last.code}"
    return False, "without the proxy, the conversation did not reach the context window"


async def _play_through_proxy(
    agent: DemoAgent, provider: DemoProvider, say: Say
) -> tuple[list[AgentExchange], int]:
    """Plays the conversation through the proxy and prints a line for each turn.

    The token counts in a line are those of the turn's last request, as the provider counts them. Stops at the
    first turn that ends with an error.

    Returns:
        The exchanges, and the tokens of all requests together as the client sent them.
    """
    exchanges: list[AgentExchange] = []
    client_tokens = 0
    say(HEAD)
    for number, turn in enumerate(agent.script.turns, 1):
        played = await agent.play_turn(turn.user)
        exchanges += played
        sizes = [provider.meter.count_prompt_tokens(ProviderPrompt.from_body(each.body)) for each in played]
        client_tokens += sum(sizes)
        sent_tokens = next(seen for seen in reversed(provider.log) if seen.model == AGENT_MODEL).prompt_tokens
        figures = f"{number:>4}  {sizes[-1]:>11,}  {sent_tokens:>7,}  {1 - sent_tokens / sizes[-1]:>4.0%}"
        say(f"{figures}   {_describe_turn(played)}".rstrip())
        if played[-1].status != 200:
            break
    return exchanges, client_tokens


def _describe_turn(exchanges: Sequence[AgentExchange]) -> str:
    """Describes a turn: its last refused or compacted exchange or, if there is none, its last exchange."""
    notes = [_describe_exchange(exchange) for exchange in exchanges]
    important = [text for text in notes if text.startswith(("refused", "compacted"))]
    return (important or notes)[-1]


def _describe_exchange(exchange: AgentExchange) -> str:
    if exchange.status != 200:
        return f"refused: {exchange.status} {exchange.code}"
    headers = exchange.headers
    match headers.get("x-compaction-status", ""):
        case "applied":
            before, after = (headers[f"x-compaction-messages-{when}"] for when in ("before", "after"))
            return f"compacted, round {headers['x-compaction-round']}: {before} messages became {after}"
        case "reused":
            return f"summary of round {headers['x-compaction-round']} reused"
        case "scheduled":
            return "next compaction prepared after the answer"
        case "none":
            return ""
        case status:
            return status


def _build_expected_history(script: DemoScript) -> list[JsonObject]:
    """Builds the history that the client must have at the end if the model forgets no fact."""
    history = build_opening(script)
    for turn in script.turns:
        history.append({"role": "user", "content": turn.user})
        for step in turn.steps:
            text = fill_in_facts(step.text, history, script.facts)
            history.append(build_message(Reply(text, step.calls)))
            history += [build_tool_message(call.id, script) for call in step.calls]
    return history


def _check_facts(script: DemoScript, last: SeenRequest) -> Check:
    """Checks that the last request still contains the planted facts, which the model needs for its replies.

    The check searches only the messages before the first question about the facts, because the replies to
    such questions repeat the facts.
    """
    texts = [extract_text(message) for message in last.parse_messages()]
    question = next(turn.user for turn in script.turns if any("{" in step.text for step in turn.steps))
    before = texts[: texts.index(question)] if question in texts else texts[:-1]
    lost = [name for name, fact in script.facts.items() if not any(fact in text for text in before)]
    if lost:
        return False, f"the model no longer sees these facts: {', '.join(lost)}"
    return True, f"the model still sees the facts of turns 1 to 3: {', '.join(script.facts)}"


def _check_answers(agent: DemoAgent, exchanges: Sequence[AgentExchange]) -> Check:
    turns = len(agent.script.turns)
    sent_turns = sum(message["role"] == "user" for message in agent.history)
    statuses = sorted({exchange.status for exchange in exchanges})
    requests = f"{len(exchanges)} requests, status {', '.join(map(str, statuses))}"
    text = f"with the proxy, {sent_turns} of {turns} turns were answered ({requests})"
    return sent_turns == turns and statuses == [200], text


def _check_window(log: Sequence[SeenRequest]) -> Check:
    size = max(seen.prompt_tokens + seen.output_tokens for seen in log)
    is_ok = size <= WINDOW_TOKENS and all(seen.code != OVERFLOW for seen in log)
    text = f"no request exceeded the window of {WINDOW_TOKENS:,} tokens (largest: {size:,}, with the answer)"
    return is_ok, text


async def _play_demo(provider: DemoProvider, direct_url: str, proxy_url: str, say: Say) -> bool:
    script = load_script()
    say(f"A conversation of {len(script.turns)} turns for a model with a window of {WINDOW_TOKENS:,} tokens.")
    say("")
    async with httpx.AsyncClient(transport=EngineTransport(NativeEngine())) as http:
        direct = await _play_directly(DemoAgent(http, direct_url, script, build_opening(script)), say)
        direct_requests = len(provider.log)
        say("The same conversation with the proxy:")
        say("")
        wait_until_quiet = partial(_wait_until_quiet, asyncio.all_tasks())
        agent = DemoAgent(http, proxy_url, script, build_opening(script), wait_until_quiet)
        exchanges, client_tokens = await _play_through_proxy(agent, provider, say)
    log = provider.log[direct_requests:]
    read_tokens = sum(seen.prompt_tokens for seen in log)
    summaries = sum(seen.model == SUMMARY_MODEL for seen in log)
    say("")
    say(
        f"In total, the client sent {client_tokens:,} tokens and the provider read {read_tokens:,} "
        f"({1 - read_tokens / client_tokens:.0%} less), including {summaries} summary calls."
    )
    say("")
    last = [seen for seen in log if seen.model == AGENT_MODEL][-1]
    is_whole = agent.history == _build_expected_history(script)
    checks = [
        direct,
        _check_answers(agent, exchanges),
        _check_facts(script, last),
        _check_window(log),
        (is_whole, f"the client's own history is complete and unchanged ({len(agent.history)} messages)"),
    ]
    for is_ok, text in checks:
        say(f"{'ok  ' if is_ok else 'FAIL'}  {text}")
    return all(is_ok for is_ok, _ in checks)


async def _wait_forever(provider_url: str, proxy_url: str, dashboard: str) -> None:
    print("\nThe proxy and the provider keep running. Press Ctrl+C to stop them.")
    print(f"provider:  {provider_url}/v1\nproxy:     {proxy_url}/v1")
    print(f"dashboard: {dashboard}\n")
    print(f"export OPENAI_BASE_URL={proxy_url}/v1 OPENAI_API_KEY=demo\n")
    body = f'{{"model":"{AGENT_MODEL}","messages":[{{"role":"user","content":"Hello"}}]}}'
    kind = "content-type: application/json"
    print(f"curl {proxy_url}/v1/chat/completions -H '{kind}' -d '{body}'", flush=True)
    await asyncio.Event().wait()


async def run_demo(say: Say, *, keep: bool = False) -> bool:
    """Runs the demo and returns whether all checks passed.

    Args:
        say: Called with each line of output.
        keep: Whether the proxy and the provider keep running after the demo, until the task is cancelled.
    """
    logs.configure_logging("console", logging.WARNING)
    provider = DemoProvider(DemoProviderSettings(TiktokenCounter(say), window=WINDOW_TOKENS))
    async with serve_embedded(provider) as provider_url:
        loaded = LoadedConfig(build_demo_config(provider_url), {}, None, ())
        loaded = add_admin_key(loaded) if keep else loaded
        async with serve_embedded(create_app(loaded.config, loaded_config=loaded)) as proxy_url:
            all_passed = await _play_demo(provider, provider_url, proxy_url, say)
            if keep:
                with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is the normal end of the wait
                    await _wait_forever(provider_url, proxy_url, describe_dashboard(loaded, proxy_url))
    return all_passed


def render_table() -> str:
    """Runs the demo and returns its whole output, as the README shows it."""
    lines: list[str] = []
    asyncio.run(run_demo(lines.append))
    return "\n".join(lines) + "\n"


def main(keep: bool = False) -> int:
    """Runs the demo and prints its output on stdout.

    Returns:
        The exit code: 0 if all checks passed, 1 if a check failed, and 130 if Ctrl-C interrupted the demo.
        With `keep`, Ctrl-C after the checks does not count as an interruption.
    """
    logs.configure_logging("console", logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        return 0 if asyncio.run(run_demo(lambda line: print(line, flush=True), keep=keep)) else 1
    return 130

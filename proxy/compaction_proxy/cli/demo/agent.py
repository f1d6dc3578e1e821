"""Defines the demo's client: an agent that sends its whole history with each request.

It runs no real tools: their results come from the script.
"""

import copy
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import httpx

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.provider import AGENT_MODEL
from compaction_proxy.cli.demo.replies import DemoScript

OUTPUT_TOKENS = 512
TIMEOUT_S = 20
SESSION = "demo"
DATA = "data: "
DONE = "data: [DONE]"


@dataclass(frozen=True, slots=True)
class AgentExchange:
    """A request of the agent and its response.

    Attributes:
        body: The request body.
        status: Status of the response.
        headers: Headers of the response, names in lower case.
        message: The assistant message assembled from the stream. None for an error.
        code: The error code, or an empty text.
    """

    body: JsonObject
    status: int
    headers: Mapping[str, str]
    message: JsonObject | None = None
    code: str = ""


async def skip_pause() -> None:
    """Does nothing. It is the default pause of an agent, which then does not wait."""


@dataclass(slots=True)
class DemoAgent:
    """Plays a script against a base URL.

    Attributes:
        http_client: The HTTP client.
        base_url: Base URL of the proxy or the provider, without `/v1`.
        script: The scripted user messages and tool results.
        history: All messages so far. The list only grows.
        pause: Called after each answer. It waits as if a user read the answer or a tool ran.
    """

    http_client: httpx.AsyncClient
    base_url: str
    script: DemoScript
    history: list[JsonObject] = field(default_factory=list)
    pause: Callable[[], Awaitable[None]] = skip_pause

    async def play_turn(self, text: str) -> list[AgentExchange]:
        """Sends a user message, and tool results as long as the model calls tools.

        The turn ends with an answer without tool calls or with an error.

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
    """Builds the scripted result of a tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": script.results[call_id]}


def build_opening(script: DemoScript) -> list[JsonObject]:
    """Builds the history before the first turn: the system prompt."""
    return [{"role": "system", "content": script.system}]


async def _read_message(answer: httpx.Response) -> JsonObject:
    """Assembles the assistant message of a stream.

    Raises:
        httpx.RemoteProtocolError: The stream ended before `[DONE]`.
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
    """Adds a streamed piece of a tool call to the pieces received so far."""
    index, function = piece["index"], piece["function"]
    if index in calls:
        calls[index]["function"]["arguments"] += function["arguments"]
    else:
        calls[index] = {"id": piece["id"], "type": "function", "function": dict(function)}

"""Implements the demo provider with two more wires: Responses and Messages.

It validates requests as OpenAI and Anthropic do. It also serves these paths under any prefix: `POST
…/responses`, `POST …/messages`, `POST …/messages/count_tokens`, and `GET …/models` in Anthropic's format for
clients that send `anthropic-version`.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from compaction_proxy.cli.demo.chat import JsonObject, Reply
from compaction_proxy.cli.demo.provider import (
    DemoClient,
    DemoProviderSettings,
    Scope,
    SeenRequest,
    parse_body,
)
from compaction_proxy.cli.demo.validation import Refusal
from compaction_proxy.replay.provider import ProviderPrompt, round_down_to_cache_blocks
from compaction_proxy.wires.json.values import encode_json
from tests.doubles.faulty_provider import FaultyProvider, get_header
from tests.doubles.messages_wire import COUNT_TOKENS, MESSAGES, VERSION_HEADER
from tests.doubles.provider_wire import ProviderWire, WireAnswer, WireReply, WireRequest, WireUsage
from tests.doubles.response_store import ResponseStore
from tests.doubles.responses_wire import RESPONSES, format_response_id, iter_output_items

MARK_DIGITS = 12


class ThreeWireProvider(FaultyProvider):
    """The demo provider, with the wires of OpenAI's Responses and Anthropic's Messages in addition."""

    def __init__(self, settings: DemoProviderSettings) -> None:
        super().__init__(settings)
        self._responses = ResponseStore()

    async def _route_request(self, scope: Scope, client: DemoClient) -> None:
        match scope["method"], scope["path"].rstrip("/").rsplit("/", 2)[1:]:
            case "POST", [*_, "responses"]:
                await self._serve_wire(RESPONSES, scope, client)
            case "POST", [*_, "messages"]:
                await self._serve_wire(MESSAGES, scope, client)
            case "POST", ["messages", "count_tokens"]:
                await self._serve_wire(COUNT_TOKENS, scope, client)
            case "GET", [*_, "models"] if get_header(scope, VERSION_HEADER):
                await client.send_json(200, _encode_models(self._settings.models, self._settings.window))
            case _:
                await super()._route_request(scope, client)

    async def _serve_wire(self, wire: ProviderWire, scope: Scope, client: DemoClient) -> None:
        seen = await self._read_request(scope, client)
        client.headers = wire.build_headers(seen.number)
        body, refusal = parse_body(seen.body)
        if wire.required_header and not get_header(scope, wire.required_header):
            refusal = Refusal(f"{wire.required_header.decode()}: header is required")
        body = self._responses.expand_references(body) if wire is RESPONSES else body
        refusal = refusal or wire.validate(body)
        request = None if refusal else wire.read_request(body)
        written_tokens = 0
        if request:
            seen, written_tokens, refusal = self._check_request(wire, request, seen)
        refusal = await self._choose_fault(seen, refusal, client)
        self._log_request(seen, refusal)
        if refusal:
            await client.send_json(refusal.status, wire.encode_refusal(refusal, seen.number))
        elif request:
            answer = self._build_answer(request, seen, written_tokens)
            if wire is RESPONSES:
                self._responses.keep_response(format_response_id(answer), body, iter_output_items(answer))
            await _send_answer(wire, answer, client)

    def _check_request(
        self, wire: ProviderWire, request: WireRequest, seen: SeenRequest
    ) -> tuple[SeenRequest, int, Refusal | None]:
        """Returns the request with its sizes, the tokens written to the cache, and the refusal or None."""
        seen = replace(seen, model=request.prompt["model"], output_tokens=request.output_tokens)
        if seen.model not in self._settings.models:
            return seen, 0, wire.build_model_refusal(seen.model)
        seen = replace(
            seen, prompt_tokens=self.meter.count_prompt_tokens(ProviderPrompt.from_body(request.prompt))
        )
        refusal = wire.check_overflow(self._settings.window, seen.prompt_tokens, seen.output_tokens)
        if refusal:
            return seen, 0, refusal
        cached_tokens, written_tokens = self._update_cache(request)
        return replace(seen, cached_tokens=cached_tokens), written_tokens, None

    def _update_cache(self, request: WireRequest) -> tuple[int, int]:
        """Returns how many tokens of the prompt were read from the cache, and how many are written to it.

        Then the prefixes of the prompt are in the cache. Written tokens are counted only on the wire on which
        clients mark what to cache; the other wire returns 0.
        """
        if request.cached_messages is None:
            return self.meter.count_and_cache_prompt(ProviderPrompt.from_body(request.prompt)), 0
        if not request.cached_messages:
            return 0, 0
        prompt = ProviderPrompt.from_body(request.prompt)
        marked_prompt = prompt._replace(messages=prompt.messages[: request.cached_messages])
        cached = self.meter.count_and_cache_prompt(marked_prompt)
        size = self.meter.count_prompt_tokens(marked_prompt)
        return cached, max(0, round_down_to_cache_blocks(size) - cached)

    def _build_answer(self, request: WireRequest, seen: SeenRequest, written_tokens: int) -> WireAnswer:
        messages = request.prompt["messages"]
        content = Reply() if request.counts_only else self._compose_reply(request.prompt, seen)
        thought = f"The last of {len(messages)} messages decides what I say next." if request.thinks else ""
        reply = WireReply(content.text, content.calls, content.finish_reason, thought)
        thought_tokens = self.meter.count_text_tokens(thought, seen.model)
        usage = WireUsage(
            seen.prompt_tokens,
            self._count_reply_tokens(content, seen.model) + thought_tokens,
            seen.cached_tokens,
            written_tokens,
            thought_tokens,
        )
        mark = hashlib.sha256(encode_json(messages)).hexdigest()[:MARK_DIGITS]
        return WireAnswer(request, seen.number, int(time.time()), mark, reply, usage)


async def _send_answer(wire: ProviderWire, answer: WireAnswer, client: DemoClient) -> None:
    if answer.request.streamed:
        await client.send_stream(wire.encode_events(answer))
    else:
        await client.send_json(200, wire.encode_answer(answer))


def _encode_models(names: Sequence[str], window: int) -> bytes:
    """Encodes the list of models for clients of the Messages wire, as a single page."""
    row: JsonObject = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "max_input_tokens": window}
    data = [{"id": name, "display_name": name, **row} for name in names]
    return encode_json({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})

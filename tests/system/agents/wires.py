"""The three wires as a strict provider sees them: what is invalid, what an answer and a refusal look like.

A wire is a class with these functions; `body` is always a decoded request.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.system.black_box import Reply

BYTES_PER_TOKEN = 4
SIGNING_KEY = b"the provider's own"
# Models that take a signed thought back wherever it stands; newer ones only behind what it was made for.
FREE_THOUGHT_MODELS = ("claude-sonnet-4", "claude-opus-4", "claude-haiku-4")
CACHE_MARKS = 4  # cache_control marks that a request of Messages may have
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}
PIECE_CHARACTERS = 400  # of an answer in one event


@dataclass(frozen=True)
class Call:
    """A tool call. `freeform`, where it is set, is the whole input of a tool without a schema."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    freeform: str | None = None


@dataclass(frozen=True)
class Move:
    """What the model says and calls in one answer; without a call the turn ends."""

    text: str
    call: Call | None = None


class Wire(Protocol):
    """What the provider and the judge ask of a wire."""

    name: str

    def list_items(self, body: Any) -> list[Any]:
        """The conversation as it stands in the request, without privileged messages."""

    def get_fixed_part(self, body: Any) -> list[Any]:
        """System prompt, privileged messages and tools."""

    def list_texts(self, item: Any) -> list[str]:
        """All texts of an item, results of tools included."""

    def list_newest_results(self, body: Any) -> list[str]:
        """The texts of the tool results at the conversation's end; empty if it ends otherwise."""

    def get_max_tokens(self, body: Any) -> int:
        """Output tokens that the request asks for; 0 if it names none."""

    def find_faults(self, body: Any) -> list[str]:
        """What a strict provider refuses in a request, as short sentences."""

    def make_answer(self, body: Any, move: Move, number: int, used_tokens: int) -> Reply:
        """An answer, streamed if the request asks for that."""

    def make_refusal(self, body: Any, window: int, used_tokens: int, asked_tokens: int) -> Reply:
        """The refusal of a request that is too long; `asked_tokens` is 0 where the prompt alone counts."""

    def make_error(self, message: str) -> Reply:
        """The refusal of an invalid request."""


def count_tokens(body: bytes) -> int:
    """Tokens of a request: its bytes by a fixed rate."""
    return len(body) // BYTES_PER_TOKEN


def begins_with_user(wire: "Wire", body: Any) -> bool:
    """Whether the conversation's first message is the user's, as all backends take it."""
    first: Any = next(iter(wire.list_items(body)), {})
    return bool(first.get("role") == "user")


def _split(text: str) -> list[str]:
    return [text[k : k + PIECE_CHARACTERS] for k in range(0, len(text), PIECE_CHARACTERS)]


def _sign(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hmac.new(SIGNING_KEY, text.encode(), hashlib.sha256).hexdigest()


def _stream(events: Sequence[tuple[str, Any]], *, named: bool) -> Reply:
    def write() -> Iterator[bytes]:
        for name, data in events:
            head = f"event: {name}\n" if named else ""
            text = data if isinstance(data, str) else json.dumps(data)
            yield f"{head}data: {text}\n\n".encode()

    return Reply(headers=STREAM_HEADERS, chunks=tuple(write()))


def _texts_of_parts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [
        part["text"] for part in content or [] if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]


def _find_pair_faults(calls: Sequence[str], results: Sequence[str], place: str) -> list[str]:
    """Faults of the results that stand behind an answer with calls."""
    faults = [f"{place}: call {each} has no result" for each in calls if each not in results]
    faults += [
        f"{place}: result of {each}, which was not called there" for each in results if each not in calls
    ]
    if len(set(results)) < len(results):
        faults.append(f"{place}: two results of one call")
    return faults


class ChatWire:
    """Chat completions."""

    name = "chat"
    privileged = ("system", "developer")

    def list_items(self, body: Any) -> list[Any]:
        return [each for each in body["messages"] if each["role"] not in self.privileged]

    def get_fixed_part(self, body: Any) -> list[Any]:
        privileged = [each for each in body["messages"] if each["role"] in self.privileged]
        return [*privileged, *(body.get("tools") or [])]

    def list_texts(self, item: Any) -> list[str]:
        return _texts_of_parts(item.get("content"))

    def list_newest_results(self, body: Any) -> list[str]:
        found: list[str] = []
        for message in reversed(self.list_items(body)):
            if message["role"] != "tool":
                break
            found += self.list_texts(message)
        return found

    def get_max_tokens(self, body: Any) -> int:
        return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0)

    def find_faults(self, body: Any) -> list[str]:
        faults: list[str] = []
        open_calls: list[str] = []
        results: list[str] = []
        privileged_ended = False
        messages = [*body["messages"], {"role": "end"}]
        for k, message in enumerate(messages):
            role = message["role"]
            if role == "tool":
                results.append(message.get("tool_call_id", ""))
                continue
            faults += _find_pair_faults(open_calls, results, f"messages[{k}]")
            calls = message.get("tool_calls") or []
            open_calls, results = [call["id"] for call in calls], []
            if role == "assistant" and not calls and not "".join(self.list_texts(message)).strip():
                faults.append(f"messages[{k}]: empty assistant message")
            if role == "user" and not message.get("content"):
                faults.append(f"messages[{k}]: empty user message")
            for call in calls:
                faults += _find_argument_faults(call["function"]["arguments"], f"messages[{k}]")
            privileged_ended |= role not in self.privileged
            if role == "system" and privileged_ended:
                faults.append(f"messages[{k}]: system message behind the conversation's begin")
        return faults

    def make_answer(self, body: Any, move: Move, number: int, used_tokens: int) -> Reply:
        usage = {"prompt_tokens": used_tokens, "completion_tokens": 40, "total_tokens": used_tokens + 40}
        common = {"id": f"chatcmpl-{number}", "created": 1_790_000_000, "model": body["model"]}
        finish = "tool_calls" if move.call else "stop"
        calls: list[dict[str, Any]] = []
        if move.call:
            function: dict[str, str] = {"name": move.call.name, "arguments": json.dumps(move.call.arguments)}
            calls = [{"id": f"call_{number}", "type": "function", "function": function}]
        if not body.get("stream"):
            message = {"role": "assistant", "content": move.text, **({"tool_calls": calls} if calls else {})}
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            answer = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
            return Reply(body=json.dumps(answer).encode())

        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in _split(move.text)]
        for call in calls:
            function = call["function"]
            begun = {"name": function["name"], "arguments": ""}
            deltas.append({"tool_calls": [{**call, "index": 0, "function": begun}]})
            deltas += [
                {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
                for piece in _split(function["arguments"])
            ]

        def chunk(choices: list[Any], **more: Any) -> tuple[str, Any]:
            return "", {**common, "object": "chat.completion.chunk", "choices": choices, **more}

        events = [chunk([{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
        events.append(chunk([{"index": 0, "delta": {}, "finish_reason": finish}]))
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(chunk([], usage=usage))
        return _stream([*events, ("", "[DONE]")], named=False)

    def make_refusal(self, body: Any, window: int, used_tokens: int, asked_tokens: int) -> Reply:
        words = f"This model's maximum context length is {window} tokens. However, "
        if asked_tokens:
            words += f"you requested {used_tokens + asked_tokens} tokens ({used_tokens} in the messages, "
            words += (
                f"{asked_tokens} in the completion). Please reduce the length of the messages or completion."
            )
        else:
            words += (
                f"your messages resulted in {used_tokens} tokens. Please reduce the length of the messages."
            )
        return _openai_error(words, "context_length_exceeded", "messages")

    def make_error(self, message: str) -> Reply:
        return _openai_error(message, None, None)


def _openai_error(message: str, code: str | None, param: str | None) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return Reply(400, json.dumps({"error": error}).encode())


def _find_argument_faults(arguments: str, place: str) -> list[str]:
    try:
        read = json.loads(arguments)
    except ValueError:
        read = None
    return [] if isinstance(read, dict) else [f"{place}: arguments of a call are no JSON object"]


class ResponsesWire:
    """Responses, without state at the provider."""

    name = "responses"
    privileged = ("system", "developer")
    calls = ("function_call", "custom_tool_call")
    results = ("function_call_output", "custom_tool_call_output")

    def _is_privileged(self, item: Any) -> bool:
        return item.get("role") in self.privileged or item.get("type") == "additional_tools"

    def _list_input(self, body: Any) -> list[Any]:
        given: str | list[Any] = body["input"]
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def list_items(self, body: Any) -> list[Any]:
        return [each for each in self._list_input(body) if not self._is_privileged(each)]

    def get_fixed_part(self, body: Any) -> list[Any]:
        privileged = [each for each in self._list_input(body) if self._is_privileged(each)]
        return [body.get("instructions") or "", *privileged, *(body.get("tools") or [])]

    def list_texts(self, item: Any) -> list[str]:
        return _texts_of_parts(item.get("output", item.get("content")))

    def list_newest_results(self, body: Any) -> list[str]:
        found: list[str] = []
        for item in reversed(self.list_items(body)):
            if item.get("type") not in self.results:
                break
            found += self.list_texts(item)
        return found

    def get_max_tokens(self, body: Any) -> int:
        return int(body.get("max_output_tokens") or 0)

    def find_faults(self, body: Any) -> list[str]:
        items = self._list_input(body)
        called = [item["call_id"] for item in items if item.get("type") in self.calls]
        answered = [item["call_id"] for item in items if item.get("type") in self.results]
        faults = _find_pair_faults(called, answered, "input")
        seen: set[str] = set()
        for k, item in enumerate(items):
            kind = item.get("type", "message")
            if kind in self.calls:
                seen.add(item["call_id"])
            elif kind in self.results and item["call_id"] not in seen:
                faults.append(f"input[{k}]: result before its call")
            elif kind == "reasoning":
                faults += self._find_reasoning_faults(item, items[k + 1 : k + 3], f"input[{k}]")
            elif kind == "message" and not "".join(self.list_texts(item)).strip():
                faults.append(f"input[{k}]: empty message")
            elif kind == "item_reference":
                faults.append(f"input[{k}]: reference to an item that nobody keeps")
        return faults

    def _find_reasoning_faults(self, item: Any, following: Sequence[Any], place: str) -> list[str]:
        """Reasoning stands right before the items that it was made with."""
        sealed = item.get("encrypted_content") or ""
        owner, _, signature = sealed.rpartition(":")
        if signature != _sign(owner):
            return [f"{place}: the encrypted content could not be verified"]
        ids = [each.get("call_id", "message") for each in following if each.get("type") not in self.results]
        if owner not in ids:
            return [f"{place}: reasoning was provided without its required following item"]
        return []

    def make_answer(self, body: Any, move: Move, number: int, used_tokens: int) -> Reply:
        output: list[dict[str, Any]] = []
        if "reasoning.encrypted_content" in (body.get("include") or []):
            owner = f"call_{number}" if move.call else "message"
            sealed = f"{owner}:{_sign(owner)}"
            output.append(
                {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": sealed}
            )
        part = {"type": "output_text", "text": move.text, "annotations": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
        if move.call:
            head = {
                "id": f"fc_{number}",
                "call_id": f"call_{number}",
                "name": move.call.name,
                "status": "completed",
            }
            if move.call.freeform is None:
                arguments = json.dumps(move.call.arguments)
                output.append({"type": "function_call", "arguments": arguments, **head})
            else:
                output.append({"type": "custom_tool_call", "input": move.call.freeform, **head})
        usage = {
            "input_tokens": used_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 40,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used_tokens + 40,
        }
        done = self._make_response(body, number, "completed", output=output, usage=usage)
        if not body.get("stream"):
            return Reply(body=json.dumps(done).encode())
        begun = self._make_response(body, number, "in_progress")
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for k, item in enumerate(output):
            events += self._list_item_events(k, item)
        events.append({"type": "response.completed", "response": done})
        return self._make_stream(events)

    @staticmethod
    def _make_stream(events: Sequence[dict[str, Any]]) -> Reply:
        return _stream(
            [(each["type"], {**each, "sequence_number": k}) for k, each in enumerate(events)], named=True
        )

    @staticmethod
    def _list_item_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        place = {"output_index": index, "item_id": item["id"]}
        begin = {**item, **({"status": "in_progress"} if "status" in item else {})}
        middle: list[dict[str, Any]] = []
        if item["type"] == "message":
            [part] = item["content"]
            at = {**place, "content_index": 0}
            begin["content"] = []
            middle.append({"type": "response.content_part.added", **at, "part": {**part, "text": ""}})
            middle += [
                {"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []}
                for piece in _split(part["text"])
            ]
            middle.append({"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []})
            middle.append({"type": "response.content_part.done", **at, "part": part})
        elif item["type"] == "function_call":
            begin["arguments"] = ""
            middle += [
                {"type": "response.function_call_arguments.delta", **place, "delta": piece}
                for piece in _split(item["arguments"])
            ]
            middle.append(
                {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}
            )
        elif item["type"] == "custom_tool_call":
            begin["input"] = ""
            middle += [
                {"type": "response.custom_tool_call_input.delta", **place, "delta": item["input"]},
                {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]},
            ]
        added = {"type": "response.output_item.added", "output_index": index, "item": begin}
        return [added, *middle, {"type": "response.output_item.done", "output_index": index, "item": item}]

    @staticmethod
    def _make_response(body: Any, number: int, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": 1_790_000_000,
            "model": body["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "output": [],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
            "temperature": 1.0,
            "top_p": 1.0,
            **more,
        }

    def make_refusal(self, body: Any, window: int, used_tokens: int, asked_tokens: int) -> Reply:
        """OpenAI's refusal has no number, and comes within the stream of a request that is streamed."""
        if asked_tokens:  # OpenAI never adds them; vLLM does, and names the numbers
            return ChatWire().make_refusal(body, window, used_tokens, asked_tokens)
        words = "Your input exceeds the context window of this model. Please adjust your input and try again."
        if not body.get("stream"):
            return _openai_error(words, "context_length_exceeded", "input")
        begun = self._make_response(body, 0, "in_progress")
        error = {"code": "context_length_exceeded", "message": words}
        failed = self._make_response(body, 0, "failed", error=error)
        return self._make_stream(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
                {"type": "response.failed", "response": failed},
            ]
        )

    def make_error(self, message: str) -> Reply:
        return _openai_error(message, None, "input")


class MessagesWire:
    """Anthropic's Messages."""

    name = "messages"

    def list_items(self, body: Any) -> list[Any]:
        return [each for each in body["messages"] if each["role"] != "system"]

    def get_fixed_part(self, body: Any) -> list[Any]:
        privileged = [each for each in body["messages"] if each["role"] == "system"]
        return [body.get("system") or "", *privileged, *(body.get("tools") or [])]

    def list_texts(self, item: Any) -> list[str]:
        content = item.get("content")
        if isinstance(content, str):
            return [content]
        texts: list[str] = []
        for block in content:
            texts += (
                _texts_of_parts(block["content"])
                if block["type"] == "tool_result"
                else _texts_of_parts([block])
            )
        return texts

    def list_newest_results(self, body: Any) -> list[str]:
        items = self.list_items(body)
        content = items[-1]["content"] if items and items[-1]["role"] == "user" else []
        return [
            text
            for block in content
            if isinstance(block, dict) and block["type"] == "tool_result"
            for text in _texts_of_parts(block.get("content"))
        ]

    def get_max_tokens(self, body: Any) -> int:
        return int(body.get("max_tokens") or 0)

    @staticmethod
    def _list_blocks(message: Any) -> list[Any]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return [{key: value for key, value in block.items() if key != "cache_control"} for block in blocks]

    def _sign_thought(self, model: str, messages: Sequence[Any], thinking: str) -> str:
        """A signature binds a thought to all that preceded it, with newer models."""
        bound = [] if model.startswith(FREE_THOUGHT_MODELS) else messages
        before = [[each["role"], self._list_blocks(each)] for each in bound if each["role"] != "system"]
        return _sign(before, thinking)

    def find_faults(self, body: Any) -> list[str]:
        faults: list[str] = []
        messages = self.list_items(body)
        if not begins_with_user(self, body):
            faults.append("the conversation begins with an assistant message")
        if messages and messages[-1]["role"] != "user":
            faults.append("the conversation ends with an assistant message")
        marks = json.dumps(body).count('"cache_control": {')
        if marks > CACHE_MARKS:
            faults.append(f"{marks} cache_control marks")
        if (body.get("thinking") or {}).get("budget_tokens", 0) >= body.get("max_tokens", 1):
            faults.append("max_tokens is not greater than thinking.budget_tokens")
        open_calls: list[str] = []
        for k, message in enumerate([*messages, {"role": "end", "content": []}]):
            if k and message["role"] == messages[k - 1]["role"]:
                faults.append(f"messages[{k}]: two messages of one role in a row")
            faults += self._find_pairs_and_texts(message, open_calls, f"messages[{k}]")
            faults += self._find_thought_faults(body["model"], message, messages[:k], f"messages[{k}]")
            open_calls = [each["id"] for each in self._list_blocks(message) if each["type"] == "tool_use"]
        return faults

    def _find_pairs_and_texts(self, message: Any, open_calls: Sequence[str], place: str) -> list[str]:
        """Faults of a message's results, which answer the calls of the message before, and of its texts."""
        blocks = self._list_blocks(message)
        results = [each["tool_use_id"] for each in blocks if each["type"] == "tool_result"]
        faults = _find_pair_faults(open_calls, results, place)
        if any(each["type"] != "tool_result" for each in blocks[: len(results)]):
            faults.append(f"{place}: tool results do not stand first")
        if not blocks and message["role"] != "end":
            faults.append(f"{place}: no content")
        if any(each["type"] == "text" and not each["text"].strip() for each in blocks):
            faults.append(f"{place}: empty text")
        return faults

    def _find_thought_faults(self, model: str, message: Any, before: Sequence[Any], place: str) -> list[str]:
        thoughts = [each for each in self._list_blocks(message) if each["type"] == "thinking"]
        signed = [
            self._sign_thought(model, before, each["thinking"]) == each["signature"] for each in thoughts
        ]
        return [] if all(signed) else [f"{place}: invalid signature in thinking block"]

    def make_answer(self, body: Any, move: Move, number: int, used_tokens: int) -> Reply:
        blocks: list[dict[str, Any]] = []
        if (body.get("thinking") or {}).get("type") in ("enabled", "adaptive"):
            thought = f"I have to think about step {number}."
            signature = self._sign_thought(body["model"], body["messages"], thought)
            blocks.append({"type": "thinking", "thinking": thought, "signature": signature})
        blocks.append({"type": "text", "text": move.text})
        if move.call:
            call = {"id": f"toolu_{number}", "name": move.call.name, "input": dict(move.call.arguments)}
            blocks.append({"type": "tool_use", **call})
        usage = {"input_tokens": used_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        message = {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": blocks,
            "stop_reason": "tool_use" if move.call else "end_turn",
            "stop_sequence": None,
            "usage": {**usage, "output_tokens": 40},
        }
        if not body.get("stream"):
            return Reply(body=json.dumps(message).encode())
        begun = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
        events: list[tuple[str, Any]] = [("message_start", {"type": "message_start", "message": begun})]
        for k, block in enumerate(blocks):
            events += self._list_block_events(k, block)
        ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        events.append(
            ("message_delta", {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 40}})
        )
        events.append(("message_stop", {"type": "message_stop"}))
        return _stream(events, named=True)

    @staticmethod
    def _list_block_events(index: int, block: dict[str, Any]) -> list[tuple[str, Any]]:
        begin: dict[str, Any]
        if block["type"] == "thinking":
            begin = {**block, "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        elif block["type"] == "text":
            begin = {**block, "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in _split(block["text"])]
        else:
            begin = {**block, "input": {}}
            pieces = _split(json.dumps(block["input"]))
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        kind = "content_block_"
        return [
            (f"{kind}start", {"type": f"{kind}start", "index": index, "content_block": begin}),
            *((f"{kind}delta", {"type": f"{kind}delta", "index": index, "delta": each}) for each in deltas),
            (f"{kind}stop", {"type": f"{kind}stop", "index": index}),
        ]

    def make_refusal(self, body: Any, window: int, used_tokens: int, asked_tokens: int) -> Reply:
        words = f"prompt is too long: {used_tokens} tokens > {window} maximum"
        if asked_tokens:
            words = f"input length and `max_tokens` exceed context limit: {used_tokens} + {asked_tokens}"
            words += f" > {window}, decrease input length or `max_tokens` and try again"
        return self.make_error(words)

    def make_error(self, message: str) -> Reply:
        error = {"type": "invalid_request_error", "message": message}
        return Reply(400, json.dumps({"type": "error", "error": error, "request_id": "req_1"}).encode())


WIRES: Mapping[str, Wire] = {"chat": ChatWire(), "responses": ResponsesWire(), "messages": MessagesWire()}

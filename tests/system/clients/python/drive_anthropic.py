"""anthropic: the Messages wire, blocking and not."""

import asyncio
from typing import Any

import anthropic  # type: ignore[import-not-found] # of the driver's environment

from tests.system.clients.python.reporting import (
    FAULT,
    HELLO,
    INSTRUCTIONS,
    KEY,
    LOOK_UP,
    MODEL,
    TIMEOUT_S,
    TOOL,
    TURNS,
    URL,
    Outcome,
    expecting,
    looked_up,
    run,
    said,
)

OUTPUT_TOKENS = 400
MARK = {"cache_control": {"type": "ephemeral"}}
TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def completed(message: Any) -> Outcome:
    texts = [block.text for block in message.content if block.type == "text"]
    thoughts = [block.thinking for block in message.content if block.type == "thinking"]
    calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    usage = message.usage
    counted = [
        usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens,
        usage.output_tokens,
    ]  # fmt: skip
    return said("".join(texts), calls, thoughts=thoughts, finish=message.stop_reason, usage=counted)


def create(prompt: Any, **options: Any) -> Any:
    messages = user(prompt) if isinstance(prompt, str) else prompt
    return client.messages.create(model=MODEL, max_tokens=OUTPUT_TOKENS, messages=messages, **options)


def streamed() -> Outcome:
    events = list(create(HELLO, stream=True))
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    return said("".join(deltas), kinds=[event.type for event in events])


def helper(prompt: str, **options: Any) -> Outcome:
    options = {"max_tokens": OUTPUT_TOKENS, **options}
    with client.messages.stream(model=MODEL, messages=user(prompt), **options) as stream:
        kinds = [event.type for event in stream]
        return {**completed(stream.get_final_message()), "kinds": kinds}


def thinking() -> Outcome:
    return helper(HELLO, max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024})


def counted() -> Outcome:
    count = client.messages.count_tokens(
        model=MODEL, messages=user(LOOK_UP), tools=TOOLS, system=INSTRUCTIONS
    )
    return {"tokens": count.input_tokens}


def unpaired() -> object:
    return create([{"role": "user", "content": [result("toolu_none", "nothing")]}])


def troubled(fault: str, **options: Any) -> object:
    return create(HELLO, extra_headers={FAULT: fault}, **options)


def without_waiting() -> Outcome:
    async def asked() -> Outcome:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as aclient:
            return completed(
                await aclient.messages.create(model=MODEL, max_tokens=OUTPUT_TOKENS, messages=user(HELLO))
            )

    return asyncio.run(asked())


def result(call_id: str, text: str) -> Any:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


def grown(**options: Any) -> Outcome:
    """The whole conversation; the system prompt and the last message carry cache marks."""
    system = [{"type": "text", "text": INSTRUCTIONS, **MARK}]
    history: list[Any] = []
    outcomes = []

    def ask(blocks: list[Any]) -> Any:
        marked = [*blocks[:-1], {**blocks[-1], **MARK}]
        answer = create(
            [*history, {"role": "user", "content": marked}], system=system, tools=TOOLS, **options
        )
        history.append({"role": "user", "content": blocks})
        history.append({"role": "assistant", "content": [b.model_dump(mode="json") for b in answer.content]})
        outcomes.append(completed(answer))
        return answer

    for turn in TURNS:
        called = ask([{"type": "text", "text": turn}])
        ask(
            [
                result(block.id, looked_up(block.input["topic"]))
                for block in called.content
                if block.type == "tool_use"
            ]
        )
    return {"turns": outcomes}


MESSAGES = {
    "messages/text": lambda: completed(create(HELLO, system=INSTRUCTIONS)),
    "messages/stream": streamed,
    "messages/helper": lambda: helper(HELLO),
    "messages/tools": lambda: completed(create(LOOK_UP, tools=TOOLS)),
    "messages/stream-tools": lambda: helper(LOOK_UP, tools=TOOLS),
    "messages/thinking": thinking,
    "messages/count-tokens": counted,
    "messages/async": without_waiting,
    "messages/error-400": lambda: expecting(anthropic.BadRequestError, unpaired),
    "messages/error-429": lambda: expecting(anthropic.RateLimitError, lambda: troubled("status=429")),
    "messages/error-500": lambda: expecting(anthropic.InternalServerError, lambda: troubled("status=500")),
    "messages/timeout": lambda: expecting(
        anthropic.APITimeoutError, lambda: troubled("hang", timeout=TIMEOUT_S)
    ),
    "messages/growing": grown,
}

if __name__ == "__main__":
    run(MESSAGES)

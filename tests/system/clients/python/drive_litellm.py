"""litellm: one call for every provider, over all three wires."""

import asyncio
from typing import Any

import litellm  # type: ignore[import-not-found] # of the driver's environment

from tests.system.clients.python.reporting import (
    FAULT,
    HELLO,
    INSTRUCTIONS,
    KEY,
    LOOK_UP,
    MODEL,
    TOOL,
    TURNS,
    URL,
    Outcome,
    expecting,
    looked_up,
    run,
    said,
    topic_of,
)

FUNCTION = {"type": "function", "function": TOOL}
FLAT_FUNCTION = {"type": "function", **TOOL}
CHAT = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": KEY,
    "num_retries": 0,
    "max_retries": 0,
}
MESSAGES = {
    "model": f"anthropic/{MODEL}",
    "api_base": URL,
    "api_key": KEY,
    "num_retries": 0,
    "max_tokens": 400,
}


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def completed(completion: Any) -> Outcome:
    choice, used = completion.choices[0], completion.usage
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    counts = [used.prompt_tokens, used.completion_tokens]
    return said(choice.message.content, calls, finish=choice.finish_reason, usage=counts)


def streamed(how: dict[str, Any], prompt: str, **options: Any) -> Outcome:
    asking = {"messages": user(prompt), "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**how, **asking, **options))
    return completed(litellm.stream_chunk_builder(chunks))


def waited(how: dict[str, Any]) -> Outcome:
    return completed(asyncio.run(litellm.acompletion(**how, messages=user(HELLO))))


def growing(how: dict[str, Any]) -> Outcome:
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
    outcomes = []
    for turn in TURNS:
        messages += user(turn)
        for _ in range(2):
            answer = litellm.completion(**how, messages=messages, tools=[FUNCTION])
            outcomes.append(completed(answer))
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": looked_up(topic_of(call.function.arguments)),
                }
                for call in message.tool_calls or ()
            ]
    return {"turns": outcomes}


def cases(wire: str, how: dict[str, Any]) -> dict[str, Any]:
    def ask(prompt: str, **options: Any) -> Any:
        return litellm.completion(**how, messages=user(prompt), **options)

    return {
        f"{wire}/text": lambda: completed(ask(HELLO)),
        f"{wire}/stream": lambda: streamed(how, HELLO),
        f"{wire}/tools": lambda: completed(ask(LOOK_UP, tools=[FUNCTION])),
        f"{wire}/stream-tools": lambda: streamed(how, LOOK_UP, tools=[FUNCTION]),
        f"{wire}/async": lambda: waited(how),
        f"{wire}/error-429": lambda: expecting(
            litellm.RateLimitError, lambda: ask(HELLO, extra_headers={FAULT: "status=429"})
        ),
        f"{wire}/growing": lambda: growing(how),
    }


def responded(response: Any) -> Outcome:
    texts = [part.text for item in response.output if item.type == "message" for part in item.content]
    calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    used = response.usage
    return said("".join(texts), calls, usage=[used.input_tokens, used.output_tokens])


def respond(prompt: Any, **options: Any) -> Any:
    return litellm.responses(**CHAT, input=prompt, store=False, **options)


def response_stream() -> Outcome:
    events = list(respond(HELLO, stream=True))
    return {**responded(events[-1].response), "kinds": [str(event.type.value) for event in events]}


def response_growing() -> Outcome:
    items: list[Any] = []
    outcomes = []
    for turn in TURNS:
        items += user(turn)
        for _ in range(2):
            answer = respond(items, instructions=INSTRUCTIONS, tools=[FLAT_FUNCTION])
            outcomes.append(responded(answer))
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            items += [
                {
                    "type": "function_call_output",
                    "call_id": item.call_id,
                    "output": looked_up(topic_of(item.arguments)),
                }
                for item in answer.output
                if item.type == "function_call"
            ]
    return {"turns": outcomes}


RESPONSES = {
    "responses/text": lambda: responded(respond(HELLO, instructions=INSTRUCTIONS)),
    "responses/stream": response_stream,
    "responses/tools": lambda: responded(respond(LOOK_UP, tools=[FLAT_FUNCTION])),
    "responses/growing": response_growing,
}

if __name__ == "__main__":
    run(cases("chat", CHAT) | RESPONSES | cases("messages", MESSAGES))

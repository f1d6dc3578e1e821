"""openai: both its wires, blocking and not."""

import asyncio
from typing import Any

import openai
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel

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
    topic_of,
)

FUNCTION: Any = {"type": "function", "function": TOOL}
FLAT_FUNCTION: Any = {"type": "function", **TOOL}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


class City(BaseModel):
    """A city."""

    name: str
    degrees: int


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def used(usage: Any) -> list[int]:
    return [usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens]


def completed(completion: Any) -> Outcome:
    choice = completion.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return said(choice.message.content, calls, finish=choice.finish_reason, usage=used(completion.usage))


def text() -> Outcome:
    return completed(client.chat.completions.create(model=MODEL, messages=user(HELLO), temperature=0.5))


def streamed(prompt: str, **options: Any) -> Outcome:
    state: Any = ChatCompletionStreamState()
    chunks = client.chat.completions.create(
        model=MODEL, messages=user(prompt), stream=True, stream_options={"include_usage": True}, **options
    )
    count = sum(state.handle_chunk(chunk) is not None for chunk in chunks)
    return {**completed(state.get_final_completion()), "chunks": count}


def helper() -> Outcome:
    with client.chat.completions.stream(model=MODEL, messages=user(LOOK_UP), tools=[FUNCTION]) as stream:
        kinds = [event.type for event in stream]
        choice: Any = stream.get_final_completion().choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    return said(choice.message.content, calls, finish=choice.finish_reason, kinds=kinds)


def tools() -> Outcome:
    return completed(client.chat.completions.create(model=MODEL, messages=user(LOOK_UP), tools=[FUNCTION]))


def structured() -> Outcome:
    prompt = 'Please answer.\ncall City {"name": "Zürich", "degrees": 21}'
    parsed: Any = client.chat.completions.parse(
        model=MODEL, messages=user(prompt), tools=[openai.pydantic_function_tool(City)]
    )
    call = parsed.choices[0].message.tool_calls[0]
    return said(None, [(call.function.name, call.function.parsed_arguments.model_dump())])


def unpaired() -> object:
    messages: Any = [*user(HELLO), {"role": "tool", "tool_call_id": "call_none", "content": "nothing"}]
    return client.chat.completions.create(model=MODEL, messages=messages)


def troubled(fault: str, **options: Any) -> object:
    return client.chat.completions.create(
        model=MODEL, messages=user(HELLO), extra_headers={FAULT: fault}, **options
    )


def without_waiting() -> Outcome:
    async def asked() -> Outcome:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as aclient:
            return completed(await aclient.chat.completions.create(model=MODEL, messages=user(HELLO)))

    return asyncio.run(asked())


def growing() -> Outcome:
    messages: Any = [{"role": "system", "content": INSTRUCTIONS}]
    outcomes = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        for _ in range(2):
            answer: Any = client.chat.completions.create(model=MODEL, messages=messages, tools=[FUNCTION])
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


def responded(response: Any) -> Outcome:
    calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    usage = response.usage
    counted = [usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens]
    return said(response.output_text, calls, finish=response.status, usage=counted)


def response(prompt: Any, **options: Any) -> Any:
    return client.responses.create(model=MODEL, input=prompt, store=False, **options)


def response_helper() -> Outcome:
    with client.responses.stream(model=MODEL, input=LOOK_UP, tools=[FLAT_FUNCTION], store=False) as stream:
        kinds = [event.type for event in stream]
        return {**responded(stream.get_final_response()), "kinds": kinds}


def response_stream() -> Outcome:
    events = list(response(HELLO, stream=True))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return {**responded(events[-1].response), "deltas": deltas, "kinds": [event.type for event in events]}


def response_structured() -> Outcome:
    prompt = 'Please answer.\ncall City {"name": "Zürich", "degrees": 21}'
    parsed: Any = client.responses.parse(
        model=MODEL,
        input=prompt,
        tools=[openai.pydantic_function_tool(City)],
        store=False,
    )
    calls = [item for item in parsed.output if item.type == "function_call"]
    return said(None, [(call.name, call.parsed_arguments.model_dump()) for call in calls])


def response_unpaired() -> object:
    return response(
        [*user(HELLO), {"type": "function_call_output", "call_id": "call_none", "output": "nothing"}]
    )


def response_async() -> Outcome:
    async def asked() -> Outcome:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as aclient:
            return responded(await aclient.responses.create(model=MODEL, input=HELLO, store=False))

    return asyncio.run(asked())


def response_growing() -> Outcome:
    items: list[Any] = []
    outcomes = []
    for turn in TURNS:
        items += user(turn)
        for _ in range(2):
            answer = response(items, instructions=INSTRUCTIONS, tools=[FLAT_FUNCTION])
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


CHAT = {
    "chat/text": text,
    "chat/stream": lambda: streamed(HELLO),
    "chat/helper": helper,
    "chat/tools": tools,
    "chat/stream-tools": lambda: streamed(LOOK_UP, tools=[FUNCTION]),
    "chat/structured": structured,
    "chat/async": without_waiting,
    "chat/error-400": lambda: expecting(openai.BadRequestError, unpaired),
    "chat/error-429": lambda: expecting(openai.RateLimitError, lambda: troubled("status=429")),
    "chat/error-500": lambda: expecting(openai.InternalServerError, lambda: troubled("status=500")),
    "chat/timeout": lambda: expecting(openai.APITimeoutError, lambda: troubled("hang", timeout=TIMEOUT_S)),
    "chat/growing": growing,
}
RESPONSES = {
    "responses/text": lambda: responded(response(HELLO, instructions=INSTRUCTIONS)),
    "responses/stream": response_stream,
    "responses/helper": response_helper,
    "responses/tools": lambda: responded(response(LOOK_UP, tools=[FLAT_FUNCTION])),
    "responses/structured": response_structured,
    "responses/async": response_async,
    "responses/error-400": lambda: expecting(openai.BadRequestError, response_unpaired),
    "responses/error-429": lambda: expecting(
        openai.RateLimitError, lambda: response(HELLO, extra_headers={FAULT: "status=429"})
    ),
    "responses/error-500": lambda: expecting(
        openai.InternalServerError, lambda: response(HELLO, extra_headers={FAULT: "status=500"})
    ),
    "responses/timeout": lambda: expecting(
        openai.APITimeoutError,
        lambda: response(HELLO, extra_headers={FAULT: "hang"}, timeout=TIMEOUT_S),
    ),
    "responses/growing": response_growing,
}

if __name__ == "__main__":
    run(CHAT | RESPONSES)

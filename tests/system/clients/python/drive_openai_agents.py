"""openai-agents: its loop with a tool, over both of OpenAI's wires."""

import asyncio
from functools import partial
from typing import Any

import openai
from agents import (  # type: ignore[import-not-found] # of the driver's environment
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)

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
    looked_up,
    refused,
    run,
    topic_of,
)

set_tracing_disabled(disabled=True)


async def look_up(_context: Any, arguments: str) -> str:
    return looked_up(topic_of(arguments))


def agent(kind: Any, client: openai.AsyncOpenAI, fault: str = "") -> Any:
    tool = FunctionTool(
        name=TOOL["name"],
        description=TOOL["description"],
        params_json_schema=TOOL["parameters"],
        on_invoke_tool=look_up,
    )
    settings = ModelSettings(store=False, extra_headers={FAULT: fault} if fault else None)
    return Agent(
        name="books", instructions=INSTRUCTIONS, model=kind(MODEL, client), tools=[tool],
        model_settings=settings,
    )  # fmt: skip


def finished(result: Any) -> Outcome:
    used = result.context_wrapper.usage
    kinds = [item.type for item in result.new_items]
    counts = [used.requests, used.input_tokens, used.output_tokens]
    return {"text": result.final_output, "items": kinds, "usage": counts}


async def asked(kind: Any, client: openai.AsyncOpenAI, prompt: str) -> Outcome:
    return finished(await Runner.run(agent(kind, client), prompt))


async def streamed(kind: Any, client: openai.AsyncOpenAI, prompt: str) -> Outcome:
    result = Runner.run_streamed(agent(kind, client), prompt)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    return {**finished(result), "kinds": kinds}


async def limited(kind: Any, client: openai.AsyncOpenAI) -> Outcome:
    try:
        await Runner.run(agent(kind, client, "status=429"), HELLO)
    except openai.RateLimitError as error:
        return refused(error)
    raise AssertionError("an error was expected")


async def growing(kind: Any, client: openai.AsyncOpenAI) -> Outcome:
    history: list[Any] = []
    outcomes = []
    for turn in TURNS:
        result = await Runner.run(agent(kind, client), [*history, {"role": "user", "content": turn}])
        outcomes.append(finished(result))
        history = result.to_input_list()
    return {"turns": outcomes}


def alone(case: Any, kind: Any, *given: str) -> Outcome:
    async def performed() -> Outcome:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
            outcome: Outcome = await case(kind, client, *given)
            return outcome

    return asyncio.run(performed())


def cases(wire: str, kind: Any) -> dict[str, Any]:
    return {
        f"{wire}/text": partial(alone, asked, kind, HELLO),
        f"{wire}/stream": partial(alone, streamed, kind, HELLO),
        f"{wire}/tools": partial(alone, asked, kind, LOOK_UP),
        f"{wire}/stream-tools": partial(alone, streamed, kind, LOOK_UP),
        f"{wire}/error-429": partial(alone, limited, kind),
        f"{wire}/growing": partial(alone, growing, kind),
    }


if __name__ == "__main__":
    run(cases("chat", OpenAIChatCompletionsModel) | cases("responses", OpenAIResponsesModel))

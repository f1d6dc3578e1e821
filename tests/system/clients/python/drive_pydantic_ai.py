"""pydantic-ai: its agent with a tool, over all three wires."""

import asyncio
from functools import partial
from typing import Any

import anthropic  # type: ignore[import-not-found] # of the driver's environment
import openai
from pydantic import BaseModel
from pydantic_ai import Agent  # type: ignore[import-not-found] # likewise
from pydantic_ai.exceptions import ModelHTTPError  # type: ignore[import-not-found] # likewise
from pydantic_ai.models.anthropic import AnthropicModel  # type: ignore[import-not-found] # likewise
from pydantic_ai.models.openai import (  # type: ignore[import-not-found] # likewise
    OpenAIChatModel,
    OpenAIResponsesModel,
)
from pydantic_ai.providers.anthropic import AnthropicProvider  # type: ignore[import-not-found] # likewise
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found] # likewise

from tests.system.clients.python.reporting import (
    FAULT,
    HELLO,
    INSTRUCTIONS,
    KEY,
    LOOK_UP,
    MODEL,
    TURNS,
    URL,
    Outcome,
    looked_up,
    refused,
    run,
)


class City(BaseModel):
    """A city."""

    name: str
    degrees: int


def lookup(topic: str) -> str:
    """Look something up in the books."""
    return looked_up(topic)


def over_chat() -> Any:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))


def over_responses() -> Any:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return OpenAIResponsesModel(
        MODEL, provider=OpenAIProvider(openai_client=client), settings={"openai_store": False}
    )


def over_messages() -> Any:
    client = anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0)
    return AnthropicModel(
        MODEL, provider=AnthropicProvider(anthropic_client=client), settings={"max_tokens": 400}
    )


def finished(result: Any) -> Outcome:
    used = result.usage() if callable(result.usage) else result.usage
    return {"text": result.output, "usage": [used.requests, used.input_tokens, used.output_tokens]}


def agent(model: Any) -> Any:
    return Agent(model, instructions=INSTRUCTIONS, tools=[lookup], retries=0)


async def asked(model: Any, prompt: str) -> Outcome:
    return finished(await agent(model).run(prompt))


async def streamed(model: Any, prompt: str) -> Outcome:
    async with agent(model).run_stream(prompt) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        return {**said_in(pieces), "usage": finished_usage(result)}


def said_in(pieces: list[str]) -> dict[str, Any]:
    return {"text": "".join(pieces), "pieces": len(pieces)}


def finished_usage(result: Any) -> list[int]:
    used = result.usage() if callable(result.usage) else result.usage
    return [used.requests, used.input_tokens, used.output_tokens]


async def structured(model: Any) -> Outcome:
    prompt = 'Please answer.\ncall final_result {"name": "Zürich", "degrees": 21}'
    result = await Agent(model, output_type=City, retries=0).run(prompt)
    return {"text": "", "output": result.output.model_dump()}


async def limited(model: Any) -> Outcome:
    try:
        await agent(model).run(HELLO, model_settings={"extra_headers": {FAULT: "status=429"}})
    except ModelHTTPError as error:
        return refused(error)
    raise AssertionError("an error was expected")


async def growing(model: Any) -> Outcome:
    history: list[Any] = []
    outcomes = []
    for turn in TURNS:
        result = await agent(model).run(turn, message_history=history)
        outcomes.append(finished(result))
        history = result.all_messages()
    return {"turns": outcomes}


def alone(case: Any, make: Any, *given: str) -> Outcome:
    async def performed() -> Outcome:
        outcome: Outcome = await case(make(), *given)
        return outcome

    return asyncio.run(performed())


def cases(wire: str, make: Any) -> dict[str, Any]:
    return {
        f"{wire}/text": partial(alone, asked, make, HELLO),
        f"{wire}/stream": partial(alone, streamed, make, HELLO),
        f"{wire}/tools": partial(alone, asked, make, LOOK_UP),
        f"{wire}/stream-tools": partial(alone, streamed, make, LOOK_UP),
        f"{wire}/structured": partial(alone, structured, make),
        f"{wire}/error-429": partial(alone, limited, make),
        f"{wire}/growing": partial(alone, growing, make),
    }


if __name__ == "__main__":
    run(cases("chat", over_chat) | cases("responses", over_responses) | cases("messages", over_messages))
